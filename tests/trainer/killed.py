"""A training job that is killed at a point of a save; also a program for torchrun."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2s
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ending import end_with_parent
from trainer_world import Outcome, World, attempt
from training import HIDDEN, Trained, train
from typing_extensions import Buffer
from waiting import eventually

from weightyard.format.block import MIB
from weightyard.format.pack import PACK_HEADER
from weightyard.storage.store import Again, FileOptions, Stage, StagedFile, Store, StorePath
from weightyard.testing.faults import FaultyStore
from weightyard.trainer.run import TrainRun
from weightyard.trainer.staging import Staging
from weightyard.yard import Yard

UNTIL = 10
INTERVAL = 3
LIMIT_S = 240.0
"""For three starts of a job, on a busy machine. Usually it takes a tenth of that."""


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and when."""

    point: str
    """`staging`: half the state is copied. `writing`: a pack is begun. `midway`: half of its first
    block is written. `upload`: all of it is, but not published. `finished`: this rank has written
    everything. `commit`: before it; `committed`: after it."""
    rank: int
    step: int = 2 * INTERVAL
    pid: int | None = None
    """Another process, instead of the rank itself."""
    datanode: str | None = None
    """The folder of one that must have got bytes of the pack before."""

    def arriving(self) -> dict[Path, int]:
        """What the DataNode is being sent, and how much of it is there: it lies apart until then.

        What writers that were killed before did not send to the end is there for a long time.
        """
        if self.datanode is None:
            return {}
        sizes = {}
        for file in Path(self.datanode).glob("*/current/*/current/rbw/blk_*"):
            with suppress(FileNotFoundError):
                sizes[file] = file.stat().st_size
        return sizes

    def strike(self, arrived: Collection[Path] = ()) -> None:
        """`arrived`: what the DataNode was being sent before."""
        if self.datanode is not None:
            eventually(
                lambda: any(
                    size > MIB // 4 for file, size in self.arriving().items() if file not in arrived
                )
            )
        os.kill(self.pid or os.getpid(), signal.SIGKILL)


class Killing:
    """Watches a rank's calls, and kills at the point meant."""

    def __init__(self, kill: Kill | None, rank: int) -> None:
        self._kill = kill if kill is not None and kill.rank == rank else None
        self._step = kill.step if kill is not None else None
        self._arrived: Collection[Path] = ()
        self._is_armed = False

    def on_step(self, step: int, run: TrainRun) -> None:
        if step == self._step:
            # So that it is this step's save, and neither the one before nor its records.
            run._saver.wait()
            assert run._yard._settling.wait()
            self._arrived = self._kill.arriving() if self._kill is not None else ()
            self._is_armed = True

    def at(self, point: str) -> None:
        if self._is_armed and self._kill is not None and self._kill.point == point:
            self._is_armed = False
            self._kill.strike(self._arrived)

    def yard(self, opened: Yard) -> Yard:
        """The same yard, watched."""
        store = _Midway(opened.store, self.at, self._on_store)
        catalogue: Any = _Catalogue(opened.catalogue, self.at)
        return Yard(store, catalogue, block_bytes=opened.block_bytes)

    def staging(self) -> None:
        """Watch the copying of state, too."""
        plain = Staging.copied

        def copied(staging: Staging, items: dict[str, Any]) -> dict[str, Any]:
            plain(staging, dict(list(items.items())[: len(items) // 2]))
            self.at("staging")
            return plain(staging, items)

        Staging.copied = copied  # type: ignore[method-assign]

    def _on_store(self, index: int, name: str) -> None:
        if point := {"write": "writing", "publish": "upload"}.get(name):
            self.at(point)


class _Midway(FaultyStore):
    """Writes whatever is longer than a header in two halves, and says when the first is written."""

    def __init__(
        self, store: Store, at: Callable[[str], None], on_call: Callable[[int, str], None]
    ) -> None:
        super().__init__(store, on_call=on_call)
        self._at = at

    def stage(self, path: StorePath, options: FileOptions | None = None) -> Stage:
        return _Halves(super().stage(path, options), self._at)


class _Halves(Stage):
    def __init__(self, stage: Stage, at: Callable[[str], None]) -> None:
        self._stage, self._at = stage, at

    def write(self, data: Buffer, again: Again | None = None) -> None:
        view = memoryview(data).cast("B")
        half = view.nbytes // 2
        self._stage.write(view[:half])
        if half > len(PACK_HEADER):
            self._at("midway")
        self._stage.write(view[half:])

    def close(self) -> StagedFile:
        return self._stage.close()

    def abort(self) -> None:
        self._stage.abort()


class _Watched:
    def __init__(self, real: Any, at: Callable[[str], None]) -> None:
        self._real, self._at = real, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Catalogue(_Watched):
    def open_upload(self, *given: Any) -> Any:
        return _Upload(self._real.open_upload(*given), self._at)

    def join_upload(self, *given: Any) -> Any:
        return _Upload(self._real.join_upload(*given), self._at)


class _Upload(_Watched):
    def finish_rank(self, rank: int) -> None:
        self._real.finish_rank(rank)
        self._at("finished")

    def commit(self, *given: Any) -> Any:
        self._at("commit")
        version = self._real.commit(*given)
        self._at("committed")
        return version


def record(world: World, rank: int, step: int, loss: float, samples: Sequence[int]) -> None:
    """Note a step before the run is told of it: a kill must not lose the note."""
    with (world.folder / f"steps-{rank}.jsonl").open("a") as file:
        file.write(json.dumps([step, loss, list(samples)]) + "\n")


def recorded(world: World, rank: int) -> dict[int, Any]:
    """What each step came to in the end: one that was done again replaces what was undone."""
    lines = (world.folder / f"steps-{rank}.jsonl").read_text().splitlines()
    return {step: (loss, samples) for step, loss, samples in map(json.loads, lines)}


def job(
    world: World, rank: int, kill: Kill | None = None, until: int = UNTIL, hidden: int = HIDDEN
) -> Outcome:
    """Train to the end, or to the kill."""
    torch.use_deterministic_algorithms(True)
    killing = Killing(kill, rank)
    killing.staging()
    with world.yard(rank) as opened:
        yard = killing.yard(opened)

        def run() -> Trained:
            return train(
                yard,
                until,
                hidden=hidden,
                interval=INTERVAL,
                async_mode="async",
                on_step=killing.on_step,
                on_result=lambda *result: record(world, rank, *result),
            )

        return attempt(run)


def digest(weights: dict[str, bytes]) -> str:
    return blake2s(b"".join(weights[name] for name in sorted(weights))).hexdigest()


def main() -> None:
    """Under torchrun: which kill it is to be follows from how often it was started."""
    end_with_parent()  # torchrun
    folder, kills = Path(sys.argv[1]), [Kill(**one) for one in json.loads(sys.argv[2])]
    torch.set_num_threads(1)
    rank, restarts = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    # The launcher's own store, whose port nobody can take before a rank does. It keeps it over
    # restarts, with the addresses of ranks that are gone: each start has names of its own.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"start-{restarts}", store),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=limit,
    )
    kill = kills[restarts] if restarts < len(kills) else None
    outcome = job(World(folder, str(folder / "store")), rank, kill)
    if outcome.error:
        raise SystemExit(f"rank {rank}: {outcome.error}: {outcome.message}")
    trained: Trained = outcome.value
    done = {"restarts": restarts, "resumed": trained.resumed, "weights": digest(trained.weights)}
    (folder / f"done-{rank}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
