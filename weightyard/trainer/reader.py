"""YardReader: torch's distributed checkpoint reads a yard's checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from weightyard.errors import YardError
from weightyard.format import manifest as manifests
from weightyard.format.manifest import Manifest, TensorEntry
from weightyard.loader.asked import Asked, deadline_of
from weightyard.loader.finding import told
from weightyard.loader.interface import Loads
from weightyard.loader.joint import Joint, read_jointly
from weightyard.loader.peers import Alone, Peers, Ranks
from weightyard.loader.report import LoadReport
from weightyard.loader.shared import told_version
from weightyard.loader.stored import StoreOrigin
from weightyard.names import Digest, Ref
from weightyard.records import Version
from weightyard.storage.deadline import Deadline
from weightyard.trainer import state as states
from weightyard.trainer.items import Destinations, give_objects, require_objects
from weightyard.trainer.metadata import entries_of, metadata_of, state_entry
from weightyard.trainer.state import State


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What reading a checkpoint did."""

    load: LoadReport
    """On this rank."""
    ranks: int
    needed_bytes: int
    """Stored bytes that had to be read for all ranks together: in whole chunks, each once, bases of
    deltas included."""
    stored_bytes: int
    """Stored bytes that all ranks together read."""

    @property
    def amplification(self) -> float:
        """Stored bytes read for each that was needed."""
        return self.stored_bytes / self.needed_bytes if self.needed_bytes else 1.0


class _Said(msgspec.Struct):
    """What the first rank tells the others of a checkpoint."""

    version: bytes
    manifest: bytes
    state: bytes | None
    """The bytes of its `state.json`; None if it has none."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint whose manifest was read."""

    version: Version
    manifest: Manifest
    entries: Mapping[str, TensorEntry]
    state: bytes | None
    """Of its `state.json`; parsed anew for each load, since objects are the caller's own."""
    metadata: Metadata


