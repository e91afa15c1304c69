"""How much memory saves in the background take besides the training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from trainer_world import RUN, World, run_ranks

from weightyard.format.block import MIB
from weightyard.trainer.run import TrainRun
from weightyard.transfer.writer import WriteOptions

LAYERS, LAYER_BYTES, SAVES = 8, 16 * MIB, 6
THREADS = 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ParameterList(torch.randn(2048, 2048) for _ in range(LAYERS))


def peak_bytes() -> int:
    """The most memory this process has had since `count_anew`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def count_anew() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def grown(world: World, rank: int) -> int:
    """By how much a process grows that saves in the background after each step."""
    net = Layers()
    options = {"async_mode": "async", "anchors_bytes": 0, "threads": THREADS}
    with (
        world.yard(rank) as yard,
        TrainRun(yard, RUN, {"model": net}, interval=1, **options) as run,
    ):
        run.resume()
        before = count_anew()
        for _ in range(SAVES):
            with torch.no_grad():
                for layer in net.layers:
                    layer.add_(1)
            run.step()
        run.save(wait=True)
        assert run._saver.step == SAVES
        return peak_bytes() - before


@pytest.mark.long
def test_saves_in_the_background_take_one_copy_and_what_the_writer_works_with(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    took = run_ranks(world, grown, size=1, is_grouped=False)[0]
    options = WriteOptions()
    # Pieces claimed at once, packs that are not closed yet, and blocks being encoded.
    blocks = (THREADS + 1) * 2 * LAYER_BYTES
    working = options.kept_bytes + options.lanes * options.pack_bytes + blocks
    one_copy = LAYERS * LAYER_BYTES
    assert one_copy < took < one_copy + working < SAVES * one_copy
