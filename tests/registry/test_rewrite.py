from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from collecting import DAY_S, KIB, gc, noise, pass_time, require_no_orphan, states
from pushing import BERT, push, push_delta, read_back, write_pack
from sqlalchemy import select

from weightyard.errors import FileMissing
from weightyard.format.block import block_id
from weightyard.format.pack import Placement
from weightyard.names import BlockId, PackId, Ref
from weightyard.records import Publication
from weightyard.registry import schema
from weightyard.registry.collect import GcOptions
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.registry.schema import FileState
from weightyard.registry.uploads import Reading
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.writer import WriteOptions

_WRITERS = select(schema.uploads.c.project, schema.uploads.c.author)


class Remembered:
    """A reader's placements, as they were when it asked."""

    def __init__(self, placements: Mapping[BlockId, Sequence[Placement]]) -> None:
        self._placements = placements

    def placements(
        self, blocks: Sequence[BlockId], *, within_s: float = math.inf
    ) -> Mapping[BlockId, Sequence[Placement]]:
        return {block: self._placements[block] for block in blocks}


def packs(store: LocalStore) -> list[int]:
    return sorted(file.length for file in store.list(layout.PACKS))


def pack_names(store: LocalStore) -> set[str]:
    return {file.path.text.rpartition("/")[2] for file in store.list(layout.PACKS)}


def write_twin(registry: Registry, store: LocalStore, *contents: bytes) -> None:
    """A pack with what others have too, as of two writers who began before either had written."""
    upload = registry.open_upload(BERT, Publication())
    write_pack(upload, store, *((data, None) for data in contents))
    upload.abandon()


def spoil(store: LocalStore, pack: str, content: bytes) -> None:
    """Let a byte of a block rot in a pack."""
    file = store.folder / layout.pack(PackId(pack)).text
    data = bytearray(file.read_bytes())
    data[data.index(content[:1000])] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


