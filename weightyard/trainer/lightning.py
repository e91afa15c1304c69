"""Lightning's checkpoints in a yard: `Trainer(plugins=[YardCheckpointIO(yard, "team/run42")])`.

What Lightning would write to a file becomes a checkpoint of a run: the module's weights as tensors
`model.…`, all else under `lightning`, without pickle. The path that Lightning gave it is kept as a
tag, so that Lightning finds it again; people call it `team/run42@step-1200`.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from weightyard.errors import NoSuchThing, Unsupported
from weightyard.names import ModelName, Ref
from weightyard.records import Version
from weightyard.trainer.run import checkpoint_to_resume
from weightyard.trainer.values import load_values, save_values
from weightyard.trainer.writer import YardWriter

try:
    from lightning.fabric.plugins import CheckpointIO
except ImportError:
    from lightning_fabric.plugins import CheckpointIO

if TYPE_CHECKING:
    from weightyard.yard import Yard

_WEIGHTS, _OTHERS = "model", "lightning"
_PATH_TAG = "lightning.path"
_LIGHTNINGS_WEIGHTS = "state_dict"


class YardCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Saves, loads and removes Lightning's checkpoints as those of a run.

    For strategies that have Lightning save whole state dicts: one device, DDP. Its first rank saves
    for all, and each one loads for itself. The first save takes the run over: a job from before can
    save no more.

        io = YardCheckpointIO(yard, "team/run42")
        trainer = Trainer(plugins=[io], …)
        trainer.fit(module, ckpt_path=io.latest)
    """

    def __init__(self, yard: Yard, run: str, **options: Any) -> None:
        """`options`: those of YardWriter. Raises InvalidName."""
        self._yard, self._run = yard, ModelName.parse(run)
        self._writer = YardWriter(yard, run, **options)

    @property
    def latest(self) -> str | None:
        """The ref of the newest checkpoint that is whole, for `ckpt_path`; None: there is none."""
        return checkpoint_to_resume(self._yard.catalogue, self._run)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | PathLike[str], storage_options: Any = None
    ) -> None:
        """Publish a checkpoint of the trainer's step. Raises Refused, naming what cannot be saved.

        A step may have several: they share what is the same, and `@step-N` means the newest.
        """
        if storage_options is not None:
            raise Unsupported("storage_options: give them to YardCheckpointIO")
        others = {key: value for key, value in checkpoint.items() if key != _LIGHTNINGS_WEIGHTS}
        weights = checkpoint.get(_LIGHTNINGS_WEIGHTS, {})
        step = checkpoint.get("global_step", 0)
        save_values(self._writer, step, {_WEIGHTS: weights, _OTHERS: others})
        assert self._writer.version is not None  # this process alone has made it
        ref = Ref.parse(self._writer.version.ref)
        self._yard.catalogue.annotate(ref, {"tags": {_PATH_TAG: str(path)}})
        self._yard.settle()

    def load_checkpoint(
        self,
        path: str | PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """What was saved under a path, or is meant by a ref, in host memory.

        Nothing in it can run code, whatever `weights_only` says. Raises NoSuchThing, Damaged.
        """
        version = self._find(path)
        if version is None:
            raise NoSuchThing(
                f"{self._run} has no checkpoint {path}; give its ref, such as {self._run}@step-1200"
            )
        loaded = load_values(self._yard, version.ref, _WEIGHTS, _OTHERS)
        return {**loaded[_OTHERS], _LIGHTNINGS_WEIGHTS: loaded[_WEIGHTS]}

    def remove_checkpoint(self, path: str | PathLike[str]) -> None:
        """Take a checkpoint out of sight; one that is not there is no error."""
        if (version := self._find(path)) is not None:
            self._yard.delete(version.ref, reason="Lightning keeps it no longer")

    def teardown(self) -> None:
        self._writer.close()

    def _find(self, path: str | PathLike[str]) -> Version | None:
        text = str(path)
        if text.partition("@")[0] == str(self._run):
            return self._yard.resolve(text)
        try:
            versions = self._yard.versions(str(self._run))
        except NoSuchThing:
            return None
        return next((one for one in versions if one.tags.get(_PATH_TAG) == text), None)
