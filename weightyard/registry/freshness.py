"""Freshness: is this database the newest one that wrote to its store?

A database brought back from a backup knows nothing of what was published since, and would take
its packs for garbage. The records and the journal in the store tell.
"""

from __future__ import annotations

from weightyard.errors import ForeignStore
from weightyard.registry import binding, history
from weightyard.registry.database import Database
from weightyard.storage.store import Store


def require_newest(database: Database, store: Store) -> None:
    """Raises ForeignStore if the store belongs to another registry, or to a newer copy of this."""
    if binding.read_yard_file(store) is None:
        raise ForeignStore(f"{store.url} has no yard.json: is it the right store?")
    binding.bind(database, store)
    unknown = next(history.unknown_to(database, store), None)
    if unknown is not None:
        raise ForeignStore(
            f"{store.url} has {unknown}, of which this database does not know: it is older than "
            "its store, so nothing is collected. Restore the newest backup, or run "
            "`weightyard rebuild`"
        )
