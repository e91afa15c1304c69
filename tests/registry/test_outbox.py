"""The outbox: what the store has still to be told of, also by several at once."""

from __future__ import annotations

from weightyard.names import ModelName
from weightyard.registry import outbox
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.testing.faults import FaultyStore


def test_a_change_made_while_another_process_tells_of_the_ones_before_is_told_too(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    """SQLite gives its row the number of one that was told of and forgotten."""
    registry.create_model(ModelName("team", "first"))
    is_done = False

    def meanwhile(index: int, name: str) -> None:
        nonlocal is_done
        if name == "publish" and not is_done:
            is_done = True
            assert registry.flush_outbox(store)
            registry.create_model(ModelName("team", "second"))

    registry.flush_outbox(FaultyStore(store, {}, on_call=meanwhile))
    assert is_done
    registry.flush_outbox(store)
    last = database.read(outbox.last_sequence)
    told = {file.path for file in store.list(layout.JOURNAL)}
    assert told == {layout.journal(number) for number in range(1, last + 1)}
    assert registry.check(store).findings == ()
