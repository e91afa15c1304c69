"""Two at once: who comes first wins, and the other is told how things are now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

import pytest
from collecting import KIB, noise
from pushing import BERT, push, read_back, write
from racing import LIMIT_S, SOON_S, race, reaching
from sqlalchemy import Connection

from weightyard.errors import (
    AliasMoved,
    KeyReused,
    NoSuchThing,
    Protected,
    QuotaExceeded,
    VersionMoved,
)
from weightyard.format.manifest import encode
from weightyard.names import AliasName, FilePath, ModelName, Ref
from weightyard.records import Publication, Retention, Version
from weightyard.registry import binding, quotas, received
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage.local import LocalStore
from weightyard.transfer.publish import publish, store_manifest

_T = TypeVar("_T")

PROD = AliasName("prod")


@pytest.fixture
def one(database: Database, store: LocalStore) -> Registry:
    """A registry with three versions, `prod` on the first."""
    binding.bind(database, store)
    registry = Registry(database, store=store, who="one")
    push(registry, store, b"first", alias="prod")
    push(registry, store, b"second")
    push(registry, store, b"third")
    return registry


@pytest.fixture
def two(database_url: str, one: Registry, store: LocalStore) -> Iterator[Registry]:
    """The same, as another process has it open."""
    with Registry(Database(database_url), store=store, who="two") as registry:
        yield registry


def begun(registry: Registry, store: LocalStore, name: str) -> Callable[[], Version]:
    """All but the commit, in a model of its own: there is nothing else to wait for."""
    model, said = ModelName("team", name), Publication()
    registry.create_model(model)
    upload = registry.open_upload(model, said)
    manifest = write(upload, store, noise(len(name)))
    return lambda: publish(store, upload, manifest, said, upload.id.hex)


@pytest.mark.parametrize("at", ["UPDATE aliases", "INSERT INTO alias_moves", "INSERT INTO outbox"])
def test_of_two_moves_of_an_alias_one_wins_and_the_other_is_told_where_it_is(
    one: Registry, two: Registry, at: str
) -> None:
    done = race(
        one.database,
        at,
        lambda: one.move_alias(BERT, PROD, 2, expect=1),
        lambda: two.move_alias(BERT, PROD, 3, expect=1),
    )
    assert done.second_waited
    assert done.first.result().after == 2
    (error,) = done.errors
    assert isinstance(error, AliasMoved)
    assert error.current == 2
    assert one.alias(BERT, PROD) == 2
    assert [move.after for move in two.alias_log(BERT, PROD)] == [2, 1]


def test_of_two_who_make_an_alias_one_wins_and_the_other_is_told_where_it_is(
    one: Registry, two: Registry
) -> None:
    new = AliasName("next")
    done = race(
        one.database,
        "INSERT INTO aliases",
        lambda: one.move_alias(BERT, new, 2, expect=None),
        lambda: two.move_alias(BERT, new, 3, expect=None),
    )
    (error,) = done.errors
    assert isinstance(error, AliasMoved)
    assert error.current == 2
    assert two.alias(BERT, new) == 2


def test_a_version_is_not_removed_under_an_alias_that_is_moving_to_it(
    one: Registry, two: Registry
) -> None:
    done = race(
        one.database,
        "INSERT INTO outbox",
        lambda: one.move_alias(BERT, PROD, 2),
        lambda: two.remove(Ref.parse("team/bert@v2")),
    )
    assert done.second_waited
    (error,) = done.errors
    assert isinstance(error, Protected)
    assert two.resolve(Ref.parse("team/bert@prod")).number == 2


def test_an_alias_is_not_moved_to_a_version_that_is_being_removed(
    one: Registry, two: Registry
) -> None:
    done = race(
        one.database,
        "INSERT INTO outbox",
        lambda: one.remove(Ref.parse("team/bert@v2")),
        lambda: two.move_alias(BERT, PROD, 2),
    )
    assert done.second_waited
    (error,) = done.errors
    assert isinstance(error, NoSuchThing)
    assert two.alias(BERT, PROD) == 1


@pytest.mark.parametrize("is_expected", [False, True])
def test_a_version_that_is_being_removed_is_not_annotated(
    one: Registry, two: Registry, is_expected: bool
) -> None:
    second = Ref.parse("team/bert@v2")
    expect = one.resolve(second).etag if is_expected else None
    done = race(
        one.database,
        "INSERT INTO outbox",
        lambda: one.remove(second),
        lambda: two.annotate(second, {"message": "good"}, expect=expect),
    )
    assert done.second_waited
    (error,) = done.errors
    assert isinstance(error, NoSuchThing), error


def test_a_model_that_is_being_removed_gets_no_rules(one: Registry, two: Registry) -> None:
    empty = ModelName("team", "empty")
    one.create_model(empty)
    done = race(
        one.database,
        "INSERT INTO outbox",
        lambda: one.remove_model(empty),
        lambda: two.set_retention(empty, Retention(keep_last=1)),
    )
    assert done.second_waited
    (error,) = done.errors
    assert isinstance(error, NoSuchThing), error
    assert one.create_model(empty).retention is None, "made again, it has none"


def test_a_parent_is_not_removed_while_its_child_is_published(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    done = race(
        one.database,
        "INSERT INTO commits",
        lambda: push(one, store, b"child", parent="team/bert@v2"),
        lambda: two.remove(Ref.parse("team/bert@v2")),
    )
    assert done.second_waited
    (error,) = done.errors
    assert isinstance(error, Protected)
    assert "v4" in str(error)
    assert two.resolve(Ref.parse("team/bert@v4")).parent == "team/bert@v2"


def test_a_child_of_a_version_that_is_being_removed_is_not_published(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    done = race(
        one.database,
        "INSERT INTO outbox",
        lambda: one.remove(Ref.parse("team/bert@v2")),
        lambda: push(two, store, b"child", parent="team/bert@v2"),
    )
    (error,) = done.errors
    assert isinstance(error, NoSuchThing)
    assert [version.number for version in two.versions(BERT)] == [3, 1]


def test_of_two_publishers_who_expect_the_same_version_one_wins(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    done = race(
        one.database,
        "INSERT INTO commits",
        lambda: push(one, store, b"ours", expect_latest=3),
        lambda: push(two, store, b"theirs", expect_latest=3),
    )
    (error,) = done.errors
    assert isinstance(error, VersionMoved)
    assert error.current == 4
    assert read_back(two, store, two.resolve(Ref.parse("team/bert"))) == [b"ours"]


def test_of_two_commits_with_one_key_and_other_content_one_is_refused(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    done = race(
        one.database,
        "UPDATE uploads SET state",
        lambda: push(one, store, b"ours", key="the-key"),
        lambda: push(two, store, b"theirs", key="the-key"),
    )
    assert done.second_waited
    (error,) = done.errors
    assert isinstance(error, KeyReused)
    assert two.resolve(Ref.parse("team/bert")) == done.first.result()
    assert done.first.result().number == 4


def test_a_commit_that_is_asked_for_again_while_it_goes_on_gives_the_same_version(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    """As whoever did not wait for its answer does, or a proxy between them."""
    said = Publication()
    upload = one.open_upload(BERT, said)
    manifest = write(upload, store, b"ours")
    digest, stored = encode(manifest)
    store_manifest(store, upload, digest, stored, None, min_replicas=1)
    again = two.resume_upload(upload.id, said)
    with reaching(two.database, "SELECT uploads", "BEGIN IMMEDIATE") as second_reached:
        done = race(
            one.database,
            "UPDATE uploads SET state",
            lambda: upload.commit(digest, manifest, said, "the-key"),
            lambda: again.commit(digest, manifest, said, "the-key"),
            second_reached=second_reached,
        )
    assert done.second_waited
    assert done.errors == []
    assert done.second.result() == done.first.result()
    assert [version.number for version in two.versions(BERT)] == [4, 3, 2, 1]


def meet(one: Registry, first: Callable[[Connection], object], second: Callable[[], _T]) -> _T:
    """`second` comes when `first` has done all but its commit. What it gives."""
    with ThreadPoolExecutor(1) as pool:

        def work(tx: Connection) -> Future[_T]:
            first(tx)
            coming = pool.submit(second)
            wait([coming], SOON_S)
            return coming

        return one.database.write(work).result()


def test_of_two_who_send_the_same_file_at_once_neither_is_in_the_others_way(
    one: Registry, two: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried again, each would meet the next, however many they are."""
    monkeypatch.setattr("weightyard.registry.database._MEETINGS", 1)
    upload, path = one.open_upload(BERT, Publication()), FilePath("a")
    again = two.resume_upload(upload.id, Publication())
    for ours, theirs in ((b"1", b"2"), (b"3", b"4")):  # of a new file, and of one sent before
        meet(
            one,
            partial(received.put, upload=upload.id, path=path, manifest=ours),
            partial(again.put_file, path, theirs),
        )
        assert upload.received() == [theirs]


