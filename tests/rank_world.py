"""Ranks as real processes that talk over loopback."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.yard import Yard

RANKS = 4
_LIMIT_S = 300.0
_IMPORTED_ONCE = [
    "alembic.command",
    "pytest",
    "safetensors.torch",
    "torch._dynamo",  # which optimizers and FSDP bring in when they are first used
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "weightyard.loader.mapped",
    "weightyard.loader.shared",
    "weightyard.registry.migrate",
    "weightyard.registry.registry",
    "weightyard.testing.cluster",
    "weightyard.testing.faults",
    "weightyard.trainer.writer",
]
_IMPORTED_IF_USED = ["accelerate", "pytorch_lightning", "transformers.trainer"]
"""The same for what is slow to import, if some test that was collected imports it."""


@dataclass(frozen=True)
class World:
    """Where the ranks find a yard."""

    folder: Path
    url: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def yard(self, rank: int, **more: Any) -> Iterator[Yard]:
        given = Settings(
            home=self.folder / "home",
            cache=self.folder / f"cache-{rank}",
            **{**self.settings, **more},
        )
        with open_yard(self.url, settings=given) as yard:
            yield yard


Job = Callable[[World, int], Any]


def run_ranks(
    world: World,
    job: Job,
    *,
    dead: Collection[int] = (),
    size: int = RANKS,
    is_grouped: bool = True,
) -> dict[int, Any]:
    """What a function comes to on each rank of a new group, but for those that die.

    Unless `is_grouped` they have only what a launcher gives them, and make the group themselves.
    """
    context = multiprocessing.get_context("forkserver")
    used = [name for name in _IMPORTED_IF_USED if name in sys.modules]
    context.set_forkserver_preload([*_IMPORTED_ONCE, *used])
    # As a launcher keeps it: whichever rank dies, the store is there.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = {rank: context.Pipe(duplex=False) for rank in range(size)}
    processes = [
        context.Process(
            target=_rank, args=(world, job, rank, size, store.port, is_grouped, answers[rank][1])
        )
        for rank in range(size)
    ]
    try:
        for rank, process in enumerate(processes):
            process.start()
            answers[rank][1].close()  # the rank has it: if it dies, that is seen at once
        found = {}
        until = time.monotonic() + _LIMIT_S
        for rank in range(size):
            if rank not in dead:
                assert answers[rank][0].poll(until - time.monotonic()), f"rank {rank} hangs"
                found[rank] = answers[rank][0].recv()
        return found
    finally:
        for process in processes:
            process.join(0.2)
            process.kill()
            process.join()


def _rank(
    world: World, job: Job, rank: int, size: int, port: int, is_grouped: bool, answer: Any
) -> None:
    gc.freeze()  # what all ranks share is no garbage, and looking at it would copy it
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    if is_grouped:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_LIMIT_S))
    answer.send(job(world, rank))
    os._exit(0)  # a broken group is not worth tearing down
