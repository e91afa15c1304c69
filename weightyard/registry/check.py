"""Check: compares the catalogue with the store. Changes nothing in the store.

What the catalogue names must be in the store; what is in the store must have a row. Writers and gc
go on meanwhile, so each finding is confirmed before it counts: a listed file is looked at again,
and a row is marked damaged only if it is still in use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Table, and_, func, or_, select, update

from weightyard.errors import FileMissing
from weightyard.format.pack import Placement, read_entry
from weightyard.logs import Log
from weightyard.names import Digest, PackId
from weightyard.records import CheckReport, Finding
from weightyard.registry import damage, schema, told
from weightyard.registry.database import Database, is_one_of
from weightyard.registry.examine import Examined, examine_manifest, examine_pack
from weightyard.registry.needs import Needs
from weightyard.registry.rows import batches
from weightyard.registry.schema import FileState
from weightyard.storage import layout
from weightyard.storage.opening import folder_of
from weightyard.storage.store import FileStat, Store, StorePath
from weightyard.transfer.together import run_together

_log = Log(__name__)

MAX_FINDINGS = 10_000
"""How many findings a report lists; more are only counted."""

_THREADS = 8
_PREFIXES = tuple(f"{first:02x}" for first in range(256))
_AT_ONCE = 20_000
"""About how many files and rows of one kind are in memory together."""

_PUSH_AGAIN = "push the same content again, or put the file back; then check again"
_HEAL_AND_PUSH = (
    "run `weightyard check --heal`, which moves it out of the way if no replica of it is whole, "
    "and push the same content again; or put the file back; then check again"
)
_PUSH_THAT_AGAIN = "push the same content again; then check again"
_HEAL = "run `weightyard check --heal`"
_BRING_BACK = "bring its DataNodes back, then check again"
_HDFS_COPIES = "HDFS copies it by itself when enough DataNodes are up; check again later"
_NOT_OURS = "gc leaves it alone; remove it by hand if nobody needs it"
_OF_A_PROBE = (
    "a `weightyard doctor` tries the store just now, or was killed while it did: then remove its "
    "folder by hand"
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Packs or manifests: where they lie, and how one is examined."""

    table: Table
    folder: StorePath
    path: Callable[[str], StorePath]
    in_use: ColumnElement[bool]
    """Which rows must have their file, whole."""
    examine: Callable[[Database, Store, Row[Any]], Examined]
    touched: Callable[[Connection, int], tuple[str, ...]]


def placements_in(tx: Connection, pack_row: int, pack: PackId) -> list[Placement]:
    """What the registry knows to lie in a pack, in the order in which it lies there."""
    p = schema.placements
    entries = select(p.c.encoding).where(p.c.pack_id == pack_row).order_by(p.c.offset)
    return [read_entry(entry, pack) for entry in tx.scalars(entries)]


def _examine_pack(database: Database, store: Store, row: Row[Any]) -> Examined:
    pack = PackId(row.name)
    return examine_pack(store, pack, database.read(lambda tx: placements_in(tx, row.id, pack)))


PACKS = Kind(
    schema.packs,
    layout.PACKS,
    lambda name: layout.pack(PackId(name)),
    # A damaged pack matters while only it holds some needed block. Once all of them lie elsewhere,
    # by `heal` or another push, it just waits for gc.
    or_(
        schema.packs.c.state.in_(damage.READABLE),
        and_(schema.packs.c.state == FileState.DAMAGED, Needs().only_of_pack()),
    ),
    _examine_pack,
    damage.touched_by_pack,
)
MANIFESTS = Kind(
    schema.manifests,
    layout.MANIFESTS,
    lambda name: layout.manifest(Digest(name)),
    # Not condemned ones: gc deletes their files before their rows say so.
    schema.manifests.c.state.in_((FileState.LIVE, FileState.DAMAGED)),
    lambda database, store, row: examine_manifest(store, Digest(row.name)),
    damage.touched_by_manifest,
)


def bytes_to_check(database: Database) -> int:
    """The bytes of all packs and manifests in use: what `progress` adds up to."""
    return sum(database.read(partial(_in_use_bytes, kind=kind)) for kind in (PACKS, MANIFESTS))


def _in_use_bytes(tx: Connection, kind: Kind) -> int:
    return int(tx.scalar(select(func.sum(kind.table.c.bytes)).where(kind.in_use)) or 0)


def check(
    database: Database,
    store: Store,
    *,
    read_data: bool = False,
    who: str = "",
    progress: Callable[[int], None] = lambda done_bytes: None,
) -> CheckReport:
    """Compare catalogue and store; with `read_data`, read every byte of every replica too.

    Packs and manifests found bad are marked as damaged, and so are the versions that need them;
    those found whole again lose that mark. Raises StoreUnavailable if the store as a whole does not
    answer: then nothing is known.
    """
    checking = _Checking(database, store, read_data, who, progress)
    checking.check_files(PACKS)
    checking.check_files(MANIFESTS)
    checking.check_staging()
    checking.check_top()
    checking.check_records()
    checking.check_blocks()
    return checking.finish()