def test_of_two_who_set_a_quota_at_once_neither_is_in_the_others_way(
    one: Registry, two: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightyard.registry.database._MEETINGS", 1)
    for ours in (7, 9):
        set_ours = partial(quotas.put, project="team", stored_bytes=None, versions=ours, who="")
        set_theirs = partial(two.set_quota, "team", stored_bytes=None, versions=ours + 1)
        assert meet(one, set_ours, set_theirs).versions == ours + 1
        assert one.quota("team").versions == ours + 1
    one.set_quota("team", stored_bytes=None, versions=None)
    assert one.quota("team").versions is None


@pytest.mark.parametrize("limit", ["versions", "stored_bytes"])
def test_of_two_commits_that_do_not_both_fit_the_quota_one_is_refused(
    one: Registry, two: Registry, store: LocalStore, limit: str
) -> None:
    first, second = begun(one, store, "ours"), begun(two, store, "theirs")
    used = one.quota("team")
    room = {"versions": used.used_versions + 1, "stored_bytes": used.used_stored_bytes + 100 * KIB}
    one.set_quota("team", **{"versions": None, "stored_bytes": None, limit: room[limit]})
    with reaching(two.database, "SELECT quotas", "BEGIN IMMEDIATE") as second_reached:
        done = race(
            one.database, "INSERT INTO commits", first, second, second_reached=second_reached
        )
    assert done.second_waited
    (error,) = done.errors
    assert isinstance(error, QuotaExceeded)
    assert done.second.exception() is error
    assert two.resolve(Ref.parse("team/ours")) == done.first.result()
    assert two.versions(ModelName("team", "theirs")) == []


def test_a_list_shows_a_version_wholly_or_not_at_all_while_it_is_committed(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    seen: list[tuple[list[int], int | None, int | None]] = []

    def look() -> None:
        numbers = [version.number for version in two.versions(BERT)]
        seen.append((numbers, two.model(BERT).latest, two.alias(BERT, PROD)))

    done = race(
        one.database,
        "UPDATE aliases",
        lambda: push(one, store, b"fourth", alias="prod"),
        look,
        patience_s=LIMIT_S / 2,
    )
    assert not done.second_waited
    look()
    before, after = seen
    assert before == ([3, 2, 1], 3, 1), "nobody waits to look, and nothing half is seen"
    assert after == ([4, 3, 2, 1], 4, 4)


def test_a_listener_that_resumes_by_id_misses_no_event_of_two_commits_at_once(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    first, second = begun(one, store, "ours"), begun(two, store, "theirs")
    before = one.newest_event()
    seen: list[int] = []

    def publish_and_listen() -> None:
        second()
        seen.extend(event.id for event in two.events(before))

    done = race(one.database, "INSERT INTO audit", first, publish_and_listen, patience_s=1.0)
    assert done.errors == []
    every = [event.id for event in one.events(before)]
    assert len(every) == 2
    assert seen == every[: len(seen)], "one became visible after another with a higher id"
