"""What was worked out last is kept, bounded by what it weighs, and never for something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loader_world import BERT, noise, same, saved, sharded, yard_in

from weightyard.errors import Damaged
from weightyard.format.dtypes import DType
from weightyard.loader.mapping import MappedFile
from weightyard.loader.recent import Recent
from weightyard.yard import Yard


def test_what_was_used_longest_ago_goes_first() -> None:
    recent: Recent[str, int] = Recent(3)
    for number, key in enumerate("abc"):
        recent.keep(key, number, 1)
    assert recent.get("a") == 0
    recent.keep("d", 3, 1)
    assert [recent.get(key) for key in "abcd"] == [0, None, 2, 3]


def test_all_together_weigh_no_more_than_the_bound() -> None:
    recent: Recent[str, int] = Recent(10)
    recent.keep("a", 1, 4)
    recent.keep("b", 2, 4)
    recent.keep("c", 3, 6)
    assert [recent.get(key) for key in "abc"] == [None, 2, 3]
    recent.keep("d", 4, 10)
    assert [recent.get(key) for key in "abcd"] == [None, None, None, 4]


def test_a_value_that_is_too_heavy_is_not_kept_and_drives_out_nothing() -> None:
    recent: Recent[str, int] = Recent(10)
    recent.keep("a", 1, 9)
    assert recent.keep("b", 2, 11) == 2
    assert [recent.get(key) for key in "ab"] == [1, None]
    recent.keep("a", 3, 11)
    assert recent.get("a") is None, "what it replaces is old"
    recent.keep("c", 4, 10)
    assert recent.get("c") == 4, "the room is there again"


def test_a_value_that_is_replaced_weighs_nothing_any_more() -> None:
    recent: Recent[str, int] = Recent(10)
    for number in range(5):
        recent.keep("a", number, 6)
    recent.keep("b", 9, 4)
    assert [recent.get(key) for key in "ab"] == [4, 9]


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_in(tmp_path) as opened:
        yield opened


def test_what_was_asked_for_first_does_not_answer_what_is_asked_for_next(
    yard: Yard, tmp_path: Path
) -> None:
    shards = [{"l.0": noise(5)}, {"l.1": noise(6), "x": noise(7)}]
    yard.push(sharded(tmp_path / "model", *shards), BERT)
    everything = shards[0] | shards[1]
    for _ in range(2):
        assert same(yard.load(BERT), everything)
        assert same(yard.load(BERT, tensors="l.*"), {"l.0": noise(5), "l.1": noise(6)})
        assert same(yard.load(BERT, tensors=["x"]), {"x": noise(7)})
        assert same(yard.load(BERT, files="model-00002*"), shards[1])
        assert same(yard.load(BERT, files="model-00002*", tensors="l.*"), {"l.1": noise(6)})
        part = yard.load(BERT, tensors="x", slices={"x": slice(0, 2)})
        assert same(part, {"x": noise(7)[:2]})


def test_what_a_damaged_index_of_a_snapshot_says_counts_for_nobody(
    yard: Yard, tmp_path: Path
) -> None:
    shards = [{"l.0": noise(5)}, {"l.1": noise(6)}]
    yard.push(sharded(tmp_path / "model", *shards), BERT)
    index = yard.snapshot(BERT) / "model.safetensors.index.json"
    left_out = ', "l.1": "model-00002-of-00002.safetensors"'
    text = index.read_text()
    assert left_out in text
    index.chmod(0o600)
    index.write_text(text.replace(left_out, " " * len(left_out)))
    with pytest.raises(Damaged, match="load again"):
        yard.load(BERT)
    everything = shards[0] | shards[1]
    assert same(yard.load(BERT), everything)
    assert same(yard.load(BERT, cache=False), everything)
    assert same(yard.load(BERT, verify="full"), everything)


def test_a_file_that_was_replaced_is_looked_at_anew(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.safetensors", {"one": torch.arange(4, dtype=torch.int64)})
    assert MappedFile(file).tensor("one", DType.I64) is not None
    other = saved(tmp_path / "b.safetensors", {"two": torch.arange(4, 8, dtype=torch.int64)})
    assert other.stat().st_size == file.stat().st_size
    other.replace(file)
    mapped = MappedFile(file)
    found = mapped.tensor("two", DType.I64)
    assert found is not None
    assert found.tolist() == [4, 5, 6, 7]
    assert mapped.tensor("one", DType.I64) is None
