"""A database that is not the newest of its store changes nothing there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import crash_world
import pytest
from crash_world import AT_ONCE, BEGINNING, GPT, OPTIONS, PROD
from pushing import BERT, push, read_back
from waiting import SOON_S

from weightyard.errors import ForeignStore, StoreUnavailable
from weightyard.names import ModelName, Ref
from weightyard.records import Publication, Retention
from weightyard.registry import freshness, migrate
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.testing.faults import Fault, FaultyStore

V1 = Ref.parse("team/gpt@v1")

CHANGES: dict[str, Callable[[Registry], object]] = {
    "open_upload": lambda registry: registry.open_upload(GPT, Publication()),
    "create_model": lambda registry: registry.create_model(ModelName("team", "new")),
    "annotate": lambda registry: registry.annotate(V1, {"message": "old"}),
    "remove": lambda registry: registry.remove(V1),
    "remove_model": lambda registry: registry.remove_model(GPT),
    "set_retention": lambda registry: registry.set_retention(GPT, Retention(keep_last=1)),
    "move_alias": lambda registry: registry.move_alias(BERT, PROD, 2),
    "rollback_alias": lambda registry: registry.rollback_alias(BERT, PROD),
    "keep": lambda registry: registry.keep(V1, copies=3, policy=None),
}


@pytest.fixture
def today(database: Database, store: LocalStore) -> Registry:
    crash_world.begin(database, store)
    registry = Registry(database, store=store)
    registry.flush_outbox(store)
    database.close()
    return registry


@pytest.fixture
def yesterday(today: Registry, backup: Callable[[], Database], store: LocalStore) -> Registry:
    return Registry(backup(), store=store)


def files(store: LocalStore) -> dict[str, bytes]:
    found = (file for folder in layout.FOLDERS for file in store.list(folder))
    return {file.path.text: (store.folder / file.path.text).read_bytes() for file in found}


def publish_today(today: Registry, store: LocalStore) -> None:
    """As little as can be: a version without an alias, of a model that was there."""
    push(today, store, b"today's", options=OPTIONS)
    today.flush_outbox(store)


def test_yesterdays_database_changes_nothing_once_something_was_published(
    today: Registry, yesterday: Registry, store: LocalStore
) -> None:
    publish_today(today, store)
    for change in CHANGES.values():
        with pytest.raises(ForeignStore, match="older"):
            change(yesterday)
    assert yesterday.flush_outbox(store) == 0, "nothing was written down"


def test_yesterdays_database_does_not_publish_what_it_began_before_it_was_old(
    today: Registry, yesterday: Registry, store: LocalStore
) -> None:
    class Meanwhile(LocalStore):
        """Today's database publishes when yesterday's has all but committed."""

        def publish(self, staged: object, path: object) -> None:
            super().publish(staged, path)  # type: ignore[arg-type]
            if str(path).startswith("manifests"):
                publish_today(today, store)

    with pytest.raises(ForeignStore, match="older"):
        push(yesterday, Meanwhile(store.folder), b"yesterday's", model=GPT, options=OPTIONS)
    assert [version.number for version in yesterday.versions(GPT)] == [2, 1]
    assert yesterday.flush_outbox(store) == 0


@pytest.mark.parametrize("what", ["alias", "removal", "gc"])
def test_yesterdays_database_is_told_apart_by_any_change(
    today: Registry, yesterday: Registry, store: LocalStore, what: str
) -> None:
    if what == "alias":
        today.move_alias(BERT, PROD, 2)
    elif what == "removal":
        today.remove(V1)
    else:
        today.gc(store, AT_ONCE)
    today.flush_outbox(store)
    with pytest.raises(ForeignStore, match="older"):
        push(yesterday, store, b"yesterday's", model=GPT, options=OPTIONS)


def test_yesterdays_database_can_be_read(
    today: Registry, yesterday: Registry, store: LocalStore
) -> None:
    publish_today(today, store)
    version = yesterday.resolve(Ref.parse("team/bert@prod"))
    assert read_back(yesterday, store, version) == BEGINNING["team/bert@v1"]


def test_yesterdays_database_deletes_nothing_of_a_full_store(
    today: Registry, yesterday: Registry, store: LocalStore
) -> None:
    version = push(today, store, *BEGINNING["team/gpt@v1"], options=OPTIONS)
    today.remove(V1)
    today.flush_outbox(store)
    before = files(store)
    blind = Registry(yesterday.database)
    blind.remove(V1)  # without its store it cannot know
    crash_world.age(blind.database)
    with pytest.raises(ForeignStore, match="older"):
        blind.gc(store, AT_ONCE)
    with pytest.raises(ForeignStore, match="older"):
        blind.gc(store, AT_ONCE, dry_run=True)
    report = blind.check(store)
    assert "unknown-record" in {finding.code for finding in report.findings}, "check says so, too"
    with pytest.raises(ForeignStore, match="older"):
        blind.heal(store, report)
    assert files(store) == before
    assert read_back(today, store, version) == BEGINNING["team/gpt@v1"]


@pytest.fixture
def empty(database: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Database]:
    """Another database of the same kind with nothing in it."""
    url = f"sqlite:///{tmp_path}/empty.db"
    other = Database(url if database.is_sqlite else request.getfixturevalue("postgres")())
    migrate.upgrade(other)
    yield other
    other.close()


def test_an_empty_database_deletes_nothing_of_a_full_store_and_publishes_nothing(
    today: Registry, empty: Database, store: LocalStore
) -> None:
    before = files(store)
    registry = Registry(empty, store=store)
    with pytest.raises(ForeignStore):
        registry.gc(store, AT_ONCE)
    with pytest.raises(ForeignStore):
        push(registry, store, b"new", options=OPTIONS)
    assert files(store) == before


def test_two_processes_that_publish_at_once_do_not_take_each_other_for_newer(
    today: Registry, database_url: str, store: LocalStore
) -> None:
    with Registry(Database(database_url), store=store) as other:
        for number in range(3):
            push(other, store, b"other %d" % number, options=OPTIONS)
            other.flush_outbox(store)
            push(today, store, b"one %d" % number, options=OPTIONS)
            today.flush_outbox(store)
    assert [version.number for version in today.versions(BERT)] == [8, 7, 6, 5, 4, 3, 2, 1]


def test_an_alias_is_moved_while_the_store_does_not_answer_but_nothing_is_published(
    today: Registry, database: Database, store: LocalStore
) -> None:
    silent = Registry(database, store=FaultyStore(store, dict.fromkeys(range(99), Fault.BEFORE)))
    silent.move_alias(BERT, PROD, 2)
    assert today.alias(BERT, PROD) == 2
    with pytest.raises(StoreUnavailable):
        push(silent, store, b"new", options=OPTIONS)
    assert [version.number for version in today.versions(BERT)] == [2, 1]


def test_a_store_known_to_be_silent_is_asked_again_later_and_by_one_change(
    today: Registry, database: Database, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "_LOOK_S", 0.1)
    monkeypatch.setattr(freshness, "_SILENT_S", SOON_S)
    answers = threading.Event()
    slow = FaultyStore(store, on_call=lambda *_: answers.wait(SOON_S))
    with Registry(database, store=slow) as registry:
        for number in (1, 2, 1, 2):
            registry.move_alias(BERT, PROD, number)
        assert len(slow.calls) == 1
        answers.set()
        monkeypatch.setattr(freshness, "_LOOK_S", SOON_S)
        monkeypatch.setattr(freshness, "_SILENT_S", 0.0)
        for number in (1, 2):
            registry.move_alias(BERT, PROD, number)
        assert len(slow.calls) == 3


def test_the_journal_has_no_gaps_whatever_fails(today: Registry, store: LocalStore) -> None:
    for _ in range(3):
        with pytest.raises(Exception, match="no version"):
            push(
                today,
                store,
                b"x",
                options=OPTIONS,
                model=ModelName("team", "new"),
                parent="team/bert@v9",
            )
    publish_today(today, store)
    numbers = sorted(int(file.path.text[8:20]) for file in store.list(layout.JOURNAL))
    assert numbers == list(range(1, len(numbers) + 1))
