"""YardWriter: torch's distributed checkpoint, saved as checkpoints of a run."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from weightyard.closing import Closing
from weightyard.errors import (
    BadSetting,
    Bug,
    Conflict,
    InvalidName,
    NoSuchThing,
    Refused,
    Retryable,
    StoreUnavailable,
    Unsupported,
    YardError,
)
from weightyard.format import manifest as manifests
from weightyard.format.assembly import Share, share_of
from weightyard.format.block import MIB
from weightyard.format.manifest import Manifest
from weightyard.format.splitting import split_plain
from weightyard.logs import Log
from weightyard.names import ModelName, Ref, Step, UploadId
from weightyard.records import Checkpoint, Publication, Version
from weightyard.storage import layout
from weightyard.storage.local import require_path
from weightyard.storage.store import Store
from weightyard.trainer import state as states
from weightyard.trainer.anchors import ANCHOR_BYTES, ANCHOR_EVERY, Anchors
from weightyard.trainer.cutting import boxes_of, cut, manifest_of_shares
from weightyard.trainer.host import share_of_cores
from weightyard.trainer.state import STATE_FILE, State
from weightyard.transfer.alive import kept_alive
from weightyard.transfer.catalogue import Catalogue, Upload
from weightyard.transfer.durable import least_replicas, require_kept
from weightyard.transfer.memory import SpareMemory
from weightyard.transfer.options import require_whole
from weightyard.transfer.publish import checked_publication, store_manifest
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import MemorySource, piece_id
from weightyard.transfer.together import run_together
from weightyard.transfer.writer import Content, WriteOptions, Writer, WriteReport, require_delta

_log = Log(__name__)

CheckpointId = str | int | os.PathLike[str]
"""`1200`, `"step-1200"` or `"team/run42@step-1200"`."""


class SavingYard(Protocol):
    """What a writer of checkpoints needs of a yard."""

    @property
    def store(self) -> Store:
        """Raises Unsupported where bytes go through a service."""

    @property
    def catalogue(self) -> Catalogue: ...

    @property
    def block_bytes(self) -> int: ...

    def settle(self) -> None:
        """Have the records of what was done written into the store, in the background."""


_ENDING_S = 2.0
"""How long to wait for the thread of a save that may have ended: torch's live on for a moment."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What the coordinator tells each rank with its plan."""

    upload: str
    generation: int
    step: int


@dataclass(slots=True)
class _Save:
    """A save. torch makes all calls of one in one thread, and does not tell the writer if it failed
    elsewhere: it is over when its thread has ended, or begins another."""

    step: Step
    rank: int
    thread: threading.Thread
    publication: Publication | None = None
    """Only on the coordinator, as is the upload."""
    upload: Upload | None = None
    has_failed: bool = False
    """On this rank."""

    def is_under_way(self) -> bool:
        if self.has_failed or self.thread is threading.current_thread():
            return False
        self.thread.join(_ENDING_S)
        return self.thread.is_alive()


SPARE_BYTES = 128 * MIB
"""How much memory to save with each rank keeps between two saves."""

LEAST_SAVING = 0.25
"""By which part a codec must shorten a block to be used: a job waits for encoding, and when it
resumes for decoding. Dense fp32 shrinks only by a sixth, bf16 by a third."""


class Writing(TypedDict, total=False):
    """How checkpoints are written: options that YardWriter explains."""

    delta: Literal["off", "also", "only"]
    anchors_bytes: int
    anchors_folder: str | Path | None
    anchor_every: int
    replication: int | None
    policy: str | None
    compress: bool
    threads: int | None


