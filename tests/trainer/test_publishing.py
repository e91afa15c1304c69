"""A checkpoint's weights, published as versions of models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sqlalchemy import update
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainer_world import World, run_ranks
from training import RUN, as_bytes, packs, setting, train

from weightyard.errors import BadSetting, DoesNotFit, NoSuchThing, Refused
from weightyard.format.splitting import SMALL_BYTES
from weightyard.names import ModelName
from weightyard.opening import open_yard
from weightyard.registry import schema
from weightyard.registry.collect import GcOptions
from weightyard.registry.schema import Dedup
from weightyard.settings import Settings
from weightyard.trainer.publishing import Published
from weightyard.trainer.run import TrainRun
from weightyard.yard import Yard

BERT = "team/bert"


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    with open_yard(str(tmp_path / "store"), settings=settings) as opened:
        yield opened


class Mixed(nn.Module):
    """Tensors large and small, of three types, two of them tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(500, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.embed.weight
        self.narrow = nn.Parameter(torch.randn(300, 300).to(torch.bfloat16))
        self.register_buffer("seen", torch.arange(20_000))


def published(
    yard: Yard, module: nn.Module, name: str = BERT, **given: Any
) -> tuple[Published, set[Path]]:
    """Publish a module's checkpoint; and the packs that were written for it."""
    options = {key: given.pop(key) for key in ("export_dtype",) if key in given}
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    with TrainRun(yard, f"{name}-run", {"model": module, "optim": optimizer}, **options) as run:
        run.resume()
        run.steps += 1
        run.save()
        before = packs(yard)
        made = run.publish(name, **given)
        assert made is not None
        return made, packs(yard) - before


def is_same(yard: Yard, ref: str, state: dict[str, torch.Tensor]) -> bool:
    return as_bytes(yard.load(ref)) == as_bytes(state)


def test_publishing_copies_nothing(yard: Yard) -> None:
    module = Mixed()
    made, written = published(yard, module, alias="candidate", message="good", tags={"by": "me"})
    assert (made.new_bytes, made.recoded_bytes, made.packs_written) == (0, 0, 0)
    assert not written
    assert is_same(yard, f"{BERT}@candidate", module.state_dict())
    version = yard.resolve(BERT)
    assert (version.message, version.step) == ("good", None)
    assert version.tags == {"run": f"{BERT}-run", "step": "1", "by": "me"}
    assert [one.name for one in yard.models()] == [BERT]


def test_a_published_version_is_a_safetensors_file_for_others(yard: Yard) -> None:
    module = Mixed()
    published(yard, module)
    loaded = load_file(yard.snapshot(BERT) / "model.safetensors")
    expected = {name: one for name, one in module.state_dict().items() if name != "head.weight"}
    assert as_bytes(loaded) == as_bytes(expected)


def test_tied_tensors_come_back_tied(yard: Yard) -> None:
    published(yard, Mixed())
    loaded = yard.load(BERT)
    assert loaded["head.weight"] is loaded["embed.weight"]
    assert loaded["norm.weight"] is not loaded["norm.bias"]


def test_views_of_other_values_are_not_tied_to_the_memory_they_share(yard: Yard) -> None:
    module = nn.Linear(2, 2)
    turns = torch.tensor([1 + 2j, 3 - 4j])
    module.register_buffer("back", turns.conj())
    module.register_buffer("turns", turns)
    published(yard, module)
    loaded = yard.load(BERT)
    assert torch.equal(loaded["turns"], turns)
    assert torch.equal(loaded["back"], turns.conj())
    pushed = yard.load(yard.push(module.state_dict(), "team/pushed").ref)
    assert torch.equal(pushed["turns"], turns)
    assert torch.equal(pushed["back"], turns.conj())


def test_a_cast_writes_the_tensors_it_concerns_and_says_how_many_bytes(yard: Yard) -> None:
    module = Mixed()
    made, written = published(yard, module, export_dtype="bfloat16")
    cast = ("embed.weight", "norm.weight", "norm.bias")  # the head is tied to the embedding
    expected = {
        name: one.to(torch.bfloat16) if one.is_floating_point() else one
        for name, one in module.state_dict().items()
    }
    assert made.recoded_bytes == made.new_bytes == sum(expected[name].nbytes for name in cast)
    assert written
    assert is_same(yard, BERT, expected)
    again, written = published(yard, module, export_dtype="bfloat16")
    assert (again.recoded_bytes, again.new_bytes, written) == (made.recoded_bytes, 0, set())
    assert again.digest == made.digest


@pytest.mark.parametrize("export_dtype", [None, torch.float16])
def test_consolidated_it_is_the_version_that_a_push_of_the_state_makes(
    yard: Yard, export_dtype: torch.dtype | None
) -> None:
    module = Mixed()
    made, _ = published(yard, module, export_dtype=export_dtype, consolidate=True)
    if export_dtype is None:  # the large tensors are in one box each, as a push has them
        small = [one for one in module.state_dict().values() if one.nbytes < SMALL_BYTES]
        assert made.recoded_bytes == sum(one.nbytes for one in small) > 0
    else:
        module.narrow.data = module.narrow.data.to(export_dtype)
        module = module.to(export_dtype)
    pushed = yard.push(module.state_dict(), "team/pushed")
    assert pushed.digest == made.digest
    assert pushed.new_bytes == 0


def test_names_can_be_changed_and_left_out(yard: Yard) -> None:
    def plain(name: str) -> str | None:
        return None if name.startswith(("head", "narrow")) else f"bert.{name}"

    published(yard, Mixed(), rename=plain)
    assert set(yard.load(BERT)) == {
        "bert.embed.weight",
        "bert.norm.weight",
        "bert.norm.bias",
        "bert.seen",
    }
    with pytest.raises(DoesNotFit, match="both"):
        published(yard, Mixed(), rename=lambda name: "one")
    with pytest.raises(NoSuchThing, match="no tensors"):
        published(yard, Mixed(), rename=lambda name: None)
    for odd in ("", "x" * 2000, "a\nb", 5):
        with pytest.raises(Refused, match="cannot be the name of a tensor"):
            published(yard, Mixed(), rename=lambda name, odd=odd: odd)
    with pytest.raises(BadSetting, match="no module"):
        published(yard, Mixed(), model="other")


def test_what_a_version_cannot_have_is_refused_by_its_name(yard: Yard) -> None:
    with pytest.raises(BadSetting, match="message"):
        published(yard, Mixed(), message="x" * 100_000)
    assert yard.models() == []


def test_into_a_project_that_keeps_its_own_content_it_is_written_again(yard: Yard) -> None:
    apart = update(schema.registry).values(dedup=Dedup.PROJECT)
    yard.registry.database.write(lambda tx: tx.execute(apart))
    module = Mixed()
    with TrainRun(yard, RUN, {"model": module}, interval=None) as run:
        same = run.publish(BERT)
        other = run.publish("others/bert")
    assert same is not None
    assert other is not None
    assert (same.new_bytes, same.recoded_bytes) == (0, 0)
    assert other.new_bytes == other.recoded_bytes > 0
    assert is_same(yard, "others/bert", module.state_dict())
    loaded = yard.load("others/bert")
    assert loaded["head.weight"] is loaded["embed.weight"]


def test_it_lives_on_when_its_checkpoint_is_gone(yard: Yard) -> None:
    module = Mixed()
    published(yard, module)
    checkpoint = yard.resolve(f"{BERT}-run@step-1")
    yard.delete(checkpoint.ref)
    for _ in range(2):  # condemned, then deleted
        yard.registry.gc(yard.store, GcOptions(grace_s=0, embedded=True))
    assert yard.versions(f"{BERT}-run") == []
    assert is_same(yard, BERT, module.state_dict())


def test_a_version_of_deltas_lives_on_when_the_checkpoint_of_their_bases_is_gone(
    yard: Yard,
) -> None:
    torch.manual_seed(3)
    module = nn.Linear(700, 700)
    with TrainRun(yard, RUN, {"model": module}, interval=None) as run:
        run.save()
        with torch.no_grad():
            module.weight[::50] *= 1.001
        run.steps += 1
        made = run.publish(BERT)
    assert made is not None
    assert made.new_bytes == 0
    blocks = [block.id for block in yard.manifest(BERT).blocks]
    places = yard.catalogue.placements(blocks)
    bases = {one.encoding.base for of_block in places.values() for one in of_block} - {None}
    assert bases
    assert bases.isdisjoint(blocks)
    for step in range(2):
        yard.delete(f"{RUN}@step-{step}")
    for _ in range(2):  # condemned, then deleted
        yard.registry.gc(yard.store, GcOptions(grace_s=0, embedded=True))
    assert yard.versions(RUN) == []
    assert as_bytes(yard.load(BERT, verify="full")) == as_bytes(module.state_dict())


def test_a_resumed_run_publishes_the_checkpoint_it_resumed_from(yard: Yard) -> None:
    train(yard, 2, interval=2)
    made = setting()
    with TrainRun(yard, RUN, made.state) as run:
        run.resume()
        version = run.publish(BERT)
    assert version is not None
    assert version.metrics == yard.resolve(f"{RUN}@step-2").metrics
    assert is_same(yard, BERT, made.net.state_dict())
    assert yard.catalogue.model(ModelName.parse(RUN)).versions == 1


def sharded(world: World, rank: int) -> dict[str, Any]:
    with world.yard(rank) as yard:
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(200, 301), nn.Linear(301, 40))
        for layer in module:
            fully_shard(layer)
        fully_shard(module)
        with TrainRun(yard, RUN, {"model": module}) as run:
            kept = run.publish("team/kept")
            whole = run.publish("team/whole", consolidate=True)
        full = {
            name: one.full_tensor().numpy() if isinstance(one, DTensor) else one.numpy()
            for name, one in module.state_dict().items()
        }
        assert (kept is None) is (whole is None) is (rank != 0)
        return {"kept": kept, "whole": whole, "full": full} if rank == 0 else {}


def test_shards_are_published_as_they_are_or_put_together(tmp_path: Path) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    found = run_ranks(world, sharded, size=2)[0]
    with world.yard(0) as yard:
        full = {name: torch.from_numpy(one) for name, one in found["full"].items()}
        assert found["kept"].new_bytes == 0
        assert {len(one.boxes) for one in yard.manifest("team/kept").tensors} == {2}
        assert {len(one.boxes) for one in yard.manifest("team/whole").tensors} == {1}
        assert found["kept"].recoded_bytes == 0
        assert found["whole"].recoded_bytes == sum(one.nbytes for one in full.values())
        assert is_same(yard, "team/kept", full)
        pushed = yard.push(full, "team/pushed")
        assert (pushed.digest, pushed.new_bytes) == (found["whole"].digest, 0)
        save_file(full, tmp_path / "model.safetensors")
        file = yard.push(tmp_path / "model.safetensors", "team/file")
        assert file.new_bytes < SMALL_BYTES  # its header, and what shares blocks by file
