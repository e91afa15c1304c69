"""What a rank may use of its host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightyard.trainer.host import cgroup_limits, share_of_cores, share_of_memory

GIB = 1 << 30


def test_ranks_of_a_host_share_its_memory_and_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = share_of_memory()
    assert 0 < alone <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert share_of_memory() == alone // 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    assert share_of_cores() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="no affinity elsewhere")
def test_a_process_that_may_use_one_core_alone_counts_no_others() -> None:
    one = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, {{{one}}}); "
        "from weightyard.trainer.host import share_of_cores; print(share_of_cores())"
    )
    clean = {name: value for name, value in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=clean
    )
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize(
    ("line", "folder", "file"),
    [
        ("0::/jobs/one", "", "memory.max"),
        ("4:cpu,memory:/jobs/one", "memory", "memory.limit_in_bytes"),
    ],
)
def test_a_container_has_no_more_memory_than_its_groups(
    tmp_path: Path, line: str, folder: str, file: str
) -> None:
    own, root = tmp_path / "own", tmp_path / "groups"
    own.write_text(f"9:pids:/\n{line}\n")
    assert cgroup_limits(own, root) == []
    inner = root / folder / "jobs" / "one"
    inner.mkdir(parents=True)
    (inner / file).write_text("max\n")
    (inner.parent / file).write_text(f"{2 * GIB}\n")
    (root / folder / file).write_text(f"{8 * GIB}\n")  # as a container sees its own
    assert cgroup_limits(own, root) == [2 * GIB, 8 * GIB]
    assert cgroup_limits(tmp_path / "nowhere", root) == []
