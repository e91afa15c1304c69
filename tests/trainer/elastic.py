"""A training job as users write it, for torchrun with a changing number of agents."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ending import end_with_parent
from killed import digest
from trainer_world import World
from training import RUN, as_bytes, setting, steps_of
from waiting import SOON_S

from weightyard.trainer.run import TrainRun

UNTIL = 14
"""Four steps of two ranks and ten of one are an epoch."""
INTERVAL = 2
KILLED_AT = 5


def wait_for_another() -> None:
    """torchrun ends this process when another agent has come, and starts it anew."""
    time.sleep(2 * SOON_S)
    raise SystemExit("nobody came")


def end_agent() -> None:
    """This process ends with it."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(SOON_S)


def main() -> None:
    end_with_parent()
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    was_two = folder / "was-two"
    if ranks == 1 and not was_two.exists():
        wait_for_another()
    made = setting()
    with (
        World(folder, str(folder / "store")).yard(rank) as yard,
        TrainRun(yard, RUN, made.state, interval=INTERVAL) as run,
    ):
        resumed = run.resume()
        notes = folder / f"steps-{run.generation}-{rank}.jsonl"
        for _, numbers in steps_of(made, run, UNTIL):
            step = run.steps + 1
            with notes.open("a") as file:
                file.write(json.dumps([step, numbers]) + "\n")
            if step == KILLED_AT and ranks == 2:
                was_two.touch()
                if rank == 1:
                    end_agent()
    done = {"ranks": ranks, "resumed": resumed, "weights": digest(as_bytes(made.net.state_dict()))}
    (folder / "done.json").write_text(json.dumps(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
