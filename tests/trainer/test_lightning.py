"""Lightning saves into a yard and goes on from there; with the real Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainer_world import World, as_torchrun, run_ranks

from weightyard.errors import NoSuchThing, Refused, RunTakenOver
from weightyard.opening import open_yard
from weightyard.trainer import values
from weightyard.trainer.lightning import YardCheckpointIO
from weightyard.trainer.reader import YardReader
from weightyard.yard import Yard

RUN = "team/run42"
EPOCHS = 4

pytestmark = [
    # What it would have a user know of loggers, workers and folders, and does that torch dislikes.
    pytest.mark.filterwarnings("ignore::Warning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::Warning:lightning_fabric"),
]


class Module(LightningModule):
    """Learns a line. Dropout makes the result depend on random numbers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Dropout(0.2), nn.Linear(width, 1))

    def training_step(self, batch: Any, at: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, at: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


class Dice(Callback):
    """Random numbers that depend on epoch and rank alone: Lightning does not save generators."""

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        torch.manual_seed(2 * trainer.current_epoch + trainer.global_rank)


class Dies(Callback):
    """Ends the training in the middle of an epoch."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, at: int) -> None:
        if (trainer.current_epoch, at) == (self._epoch, 1):
            raise InterruptedError


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with open_yard(str(tmp_path / "yard")) as opened:
        yield opened


def loader() -> DataLoader[Any]:
    inputs = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(data, 4, generator=torch.Generator())  # which draws none of the others


def trainer(
    folder: Path, io: YardCheckpointIO, epochs: int, *more: Callback, ranks: int = 1, **saving: Any
) -> Trainer:
    saving = {"filename": "{epoch}", "save_top_k": -1, **saving}
    return Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=[Dice(), ModelCheckpoint(folder / "checkpoints", **saving), *more],
        plugins=[io],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fitted(folder: Path, io: YardCheckpointIO, epochs: int, **saving: Any) -> Module:
    torch.manual_seed(1)
    module = Module()
    trainer(folder, io, epochs, **saving).fit(module, loader(), ckpt_path=io.latest)
    return module


def test_a_training_goes_on_from_its_newest_checkpoint_bit_for_bit(
    yard: Yard, tmp_path: Path
) -> None:
    whole = fitted(tmp_path, YardCheckpointIO(yard, "team/whole"), EPOCHS)
    fitted(tmp_path, YardCheckpointIO(yard, RUN), EPOCHS - 2)
    io = YardCheckpointIO(yard, RUN)
    assert yard.resolve(str(io.latest)).step == 12
    resumed = fitted(tmp_path, io, EPOCHS)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    assert [one.step for one in yard.versions(RUN)] == [24, 18, 12, 6]


def of_two(
    world: World, rank: int, io: YardCheckpointIO, epochs: int, *more: Callback
) -> dict[str, torch.Tensor]:
    """The weights of a module that a rank of two has trained, from the newest checkpoint on."""
    torch.manual_seed(1)
    module = Module()
    made = trainer(world.folder, io, epochs, *more, ranks=2)
    assert made.global_rank == rank
    made.fit(module, loader(), ckpt_path=io.latest)
    return dict(module.state_dict())


def dying(world: World, rank: int) -> str | None:
    as_torchrun(rank, 2)
    with world.yard(rank) as yard:
        io = YardCheckpointIO(yard, RUN)
        with pytest.raises(InterruptedError):
            of_two(world, rank, io, EPOCHS, Dies(2))
        return io.latest


class Watched(YardReader):
    """A reader that tells how many read together."""

    together: ClassVar[list[int]] = []

    def read_data(self, plan: Any, planner: Any) -> Any:
        done = super().read_data(plan, planner)
        assert self.report is not None
        self.together.append(self.report.ranks)
        return done


def resuming(world: World, rank: int) -> tuple[bool, list[int | None], list[int]]:
    """Whether weights are those of a training that was never interrupted, all steps saved, and how
    many ranks read together."""
    as_torchrun(rank, 2)
    with world.yard(rank) as yard, pytest.MonkeyPatch.context() as patched:
        patched.setattr(values, "YardReader", Watched)
        resumed = of_two(world, rank, YardCheckpointIO(yard, RUN), EPOCHS)
        whole = of_two(world, rank, YardCheckpointIO(yard, "team/whole"), EPOCHS)
        is_same = all(torch.equal(tensor, whole[name]) for name, tensor in resumed.items())
        return is_same, [one.step for one in yard.versions(RUN)], Watched.together


def test_two_ranks_resume_bit_for_bit_and_a_save_is_one_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    died = run_ranks(world, dying, size=2, is_grouped=False)
    assert list(died.values()) == 2 * [f"{RUN}@v2"]
    came = run_ranks(world, resuming, size=2, is_grouped=False)
    assert list(came.values()) == 2 * [(True, [12, 9, 6, 3], [2])]


def test_a_damaged_checkpoint_is_not_the_latest(yard: Yard, tmp_path: Path) -> None:
    io = YardCheckpointIO(yard, RUN)
    fitted(tmp_path, io, 2)
    newest = yard.resolve(RUN)
    yard.registry.database.write(
        lambda tx: tx.exec_driver_sql(
            "UPDATE versions SET damaged_ms = 1 WHERE number = ?", (newest.number,)
        )
    )
    assert newest.step == 12
    assert yard.resolve(str(io.latest)).step == 6


def test_a_checkpoint_is_one_of_a_run_and_no_file_is_written(yard: Yard, tmp_path: Path) -> None:
    module = fitted(tmp_path / "job", YardCheckpointIO(yard, RUN), 1)
    assert not list((tmp_path / "job").rglob("*.ckpt"))
    weights = yard.load(f"{RUN}@step-6", tensors="model.*")
    for name, tensor in module.state_dict().items():
        assert torch.equal(weights[f"model.{name}"], tensor)
    manifest = yard.manifest(f"{RUN}@step-6")
    assert [file.path for file in manifest.files] == ["state.json"]
    assert "lightning.optimizer_states.0.state.0.exp_avg" in {one.name for one in manifest.tensors}


def test_lightning_gets_back_what_it_gave_with_keys_that_are_numbers(
    yard: Yard, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "state_dict": {"weight": torch.ones(3)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": []}],
        "callbacks": {},
        "loops": {"fit_loop": (1, None, {"a": [torch.arange(2)]})},
        "global_step": 7,
    }
    io = YardCheckpointIO(yard, RUN)
    io.save_checkpoint(given, "/somewhere/last.ckpt")
    got = io.load_checkpoint("/somewhere/last.ckpt", weights_only=False)
    assert torch.equal(got["state_dict"].pop("weight"), torch.ones(3))
    assert torch.equal(got["optimizer_states"][0]["state"][0].pop("step"), torch.tensor(5.0))
    assert torch.equal(got["loops"]["fit_loop"][2]["a"].pop(), torch.arange(2))
    assert got == {
        "state_dict": {},
        "optimizer_states": [{"state": {0: {}}, "param_groups": []}],
        "callbacks": {},
        "loops": {"fit_loop": (1, None, {"a": []})},
        "global_step": 7,
    }


def test_the_best_is_found_by_lightnings_path_and_the_others_are_removed(
    yard: Yard, tmp_path: Path
) -> None:
    io = YardCheckpointIO(yard, RUN)
    torch.manual_seed(1)
    module = Module()
    made = trainer(tmp_path, io, 3, monitor="loss", mode="max", save_top_k=1)
    made.fit(module, loader())
    (kept,) = yard.versions(RUN)
    best = kept.ref
    made.validate(module, loader(), ckpt_path="best", verbose=False)
    weights = yard.load(best, tensors="model.*")
    assert torch.equal(module.net[0].weight, weights["model.net.0.weight"])


def test_what_is_saved_under_a_path_again_takes_the_place_of_what_was_there(yard: Yard) -> None:
    io = YardCheckpointIO(yard, RUN)
    for step in (1, 2, 3):
        io.save_checkpoint({"global_step": step}, "last.ckpt")
        io.save_checkpoint({"global_step": step}, f"{step}.ckpt")
    assert [one.step for one in yard.versions(RUN)] == [3, 3, 2, 1]
    assert io.load_checkpoint("last.ckpt")["global_step"] == 3
    io.remove_checkpoint("last.ckpt")
    with pytest.raises(NoSuchThing):
        io.load_checkpoint("last.ckpt")
    assert [io.load_checkpoint(f"{step}.ckpt")["global_step"] for step in (1, 2, 3)] == [1, 2, 3]


def test_a_checkpoint_is_found_by_its_path_as_soon_as_it_is_there(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a kill leaves undone after the commit."""

    def killed(*args: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(yard.catalogue, "annotate", killed)
    io = YardCheckpointIO(yard, RUN)
    io.save_checkpoint({"global_step": 1}, "last.ckpt")
    assert YardCheckpointIO(yard, RUN).load_checkpoint("last.ckpt")["global_step"] == 1


def test_a_checkpoint_that_an_alias_holds_stays_but_not_under_its_path(yard: Yard) -> None:
    io = YardCheckpointIO(yard, RUN)
    io.save_checkpoint({"global_step": 1}, "last.ckpt")
    yard.set_alias(RUN, "good", 1)
    io.save_checkpoint({"global_step": 2}, "last.ckpt")
    assert io.load_checkpoint(f"{RUN}@good")["global_step"] == 1
    io.remove_checkpoint("last.ckpt")
    with pytest.raises(NoSuchThing):
        io.load_checkpoint("last.ckpt")
    assert [one.aliases for one in yard.versions(RUN)] == [("good",)]


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_trainer_can_save_after_its_training_has_ended(
    yard: Yard, tmp_path: Path, place: str
) -> None:
    folder = tmp_path / "anchors" if place == "disk" else None
    io = YardCheckpointIO(yard, RUN, anchors_folder=folder)
    made = trainer(tmp_path, io, 1)
    made.fit(Module(64), loader())
    made.save_checkpoint("after.ckpt")
    assert io.load_checkpoint("after.ckpt")["global_step"] == 6
    io.teardown()


def test_what_cannot_be_saved_is_refused_by_its_key(yard: Yard) -> None:
    io = YardCheckpointIO(yard, RUN)
    with pytest.raises(Refused, match=r"lightning\['callbacks'\]\['mine'\].*set cannot be saved"):
        io.save_checkpoint({"state_dict": {}, "callbacks": {"mine": {1, 2}}}, "a.ckpt")
    assert io.latest is None


def test_a_job_from_before_can_save_no_more(yard: Yard) -> None:
    before, idle = YardCheckpointIO(yard, RUN), YardCheckpointIO(yard, RUN)
    before.save_checkpoint({"global_step": 1}, "a.ckpt")
    after = YardCheckpointIO(yard, RUN)
    after.save_checkpoint({"global_step": 2}, "b.ckpt")
    for late in (before, idle):
        with pytest.raises(RunTakenOver):
            late.save_checkpoint({"global_step": 3}, "c.ckpt")
    assert [one.step for one in yard.versions(RUN)] == [2, 1]


def test_a_checkpoint_that_is_not_there_is_an_error_to_load_and_none_to_remove(yard: Yard) -> None:
    io = YardCheckpointIO(yard, RUN)
    io.remove_checkpoint("nowhere.ckpt")
    with pytest.raises(NoSuchThing, match=r"has no checkpoint nowhere\.ckpt"):
        io.load_checkpoint("nowhere.ckpt")
    io.save_checkpoint({"global_step": 1}, "a.ckpt")
    with pytest.raises(NoSuchThing):
        io.load_checkpoint(f"{RUN}@step-2")
    assert io.load_checkpoint(f"{RUN}@step-1") == {"global_step": 1, "state_dict": {}}
