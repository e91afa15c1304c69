"""What every test of the loader begins with."""

from __future__ import annotations

import pytest
from loader_world import leave_out_others


@pytest.fixture(autouse=True)
def _others_left_out() -> None:
    """Threads that tests before this one left are not taken for those of this one."""
    leave_out_others()
