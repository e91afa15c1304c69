"""A small transformer, sharded over its workers, that another process serves while it learns.

torchrun --nproc-per-node 4 examples/transformer.py train               learns to spell, publishes
python examples/transformer.py serve                                    in a second terminal
torchrun --nproc-per-node 2 examples/transformer.py train --steps 400   goes on with two workers

The second training finds the checkpoint of four workers and cuts it anew for two. What it publishes
the server takes over between two answers. `--yard` takes a folder, hdfs://…, or http://… of a
service; to train by that, its store must be in reach, too: checkpoints go straight there.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import weightyard
from weightyard.trainer import GlobalOffsetSampler, TrainRun

RUN, MODEL, ALIAS = "example/speller", "example/speller-serving", "prod"
ROOT = Path(__file__).parent.parent
BYTES, WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 256, 128, 4, 2, 64, 16


class Speller(nn.Module):
    """Says which byte comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.out = nn.Linear(WIDTH, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        hidden = self.embed(text) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.out(hidden)


class Passages(Dataset[torch.Tensor]):
    """This repository's docs, cut to passages."""

    def __init__(self) -> None:
        pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
        text = b"\n".join(page.read_bytes() for page in pages)
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self._text) - 1) // CONTEXT

    def __getitem__(self, at: int) -> torch.Tensor:
        return self._text[at * CONTEXT : (at + 1) * CONTEXT + 1]


def train(yard_url: str | None, steps: int, interval: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Speller()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    passages = Passages()
    sampler = GlobalOffsetSampler(len(passages), seed=1)
    # With a generator of its own, a resume disturbs no other random number.
    loader = DataLoader(passages, BATCH, sampler=sampler, generator=torch.Generator())
    with (
        weightyard.open(yard_url) as yard,
        TrainRun(
            yard,
            RUN,
            state={"model": model, "optim": optimizer, "data": sampler},
            interval=interval,
            keep_latest_k=2,
            async_mode="async",
            signals=(signal.SIGTERM, signal.SIGINT),  # Ctrl-C saves and ends, too
        ) as run,
    ):
        run.resume()
        while run.steps < steps:
            for batch in sampler.batches(loader):
                found = model(batch[:, :-1])
                loss = cross_entropy(found.flatten(0, 1), batch[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step({"loss": loss.item()})
                if dist.get_rank() == 0 and run.steps % interval == 0:
                    print(f"step {run.steps}, epoch {sampler.epoch}: loss {loss.item():.3f}")
                if run.steps >= steps:
                    break
        version = run.publish(MODEL, alias=ALIAS)
        if dist.get_rank() == 0:
            print(f"published {version.ref}")
    dist.destroy_process_group()


@torch.inference_mode()
def spell(model: Speller, beginning: str, length: int = 60) -> str:
    """Go on with a text, always with the byte that is most likely."""
    text = torch.tensor([list(beginning.encode())])
    for _ in range(length):
        likely = model(text[:, -CONTEXT:])[:, -1].argmax(1)
        text = torch.cat([text, likely[:, None]], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def serve(yard_url: str | None, beginning: str, versions: int | None) -> None:
    """Answer the same question by every version that comes; so many of them, or until Ctrl-C."""
    model = Speller().eval()
    served = None
    with (
        weightyard.open(yard_url) as yard,
        yard.follow(f"{MODEL}@{ALIAS}", model, poll_s=1) as follower,
    ):
        while versions is None or versions > 0:
            version = follower.apply()
            if version is None or version == served:
                time.sleep(0.2)
                continue
            served = version
            print(f"{version.ref}: {spell(model, beginning)!r}", flush=True)
            versions = None if versions is None else versions - 1


def main() -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--yard", help="default: the embedded one, in your home")
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = arguments.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", parents=[common])
    training.add_argument("--steps", type=int, default=200)
    training.add_argument("--interval", type=int, default=50, help="steps between checkpoints")
    serving = commands.add_parser("serve", parents=[common])
    serving.add_argument("--beginning", default="A block is ")
    serving.add_argument("--versions", type=int, help="end after so many; default: Ctrl-C")
    given = arguments.parse_args()
    if given.command == "train":
        train(given.yard, given.steps, given.interval)
    else:
        serve(given.yard, given.beginning, given.versions)


if __name__ == "__main__":
    main()