class YardWriter(StorageWriter, Closing):
    """Saves checkpoints of one run; each rank has one, and uses it for save after save.

    `dcp.save(state, checkpoint_id="step-1200", storage_writer=writer)`, or `dcp.async_save` in a
    thread. Each rank writes its own packs under one upload; the coordinator commits when all have
    finished. Before that nothing is visible. One save at a time: one that begins while another is
    under way is refused with Conflict, on all ranks, and the other goes on.

    If a rank fails, `dcp.save` raises CheckpointException on all of them, with what each said; the
    upload is abandoned. If a save ends in another way (a rank is gone), its upload is abandoned by
    the next save in its thread, or in any once that has ended; by `abandon`, by `close`, or when
    its lease ends.
    """

    def __init__(
        self,
        yard: SavingYard,
        run: str,
        *,
        generation: int | None = None,
        metrics: Mapping[str, float] | None = None,
        delta: Literal["off", "also", "only"] = "only",
        anchors_bytes: int = ANCHOR_BYTES,
        anchors_folder: str | Path | None = None,
        anchor_every: int = ANCHOR_EVERY,
        replication: int | None = None,
        policy: str | None = None,
        compress: bool = True,
        threads: int | None = None,
    ) -> None:
        """`generation`: that of the run which this job took over; None: the first save takes it
        over, if nobody else did since this was made. `metrics`: of the checkpoints to come.
        `replication`, `policy`: of their packs, as in push.

        What changed is stored as a delta of the last anchor, of which this rank keeps up to
        `anchors_bytes` at hand, in memory or in `anchors_folder`; every `anchor_every` saves there
        is a new one. `delta`: as in push. `compress`: if not, blocks are stored raw, which takes
        less of the processor and more of HDFS; blocks that would shrink by less than a quarter are
        stored so anyway. `threads`: of this rank, for hashing and encoding; None: its share of the
        host's cores.
        Raises InvalidName, BadSetting; StoreUnavailable and Unsupported if the store cannot be
        reached.
        """
        require_delta(delta)
        if threads is not None:
            require_whole("threads", threads, 1)
        if anchors_folder is not None:
            require_path(anchors_folder)
        # Raises now what the first save would raise hours later.
        checked_publication(
            {"metrics": metrics or {}, "replication": replication, "policy": policy}
        )
        self._yard = yard
        self._store = _store_of(yard)
        require_kept(self._store, replication, policy)
        self.run = ModelName.parse(run)
        self.generation = generation
        """The run's generation under which this writes; None until the first save."""
        # The first save of a coordinator from before a re-election must not take the run back.
        self._found = 0 if generation is not None else current_generation(yard.catalogue, self.run)
        self._key = secrets.token_hex(16)
        self.metrics = dict(metrics or {})
        """For the checkpoints to come, as are the tags."""
        self.tags: dict[str, str] = {}
        self.version: Version | None = None
        """The last checkpoint committed; only the coordinator knows."""
        self._replication, self._policy = replication, policy
        self._options = WriteOptions(
            replication=replication,
            policy=policy,
            min_replicas=least_replicas(self._store, replication),
            compress=compress,
            least_saving=LEAST_SAVING,
            delta=delta,
            threads=threads or share_of_cores(),
        )
        self._spare = SpareMemory(SPARE_BYTES)
        """Kept from save to save: touching fresh memory takes as long as hashing its content."""
        self._anchors = Anchors(
            Reader(self._store, yard.catalogue),
            self._options,
            budget_bytes=anchors_bytes,
            folder=Path(anchors_folder) if anchors_folder is not None else None,
            every=anchor_every,
        )
        self._here = threading.local()  # which step was asked for in a thread
        self._save: _Save | None = None
        self._guard = threading.Lock()  # of the save under way
        self._writer: Writer | None = None
        self._plans: list[SavePlan] = []

    @property
    def report(self) -> WriteReport:
        """What this rank's last save wrote."""
        return WriteReport() if self._writer is None else self._writer.report

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether it names a step, of whatever run."""
        try:
            _step_of(checkpoint_id, None)
        except InvalidName:
            return False
        return True

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Only takes note: if a rank raised here, the others would wait for it."""
        self._here.asked = checkpoint_id

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=f"{self.run}@{self._asked_step()}")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise Unsupported("ranks that save each for themselves make no checkpoint of a run")
        step, self._here.asked = self._asked_step(), None
        begun = _Save(step, int(kwargs.get("rank", 0)), threading.current_thread())
        before = self._save
        is_free = before is None or not before.is_under_way()
        with self._guard:
            if self._save is None or (is_free and self._save is before):
                before, self._save = self._save, begun
            else:
                raise Conflict(
                    f"a save of {self._save.step} is still under way, so there is none of {step}: "
                    "wait for the future of one save before the next, or take another writer; one "
                    "that failed on another rank is ended by abandon()"
                )
        self._give_up(before)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Opens the upload, whose id travels to the ranks with their plans."""
        catalogue = self._yard.catalogue
        with self._own_save() as save:
            known = self._known_plans(plans)
            if self.generation is None:
                # The key is the writer's: if an answer is lost, the next save finds the generation.
                taken = catalogue.begin_generation(self.run, expect=self._found, key=self._key)
                self.generation = taken.generation
            save.publication = checked_publication(
                {
                    "metrics": dict(self.metrics),
                    "tags": dict(self.tags),
                    "replication": self._replication,
                    "policy": self._policy,
                    "checkpoint": Checkpoint(
                        step=save.step.number, generation=self.generation, ranks=len(plans)
                    ),
                }
            )
            save.upload = catalogue.open_upload(self.run, save.publication)
            errand = Errand(save.upload.id.hex, self.generation, save.step.number)
            return [replace(plan, storage_data=errand) for plan in known]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        errand = plan.storage_data
        if not isinstance(errand, Errand):
            raise Bug("a plan without the coordinator's errand")
        with self._own_save() as save:
            if errand.step != save.step.number:
                raise Refused(
                    f"rank {save.rank} saves {save.step} and the coordinator {Step(errand.step)}: "
                    "a checkpoint is of one step on all ranks"
                )
            self.generation = errand.generation
            is_coordinator = save.upload is not None
            joined = save.upload or self._yard.catalogue.join_upload(UploadId(errand.upload))
            with kept_alive(joined) as upload:
                results = self._write(plan.items, planner, upload)
                if not is_coordinator:  # which still has to write what all ranks share
                    upload.finish_rank(save.rank)
        if not is_coordinator:
            self._end(save)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes what the ranks share, and commits."""
        with self._own_save() as save:
            self.version = self._finished(save, metadata, results)
        self._end(save)
        self._yard.settle()

    def abandon(self) -> None:
        """Give up a save that did not end. Idempotent; where nobody answers, its lease will end."""
        with self._guard:
            save, self._save = self._save, None
        self._give_up(save)

    def close(self) -> None:
        self.abandon()
        self._anchors.close()
        self._spare.take_all()

    def __getstate__(self) -> Any:
        raise Unsupported(
            "a YardWriter stays in its process: use async_save with "
            "AsyncCheckpointerType.THREAD, which is the default"
        )

    def _asked_step(self) -> Step:
        asked = getattr(self._here, "asked", None)
        if asked is None:
            raise BadSetting("which step? Save with checkpoint_id='step-<number>'")
        return _step_of(asked, self.run)

    @contextmanager
    def _own_save(self) -> Iterator[_Save]:
        """The save of this thread; an error inside makes it a failed one. Raises Conflict."""
        save = self._save
        if save is None or save.thread is not threading.current_thread():
            raise Conflict("this save was given up: its writer was closed, or told to abandon it")
        try:
            yield save
        except BaseException:
            save.has_failed = True
            raise

    def _end(self, save: _Save) -> None:
        with self._guard:
            if self._save is save:
                self._save = None

    def _give_up(self, save: _Save | None) -> None:
        if save is not None and save.upload is not None:
            try:
                save.upload.abandon()
            except YardError as why:
                _log.warning("upload.not_abandoned", upload=save.upload.id, reason=why)

    def _known_plans(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """All plans; a planner may leave out those that have not changed, which are the last ones.

        They are sent in full: a rank that took its plan from its cache would not get the errand.
        """
        before = self._plans if len(self._plans) == len(plans) else [None] * len(plans)
        known: list[SavePlan] = []
        for plan, old in zip(plans, before, strict=True):
            if not plan.usable and old is None:
                raise Refused(
                    "the planner has cached plans from another writer: use one YardWriter for all "
                    "saves, or a planner without enable_plan_caching"
                )
            known.append(plan if plan.usable or old is None else old)
        self._plans = known
        return known

    def _write(
        self, items: Sequence[WriteItem], planner: SavePlanner, upload: Upload
    ) -> list[WriteResult]:
        """One result for all of them: torch pickles results, and hands them to `finish` alone."""
        is_object = WriteItemType.BYTE_IO
        objects = {
            item.index.fqn: _object(item, planner) for item in items if item.type is is_object
        }
        tensors = [item for item in items if item.type is not is_object]
        boxes = boxes_of(tensors, planner)
        content = cut(boxes, self._yard.block_bytes)
        if self._options.delta != "off":
            content = self._anchors.prepared(content)
        self._writer = Writer(
            self._store, upload, self._options, bases=self._anchors, spare=self._spare
        )
        (blocks,) = self._writer.write([content])
        if self._options.delta != "off":
            self._anchors.note(content, blocks, self._writer.report)
        written = Written(objects, share_of(content.split, blocks))
        raw_bytes = sum(piece.raw_bytes for piece in content.split.pieces)
        return [WriteResult(MetadataIndex(""), raw_bytes, written)]

    def _state_content(self, state: State) -> Content:
        text = states.encode(state)
        split = split_plain(STATE_FILE, len(text), self._yard.block_bytes)
        return Content(split, [MemorySource(text)])

    def _finished(
        self, save: _Save, metadata: Metadata, results: list[list[WriteResult]]
    ) -> Version:
        if save.upload is None or save.publication is None or self._writer is None:
            raise Bug("a checkpoint to finish that was not begun here")
        written = [result.storage_data for of_rank in results for result in of_rank]
        with kept_alive(save.upload) as upload:
            objects = {name: value for one in written for name, value in one.objects.items()}
            state = State(objects, _paths(metadata))
            shares = [one.share for one in written]
            content = self._state_content(state)
            named = [piece_id(one, content.sources) for one in content.split.pieces]
            shares.append(share_of(content.split, named))
            manifest = manifest_of_shares(shares, self._yard.block_bytes)
            _require_all(metadata, manifest, state)
            return self._publish(upload, content, manifest, save.publication, save.rank)

    def _publish(
        self,
        upload: Upload,
        state: Content,
        manifest: Manifest,
        publication: Publication,
        rank: int,
    ) -> Version:
        """Write what the ranks share and the manifest, then commit.

        Both at once: HDFS may let a writer wait half a second for each file. The manifest may come
        first: it says nothing about packs, and counts only from the commit on, which requires all
        blocks.
        """
        digest, stored = manifests.encode(manifest)
        writer, options = self._writer, self._options
        assert writer is not None
        run_together(
            2,
            "weightyard-finish",
            (
                lambda: writer.write([state]),
                lambda: store_manifest(
                    self._store,
                    upload,
                    digest,
                    stored,
                    publication.replication,
                    min_replicas=options.min_replicas,
                    is_new=True,  # a state that has not changed is rarely saved
                ),
            ),
        )
        upload.finish_rank(rank)
        version = upload.commit(digest, manifest, publication, secrets.token_hex(16))
        with suppress(Retryable):  # what counts is done; gc removes what is left here
            self._store.delete(layout.staging_folder(upload.id))
        return version


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written, on its way to the coordinator."""

    objects: Mapping[str, Any]
    """Values that are no tensors, by their names: such as may be saved."""
    share: Share


def _object(item: WriteItem, planner: SavePlanner) -> Any:
    # `resolve_data` would give a pickle of it.
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise Unsupported(
            f"{item.index.fqn}: a {type(planner).__name__} gives values that are no tensors only "
            "as pickles: derive it from DefaultSavePlanner"
        )
    value = look_up(item.index)
    states.check_object(value, item.index.fqn)
    return value


def _paths(metadata: Metadata) -> dict[str, tuple[str | int, ...]]:
    """How the state dict was flattened, by the metadata of a planner that did so."""
    data = metadata.planner_data
    if data is None:
        return {}
    if not isinstance(data, Mapping) or not all(isinstance(keys, tuple) for keys in data.values()):
        raise Unsupported("planner data that are no paths: derive it from DefaultSavePlanner")
    return dict(data)


def _require_all(metadata: Metadata, manifest: Manifest, state: State) -> None:
    """Raises Bug if the ranks wrote another state than the coordinator planned."""
    written = {tensor.name for tensor in manifest.tensors} | state.objects.keys()
    if odd := written ^ metadata.state_dict_metadata.keys():
        raise Bug(f"planned and written differ in {len(odd)} names, such as {min(odd)}")


def _store_of(yard: SavingYard) -> Store:
    try:
        return yard.store
    except StoreUnavailable as why:
        raise StoreUnavailable(
            f"{why}. A service is no way for checkpoints: each rank writes them to the store "
            "itself. Run where the store can be reached, or mend what keeps this host from it"
        ) from why


def current_generation(catalogue: Catalogue, run: ModelName) -> int:
    """The generation of a run; 0 if there is no such run."""
    try:
        return catalogue.run(run).generation
    except NoSuchThing:
        return 0


def _step_of(checkpoint_id: CheckpointId, run: ModelName | None) -> Step:
    """The step meant. Raises InvalidName."""
    if isinstance(checkpoint_id, int):
        return Step(checkpoint_id)
    text = os.fspath(checkpoint_id)
    if "@" not in text:
        return Step.parse(text)
    ref = Ref.parse(text)
    if not isinstance(ref.selector, Step) or ref.model != (run or ref.model):
        raise InvalidName(f"{text[:200]!a} is no step of {run}: 'step-<number>' is enough")
    return ref.selector
