"""A run of Hugging Face's Trainer: `Trainer(callbacks=[YardCallback(yard, "team/run42")])`.

Weights, optimizer, scheduler, random numbers and the trainer's own state go into the yard, without
pickle and without a file on the way: give the trainer `save_strategy="no"`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from weightyard.errors import Damaged, Refused
from weightyard.names import ModelName, Step
from weightyard.trainer.job import Job
from weightyard.trainer.resuming import checkpoints_to_resume, load_newest
from weightyard.trainer.rng import Rng
from weightyard.trainer.run import TrainRun
from weightyard.trainer.values import load_values

if TYPE_CHECKING:
    from weightyard.yard import Yard

_MODEL, _TRAINER = "model", "trainer"


class YardCallback(TrainerCallback):
    """Makes a TrainRun of a trainer's training, and resumes it.

        callback = YardCallback(yard, "team/run42", interval=500, keep_latest_k=3)
        trainer = Trainer(model, args, callbacks=[callback], …)
        trainer.train(resume_from_checkpoint=callback.checkpoint())
        callback.run.publish("team/bert", alias="candidate")

    A step counts as done when the trainer has logged and evaluated: what it logged for the step
    becomes the checkpoint's metrics. The end of the training is saved, too. For one process, or the
    ranks of DDP, which all have the same; with FSDP the trainer resumes only from files of its own
    kind.
    """

    def __init__(self, yard: Yard, run: str, **options: Any) -> None:
        """`options` (`interval`, `keep_latest_k`, `async_mode` …): those of TrainRun."""
        self._yard, self._name, self._options = yard, run, options
        self.run: TrainRun | None = None
        """The run, from the beginning of a training on; close it after the last one."""
        self._state = _State()
        self._metrics: dict[str, float] = {}
        self._is_counted = True
        self._random: dict[str, Any] | None = None
        self._folder: str | None = None

    def checkpoint(self) -> str | None:
        """For `resume_from_checkpoint`: what the run resumes from; None if it has no checkpoint.

        That is the newest one that is whole, or that of the option `load_step`. Returns a folder of
        this process with what the trainer asks for, its state and the weights; all the rest comes
        from the yard. The folder is gone when the training begins or the callback is closed. All
        ranks call it. Raises NoSuchThing if something else made the checkpoint.
        """
        step = self._options.get("load_step")
        name = ModelName.parse(self._name)
        with Job() as job:

            def found() -> list[str]:
                chosen = None if step is None else Step(step)
                return checkpoints_to_resume(self._yard.catalogue, name, chosen)

            refs = job.first(found, "finding a checkpoint")
            if step is not None:
                self._fill_folder(refs[0], job.group)
            elif not load_newest(job, name, refs, lambda ref: self._fill_folder(ref, job.group)):
                return None
        return self._folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises Refused unless the trainer begins at the step of the run's checkpoint."""
        self.close()
        optimizer = kwargs["optimizer"]
        self._state.trainer = state
        self._metrics, self._is_counted = {}, True
        self.run = TrainRun(
            self._yard,
            self._name,
            {
                _MODEL: kwargs["model"],
                "optim": getattr(optimizer, "optimizer", optimizer),  # accelerate wraps it
                "sched": kwargs["lr_scheduler"],
                _TRAINER: self._state,
            },
            **self._options,
        )
        with ExitStack() as opened:
            opened.callback(self.close)
            step = self.run.resume() or 0
            if step != state.global_step:
                raise Refused(
                    f"{self._name} is at step {step} and the trainer begins at "
                    f"{state.global_step}: trainer.train(resume_from_checkpoint="
                    "callback.checkpoint()), or another run; where a newer checkpoint turned out "
                    f"to be damaged, YardCallback(load_step={step})"
                )
            opened.pop_all()
        # To skip to a place inside an epoch the trainer draws the same random numbers once more.
        is_inside = step > 0 and not float(state.epoch or 0).is_integer()
        self._random = Rng().state_dict() if is_inside else None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._count()
        if self._random is not None:
            Rng().load_state_dict(self._random)
            self._random = None

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._count()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._is_counted = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        numbers = (int, float)
        self._metrics |= {key: one for key, one in (logs or {}).items() if type(one) in numbers}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._count()
        if self.run is not None:
            self.run.save(wait=True)

    def close(self) -> None:
        """End what is under way, and the run; remove the folder of `checkpoint`.

        Raises why saving failed.
        """
        self._forget_folder()
        if self.run is not None:
            run, self.run = self.run, None
            run.close()

    def _fill_folder(self, ref: str, group: dist.ProcessGroup | None) -> None:
        """Write the files of a checkpoint that the trainer asks for."""
        saved = load_values(self._yard, ref, _TRAINER, group=group)[_TRAINER]
        if not isinstance(saved, dict) or not isinstance(saved.get("json"), str):
            raise Damaged(f"{ref}: its {_TRAINER} is not the state of a trainer")
        self._forget_folder()
        self._folder = tempfile.mkdtemp(prefix="weightyard-checkpoint-")
        Path(self._folder, "trainer_state.json").write_text(saved["json"])
        weights = self._yard.load(ref, tensors=f"{_MODEL}.*", group=group)
        own = {name.removeprefix(f"{_MODEL}."): one for name, one in weights.items()}
        save_file(_apart(own), Path(self._folder, "model.safetensors"))

    def _count(self) -> None:
        """Tell the run that a step is done, once for each step."""
        if not self._is_counted and self.run is not None:
            self._is_counted = True
            metrics, self._metrics = self._metrics, {}  # the next step has its own
            self.run.step(metrics)

    def _forget_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that share no memory, as the file format wants it: those that did are copied."""
    apart: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, one in tensors.items():
        apart[name] = one.clone() if one.data_ptr() in seen else one
        seen.add(one.data_ptr())
    return apart


class _State:
    """The trainer's state as torch's Stateful. The trainer itself reads it back, from a file."""

    def __init__(self) -> None:
        self.trainer = TrainerState()

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(dataclasses.asdict(self.trainer), sort_keys=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