class _Checking:
    """One run. Files are looked at in parallel, so its findings are kept under a lock."""

    def __init__(
        self,
        database: Database,
        store: Store,
        read_data: bool,
        who: str,
        progress: Callable[[int], None],
    ) -> None:
        self._database = database
        self._progress = progress
        self._store = store
        self._read_data = read_data
        self._who = who
        self._lock = threading.Lock()
        self._counts = {"packs": 0, "manifests": 0, "stored_bytes": 0, "read_bytes": 0}
        self._replicas_named = True
        self._findings: list[Finding] = []
        self._more_findings = 0

    def check_files(self, kind: Kind) -> None:
        """Packs or manifests, as many folders at a time as fit into memory."""
        count = select(func.count()).select_from(kind.table)
        rows = self._database.read(lambda tx: tx.scalar(count)) or 0
        if rows <= _AT_ONCE:
            self._check_folders(kind, _PREFIXES, [kind.folder])
            return
        together = max(1, len(_PREFIXES) * _AT_ONCE // rows)
        for prefixes in batches(_PREFIXES, together):
            folders = [StorePath(f"{kind.folder}/{prefix}") for prefix in prefixes]
            self._check_folders(kind, prefixes, folders)
        for file in self._store.list(kind.folder):  # files beside those folders
            if file.path.text.split("/")[1] not in _PREFIXES:
                self._report_unknown(file.path)

    def _check_folders(
        self, kind: Kind, prefixes: Sequence[str], folders: Sequence[StorePath]
    ) -> None:
        """Compare the files in some folders with the rows whose names begin with their prefixes."""
        # Files before rows: a file has a row before it exists, so none seems to lack one.
        files = {file.path: file for folder in folders for file in self._store.list(folder)}
        names = (prefixes[0], f"{prefixes[-1]}g")
        rows = self._database.read(partial(_rows, kind=kind, names=names))
        for path in files.keys() - {kind.path(row.name) for row in rows}:
            self._report_unknown(path)
        in_use = [row for row in rows if row.is_in_use]
        looks = [partial(self._check_file, kind, row, files) for row in in_use]
        run_together(_THREADS, "weightyard-check", looks)
        self._count(**{kind.table.name: len(in_use)})

    def check_staging(self) -> None:
        """Each folder in staging is an upload's, which has a row before it has a file."""
        files = [file.path for file in self._store.list(layout.STAGING)]
        folders = {path.text.split("/")[1] for path in files}
        known = self._database.read(partial(_uploads, names=sorted(folders)))
        for path in files:
            if path.text.split("/")[1] not in known:
                self._report_unknown(path)

    def check_top(self) -> None:
        """Report what lies beside the yard's folders, unless it is a file of its database."""
        beside = self._database.files_in(folder_of(self._store))
        for path in self._store.top():
            if path in layout.TOP or (beside and path.text.startswith(beside)):
                continue
            try:
                self._store.stat(path)
            except FileMissing:  # a folder
                for file in self._store.list(path):
                    self._report_unknown(file.path)
            else:
                self._report_unknown(path)

    def check_records(self) -> None:
        """The store must have all records and journal entries `rebuild` needs, and no others."""
        told.check_told(self._database, self._store, self._add, read_data=self._read_data)
        for path in told.foreign_files(self._store):
            self._report_unknown(path)

    def check_blocks(self) -> None:
        """Every block a version needs lies in some pack. Damaged packs were reported before."""
        self._database.write(damage.mark_versions)
        for ref, blocks in self._database.read(damage.without_placement):
            what = f"needs {blocks} blocks that lie in no pack"
            self._add("block-missing", ref, what, _PUSH_THAT_AGAIN, [ref])

    def finish(self) -> CheckReport:
        return CheckReport(
            packs=self._counts["packs"],
            manifests=self._counts["manifests"],
            stored_bytes=self._counts["stored_bytes"],
            read_bytes=self._counts["read_bytes"],
            replicas_named=self._replicas_named,
            findings=tuple(sorted(self._findings, key=lambda one: (one.subject, one.code))),
            more_findings=self._more_findings,
            damaged_versions=self._database.read(damage.damaged_versions),
        )

    def _check_file(self, kind: Kind, row: Row[Any], files: Mapping[StorePath, FileStat]) -> None:
        path = kind.path(row.name)
        try:
            file = files.get(path) or self._store.stat(path)
            self._count(stored_bytes=file.length)
            is_doubtful = row.state == FileState.DAMAGED or file.length != row.bytes
            if self._read_data or is_doubtful:
                self._examine(kind, row, file)
            if self._store.replicates:
                self._check_replicas(kind, row, file)
        except FileMissing:
            self._report_damage(kind, row, "missing", "is not in the store")
        self._progress(row.bytes or 0)

    def _examine(self, kind: Kind, row: Row[Any], file: FileStat) -> None:
        """Read all of a file's replicas, and say what that means for the row."""
        # Only a pack's length tells: a manifest may have been compressed again, to another length.
        is_short = kind is PACKS and file.length != row.bytes
        found = kind.examine(self._database, self._store, row)
        self._count(read_bytes=found.read_bytes)
        if any(copy.replica is None for copy in found.copies):
            self._replicas_named = False
        for copy in found.copies:
            if not copy.is_reachable:
                self._report(kind, row, "unreachable", f"{copy.name}: {copy.flaw}", _BRING_BACK)
        if (found.bad or is_short) and found.is_complete:
            flaws = [f"has {file.length} bytes, not {row.bytes}"] if is_short else []
            flaws += [copy.flaw for copy in found.copies if copy.flaw is not None]
            self._report_damage(kind, row, "short" if is_short else "damaged", flaws[0])
            return
        for copy in found.copies:
            if copy.is_reachable and copy.flaw is not None:
                self._report(kind, row, "replica-damaged", f"{copy.name}: {copy.flaw}", _HEAL)
        if found.is_flawless:
            self._database.write(
                partial(_say_whole, kind=kind, row=row, length=file.length, who=self._who)
            )

    def _check_replicas(self, kind: Kind, row: Row[Any], file: FileStat) -> None:
        wanted = row.replication or file.replication
        if file.replication < wanted:
            what = f"asks HDFS for {file.replication} replicas, its versions for {wanted}"
            self._report(kind, row, "replication-low", what, _HEAL)
        spans = self._store.locate(file.path).spans
        found = min((len(span.replicas) for span in spans), default=wanted)
        if found == 0:
            self._report(kind, row, "unreachable", "no DataNode has it now", _BRING_BACK)
        elif found < wanted:
            what = f"is on {found} DataNodes, not {wanted}"
            self._report(kind, row, "under-replicated", what, _HDFS_COPIES)

    def _report_damage(self, kind: Kind, row: Row[Any], code: str, what: str) -> None:
        mark = partial(damage.mark, table=kind.table, row_id=row.id, who=self._who, why=what)
        if self._database.write(mark) or self._is_in_use(kind, row):
            # A push would find a file under the manifest's name, and never writes over one.
            is_in_the_way = kind is MANIFESTS and code != "missing"
            advice = _HEAL_AND_PUSH if is_in_the_way else _PUSH_AGAIN
            self._add_file(kind, row, code, what, advice)

    def _report_unknown(self, path: StorePath) -> None:
        try:
            self._store.stat(path)
        except FileMissing:  # gc removed file and row since they were listed
            return
        advice = _OF_A_PROBE if layout.is_probe(path) else _NOT_OURS
        self._add("unknown-file", path.text, "has no row in this registry", advice)

    def _report(self, kind: Kind, row: Row[Any], code: str, what: str, advice: str) -> None:
        if self._is_in_use(kind, row):
            self._add_file(kind, row, code, what, advice)

    def _is_in_use(self, kind: Kind, row: Row[Any]) -> bool:
        """Whether a row still is: gc may have rewritten a pack since the row was read."""
        still = select(kind.table.c.id).where(kind.table.c.id == row.id, kind.in_use)
        return self._database.read(lambda tx: tx.scalar(still)) is not None

    def _add_file(self, kind: Kind, row: Row[Any], code: str, what: str, advice: str) -> None:
        touched = self._database.read(lambda tx: kind.touched(tx, row.id))
        self._add(code, kind.path(row.name).text, what, advice, touched)

    def _add(
        self, code: str, subject: str, what: str, advice: str, versions: Sequence[str] = ()
    ) -> None:
        finding = Finding(
            code=code, subject=subject, detail=what, advice=advice, versions=tuple(versions)
        )
        _log.warning("check.found", code=code, subject=subject, detail=what)
        with self._lock:
            if len(self._findings) < MAX_FINDINGS:
                self._findings.append(finding)
            else:
                self._more_findings += 1

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, amount in more.items():
                self._counts[name] += amount


def _rows(tx: Connection, kind: Kind, names: tuple[str, str]) -> Sequence[Row[Any]]:
    first, end = names
    name = kind.table.c.name
    rows = select(kind.table, kind.in_use.label("is_in_use")).where(name >= first, name < end)
    return tx.execute(rows).all()


def _uploads(tx: Connection, names: Sequence[str]) -> set[str]:
    u = schema.uploads
    return {
        name
        for batch in batches(names)
        for name in tx.scalars(select(u.c.name).where(is_one_of(tx, u.c.name, batch)))
    }


def _say_whole(tx: Connection, kind: Kind, row: Row[Any], length: int, who: str) -> None:
    damage.unmark(tx, kind.table, row.id, who)
    if length != row.bytes:
        tx.execute(update(kind.table).where(kind.table.c.id == row.id).values(bytes=length))
