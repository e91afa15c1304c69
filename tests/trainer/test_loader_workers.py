"""Worker processes of a loader outlast the signal that asks a job to end, and nothing else."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess

import pytest
from torch.utils.data import DataLoader

from weightyard.trainer import GlobalOffsetSampler, stay_on_signals

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("asked_by", [signal.SIGTERM, signal.SIGINT])
def test_workers_serve_their_rank_to_its_last_step_after_a_signal_to_the_group(
    asked_by: signal.Signals,
) -> None:
    sampler = GlobalOffsetSampler(64)
    loader = DataLoader(range(64), 4, sampler=sampler, num_workers=1, prefetch_factor=1)  # type: ignore[arg-type]
    batches = sampler.batches(loader)
    seen = next(batches).tolist()
    (worker,) = multiprocessing.active_children()
    # As torchrun does it: another process than the one that has the loader.
    subprocess.run(["/bin/sh", "-c", f"kill -{asked_by.value} {worker.pid}"], check=True)
    for batch in batches:
        seen += batch.tolist()
    assert sorted(seen) == list(range(64))


def test_workers_end_when_their_own_process_says_so() -> None:
    loader = DataLoader(range(64), 4, num_workers=1, worker_init_fn=stay_on_signals)  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0


def test_what_a_user_has_workers_do_first_is_done_all_the_same() -> None:
    sampler = GlobalOffsetSampler(4)
    made = multiprocessing.Value("i", -1)

    def note(number: int) -> None:
        made.value = number

    loader = DataLoader(range(4), 4, sampler=sampler, num_workers=1, worker_init_fn=note)  # type: ignore[arg-type]
    assert len(list(sampler.batches(loader))) == 1
    assert made.value == 0
    list(sampler.batches(loader))
    assert made.value == 0
