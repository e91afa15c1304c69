"""Told: compares a store's records and journal, all that `rebuild` has, with the catalogue.

Every version must have its record, every change its entry in the journal, and the store must tell
of nothing that the registry does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from sqlalchemy import Connection, Row, select

from weightyard.errors import Damaged, FileMissing, Refused, Retryable
from weightyard.names import ModelName
from weightyard.registry import freshness, history, outbox, schema
from weightyard.registry.database import Database
from weightyard.storage import layout
from weightyard.storage.store import Store, StorePath
from weightyard.transfer.together import run_together

_THREADS = 8
_MODELS_PAGE = 500
_ENTRIES_PAGE = 5000

_HEAL = "run `weightyard check --heal`: it writes it again"
_SET_ASIDE = "run `weightyard check --heal`: it moves that file into `damaged`, and writes it again"
_BRING_BACK = "bring its DataNodes back, then check again"
_PUT_BACK = (
    "put the file back, from HDFS's trash or a snapshot of the folder: only the store had it. "
    "Until then keep backups of the database, which has the outcome of that change"
)
_WRITE_NOW = "run `weightyard check --heal`: it writes them, or says why it cannot"
_DIFFERENT = (
    "`rebuild` would believe that file, not this registry: find out who wrote it, move the file "
    "away, and run `weightyard check --heal`"
)
_UNBLOCK = {
    outbox.Obstacle.NONE: "run `weightyard check --heal`: it writes it",
    outbox.Obstacle.UNREADABLE: "run `weightyard check --heal`: it moves that file into `damaged`, "
    "and writes what belongs there",
    outbox.Obstacle.DIFFERENT: _DIFFERENT,
}
_OLD = "is the database an old copy? `weightyard rebuild` makes a new one from the store"


class Report(Protocol):
    """Takes a finding; from several threads at once."""

    def __call__(
        self, code: str, subject: str, what: str, advice: str, versions: Sequence[str] = ()
    ) -> None: ...


def check_told(database: Database, store: Store, report: Report, *, read_data: bool) -> None:
    """Report what is missing or unknown; with `read_data` also what cannot be read."""
    if (late := database.read(outbox.late)) is not None:
        report("records-late", late.oldest.text, str(late), _WRITE_NOW)
    for path, obstacle in outbox.set_aside(database, store):
        what = f"could not be written: the file of that name {obstacle.value}"
        report("record-blocked", path.text, what, _UNBLOCK[obstacle])
    for path in freshness.unknown_to(database, store):
        report("unknown-record", path.text, "tells of what this registry never did", _OLD)
    checking = _Told(database, store, report, read_data)
    run_together(_THREADS, "weightyard-check", checking.records())
    run_together(_THREADS, "weightyard-check", checking.entries())


def foreign_files(store: Store) -> Iterator[StorePath]:
    """Files among records and journal entries that are neither."""
    for file in store.list(layout.MODELS):
        if history.record_of(file.path) is None:
            yield file.path
    for file in store.list(layout.JOURNAL):
        if history.sequence_of(file.path) is None:
            yield file.path


class _Told:
    def __init__(self, database: Database, store: Store, report: Report, read_data: bool) -> None:
        self._database = database
        self._store = store
        self._report = report
        self._read_data = read_data

    def records(self) -> Iterator[Callable[[], None]]:
        """Looks at every version's record, one model's in memory at a time."""
        for model, numbers in _versions(self._database):
            folder = StorePath(f"{layout.MODELS}/{model.project}/{model.name}")
            there = {file.path: file.length for file in self._store.list(folder)}
            for number, digest in numbers:
                path = layout.record(model, number)
                ref = f"{model}@v{number}"
                if path not in there:
                    yield partial(self._miss_record, path, ref)
                elif self._read_data or not there[path]:
                    yield partial(self._read_record, path, ref, digest)

    def entries(self) -> Iterator[Callable[[], None]]:
        """Looks at every entry of the journal this registry has made or been rebuilt from."""
        last = self._database.read(outbox.last_sequence)
        lengths = {
            sequence: file.length
            for file in self._store.list(layout.JOURNAL)
            if (sequence := history.sequence_of(file.path)) is not None
        }
        for sequence in _sequences(self._database, last):
            path = layout.journal(sequence)
            if sequence not in lengths:
                yield partial(self._miss_entry, path)
            elif self._read_data or not lengths[sequence]:
                yield partial(self._read_entry, path)

    def _miss_record(self, path: StorePath, ref: str) -> None:
        if not self._is_waiting(path):
            what = "is gone: without it `rebuild` loses the version"
            self._report("record-missing", path.text, what, _HEAL, [ref])

    def _read_record(self, path: StorePath, ref: str, digest: str) -> None:
        if self._is_in_outbox(path):  # then `check_told` has reported the file of that name
            return
        try:
            told = history.read_version(self._store, path)
        except FileMissing:
            self._miss_record(path, ref)
        except Retryable as why:
            self._report("unreachable", path.text, str(why), _BRING_BACK, [ref])
        except (Damaged, Refused) as why:
            what = f"cannot be read, so `rebuild` loses the version: {why}"
            self._report("record-damaged", path.text, what, _SET_ASIDE, [ref])
        else:
            if told.digest != digest:
                what = f"tells of content {told.digest}, not {digest}"
                self._report("record-different", path.text, what, _DIFFERENT, [ref])

    def _miss_entry(self, path: StorePath) -> None:
        if not self._is_waiting(path):
            what = "is gone: `rebuild` would not know what changed then"
            self._report("journal-missing", path.text, what, _PUT_BACK)

    def _read_entry(self, path: StorePath) -> None:
        if self._is_in_outbox(path):
            return
        try:
            history.read_entry(self._store, path)
        except FileMissing:
            self._miss_entry(path)
        except Retryable as why:
            self._report("unreachable", path.text, str(why), _BRING_BACK)
        except (Damaged, Refused) as why:
            what = f"cannot be read, so `rebuild` would not know what changed then: {why}"
            self._report("journal-damaged", path.text, what, _PUT_BACK)

    def _is_waiting(self, path: StorePath) -> bool:
        """Whether a file is still in the outbox, or came out of it just now."""
        if self._is_in_outbox(path):
            return True
        try:
            self._store.stat(path)
        except FileMissing:
            return False
        return True

    def _is_in_outbox(self, path: StorePath) -> bool:
        waiting = select(schema.outbox.c.id).where(schema.outbox.c.path == path.text)
        return self._database.read(lambda tx: tx.scalar(waiting)) is not None


def _versions(database: Database) -> Iterator[tuple[ModelName, Sequence[Row[int, str]]]]:
    """The numbers and digests of every model's versions, one model's in memory at a time."""
    last = 0
    while page := database.read(partial(_models_after, last=last)):
        for row in page:
            numbers = database.read(partial(_numbers, model_row=row.id))
            yield ModelName(row.project, row.name), numbers
        last = page[-1].id


def _models_after(tx: Connection, last: int) -> Sequence[Row[Any, Any, Any]]:
    m = schema.models
    wanted = select(m.c.id, m.c.project, m.c.name).where(m.c.id > last)
    return tx.execute(wanted.order_by(m.c.id).limit(_MODELS_PAGE)).all()


def _numbers(tx: Connection, model_row: int) -> Sequence[Row[int, str]]:
    v, manifests = schema.versions, schema.manifests
    return tx.execute(
        select(v.c.number, manifests.c.name)
        .join(manifests, manifests.c.id == v.c.manifest_id)
        .where(v.c.model_id == model_row, v.c.removed_ms.is_(None))
    ).all()


def _sequences(database: Database, last: int) -> Iterator[int]:
    """The numbers of journal entries up to `last`; only one page of them is in memory."""
    done = 0
    while page := database.read(partial(_sequences_after, done=done, last=last)):
        yield from page
        done = page[-1]


def _sequences_after(tx: Connection, done: int, last: int) -> Sequence[int]:
    j = schema.journal
    wanted = select(j.c.id).where(j.c.id > done, j.c.id <= last)
    return tx.scalars(wanted.order_by(j.c.id).limit(_ENTRIES_PAGE)).all()
