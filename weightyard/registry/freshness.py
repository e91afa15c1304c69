"""Freshness: is this database the newest one that wrote to its store?

A database brought back from a backup knows nothing of what was done since. It would take packs for
garbage, give out numbers twice, and write other entries under the names of those that are there.
Records and journal in the store tell.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import select

from weightyard.errors import FileMissing, ForeignStore, Retryable
from weightyard.logs import Log
from weightyard.names import ModelName
from weightyard.registry import binding, history, outbox, schema
from weightyard.registry.database import Database
from weightyard.storage import layout
from weightyard.storage.store import Store, StorePath

_log = Log(__name__)


def require_newest(database: Database, store: Store) -> None:
    """Look for the journal entry after the newest one this database knows: one look is enough.

    The journal has no gaps, and whatever is published or changed is in it. For every change; gc
    asks for more. Raises ForeignStore if the database is older than its store.
    """
    known = database.read(outbox.last_sequence)
    while _is_there(store, layout.journal(known + 1)):
        again = database.read(outbox.last_sequence)
        if again <= known:  # else another process has just written it
            raise _older(store, layout.journal(known + 1))
        known = again


def require_newest_if_told(database: Database, store: Store) -> None:
    """The same, but a store that does not answer stops nobody: an alias can be moved without it."""
    try:
        require_newest(database, store)
    except Retryable as why:
        _log.warning("registry.freshness_unknown", reason=why)


def require_newest_of_all(database: Database, store: Store) -> None:
    """Look at every record and journal entry, before anything is taken away.

    Raises ForeignStore if the store belongs to another registry, or to a newer copy of this one.
    """
    if binding.read_yard_file(store) is None:
        raise ForeignStore(f"{store.url} has no yard.json: is it the right store?")
    binding.bind(database, store)
    unknown = next(unknown_to(database, store), None)
    if unknown is not None:
        raise _older(store, unknown)


def unknown_to(database: Database, store: Store) -> Iterator[StorePath]:
    """Records and journal entries that a database cannot have caused.

    There are none, unless the database is older than the store, or not its own: what it holds
    to be unused may then be in use.
    """
    numbers: dict[ModelName, int] = {}
    for file in store.list(layout.MODELS):
        version = history.record_of(file.path)
        if version is None:
            continue
        model, number = version
        # Asked again where it seems too low: versions are published meanwhile.
        if number > numbers.get(model, 0):
            numbers[model] = _last_number(database, model)
        if number > numbers[model]:
            yield file.path
    known = -1
    for file in store.list(layout.JOURNAL):
        sequence = history.sequence_of(file.path)
        if sequence is not None and sequence > known:
            known = database.read(outbox.last_sequence)
            if sequence > known:
                yield file.path


def _older(store: Store, unknown: StorePath) -> ForeignStore:
    return ForeignStore(
        f"{store.url} has {unknown}, of which this database does not know: it is older than its "
        "store, so nothing is changed. Restore the newest backup, or run `weightyard rebuild` into "
        "an empty database"
    )


def _is_there(store: Store, path: StorePath) -> bool:
    try:
        store.stat(path)
    except FileMissing:
        return False
    return True


def _last_number(database: Database, model: ModelName) -> int:
    m = schema.models
    wanted = select(m.c.last_number).where(m.c.project == model.project, m.c.name == model.name)
    return database.read(lambda tx: tx.scalar(wanted)) or 0
