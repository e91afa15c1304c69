"""Whether projects share blocks, and that with `dedup = project` none learns of another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from collecting import gc_twice, noise
from pushing import push, push_delta, read_back
from sqlalchemy import select

from weightyard.errors import BadSetting, BlockMissing
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB, block_id
from weightyard.format.dtypes import DType
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import ModelName, Ref
from weightyard.records import Publication, Version
from weightyard.registry import binding, migrate, schema
from weightyard.registry.collect import GcOptions
from weightyard.registry.database import Database
from weightyard.registry.rebuild import rebuild
from weightyard.registry.registry import Registry
from weightyard.registry.schema import Dedup
from weightyard.registry.uploads import Reading
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.transfer.publish import publish
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, Writer

RED, BLUE = ModelName("red", "bert"), ModelName("blue", "bert")


@pytest.fixture
def apart(database: Database, store: LocalStore) -> Registry:
    """A yard whose projects share nothing."""
    binding.bind(database, store, dedup=Dedup.PROJECT)
    return Registry(database, store=store)


@pytest.fixture
def empty(database: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path}/empty.db"
    other = Database(url if database.is_sqlite else request.getfixturevalue("postgres")())
    migrate.upgrade(other)
    yield other
    other.close()


def stored_bytes(store: LocalStore) -> int:
    return sum(file.length for file in store.list(layout.PACKS))


def packs(store: LocalStore) -> int:
    return len(list(store.list(layout.PACKS)))


def projects(registry: Registry) -> list[str | None]:
    """Whom the packs that can be read are for, the oldest first."""
    p = schema.packs
    live = select(p.c.project).where(p.c.state == "live").order_by(p.c.id)
    return registry.database.read(lambda tx: list(tx.scalars(live)))


def test_equal_content_of_two_projects_is_stored_once_in_a_yard_that_shares(
    database: Database, store: LocalStore
) -> None:
    assert binding.bind(database, store).dedup is Dedup.YARD
    registry = Registry(database, store=store)
    for model in (RED, BLUE):
        push(registry, store, noise(1), model=model)
    assert packs(store) == 1


def test_equal_content_of_two_projects_is_stored_twice_where_they_share_nothing(
    apart: Registry, store: LocalStore
) -> None:
    versions = [push(apart, store, noise(1), model=model) for model in (RED, BLUE, RED, BLUE)]
    assert projects(apart) == ["red", "blue"], "and once in each"
    for version in versions:
        assert read_back(apart, store, version) == [noise(1)]


def test_a_claim_does_not_tell_what_another_project_has(apart: Registry, store: LocalStore) -> None:
    push(apart, store, noise(1), model=RED)
    upload = apart.open_upload(BLUE, Publication())
    assert upload.claim([block_id(noise(1))]) == {}
    every = Reading(("blue", "red"), "eve")  # may read both, but the pack would be of both
    upload = apart.resume_upload(upload.id, Publication(), reading=every)
    assert upload.claim([block_id(noise(1))]) == {}


def test_a_reader_is_told_of_packs_of_its_own_projects_only(
    apart: Registry, store: LocalStore
) -> None:
    push(apart, store, noise(1), model=RED)
    push(apart, store, noise(1), model=BLUE)
    block = block_id(noise(1))
    mine, theirs = (
        apart.placements([block], reading=Reading((project,), "eve"))[block]
        for project in ("red", "blue")
    )
    assert len(mine) == len(theirs) == 1
    assert mine[0].pack != theirs[0].pack
    assert apart.placements([block], reading=Reading(("green",), "eve")) == {}


def test_what_a_push_would_find_is_what_its_claim_finds(apart: Registry, store: LocalStore) -> None:
    push(apart, store, noise(1), model=RED)
    block = block_id(noise(1))
    every = Reading(("blue", "red"), "eve")
    for reading in (None, every):
        assert [*apart.placements([block], reading=reading, for_project="red")] == [block]
        assert apart.placements([block], reading=reading, for_project="blue") == {}
    stranger = Reading(("blue",), "eve")
    assert apart.placements([block], reading=stranger, for_project="red") == {}


def test_in_a_yard_that_shares_a_push_finds_what_other_projects_have(
    database: Database, store: LocalStore
) -> None:
    binding.bind(database, store)
    registry = Registry(database, store=store)
    push(registry, store, noise(1), model=RED)
    block = block_id(noise(1))
    assert [*registry.placements([block], for_project="blue")] == [block]


def test_the_cost_of_a_version_does_not_tell_what_another_project_has(
    apart: Registry, store: LocalStore
) -> None:
    push(apart, store, noise(1), model=RED)
    push(apart, store, noise(1), model=BLUE)
    cost = apart.cost(Ref.parse("red/bert@v1"))
    assert (cost.unique_bytes, cost.shared_with) == (len(noise(1)), {})
    assert cost.unique_stored_bytes > 0
    push(apart, store, noise(1), model=RED)
    cost = apart.cost(Ref.parse("red/bert@v1"))
    assert (cost.unique_bytes, [*cost.shared_with]) == (0, ["red/bert@v2"])


def test_what_removing_is_said_to_free_goes_although_another_project_has_the_same(
    apart: Registry, store: LocalStore
) -> None:
    for model in (RED, BLUE):
        kept = push(apart, store, noise(1), model=model)
    only = Ref.parse("red/bert@v1")
    freed = apart.freed_by_removing(only)
    assert freed > 0
    apart.remove(only)
    options = GcOptions(grace_s=0, embedded=True)
    planned = apart.gc(store, options, dry_run=True)
    assert planned.deleted_bytes >= freed
    gc_twice(apart, store, apart.database)
    assert projects(apart) == ["blue"]
    assert read_back(apart, store, kept) == [noise(1)]


def test_rewriting_leaves_out_what_only_another_project_needs(
    apart: Registry, store: LocalStore
) -> None:
    push(apart, store, noise(1), noise(2), noise(3), model=RED)
    versions = [
        push(apart, store, noise(3), model=RED),
        push(apart, store, noise(1), noise(2), model=BLUE),
    ]
    freed = apart.freed_by_removing(Ref.parse("red/bert@v1"))
    before = stored_bytes(store)
    apart.remove(Ref.parse("red/bert@v1"))
    gc_twice(apart, store, apart.database)
    assert before - stored_bytes(store) >= freed
    contents = [read_back(apart, store, version) for version in versions]
    assert contents == [[noise(3)], [noise(1), noise(2)]]


def test_a_delta_and_its_base_stay_while_their_own_project_needs_them(
    apart: Registry, store: LocalStore
) -> None:
    push(apart, store, noise(1), model=RED)
    tuned = push_delta(apart, store, noise(2), noise(1), model=RED)
    push(apart, store, noise(1), model=BLUE)
    apart.remove(Ref.parse("red/bert@v1"))
    gc_twice(apart, store, apart.database)
    assert read_back(apart, store, tuned) == [noise(2)]


def test_a_rebuilt_yard_keeps_what_a_project_has_only_in_packs_of_another(
    apart: Registry, store: LocalStore, empty: Database
) -> None:
    for model in (RED, BLUE):
        kept = push(apart, store, noise(1), model=model)
        tuned = push_delta(apart, store, noise(2), noise(1), model=model)
    apart.flush_outbox(store)
    rebuild(store, empty)
    registry = Registry(empty, store=store)
    assert set(projects(registry)) == {"blue"}, "the first of those that have all of the blocks"
    for number in (2, 1):
        registry.remove(Ref.parse(f"blue/bert@v{number}"))
    gc_twice(registry, store, empty)
    red = [version.model_copy(update={"model": "red/bert"}) for version in (kept, tuned)]
    assert [read_back(registry, store, version) for version in red] == [[noise(1)], [noise(2)]]


@pytest.mark.parametrize("dedup", Dedup)
def test_a_version_cannot_refer_to_blocks_its_token_may_not_read(
    database: Database, store: LocalStore, dedup: Dedup
) -> None:
    binding.bind(database, store, dedup=dedup)
    registry = Registry(database, store=store, who="red's")
    push(registry, store, noise(1), model=RED)
    split = split_state([StateTensor("t", DType.U8, (len(noise(1)),))], MIB)
    manifest = manifest_of([split], [[block_id(noise(1))]])
    opened = registry.open_upload(BLUE, Publication(), who="eve")
    upload = registry.resume_upload(opened.id, Publication(), reading=Reading(("blue",), "eve"))
    upload.claim([block_id(noise(1))])
    with pytest.raises(BlockMissing):
        publish(store, upload, manifest, Publication(), "key")
    Writer(store, upload).write([Content(split, [MemorySource(noise(1))])])
    assert publish(store, upload, manifest, Publication(), "key").ref == "blue/bert@v1"


def many(registry: Registry, store: LocalStore) -> list[Version]:
    """Small packs of both projects, with equal content, worth merging."""
    return [
        push(registry, store, noise(seed), noise(99), model=model)
        for seed in range(6)
        for model in (RED, BLUE)
    ]


def test_merging_packs_keeps_projects_apart(apart: Registry, store: LocalStore) -> None:
    versions = many(apart, store)
    assert len(projects(apart)) == 12
    gc_twice(apart, store, apart.database)
    assert sorted(map(str, projects(apart))) == ["blue", "red"]
    assert packs(store) == 2
    for version, seed in zip(versions, [s for s in range(6) for _ in range(2)], strict=True):
        assert read_back(apart, store, version) == [noise(seed), noise(99)]
    for model in (RED, BLUE):
        upload = apart.open_upload(model, Publication())
        assert len(upload.claim([block_id(noise(s)) for s in (0, 5, 99)])) == 3


def test_a_project_keeps_its_content_when_the_other_removes_the_same(
    apart: Registry, store: LocalStore
) -> None:
    push(apart, store, noise(1), model=RED)
    kept = push(apart, store, noise(1), model=BLUE)
    apart.remove(Ref.parse("red/bert@v1"))
    gc_twice(apart, store, apart.database)
    assert read_back(apart, store, kept) == [noise(1)]


def test_a_rebuilt_registry_still_keeps_projects_apart(
    apart: Registry, store: LocalStore, empty: Database
) -> None:
    push(apart, store, noise(1), model=RED)
    push(apart, store, noise(2), model=BLUE)
    push(apart, store, noise(3), model=RED)
    push(apart, store, noise(3), model=BLUE)
    apart.flush_outbox(store)
    rebuild(store, empty)
    again = Registry(empty, store=store)
    assert binding.bind(empty, store).dedup is Dedup.PROJECT
    assert sorted(map(str, projects(again))) == ["blue", "blue", "blue", "red"]
    claimed = {
        model: set(
            again.open_upload(model, Publication()).claim([block_id(noise(s)) for s in (1, 2, 3)])
        )
        for model in (RED, BLUE)
    }
    assert claimed[RED] == {block_id(noise(1))}
    assert claimed[BLUE] == {block_id(noise(2)), block_id(noise(3))}
    assert read_back(again, store, push(again, store, noise(3), model=RED)) == [noise(3)]


def test_a_rebuilt_registry_tells_nobody_of_packs_whose_writer_it_does_not_know(
    database: Database, store: LocalStore, empty: Database
) -> None:
    binding.bind(database, store)
    registry = Registry(database, store=store)
    push(registry, store, noise(1), model=RED)
    registry.flush_outbox(store)
    rebuild(store, empty)
    again = Registry(empty, store=store)
    upload = again.open_upload(BLUE, Publication(), who="eve")
    block = block_id(noise(1))
    for projects, found in ((("blue",), []), (("blue", "red"), [block])):
        reading = Reading(projects, "eve")
        assert [*again.placements([block], reading=reading)] == found
        claimed = again.resume_upload(upload.id, Publication(), reading=reading).claim([block])
        assert [*claimed] == found


def test_the_choice_is_made_once(apart: Registry, store: LocalStore) -> None:
    with pytest.raises(BadSetting, match="dedup=project"):
        binding.bind(apart.database, store, dedup=Dedup.YARD)
    assert binding.bind(apart.database, store, dedup=Dedup.PROJECT).dedup is Dedup.PROJECT
