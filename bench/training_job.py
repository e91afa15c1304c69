"""What the ranks of a measured training do. Started by torchrun; the first rank writes the answer.

python -m torch.distributed.run … -m bench.training_job REQUEST ANSWER
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bench import peers, stock
from bench.counting import Counted, count
from bench.site import Site
from bench.trained import Dense, Kind, Learner
from bench.worker import cpu_s, machine_cpu_s, own_cpu_s, peak_rss_bytes
from bench.yards import opened
from weightyard.trainer.reader import YardReader
from weightyard.trainer.run import TrainRun
from weightyard.trainer.writer import YardWriter
from weightyard.yard import Yard

OURS, STOCK = "weightyard", "stock"
RUN = "bench/run"
STEP = 1200


class Request(msgspec.Struct, frozen=True):
    """What a job is asked."""

    site: Site
    task: str
    options: dict[str, Any]


class Took(msgspec.Struct, frozen=True):
    """What one thing that all ranks did together took."""

    what: str
    who: str
    seconds: float
    client_cpu_s: float
    """Of all ranks."""
    server_cpu_s: float
    other_cpu_s: float
    peak_rss_bytes: int
    """Of the hungriest rank."""
    counted: Counted | None = None
    stored_bytes: int = 0
    read_bytes: int = 0
    """Stored bytes that the readers say they read; 0 if they do not."""
    needed_bytes: int = 0


@dataclass(frozen=True)
class Job:
    """The ranks, and where they put things."""

    site: Site
    url: str
    """In HDFS, of this repetition alone."""
    folder: str
    """For the registry."""

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0

    def yard(self, who: str = OURS) -> Yard:
        """One that the first rank has made, where it is new."""
        place = f"{self.url}/{_folder(who)}", f"{self.folder}/{_folder(who)}"
        if self.is_first:
            opened(*place).close()
        dist.barrier()
        return opened(*place)

    def timed(
        self,
        what: str,
        who: str,
        action: Callable[[], object],
        *,
        is_counted: bool,
        yard: Yard | None = None,
    ) -> Took:
        """Do it on all ranks at once. The first one's answer holds the sums.

        `yard`: what it writes behind its caller counts among the calls, and not as time.
        """
        pids = self.site.datanode_pids
        _settled(yard)
        dist.barrier()  # what other ranks still open is not what is counted
        before = count(self.site.namenode_http) if is_counted and self.is_first else None
        dist.barrier()
        cpu, servers, machine = own_cpu_s(), cpu_s(pids), machine_cpu_s()
        began = time.perf_counter()
        action()
        dist.barrier()
        seconds = time.perf_counter() - began
        used = torch.tensor([own_cpu_s() - cpu], dtype=torch.float64)
        peak = torch.tensor([peak_rss_bytes()])
        served, all_s = cpu_s(pids) - servers, machine_cpu_s() - machine
        dist.all_reduce(used)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        _settled(yard)
        dist.barrier()
        counted = count(self.site.namenode_http).since(before) if before is not None else None
        dist.barrier()
        client = float(used)
        other = max(0.0, all_s - client - served)
        return Took(what, who, seconds, client, served, other, int(peak), counted)

    def stored_bytes(self, folder: str) -> int:
        """Of all files below a folder, one copy of each."""
        path = folder.removeprefix(self.site.url)
        files = peers.native_client(self.site).list_status(path, recursive=True)
        return sum(file.length for file in files if not file.isdir)


def _settled(yard: Yard | None) -> None:
    """Wait for the records that a yard writes behind whoever used it."""
    if yard is not None and not yard._settling.wait():
        raise ValueError("records are still being written: their calls would be missed")


def save(
    job: Job, *, length: int, ways: list[str], is_counted: bool, is_delta: bool = False
) -> list[Took]:
    """The same state by each way; what they made stays.

    `is_delta`: ours is the second checkpoint of the run, and one value in ten differs in its last
    bit from the first. Theirs are whole, whichever it is.
    """
    state = Dense(length, init_device_mesh("cpu", (dist.get_world_size(),))).made()
    took = []
    for who in ways:
        folder = f"{job.url}/{_folder(who)}"
        if who == STOCK:
            theirs = stock.writer(folder)
            one = job.timed(
                "save",
                who,
                lambda w=theirs: dcp.save(state, storage_writer=w),
                is_counted=is_counted,
            )
        else:
            with job.yard(who) as yard, YardWriter(yard, RUN) as writer:
                if is_delta:
                    _turn_last_bits(state)
                    dcp.save(state, checkpoint_id=STEP - 1, storage_writer=writer)
                    _turn_last_bits(state)
                one = job.timed(
                    "save",
                    who,
                    lambda w=writer: dcp.save(state, checkpoint_id=STEP, storage_writer=w),
                    is_counted=is_counted,
                    yard=yard,
                )
                if is_delta and writer.report.stored_bytes > writer.report.whole_bytes / 2:
                    raise ValueError("what was saved second is not stored as a delta")
        stored = job.stored_bytes(folder) if job.is_first else 0
        took.append(msgspec.structs.replace(one, stored_bytes=stored))
    return took


def _folder(who: str) -> str:
    """Where in HDFS it has its files."""
    return {OURS: "yard", STOCK: "stock"}[who]


def _turn_last_bits(state: Mapping[str, Any]) -> None:
    """Of one value in ten; twice is as if never."""
    for one in state.values():
        if isinstance(one, torch.Tensor):
            local = one.to_local() if isinstance(one, DTensor) else one
            local.view(torch.int32).view(-1)[::10] ^= 1


def load(job: Job, *, length: int, ways: list[str], is_counted: bool) -> list[Took]:
    """What `save` made; into tensors that are there, each value compared afterwards."""
    dense = Dense(length, init_device_mesh("cpu", (dist.get_world_size(),)))
    took = []
    for who in ways:
        state = dense.empty()
        if who == STOCK:
            theirs = stock.reader(f"{job.url}/stock")
            one = job.timed(
                "load",
                who,
                lambda r=theirs, s=state: dcp.load(s, storage_reader=r),
                is_counted=is_counted,
            )
            stored = job.stored_bytes(f"{job.url}/stock") if job.is_first else 0
            one = msgspec.structs.replace(one, needed_bytes=stored)
        else:
            with job.yard(who) as yard:
                reader = YardReader(yard, f"{RUN}@step-{STEP}")
                one = job.timed(
                    "load",
                    who,
                    lambda r=reader, s=state: dcp.load(s, storage_reader=r),
                    is_counted=is_counted,
                    yard=yard,
                )
            report = reader.report
            assert report is not None
            one = msgspec.structs.replace(
                one, read_bytes=report.stored_bytes, needed_bytes=report.needed_bytes
            )
        dense.require_same(state)
        took.append(one)
    return took


def stall(job: Job, *, width: int, layers: int, steps: int, interval: int) -> list[dict[str, Any]]:
    """A transformer trained while it is saved in the background, by either way.

    Each begins with weights of its own: what an earlier one has stored would cost a later one
    nothing.
    """
    with job.yard() as yard:
        ways: tuple[tuple[str, _Saves], ...] = (
            (OURS, _Ours(yard, "bench/stall", interval)),
            (STOCK, _Stock(f"{job.url}/stock", interval)),
        )
        return [
            _trained(way, saves, width, layers, steps, seed)
            for seed, (way, saves) in enumerate(ways)
        ]


class _Saves(Protocol):
    """A way to save beside the training. Call order: begin → step, again and again → end."""

    def begin(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None: ...

    def step(self, number: int) -> bool:
        """Whether a save was begun."""

    def end(self) -> None: ...


class _Stock:
    """As torch's documents show it; with a group of its own, or its collectives meet FSDP's."""

    def __init__(self, url: str, interval: int) -> None:
        self._url, self._interval = url, interval
        self._under_way: Any = None

    def begin(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def step(self, number: int) -> bool:
        if number % self._interval:
            return False
        self.wait()
        model, optim = get_state_dict(self._model, self._optimizer)
        self._under_way = dcp.async_save(
            {"model": model, "optim": optim},
            storage_writer=stock.writer(f"{self._url}/{number}"),
            process_group=self._group,
            async_stager=self._stager,
        )
        return True

    def wait(self) -> None:
        if self._under_way is not None:
            under_way = getattr(self._under_way, "upload_completion", self._under_way)
            under_way.result()
            self._under_way = None

    def end(self) -> None:
        self.wait()
        self._stager.close()


class _Ours:
    """By a TrainRun."""

    def __init__(self, yard: Yard, run: str, interval: int) -> None:
        self._yard, self._name, self._interval = yard, run, interval

    def begin(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = {"model": model, "optim": optimizer}
        self._run = TrainRun(
            self._yard, self._name, state, interval=self._interval, async_mode="async"
        )

    def step(self, number: int) -> bool:
        self._run.step()
        return number % self._interval == 0

    def end(self) -> None:
        self._run.close()


def _trained(
    way: str, saves: _Saves, width: int, layers: int, steps: int, seed: int
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Learner(width, layers)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(4, 64, width)
    for _ in range(3):  # warm up, and have a state to save
        _learn(model, optimizer, batch)
    saves.begin(model, optimizer)
    dist.barrier()
    taken, stalled = [], {}
    for number in range(1, steps + 1):
        at = time.perf_counter()
        _learn(model, optimizer, batch)
        learned = time.perf_counter()
        is_saved = saves.step(number)
        taken.append(time.perf_counter() - at)
        if is_saved:
            stalled[number] = time.perf_counter() - learned
    saves.end()
    dist.barrier()
    state_bytes = 3 * sum(one.nbytes for one in model.parameters())
    return {
        "way": way,
        "steps_s": taken,
        "stalls_s": stalled,
        "state_bytes": state_bytes,
    }


def _learn(model: Learner, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def kind(job: Job, *, kind: str, length: int, saves: int, steps: int) -> list[dict[str, Any]]:
    """What the checkpoints of a kind of training store, and what reading the last one reads."""
    trained = Kind(kind, length)
    rows = []
    with job.yard() as yard, YardWriter(yard, RUN) as writer:
        for number in range(1, saves + 1):
            for _ in range(steps):
                trained.step()
            dcp.save(trained.state(), checkpoint_id=number, storage_writer=writer)
            rows.append({"stored_bytes": writer.report.stored_bytes})
        state = trained.state()
        state_bytes = sum(one.nbytes for one in state.values())
        into = {name: torch.zeros_like(one) for name, one in state.items()}
        reader = YardReader(yard, f"{RUN}@step-{saves}")
        dcp.load(into, storage_reader=reader)
        if any(not torch.equal(one, into[name]) for name, one in state.items()):
            raise ValueError("what was read is not what was saved")
        assert reader.report is not None
        rows.append({"read_bytes": reader.report.stored_bytes, "state_bytes": state_bytes})
    return rows


TASKS: Mapping[str, Callable[..., list[Any]]] = {
    "save": save,
    "load": load,
    "stall": stall,
    "kind": kind,
}


def main() -> None:
    asked, answer = Path(sys.argv[1]), Path(sys.argv[2])
    request = msgspec.json.decode(asked.read_bytes(), type=Request)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    options = dict(request.options)
    job = Job(request.site, options.pop("url"), options.pop("folder"))
    found = TASKS[request.task](job, **options)
    if job.is_first:
        answer.write_bytes(msgspec.json.encode(found))
    with suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
