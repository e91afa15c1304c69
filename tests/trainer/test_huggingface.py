"""Hugging Face's Trainer saves into a yard and goes on from there; with the real Trainer."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from trainer_world import World, as_torchrun, run_ranks
from training import packs, spoil
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from weightyard.errors import NoSuchThing, Refused
from weightyard.opening import open_yard
from weightyard.trainer import huggingface
from weightyard.trainer.huggingface import YardCallback, _State
from weightyard.trainer.run import TrainRun
from weightyard.trainer.values import save_values
from weightyard.trainer.writer import YardWriter
from weightyard.yard import Yard

RUN = "team/run42"
EPOCHS, STEPS_OF_EPOCH = 3, 6


class Net(nn.Module):
    """Learns a line. Dropout makes the result depend on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.net(x)
        return {"loss": nn.functional.mse_loss(found, labels), "found": found}


class Dies(TrainerCallback):
    """Ends the training in the middle of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise InterruptedError


class Unlike(TrainerCallback):
    """Gives each rank random numbers of its own, as another process would have drawn them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(self._rank)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with open_yard(str(tmp_path / "yard")) as opened:
        yield opened


def samples() -> list[dict[str, torch.Tensor]]:
    inputs = torch.randn(4 * STEPS_OF_EPOCH, 2, generator=torch.Generator().manual_seed(0))
    return [{"x": one, "labels": one.sum(0, keepdim=True)} for one in inputs]


def trainer(folder: Path, *callbacks: TrainerCallback, ranks: int = 1, **more: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder / "output"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4 // ranks,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )
    set_seed(1)
    data = samples()
    return Trainer(
        Net(), arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks)
    )


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items()
    )


@pytest.mark.parametrize("step", [8, 2 * STEPS_OF_EPOCH])
def test_a_training_goes_on_after_its_death_bit_for_bit(
    yard: Yard, tmp_path: Path, step: int
) -> None:
    whole = trainer(tmp_path)
    whole.train()
    first = YardCallback(yard, RUN, interval=4)
    with pytest.raises(InterruptedError):
        trainer(tmp_path, first, Dies(step + 1)).train(resume_from_checkpoint=first.checkpoint())
    assert yard.resolve(RUN).step == step
    second = YardCallback(yard, RUN, interval=4)
    resumed = trainer(tmp_path, second)
    torch.rand(3)  # another process has drawn others by now
    resumed.train(resume_from_checkpoint=second.checkpoint())
    assert resumed.state.global_step == EPOCHS * STEPS_OF_EPOCH
    assert same(whole.model, resumed.model)
    losses = [one["loss"] for one in resumed.state.log_history if "loss" in one]
    assert losses == [one["loss"] for one in whole.state.log_history if "loss" in one]
    second.close()


def test_a_checkpoint_has_the_metrics_of_its_own_step_only(yard: Yard, tmp_path: Path) -> None:
    callback = YardCallback(yard, RUN, interval=2)
    trainer(tmp_path, callback, eval_strategy="steps", eval_steps=4).train()
    callback.close()
    found = yard.versions(RUN)
    assert [one.step for one in found] == [18, 16, 14, 12, 10, 8, 6, 4, 2]
    evaluated = [one.step for one in found if "eval_loss" in one.metrics]
    assert evaluated == [18, 16, 12, 8, 4]  # the last one at the end of the training
    assert all("loss" in one.metrics for one in found)


def test_a_training_goes_on_from_the_newest_checkpoint_that_can_be_read(
    yard: Yard, tmp_path: Path
) -> None:
    first = YardCallback(yard, RUN, interval=4)
    with pytest.raises(InterruptedError):
        trainer(tmp_path, first, Dies(6)).train()
    before = packs(yard)
    second = YardCallback(yard, RUN, interval=4)
    with pytest.raises(InterruptedError):
        trainer(tmp_path, second, Dies(9)).train(resume_from_checkpoint=second.checkpoint())
    for pack in packs(yard) - before:
        spoil(pack)
    third = YardCallback(yard, RUN, interval=None)
    resumed = trainer(tmp_path, third)
    folder = third.checkpoint()
    assert folder is not None
    assert json.loads(Path(folder, "trainer_state.json").read_text())["global_step"] == 4
    resumed.train(resume_from_checkpoint=folder)
    assert resumed.state.global_step == EPOCHS * STEPS_OF_EPOCH
    third.close()


def dying(world: World, rank: int) -> list[int | None]:
    """The steps saved before a rank of two died."""
    as_torchrun(rank, 2)
    with world.yard(rank) as yard:
        callback = YardCallback(yard, RUN, interval=4)
        made = trainer(world.folder, Unlike(rank), callback, Dies(9), ranks=2)
        with pytest.raises(InterruptedError):
            made.train(resume_from_checkpoint=callback.checkpoint())
        return [one.step for one in yard.versions(RUN)]


def resuming(world: World, rank: int) -> tuple[bool, int, list[int | None]]:
    """Whether weights are those of a training that was never interrupted; where it resumed."""
    as_torchrun(rank, 2)
    with world.yard(rank) as yard:
        callback = YardCallback(yard, RUN, interval=4)
        resumed = trainer(world.folder, callback, Unlike(7), ranks=2)
        folder = callback.checkpoint()
        assert folder is not None
        begun = json.loads(Path(folder, "trainer_state.json").read_text())["global_step"]
        resumed.train(resume_from_checkpoint=folder)
        callback.close()
        whole = trainer(world.folder, Unlike(rank), ranks=2)
        whole.train()
        saved = [one.step for one in yard.versions(RUN)]
        return same(whole.model, resumed.model), begun, saved


