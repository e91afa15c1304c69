"""TrainRun: a training loop that checkpoints into a yard, resumes from it, and publishes."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from pydantic import ValidationError
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.tensor import DTensor

from weightyard.closing import Closing
from weightyard.errors import BadSetting, Damaged, NoSuchThing, RankFailed, Refused, YardError
from weightyard.format.manifest import Manifest
from weightyard.logs import Log
from weightyard.names import AliasName, ModelName, Ref, Step
from weightyard.records import KeepBest, Retention, Version
from weightyard.trainer import rng
from weightyard.trainer.alike import require_alike
from weightyard.trainer.job import Job
from weightyard.trainer.loader_workers import staying
from weightyard.trainer.packing import Items, Room
from weightyard.trainer.parts import (
    RANKS,
    RNG,
    STEP,
    HookPart,
    ModelPart,
    OptimizerPart,
    Part,
    RngPart,
    check_items,
    check_together,
    parts_of,
    require_known,
    saved_ranks,
)
from weightyard.trainer.publishing import (
    Export,
    Published,
    plan_export,
    publish_checkpoint,
    ties_of,
)
from weightyard.trainer.reader import YardReader
from weightyard.trainer.resuming import checkpoints_to_resume, load_newest
from weightyard.trainer.saving import (
    Leaving,
    Save,
    Saver,
    Schedule,
    plain_errors,
    quiet_alone,
)
from weightyard.trainer.writer import Writing, YardWriter, current_generation
from weightyard.transfer.options import require_whole, texts_of
from weightyard.transfer.publish import checked_publication

if TYPE_CHECKING:
    from weightyard.yard import Yard

_log = Log(__name__)


class TrainRun(Closing):
    """A run of a training job. All ranks make one and call the same methods in the same order.

        with TrainRun(yard, "team/run42", state={"model": m, "optim": o, "data": loader}) as run:
            run.resume()
            for batch in loader:
                …
                run.step({"loss": loss.item()})
            run.publish("team/bert", alias="candidate")

    The state's objects are modules and optimizers, wrapped or not, and whatever has `state_dict`
    and `load_state_dict`: schedulers, scalers, loaders, samplers. They hold tensors, None, bool,
    int, float, str, bytes, lists, tuples, dicts and Counters with keys of text or int. What does
    not fit is refused by its name when the run is made; what an optimizer makes in its first step,
    by the next `step`. What is iterated over is each rank's own. Saved with the state are that of
    PowerSGD and post-local SGD, registered with DDP before the run is made, and the random number
    generators of Python, NumPy and torch.

    A run resumed with as many ranks goes on bit for bit if torch is told to be deterministic. A
    plain DataLoader draws a random number whenever it is iterated: unless `sampler.batches` puts
    that back, give the loader a `generator` of its own, so that beginning in the middle of an epoch
    draws none from torch's.

    On SIGTERM the run ends the step being computed (with several ranks, also the next), saves, and
    the process leaves.
    """

    def __init__(
        self,
        yard: Yard,
        name: str,
        state: Mapping[str, Any],
        *,
        interval: int | None = 500,
        interval_s: float | None = None,
        keep_latest_k: int | None = None,
        keep_every: int | None = None,
        keep_best: KeepBest | None = None,
        async_mode: Literal["disabled", "async"] = "disabled",
        export_dtype: torch.dtype | str | None = None,
        load_step: int | None = None,
        exclude_from_loading: str | Collection[str] = (),
        seed: int = 0,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        **writing: Unpack[Writing],
    ) -> None:
        """Nothing is written yet, and no run is taken over.

        `interval`, `interval_s`: steps, and seconds, from one checkpoint to the next; None: not by
        these. `keep_latest_k`, `keep_every`, `keep_best`: which checkpoints stay: the newest ones,
        steps that are multiples, the best by a metric (`KeepBest`). They become the run's rules
        when this job takes it over; if none is given the run keeps the rules it has. gc goes by
        them. `async_mode`: "async" saves in the background, from a copy in host memory; a failure
        is raised by the `step` in which all ranks know of it. `export_dtype`: published weights are
        cast to it. `load_step`: resume from this step instead of the newest.
        `exclude_from_loading`: names in the state (and "rng") that a resume leaves as they are.
        `seed`: random numbers are derived from it if a run goes on with another number of ranks.
        `signals`: on which to save and leave. `writing` (`delta`, `anchors_bytes`,
        `anchors_folder`, `anchor_every`, `replication`, `policy`, `compress`, `threads`): as of
        YardWriter.
        Raises Refused, naming what cannot be saved; BadSetting, InvalidName.
        """
        if async_mode not in ("disabled", "async"):
            raise BadSetting(f"async_mode={async_mode!r}: 'disabled' or 'async'")
        for option, value in (("load_step", load_step), ("seed", seed)):
            if value is not None:
                require_whole(option, value, 0)
        self._yard = yard
        self.name = ModelName.parse(name)
        self._schedule = Schedule(interval, interval_s)
        self._retention = _retention(keep_latest_k, keep_every, keep_best)
        self._export_dtype = _dtype(export_dtype)
        self._load_step = None if load_step is None else Step(load_step)
        self._seed = seed
        self._excluded = frozenset(texts_of("exclude_from_loading", exclude_from_loading) or ())
        self.steps = 0
        """How many are done, those before a resume included."""
        self.generation: int | None = None
        """The run's, since this job took it over."""
        self._metrics: dict[str, Any] = {}  # of the last step, as they were given
        self.job = Job()
        self._rng = RngPart(self.job.rank, self.job.ranks)
        self._parts: list[Part] = []
        self._stateless: list[OptimizerPart] = []
        self._refused: Refused | None = None  # for an optimizer's state, until all ranks know of it
        self._is_closed = False
        with ExitStack() as opened:
            opened.callback(self.job.close)
            check_together(self.job.all(lambda: self._look_at(state), "looking at the state"))
            modules = (part for part in self._parts if isinstance(part, ModelPart))
            require_alike(self.job, (part.items() for part in modules))

            def made() -> YardWriter:
                if unknown := writing.keys() - Writing.__annotations__.keys():
                    raise BadSetting(f"{', '.join(sorted(unknown))}: a TrainRun has no such option")
                # 0 stands for no generation yet: `_begin` sets it.
                writer = YardWriter(yard, name, generation=0, **writing)
                opened.callback(writer.close)
                return writer

            self._writer = self.job.each(made, "making a writer")
            self._leaving = Leaving(signals)
            opened.pop_all()
        in_background = async_mode == "async"
        self._saver = Saver(self._writer, self.job, self._let_go, in_background=in_background)
        for value in state.values():
            staying(value)

    def resume(self) -> int | None:
        """Take the run over and go on from its newest checkpoint; its step, or None if it is new.

        A checkpoint that turns out to be damaged is passed over, unless it is that of `load_step`.
        From here on no process that had the run before can save. If several begin at once, one
        succeeds. Raises RunTakenOver, DoesNotFit, NoSuchThing for a step that is not there, Damaged
        if no checkpoint is whole.
        """
        self._require_open()
        self._saver.wait()
        self._begin()
        refs = self.job.first(self._found, "finding a checkpoint")
        if self._load_step is None:
            ref = load_newest(self.job, self.name, refs, self._load)
        else:
            ref = refs[0]
            self.job.each(lambda: self._load(ref), "loading a checkpoint")
        if ref is None:
            return None
        _log.info("run.resumed", run=self.name, checkpoint=ref, step=self.steps)
        return self.steps

    def step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Say that a step is done; call it after the optimizer's. Saves if that is due.

        `metrics`: those of rank 0 that are finite numbers are kept with the checkpoint. Tensors are
        read only when one is made, so that a step waits for no device. After a signal: saves, then
        raises SystemExit.

        Raises BadSetting for names that cannot be kept, and for a DTensor of which each rank has a
        part; RunTakenOver. Raises why a save in the background failed (RankFailed on ranks where it
        did not), on all ranks at the same step: with several ranks, the second after the failure.
        Raises Refused if an optimizer made state in its first step that cannot be saved: with
        several ranks in the second step, on the others RankFailed.
        """
        self._require_open()
        if not isinstance(metrics, Mapping | None):
            raise BadSetting(f"metrics={metrics!r:.80}: by their names, as in {{'loss': 0.5}}")
        checked_publication({"metrics": dict.fromkeys(metrics or (), 0.0)})  # values are read later
        _require_whole_tensors(metrics or {})
        try:
            self._look_at_optimizers()
        except Refused as why:
            self._refused = why
        self.steps += 1
        self._metrics = _as_now(metrics or {}) if self.job.is_first else {}
        by_time = self.job.is_first and self._schedule.is_due_by_time()
        must_leave, is_due, failed, is_refused = self.job.any_wish(
            self._leaving.is_asked, by_time, self._saver.failed, self._refused is not None
        )
        self._saver.check(failed)
        if is_refused:
            raise self._refused or RankFailed(
                [], "the optimizer of another rank keeps what cannot be saved; that rank says what"
            )
        if must_leave:
            self.save(wait=True)
            _log.info("run.left", run=self.name, step=self.steps)
            self._leaving.leave()
        if is_due or self._schedule.is_due_by_step(self.steps):
            self.save()

    def save(self, *, wait: bool = False) -> None:
        """Make a checkpoint of the last step now, unless it has one.

        With `async_mode="async"` it is only begun, unless `wait`. Raises what this save raises, and
        what the one before raised.
        """
        self._require_open()
        if self._saver.step != self.steps:
            if self.generation is None:
                self._begin()
            self._saver.wait()
            items = self.job.together(self._items, "looking at the state")
            self._saver.save(Save(self.steps, items, _finite(self._metrics)))
            self._schedule.saved()
        if wait:
            self._saver.wait()

    def publish(
        self,
        name: str,
        *,
        alias: str | None = None,
        model: str = "model",
        rename: Callable[[str], str | None] | None = None,
        consolidate: bool = False,
        message: str = "",
        metrics: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Published | None:
        """Publish the weights of the last step as a version of a model. Saves it first.

        Nothing is copied: the version is made of the checkpoint's blocks, except for tensors that
        `export_dtype` casts. `consolidate` writes each tensor as a push of the state dict would,
        so that its blocks are those of pushed files. `model`: the name in the state. `rename`:
        from a tensor's name in the module to the published one; None leaves it out. `message`,
        `metrics` (those of the checkpoint if None), `tags`: as in `yard.push`. Run and step are
        added to the tags; the checkpoint itself may be removed later.

        All ranks call it. The first one publishes and returns the version; the others return None,
        once it is there. Raises as `yard.push` does; on the others, RankFailed.
        """
        _require_whole_tensors(metrics or {})
        self.save(wait=True)

        def published() -> Published | None:
            if not self.job.is_first:
                return None
            checkpoint = self._saved_version()
            publication = checked_publication(
                {
                    "message": message,
                    "alias": AliasName(alias).text if alias is not None else None,
                    "metrics": _finite(metrics) if metrics is not None else checkpoint.metrics,
                    "tags": {"run": str(self.name), "step": str(checkpoint.step), **(tags or {})},
                }
            )
            manifest = self._yard.manifest(checkpoint.ref)
            export = self._export_of(manifest, model, rename, consolidate)
            return publish_checkpoint(
                self._yard,
                checkpoint,
                ModelName.parse(name),
                publication,
                export,
                manifest,
                self._export_dtype,
            )

        # The others wait for it: if the first rank failed, a rank that had gone on alone would wait
        # for it in the next collective.
        return self.job.at_length(published, "publishing")

    def close(self) -> None:
        """End what is under way in the background. Raises its error if it fails."""
        self._is_closed = True
        try:
            self._saver.close()
        finally:
            self._leaving.close()
            self._writer.close()
            self.job.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except BaseException as why:
            if error is None:
                raise
            # The error that ended the loop matters more; a failed last save often follows from it.
            _log.warning("run.not_saved", run=self.name, reason=why)

    def _require_open(self) -> None:
        """Raises Refused if closed: without the job's groups each rank would save for itself."""
        if self._is_closed:
            raise Refused(
                f"the run {self.name} is closed: what saves, publishes or resumes it comes before "
                "the end of its `with`, or its close()"
            )

    def _look_at(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Refuse now what could not be saved in hours; as `check_items`."""
        self._parts = parts_of(state, self.job.rank, self.job.ranks)
        if unknown := self._excluded - {part.name for part in (*self._parts, self._rng)}:
            raise BadSetting(f"exclude_from_loading: the state has no {', '.join(sorted(unknown))}")
        sizes = check_items(self._items())
        self._stateless = [part for part in self._parts if isinstance(part, OptimizerPart)]
        self._look_at_optimizers()
        return sizes

    def _look_at_optimizers(self) -> None:
        """Refuse what could not be saved of an optimizer's state as soon as it has one."""
        self._stateless = [part for part in self._stateless if not part.check_state()]

    def _items(self) -> Items:
        items: Items = {STEP: self.steps, RANKS: self.job.ranks}
        for part in (*self._parts, self._rng):
            items |= part.items()
        return items

    def _begin(self) -> None:
        """Take the run over."""
        self.generation = self.job.first(self._take_over, "taking the run over")
        self._writer.generation = self.generation

    def _take_over(self) -> int:
        catalogue = self._yard.catalogue
        current = current_generation(catalogue, self.name)
        taken = catalogue.begin_generation(self.name, expect=current)
        rules = catalogue.model(self.name).retention
        if self._retention is None:
            # A job without rules leaves those there are: an operator's must outlast jobs.
            if rules is not None:
                named = ",".join(f"{name}:{value}" for name, value in rules if value is not None)
                _log.info("run.rules_stay", run=self.name, rules=named)
        elif rules != self._retention:
            catalogue.set_retention(self.name, self._retention)
        self._yard.settle()
        return taken.generation

    def _found(self) -> list[str]:
        """The checkpoints to go on from. By now nobody else can add one."""
        return checkpoints_to_resume(self._yard.catalogue, self.name, self._load_step)

    def _load(self, ref: str) -> None:
        group = self.job.group
        reader = YardReader(self._yard, ref, process_group=group, no_dist=group is None)
        metadata = reader.read_metadata()
        is_same = saved_ranks(metadata) == self.job.ranks
        loaded = [part for part in self._parts if self._is_loaded(part, metadata, ref)]
        if is_same and RNG not in self._excluded:
            loaded.append(self._rng)  # the last one: positioning loaders draws numbers

        def placed() -> dict[str, Items]:
            if STEP not in metadata.state_dict_metadata:
                raise NoSuchThing(
                    f"{ref} holds no training to go on with: something else than a TrainRun made "
                    "it; load it with YardReader"
                )
            room = Room()
            found = {part.name: part.places(metadata, room) for part in loaded}
            for name, wanted in found.items():
                require_known(wanted, metadata, ref, name)
            return found

        places = self.job.each(placed, "comparing the state with the checkpoint")
        items: Items = {STEP: None}
        for wanted in places.values():
            items |= wanted
        if group is None:
            quiet_alone()
        with plain_errors():
            load_checkpoint(
                items, storage_reader=reader, process_group=group, no_dist=group is None
            )
        step = items[STEP]
        if type(step) is not int or step < 0:
            raise Damaged(f"{ref}: its step is {step!r:.80}")
        for part in loaded:
            part.restore({fqn: items[fqn] for fqn in places[part.name]})
        if not is_same and RNG not in self._excluded:
            rng.derive(self._seed, step, self.job.rank)
            _log.info(
                "run.rng_derived",
                checkpoint=ref,
                saved_ranks=saved_ranks(metadata),
                ranks=self.job.ranks,
                seed=self._seed,
                step=step,
            )
        self.steps = step
        # If something was left as it is, this state is in no checkpoint. Derived random numbers do
        # count as the checkpoint's own: whoever resumes it derives the same.
        self._saver.step = None if self._excluded else step
        self._schedule.saved()

    def _is_loaded(self, part: Part, metadata: Metadata, ref: str) -> bool:
        if part.name in self._excluded:
            return False
        if isinstance(part, HookPart) and part.is_missing(metadata):
            _log.warning("run.hook_begins_anew", checkpoint=ref, part=part.name)
            return False
        return True

    def _export_of(
        self,
        manifest: Manifest,
        model: str,
        rename: Callable[[str], str | None] | None,
        consolidate: bool,
    ) -> Export:
        """Which tensors of a checkpoint are published, and how. Raises BadSetting."""
        part = next((one for one in self._parts if one.name == model), None)
        if not isinstance(part, ModelPart):
            raise BadSetting(f"model={model!r}: the state has no module of this name")
        prefix = f"{model}."

        def renamed(fqn: str) -> str | None:
            if not fqn.startswith(prefix):
                return None
            return rename(fqn[len(prefix) :]) if rename is not None else fqn[len(prefix) :]

        return plan_export(
            manifest,
            renamed,
            dtype=self._export_dtype,
            consolidate=consolidate,
            ties=ties_of(part.items()),
        )

    def _saved_version(self) -> Version:
        made = self._writer.version
        if made is not None and made.step == self.steps:
            return made
        return self._yard.catalogue.resolve(Ref(self.name, Step(self.steps)))

    def _let_go(self) -> None:
        """Remove the checkpoints that are kept no longer. If that fails, the save does not."""
        if self._retention is None:
            return
        try:
            gone = self._yard.catalogue.apply_retention(self.name)
        except YardError as why:
            _log.warning("run.retention_waits", run=self.name, reason=why)  # the next save tries it
            return
        if gone:
            _log.info("run.let_go", checkpoints=",".join(gone))
            self._yard.settle()


def _retention(latest: int | None, every: int | None, best: KeepBest | None) -> Retention | None:
    if latest is None and every is None and best is None:
        return None
    try:
        return Retention(keep_last=latest, keep_every=every, keep_best=best)
    except ValidationError as why:
        first = why.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        option = "keep_latest_k" if where == "keep_last" else where
        raise BadSetting(f"{option}={first['input']!r:.80}: {first['msg']}") from None


def _dtype(asked: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if found is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise BadSetting(f"export_dtype={asked!r}: a floating-point type of torch")
    if found is None and asked is not None:
        raise BadSetting(f"export_dtype={asked!r}: torch has no such type")
    return found


def _require_whole_tensors(metrics: Mapping[str, Any]) -> None:
    """Raises BadSetting for a DTensor of which this rank would read only its part."""
    for name, value in metrics.items():
        if isinstance(value, DTensor) and not all(one.is_replicate() for one in value.placements):
            raise BadSetting(
                f"metrics.{name}: a DTensor of which each rank has a part; give its full_tensor()"
            )


def _as_now(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics that stay what they are, whatever the loop does with its tensors."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in metrics.items()
    }


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers; those that are none, or not finite, are left out."""
    numbers = {name: _number(value) for name, value in metrics.items()}
    odd = [name for name, value in numbers.items() if not math.isfinite(value)]
    if odd:
        _log.warning("run.metrics_not_finite", metrics=",".join(odd))
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several
        return math.nan
