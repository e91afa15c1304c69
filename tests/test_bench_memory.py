"""What a large tensor costs in memory beyond itself, by the tasks that the benchmark measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import memory
from bench.buffers import MIB
from bench.site import Site
from weightyard.testing.cluster import MiniCluster

TENSOR_BYTES, MOST_BEYOND_BYTES = 1024 * MIB, 512 * MIB


@pytest.mark.cluster
@pytest.mark.long
def test_a_tensor_is_written_and_read_in_half_a_gib_beyond_itself(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    site = Site.of(cluster, tmp_path)
    rows = memory.run(site, TENSOR_BYTES, lambda row: None)
    assert [row.task for row in rows] == ["write", "read"]
    for row in rows:
        assert 0 < row.beyond_bytes < MOST_BEYOND_BYTES, row