def test_small_packs_become_one_and_every_version_stays_readable(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    versions = [push(registry, store, noise(seed), noise(99)) for seed in range(5)]
    assert len(packs(store)) == 5
    report = gc(registry, store)
    assert (report.packs_rewritten, report.packs_made) == (5, 1)
    assert len(packs(store)) == 1
    for seed, version in enumerate(versions):
        assert read_back(registry, store, version) == [noise(seed), noise(99)]
    require_no_orphan(database, store)
    assert registry.check(store, read_data=True).is_clean
    assert gc(registry, store).packs_rewritten == 0, "once is enough"


def test_what_gc_wrote_is_no_tokens_own_whatever_its_name(
    registry: Registry, store: LocalStore
) -> None:
    """Who wrote a block may know of it: that is not gc, which moves those of all projects."""
    for seed in range(5):
        push(registry, store, noise(seed))
    assert gc(registry, store).packs_made == 1
    blocks = [block_id(noise(seed)) for seed in range(5)]
    wrote = registry.database.read(lambda tx: tx.execute(_WRITERS).all())
    names = {who for project, who in wrote if project != BERT.project}
    assert names == {""}, "a token of that name would read all projects"
    assert registry.placements(blocks, reading=Reading(("weightyard",), "weightyard")) == {}
    assert len(registry.placements(blocks, reading=Reading(("team",), "alice"))) == 5


def test_a_few_small_packs_are_left_alone(registry: Registry, store: LocalStore) -> None:
    for seed in range(3):
        push(registry, store, noise(seed))
    assert gc(registry, store).packs_rewritten == 0


def test_of_a_mostly_dead_pack_the_rest_moves_on(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, *(noise(seed) for seed in range(8)))
    kept = push(registry, store, noise(3))
    registry.remove(Ref.parse("team/bert@v1"))
    before = packs(store)
    told = registry.gc(store, GcOptions(grace_s=0, embedded=True), dry_run=True)
    report = gc(registry, store)
    assert (told.packs_rewritten, told.packs_made) == (1, 1)
    assert (report.packs_rewritten, report.packs_made) == (1, 1)
    assert sum(packs(store)) < sum(before) / 6
    assert read_back(registry, store, kept) == [noise(3)]
    require_no_orphan(database, store)


def test_a_reader_with_old_placements_goes_on_until_the_grace_is_over(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, *(noise(seed) for seed in range(8)))
    kept = push(registry, store, noise(3))
    registry.remove(Ref.parse("team/bert@v1"))
    block = block_id(noise(3))
    old = Remembered(registry.placements([block]))
    into = bytearray(66 * KIB)

    def read(catalogue: Remembered | Registry) -> bytes:
        Reader(store, catalogue, threads=1).read([Wanted(block, 0, memoryview(into))])
        return bytes(into)

    assert registry.gc(store).packs_rewritten == 1
    assert states(database) == [FileState.DELETING, FileState.LIVE]
    pass_time(database, 6.9 * DAY_S)
    registry.gc(store)
    assert read(old) == noise(3)
    assert [found.pack for found in registry.placements([block])[block]] != [
        found.pack for found in old.placements([block])[block]
    ]
    pass_time(database, 0.2 * DAY_S)
    registry.gc(store)
    with pytest.raises(FileMissing):
        read(old)
    assert read(registry) == noise(3)
    assert read_back(registry, store, kept) == [noise(3)]


def test_a_pack_a_writer_holds_is_not_rewritten(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, *(noise(seed) for seed in range(8)))
    push(registry, store, noise(3))
    registry.remove(Ref.parse("team/bert@v1"))
    upload = registry.open_upload(BERT, Publication())
    assert len(upload.claim([block_id(noise(5))])) == 1
    assert gc(registry, store).packs_rewritten == 0
    upload.abandon()
    assert gc(registry, store).packs_rewritten == 1


def test_a_claim_during_the_copy_keeps_the_old_pack(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    """A writer wants a block that was dead when the plan was made, just before the switch."""
    push(registry, store, *(noise(seed) for seed in range(8)))
    push(registry, store, noise(3))
    registry.remove(Ref.parse("team/bert@v1"))
    upload = registry.open_upload(BERT, Publication())

    class Meanwhile(LocalStore):
        def publish(self, *arguments: object) -> None:
            super().publish(*arguments)  # type: ignore[arg-type]
            if str(arguments[1]).startswith("packs/"):
                assert len(upload.claim([block_id(noise(5))])) == 1

    assert gc(registry, Meanwhile(store.folder)).packs_rewritten == 0
    assert FileState.DELETING not in states(database)
    assert len(upload.claim([block_id(noise(5))])) == 1
    upload.abandon()
    pass_time(database, 3600)
    gc(registry, store)
    gc(registry, store)
    require_no_orphan(database, store)


def test_of_two_copies_the_older_stays(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    first = push(registry, store, noise(1), noise(2))
    write_twin(registry, store, noise(1), noise(2), noise(7))
    assert len(packs(store)) == 2
    gc(registry, store)
    assert len(packs(store)) == 1
    assert read_back(registry, store, first) == [noise(1), noise(2)]
    require_no_orphan(database, store)


def test_a_base_stays_while_a_delta_needs_it(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    base = noise(1)
    delta = bytes(66 * KIB - 1000) + base[-1000:]
    push(registry, store, base, *(noise(seed) for seed in range(10, 18)))
    version = push_delta(registry, store, delta, base)
    registry.remove(Ref.parse("team/bert@v1"))
    for _ in range(2):
        gc(registry, store)
        assert read_back(registry, store, version) == [delta]
    assert sum(packs(store)) < 3 * 66 * KIB, "what was beside the base is gone"
    assert registry.cost(Ref.parse("team/bert")).cold_load_bytes >= 66 * KIB
    registry.remove(Ref.parse("team/bert@v2"))
    gc(registry, store)
    assert packs(store) == []


def test_a_pack_whose_bytes_are_wrong_is_not_copied(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    options = WriteOptions(compress=False)
    push(registry, store, *(noise(seed) for seed in range(8)), options=options)
    push(registry, store, noise(3))
    registry.remove(Ref.parse("team/bert@v1"))
    (pack,) = pack_names(store)
    spoil(store, pack, noise(3))
    report = gc(registry, store)
    assert report.packs_rewritten == 0
    assert pack in report.failed[0]
    assert pack_names(store) == {pack}


def test_a_copy_is_not_given_up_for_an_older_one_whose_bytes_are_wrong(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    version = push(registry, store, noise(1), noise(2))
    (older,) = pack_names(store)
    write_twin(registry, store, noise(1), noise(2))
    (newer,) = pack_names(store) - {older}
    spoil(store, older, noise(2))
    report = gc(registry, store)
    assert (report.packs_rewritten, report.packs_deleted) == (0, 0)
    assert newer in report.failed[0]
    assert older in report.failed[0]
    assert pack_names(store) == {older, newer}
    registry.check(store, read_data=True)
    gc(registry, store)
    assert pack_names(store) == {newer}, "once it is known which one is damaged"
    assert read_back(registry, store, version) == [noise(1), noise(2)]
    require_no_orphan(database, store)


def test_a_copy_beside_an_older_one_that_cannot_be_copied_is_not_given_up(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    versions = [push(registry, store, noise(0))]
    (older,) = pack_names(store)
    versions += [push(registry, store, noise(seed)) for seed in range(1, 5)]
    before = pack_names(store)
    write_twin(registry, store, noise(0))
    (newer,) = pack_names(store) - before
    spoil(store, older, noise(0))
    report = gc(registry, store)
    assert report.packs_rewritten == 4, "the others became one"
    assert {older, newer} < pack_names(store)
    for seed, version in enumerate(versions):
        assert read_back(registry, store, version) == [noise(seed)]


def test_packs_kept_differently_are_not_merged(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    for seed in range(3):
        push(registry, store, noise(seed))
        push(registry, store, noise(10 + seed), replication=1)
    assert gc(registry, store).packs_rewritten == 0
    for seed in range(3, 5):
        push(registry, store, noise(10 + seed), replication=1)
    assert gc(registry, store).packs_rewritten == 5
    kept = select(schema.packs.c.replication).where(schema.packs.c.state == FileState.LIVE)
    assert sorted(map(str, database.read(lambda tx: tx.scalars(kept).all()))) == [
        "1",
        "None",
        "None",
        "None",
    ]
