"""Snapshots of versions that were pushed as state dicts: they become safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from snapshot_world import BERT, content, yard_in

from weightyard.errors import (
    Unsupported,
)
from weightyard.loader.snapshots import open_snapshot
from weightyard.yard import Yard


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_in(tmp_path) as opened:
        yield opened


def test_a_state_dict_becomes_a_safetensors_file_that_safetensors_reads(yard: Yard) -> None:
    torch = pytest.importorskip("torch")
    import safetensors.torch

    embedding = torch.randn(300, 40, dtype=torch.bfloat16)
    state = {
        "embed": embedding,
        "head": embedding,
        "odd": torch.arange(7, dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "big": torch.randn(1000, 1000),
    }
    yard.push(state, BERT)
    path = yard.snapshot(BERT)
    assert set(content(path)) == {"model.safetensors"}
    read = safetensors.torch.load_file(path / "model.safetensors")
    assert set(read) == set(state) - {"head"}, "a tied tensor is there once, as save_model does it"
    assert all(torch.equal(read[name], state[name]) for name in read)
    mapped = open_snapshot(path)
    assert set(mapped) == set(state)
    assert mapped["head"].data_ptr() == mapped["embed"].data_ptr()
    assert all(torch.equal(mapped[name], state[name]) for name in state)
    assert all(mapped[name].data_ptr() % mapped[name].element_size() == 0 for name in state)


def test_a_state_dict_of_shards_becomes_one_file(tmp_path: Path) -> None:
    from weightyard.format.assembly import manifest_of
    from weightyard.format.block import MIB
    from weightyard.format.dtypes import DType
    from weightyard.format.splitting import BoxShape, StateTensor, split_state
    from weightyard.names import ModelName
    from weightyard.records import Publication
    from weightyard.transfer.publish import publish
    from weightyard.transfer.source import MemorySource
    from weightyard.transfer.writer import Content, Writer

    whole = np.random.default_rng(0).normal(size=(600, 500)).astype("<f4")
    with yard_in(tmp_path) as yard:
        upload = yard.catalogue.open_upload(ModelName.parse(BERT), Publication())
        splits, sources = [], []
        for rows in (slice(0, 400), slice(400, 600)):  # as four ranks of a 2 × 2 mesh save it
            for columns in (slice(0, 123), slice(123, 500)):
                part = np.ascontiguousarray(whole[rows, columns])
                box = BoxShape((rows.start, columns.start), part.shape)
                tensor = StateTensor("w", DType.F32, whole.shape, boxes=(box,))
                splits.append(split_state([tensor], MIB))
                sources.append([MemorySource(part.data)])
        contents = [Content(split, source) for split, source in zip(splits, sources, strict=True)]
        blocks = Writer(yard.store, upload).write(contents)
        publish(yard.store, upload, manifest_of(splits, blocks), Publication(), "k" * 32)
        import safetensors.numpy

        read = safetensors.numpy.load_file(yard.snapshot(BERT) / "model.safetensors")
    assert np.array_equal(read["w"], whole)


def test_a_state_dict_that_safetensors_cannot_hold_is_refused_by_name(yard: Yard) -> None:
    yard.push({"wave": np.ones(4, np.complex128)}, BERT)
    with pytest.raises(Unsupported, match="wave"):
        yard.snapshot(BERT)