def test_two_ranks_resume_bit_for_bit_and_a_save_is_one_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    died = run_ranks(world, dying, size=2, is_grouped=False)
    assert list(died.values()) == 2 * [[8, 4]]
    came = run_ranks(world, resuming, size=2, is_grouped=False)
    assert list(came.values()) == 2 * [(True, 8, [18, 16, 12, 8, 4])]


@pytest.mark.parametrize(("options", "step"), [({}, 8), ({"load_step": 4}, 4)])
def test_the_trainer_resumes_what_the_run_does(
    yard: Yard, tmp_path: Path, options: dict[str, int], step: int
) -> None:
    first = YardCallback(yard, RUN, interval=4)
    trainer(tmp_path, first, max_steps=12).train()
    first.close()
    newest = yard.resolve(RUN)
    assert newest.step == 12
    yard.registry.database.write(
        lambda tx: tx.exec_driver_sql(
            "UPDATE versions SET damaged_ms = 1 WHERE number = ?", (newest.number,)
        )
    )
    second = YardCallback(yard, RUN, interval=None, **options)
    folder = second.checkpoint()
    assert folder is not None
    assert json.loads(Path(folder, "trainer_state.json").read_text())["global_step"] == step
    resumed = trainer(tmp_path, second, max_steps=14)
    resumed.train(resume_from_checkpoint=folder)
    assert resumed.state.global_step == 14
    second.close()


def test_checkpoints_have_the_metrics_of_their_step_and_can_be_published(
    yard: Yard, tmp_path: Path
) -> None:
    callback = YardCallback(yard, RUN, interval=STEPS_OF_EPOCH)
    made = trainer(tmp_path, callback, eval_strategy="epoch")
    made.train()
    assert callback.run is not None
    published = callback.run.publish("team/net", alias="candidate")
    assert published is not None
    assert published.new_bytes == 0
    weights = yard.load("team/net@candidate")
    assert all(torch.equal(weights[name], one) for name, one in made.model.state_dict().items())
    callback.close()
    evaluated = [one["eval_loss"] for one in made.state.log_history if "eval_loss" in one]
    kept = list(reversed(yard.versions(RUN)))
    assert [one.step for one in kept] == [6, 12, 18]
    assert [one.metrics["eval_loss"] for one in kept] == evaluated
    assert not list((tmp_path / "output").iterdir())


def test_a_trainer_that_would_begin_anew_is_told_how_to_resume(yard: Yard, tmp_path: Path) -> None:
    first = YardCallback(yard, RUN, interval=4)
    with pytest.raises(InterruptedError):
        trainer(tmp_path, first, Dies(5)).train()
    first.close()
    second = YardCallback(yard, RUN, interval=4)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Refused, match=r"at step 4 and the trainer begins at 0.*checkpoint\(\)"):
        trainer(tmp_path, second).train()
    assert second.run is None
    assert signal.getsignal(signal.SIGTERM) is before


class Tied(Net):
    """Two of its layers are one."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(2, 4)
        self.again.weight = self.net[0].weight


def test_weights_to_resume_from_are_written_from_where_they_were_loaded(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second copy of a large model might not fit."""
    with TrainRun(yard, RUN, {"model": Tied(), "trainer": _State()}) as run:
        run.save()
    load, loaded = yard.load, {}

    def watched(*args: Any, **options: Any) -> Any:
        loaded.update(load(*args, **options))
        return loaded

    written: dict[str, torch.Tensor] = {}

    def write(tensors: dict[str, torch.Tensor], path: Path) -> None:
        written.update(tensors)
        save_file(tensors, path)

    monkeypatch.setattr(yard, "load", watched)
    monkeypatch.setattr(huggingface, "save_file", write)
    callback = YardCallback(yard, RUN)
    folder = callback.checkpoint()
    own = [name for name, one in written.items() if one is not loaded[f"model.{name}"]]
    assert len(own) == 1  # of the two that are one in memory: a file has no such thing
    found = load_file(Path(str(folder), "model.safetensors"))
    assert {name: one.tolist() for name, one in found.items()} == {
        name.removeprefix("model."): one.tolist() for name, one in loaded.items()
    }
    callback.close()


def test_closing_removes_the_folder_that_no_training_took(yard: Yard) -> None:
    with TrainRun(yard, RUN, {"model": Net(), "trainer": _State()}) as run:
        run.save()
    callback = YardCallback(yard, RUN)
    folder = Path(str(callback.checkpoint()))
    assert folder.is_dir()
    callback.close()
    assert not folder.exists()


def test_a_new_run_has_no_checkpoint_and_one_that_others_made_is_not_taken(yard: Yard) -> None:
    callback = YardCallback(yard, RUN)
    assert callback.checkpoint() is None
    with YardWriter(yard, RUN) as writer:
        save_values(writer, 3, {"something": "else"})
    with pytest.raises(NoSuchThing, match="holds no trainer"):
        callback.checkpoint()
