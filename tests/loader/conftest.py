"""What every test of the loader begins with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from loader_world import leave_out_others
from snapshot_world import write_model, yard_in

from weightyard.yard import Yard


@pytest.fixture(autouse=True)
def _others_left_out() -> None:
    """Threads that tests before this one left are not taken for those of this one."""
    leave_out_others()


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """An embedded one; many modules have another."""
    with yard_in(tmp_path) as opened:
        yield opened


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with files of a model."""
    return write_model(tmp_path / "model", 1, 2)