class YardReader(StorageReader):
    """Reads a checkpoint of a yard: `dcp.load(state, storage_reader=YardReader(yard, ref))`.

    The ref is `team/run42@step-1200`, or any other; `dcp.load(checkpoint_id=…)` takes one too, or
    a step of the same run. One manifest is read, by the first rank, and told to the others. Each
    byte is read once, by a rank near to it that wants it, which sends it to the others that do.
    While the checkpoint is read a lease keeps it. Nothing is unpickled.

    A reader stays with the version its ref meant at first; `reset` lets it look anew.
    """

    def __init__(
        self,
        yard: Loads,
        ref: str,
        *,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        cast: bool = False,
        verify: Literal["fast", "full"] = "fast",
        timeout: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """`process_group`, `no_dist`: as given to `dcp.load`, which does not pass them on.

        `cast`: also fill tensors of another dtype than the saved one. `verify`, `timeout`,
        `progress`: as of `yard.load`. Raises InvalidName, BadSetting.
        """
        self.report: RestoreReport | None = None
        """Of the last load."""
        self._yard = yard
        self._ref = Ref.parse(ref)
        self._group = process_group
        self._is_alone = no_dist
        self._cast = cast
        deadline_of(timeout)  # refuses a wrong one; the time begins with each load
        self._timeout_s = timeout
        self._asked = Asked(verify=verify, progress=progress)
        self._opened: _Opened | None = None

    @property
    def version(self) -> Version | None:
        """The version that is read, once that is known."""
        return self._opened.version if self._opened is not None else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Begin anew, with another checkpoint if one is named. Raises InvalidName."""
        self._opened = None
        if checkpoint_id is not None:
            self._ref = checkpoint_ref(checkpoint_id, self._ref)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds. All ranks call it. A failure is raised when that is looked at.

        If it were raised here, DCP would take the checkpoint for one of another kind, and lose it.
        """
        if self._opened is None:
            try:
                self._opened = self._open()
            except YardError as why:
                return _Unread(why)
        return self._opened.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Raises the error of reading the metadata, if there was one."""
        if isinstance(metadata, _Unread):
            raise metadata.why

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans  # the ranks settle who reads what when they read

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors and set the objects of a plan. All ranks call it.

        Raises NoSuchThing, DoesNotFit and Unsupported before anything is read, naming the key;
        RankFailed where another rank fails.
        """
        opened = self._opened
        assert opened is not None, "read_metadata comes first"
        origin = self._yard.stored(opened.version, opened.manifest)
        asked = self._asked_until()
        ranks = self._ranks(asked.deadline)
        into = Destinations(opened.entries, plan.items, planner, cast=self._cast)
        with origin.tally.watched(str(self._ref)), ExitStack() as holding:

            def prepare() -> Any:
                require_objects(plan.items, planner)
                planned = into.planned(origin, asked)
                if ranks.rank == 0:  # before any rank begins to read
                    holding.enter_context(origin.held())
                return planned

            joint = read_jointly(ranks, prepare, into.take)
            give_objects(plan.items, planner, _parsed(opened.state).objects)
            self.report = _report(origin, ranks, into.device, joint)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a checkpoint of some yard. Which yard it does not say."""
        try:
            Ref.parse(os.fspath(checkpoint_id))
        except YardError:
            return False
        return True

    def _open(self) -> _Opened:
        ranks = self._ranks(Deadline.after(self._timeout_s))
        mine: list[tuple[Version, Manifest]] = []

        def first() -> bytes:
            if ranks.rank != 0:
                return b""
            version, manifest = self._yard.use(str(self._ref))
            mine.append((version, manifest))
            stored = manifests.encode(manifest)[1] if ranks.size > 1 else b""
            said = _Said(version.model_dump_json().encode(), stored, self._state(version, manifest))
            return msgspec.msgpack.encode(said)

        said = told(ranks.tell(first, "opening")[0], _Said)
        if not mine:
            version = told_version(said.version)
            mine.append((version, manifests.decode(said.manifest, Digest(version.digest))))
        version, manifest = mine[0]
        entries = entries_of(manifest)
        metadata = metadata_of(entries, _parsed(said.state))
        return _Opened(version, manifest, entries, said.state, metadata)

    def _state(self, version: Version, manifest: Manifest) -> bytes | None:
        entry = state_entry(manifest)
        if entry is None:
            return None
        return self._yard.stored(version, manifest).head(entry, entry.bytes, self._asked_until())

    def _ranks(self, deadline: Deadline) -> Ranks:
        if self._is_alone or not (dist.is_available() and dist.is_initialized()):
            return Alone()
        return Peers(self._group or dist.group.WORLD, deadline)

    def _asked_until(self) -> Asked:
        asked = self._asked
        deadline = Deadline.after(self._timeout_s)
        return Asked(verify=asked.verify, deadline=deadline, progress=asked.progress)


def _parsed(state: bytes | None) -> State:
    return State() if state is None else states.decode(state)


class _Unread(Metadata):
    """The metadata of a checkpoint that could not be read: looking at it raises why."""

    def __init__(self, why: YardError) -> None:
        self.why = why

    def __getattribute__(self, name: str) -> Any:
        if name in Metadata.__dataclass_fields__:
            raise object.__getattribute__(self, "why")
        return object.__getattribute__(self, name)


def checkpoint_ref(checkpoint_id: str | os.PathLike[str] | int, of: Ref) -> Ref:
    """A checkpoint's id as a ref; of the same run if it names none. Raises InvalidName."""
    text = str(checkpoint_id) if isinstance(checkpoint_id, int) else os.fspath(checkpoint_id)
    if text.isascii() and text.isdigit():
        text = f"step-{text}"
    return Ref.parse(text if "/" in text else f"{of.model}@{text}")


def _report(origin: StoreOrigin, ranks: Ranks, device: torch.device, joint: Joint) -> RestoreReport:
    load = origin.report(
        device,
        ranks=ranks.size,
        received_bytes=joint.received_bytes,
        group_bytes=joint.wanted_bytes,
        group_read_bytes=joint.read_bytes,
    )
    return RestoreReport(load, ranks.size, joint.needed_bytes, joint.stored_bytes)
