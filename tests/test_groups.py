"""Tests that run side by side."""

from __future__ import annotations

import pytest


@pytest.mark.cluster
def test_those_that_share_a_cluster_run_in_one_process(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process runs all of them")
    # By this, pytest-xdist knows them: what it does not show is spread over all processes.
    assert request.node.nodeid.endswith("@cluster")
