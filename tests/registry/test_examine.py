"""Examining files whose replicas HDFS itself refuses: they are bad, not out of reach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from weightyard.errors import DataNodeFailed, ReplicasDamaged, YardError
from weightyard.format.dtypes import DType
from weightyard.format.pack import Placement
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import Digest, PackId
from weightyard.registry.examine import (
    examine_manifest,
    examine_pack,
    read_good_block,
    read_good_manifest,
)
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Location, Read, Store
from weightyard.testing.faults import FaultyStore
from weightyard.testing.store_contract import stage
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, Writer

BLOCK_BYTES = 1 << 20
REFUSED = ReplicasDamaged("none passes HDFS's checksums")


class Refusing(FaultyStore):
    """Fails the reads that touch one byte."""

    def __init__(self, root: Path, failure: YardError) -> None:
        super().__init__(LocalStore(root))
        self._failure = failure
        self.at = -1

    def before_read(self, location: Location, reads: Sequence[Read], *_: object) -> None:
        if any(read.offset <= self.at < read.offset + len(read.into) for read in reads):
            raise self._failure


def write_pack(store: Store) -> tuple[PackId, list[Placement]]:
    """A pack of three blocks."""
    store.init()
    catalogue = MemoryCatalogue()
    tensors = [StateTensor(f"t{i}", DType.U8, (BLOCK_BYTES,)) for i in range(3)]
    sources = [MemorySource(bytes([i]) * BLOCK_BYTES) for i in range(3)]
    split = split_state(tensors, BLOCK_BYTES)
    Writer(store, catalogue.upload()).write([Content(split, sources)])
    ((pack, placements),) = catalogue.packs.items()
    return pack, sorted(placements, key=lambda placement: placement.offset)


def test_a_block_that_hdfs_refuses_from_every_replica_is_bad_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    store = Refusing(tmp_path, REFUSED)
    pack, placements = write_pack(store)
    store.at = placements[1].offset
    found = examine_pack(store, pack, placements)
    assert found.is_complete
    assert found.bad == {placements[1].offset}
    assert [copy.flaw for copy in found.copies] == [str(REFUSED)]
    with pytest.raises(ReplicasDamaged):
        read_good_block(store, placements[1])


@pytest.mark.parametrize("at", [0, -1], ids=["head", "footer"])
def test_a_head_or_footer_that_hdfs_refuses_is_a_flaw(tmp_path: Path, at: int) -> None:
    store = Refusing(tmp_path, REFUSED)
    pack, placements = write_pack(store)
    store.at = at % store.stat(layout.pack(pack)).length
    found = examine_pack(store, pack, placements)
    assert (found.is_complete, found.is_flawless, found.bad) == (True, False, frozenset())


def test_a_manifest_that_hdfs_refuses_is_bad(tmp_path: Path) -> None:
    store = Refusing(tmp_path, REFUSED)
    store.init()
    digest = Digest("ab" * 32)
    store.publish(stage(store, b"whatever"), layout.manifest(digest))
    store.at = 0
    found = examine_manifest(store, digest)
    assert (found.is_complete, found.bad) == (True, {0})
    assert read_good_manifest(store, digest) is None


def test_a_replica_that_is_away_is_not_bad(tmp_path: Path) -> None:
    store = Refusing(tmp_path, DataNodeFailed("dn:1", "nobody listens"))
    pack, placements = write_pack(store)
    store.at = placements[1].offset
    found = examine_pack(store, pack, placements)
    assert not found.is_complete
    assert found.bad == frozenset()
