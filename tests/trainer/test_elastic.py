"""A job that torchrun goes on with when one of its machines is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from elastic import INTERVAL, KILLED_AT, UNTIL
from ending import end_with_parent
from killed import digest
from trainer_world import World
from training import RUN, SAMPLES, as_bytes

LIMIT_S = 600.0


@contextmanager
def agent(folder: Path, port: int, number: int) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun, as if on a machine of its own. The test keeps the store at which they meet."""
    here = Path(__file__).parent
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-id=elastic"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
        "--rdzv-conf=is_host=0,last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=9",
        *("--local-addr=127.0.0.1", "--monitor-interval=0.1"),
        *(str(here / "elastic.py"), str(folder)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as docs/training.md says
        "PYTHONPATH": os.pathsep.join((str(here.parent.parent), str(here.parent))),
    }
    with (folder / f"agent-{number}.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, preexec_fn=end_with_parent
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def seen_in(folder: Path) -> dict[int, list[int]]:
    """What each step came to in the end: where it was done again, by those who had the run last."""
    found: dict[int, tuple[int, list[int]]] = {}
    for file in folder.glob("steps-*.jsonl"):
        generation = int(file.stem.split("-")[1])
        for step, numbers in map(json.loads, file.read_text().splitlines()):
            last, before = found.get(step, (0, []))
            if generation >= last:
                found[step] = generation, [*(before if generation == last else []), *numbers]
    return {step: numbers for step, (_, numbers) in found.items()}


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_job_of_two_agents_goes_on_with_one_when_the_other_is_killed(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        agents = [stack.enter_context(agent(tmp_path, store.port, n)) for n in range(2)]
        ended = sorted(one.wait(LIMIT_S) for one in agents)
    logs = [(tmp_path / f"agent-{number}.log").read_text()[-4000:] for number in range(2)]
    assert ended == [-9, 0], "\n".join(logs)
    done = json.loads((tmp_path / "done.json").read_text())
    saved = KILLED_AT - KILLED_AT % INTERVAL
    assert (done["ranks"], done["resumed"]) == (1, saved)
    steps = seen_in(tmp_path)
    assert {step: len(steps[step]) for step in steps} == {
        step: 4 if step <= saved else 2 for step in range(1, UNTIL + 1)
    }
    seen = Counter(number for numbers in steps.values() for number in numbers)
    assert seen == Counter(range(SAMPLES))
    with World(tmp_path, str(tmp_path / "store")).yard(99) as yard:
        weights = yard.load(f"{RUN}@step-{UNTIL}", tensors="model.*")
        assert yard.versions(RUN)[0].step == UNTIL
    named = {name.removeprefix("model."): one for name, one in weights.items()}
    assert digest(as_bytes(named)) == done["weights"]
