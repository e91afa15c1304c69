"""Lightning's checkpoints in a yard: `Trainer(plugins=[YardCheckpointIO(yard, "team/run42")])`.

What Lightning would write to a file becomes a checkpoint of a run: the module's weights as tensors
`model.…`, all else under `lightning`, without pickle. The path that Lightning gave it is kept as a
tag, so that Lightning finds it again; people call it `team/run42@step-1200`.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

import torch.distributed as dist

from weightyard.errors import NoSuchThing, Protected, Unsupported
from weightyard.logs import Log
from weightyard.names import ModelName, Ref
from weightyard.records import Version
from weightyard.trainer.resuming import checkpoint_to_resume
from weightyard.trainer.values import load_values, save_values
from weightyard.trainer.writer import Writing, YardWriter

try:
    from lightning.fabric.plugins import CheckpointIO
except ImportError:
    from lightning_fabric.plugins import CheckpointIO

if TYPE_CHECKING:
    from weightyard.yard import Yard

_log = Log(__name__)

_WEIGHTS, _OTHERS = "model", "lightning"
_PATH_TAG = "lightning.path"
_LIGHTNINGS_WEIGHTS = "state_dict"


class YardCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Saves, loads and removes Lightning's checkpoints as those of a run.

    For strategies by which Lightning saves whole state dicts: one device, DDP. Its first rank saves
    for all, and all load together. The first save takes the run over: older jobs can then save no
    more, even those that had not saved yet. Lightning shows what is to be saved only when it saves:
    so what cannot be saved is refused only then.

        io = YardCheckpointIO(yard, "team/run42")
        trainer = Trainer(plugins=[io], …)
        trainer.fit(module, ckpt_path=io.latest)
    """

    def __init__(self, yard: Yard, run: str, **options: Unpack[Writing]) -> None:
        """`options` (`delta`, `replication`, `policy`, `threads` …): those of YardWriter.

        Raises InvalidName, BadSetting.
        """
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

        It replaces what was saved under the same path. A step may have several checkpoints: they
        share equal content, and `@step-N` means the newest.
        """
        if storage_options is not None:
            raise Unsupported("storage_options: give them to YardCheckpointIO")
        others = {key: value for key, value in checkpoint.items() if key != _LIGHTNINGS_WEIGHTS}
        weights = checkpoint.get(_LIGHTNINGS_WEIGHTS, {})
        step = checkpoint.get("global_step", 0)
        self._writer.tags = {_PATH_TAG: str(path)}
        save_values(self._writer, step, {_WEIGHTS: weights, _OTHERS: others})
        made = self._writer.version
        assert made is not None  # this process alone has made it
        for older in self._saved_under(str(path)):
            if older.number < made.number:
                self._let_go(older, "Lightning saved another under its path")

    def load_checkpoint(
        self,
        path: str | PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """What was saved under a path, or is meant by a ref, in host memory.

        If there are several ranks, all of them call it, as Lightning does. Nothing in it can run
        code, whatever `weights_only` says. Raises NoSuchThing, Damaged.
        """
        found = self._meant_by(path)
        if not found:
            raise NoSuchThing(
                f"{self._run} has no checkpoint {path}; give its ref, such as {self._run}@step-1200"
            )
        loaded = load_values(self._yard, found[0].ref, _WEIGHTS, _OTHERS, group=_all_ranks())
        return {**loaded[_OTHERS], _LIGHTNINGS_WEIGHTS: loaded[_WEIGHTS]}

    def remove_checkpoint(self, path: str | PathLike[str]) -> None:
        """Take a checkpoint out of sight; one that is not there is no error.

        One that an alias holds stays, but is no longer found by its path.
        """
        for version in self._meant_by(path):
            self._let_go(version, "Lightning keeps it no longer")

    def teardown(self) -> None:
        self._writer.close()

    def _meant_by(self, path: str | PathLike[str]) -> list[Version]:
        """The checkpoint of a ref, or those saved under a path, the newest first."""
        text = str(path)
        if text.partition("@")[0] == str(self._run):
            return [self._yard.resolve(text)]
        return self._saved_under(text)

    def _saved_under(self, path: str) -> list[Version]:
        try:
            versions = self._yard.versions(str(self._run))
        except NoSuchThing:
            return []
        return [one for one in versions if one.tags.get(_PATH_TAG) == path]

    def _let_go(self, version: Version, reason: str) -> None:
        try:
            self._yard.delete(version.ref, reason=reason)
        except Protected as why:
            tags = {name: tag for name, tag in version.tags.items() if name != _PATH_TAG}
            self._yard.catalogue.annotate(Ref.parse(version.ref), {"tags": tags})
            self._yard.settle()
            _log.info("lightning.kept", checkpoint=version.ref, reason=why)


def _all_ranks() -> dist.ProcessGroup | None:
    """The ranks that load together, reading each byte once; None: this process is alone."""
    is_joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if is_joined else None
