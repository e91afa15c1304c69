"""Word vectors from this repository's own docs, learned by several workers.

torchrun --nproc-per-node 2 examples/word2vec.py train    learns, saves as it goes, publishes
python examples/word2vec.py near block                    loads what was published: words near one

Stop it and start it again, with as many workers as you like: it goes on where it was, and gives
every pair of words to one worker once an epoch. `--yard` takes a folder, hdfs://…, or http://… of a
service where its store can be reached from here, too: checkpoints go straight there.
"""

from __future__ import annotations

import argparse
import re
import signal
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cosine_similarity, logsigmoid
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import weightyard
from weightyard.trainer import GlobalOffsetSampler, TrainRun

RUN, MODEL, ALIAS = "example/word2vec", "example/words", "prod"
ROOT = Path(__file__).parent.parent
WIDTH, WINDOW, NEGATIVES, BATCH = 64, 4, 8, 512
RAREST = 4
"""Words that occur less often are left out: nothing is to be learned of them."""


class Pairs(Dataset[torch.Tensor]):
    """Two words that stand near each other, for every two that do."""

    def __init__(self, text: str) -> None:
        words = re.findall(r"[a-z]{2,}", text.lower())
        self.counts = {word: n for word, n in Counter(words).most_common() if n >= RAREST}
        number = {word: at for at, word in enumerate(self.counts)}
        line = torch.tensor([number[word] for word in words if word in number])
        near = [torch.stack((line[:-far], line[far:]), 1) for far in range(1, WINDOW + 1)]
        self._pairs = torch.cat([*near, *(pairs.flip(1) for pairs in near)])

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitems__(self, places: list[int]) -> torch.Tensor:
        """A batch at once, instead of one pair after the other."""
        return self._pairs[places]


def as_it_is(batch: torch.Tensor) -> torch.Tensor:
    """Pairs come as a batch. A lambda could not be sent to a worker that is not forked."""
    return batch


class Words(nn.Module):
    """A vector for each word, such that those of neighbours are alike."""

    def __init__(self, words: list[str], width: int = WIDTH) -> None:
        super().__init__()
        self.vectors = nn.Embedding(len(words), width, sparse=True)
        self.contexts = nn.Embedding(len(words), width, sparse=True)
        nn.init.uniform_(self.vectors.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.contexts.weight)
        # The words travel with their vectors: a version is all that its users need.
        text = torch.frombuffer(bytearray("\n".join(words).encode()), dtype=torch.uint8)
        self.register_buffer("words", text)

    def forward(self, pairs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """How badly the vectors tell a word's neighbours from words drawn at random."""
        vector = self.vectors(pairs[:, 0])
        near = (vector * self.contexts(pairs[:, 1])).sum(1)
        far = torch.einsum("bw,bnw->bn", vector, self.contexts(others))
        return -(logsigmoid(near) + logsigmoid(-far).sum(1)).mean()


def corpus() -> str:
    return "\n".join(
        page.read_text() for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    )


def train(yard_url: str | None, steps: int, interval: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pairs = Pairs(corpus())
    model = DistributedDataParallel(Words(list(pairs.counts)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * BATCH)
    sampler = GlobalOffsetSampler(len(pairs), seed=1)
    loader = DataLoader(
        pairs,
        BATCH,
        sampler=sampler,
        num_workers=1,
        collate_fn=as_it_is,
        generator=torch.Generator(),  # its own: a resume disturbs no other random number
    )
    # Frequent words are drawn less often than they occur, as in the original word2vec.
    often = torch.tensor(list(pairs.counts.values())).float() ** 0.75
    with (
        weightyard.open(yard_url) as yard,
        TrainRun(
            yard,
            RUN,
            state={"model": model, "optim": optimizer, "data": sampler},
            interval=interval,
            keep_latest_k=3,
            signals=(signal.SIGTERM, signal.SIGINT),  # Ctrl-C saves and ends, too
        ) as run,
    ):
        run.resume()
        while run.steps < steps:
            for batch in sampler.batches(loader):
                others = torch.multinomial(often, len(batch) * NEGATIVES, replacement=True)
                loss = model(batch, others.view(len(batch), NEGATIVES))
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


def near(yard_url: str | None, word: str, count: int = 8) -> None:
    with weightyard.open(yard_url) as yard:
        weights = yard.load(f"{MODEL}@{ALIAS}", tensors=["vectors.weight", "words"])
    words = bytes(weights["words"].numpy()).decode().split("\n")
    if word not in words:
        raise SystemExit(f"{word} is not among the {len(words)} words of {weights.version.ref}")
    vectors = weights["vectors.weight"]
    likeness = cosine_similarity(vectors[words.index(word)], vectors)
    for at in likeness.topk(count + 1).indices.tolist()[1:]:
        print(f"{likeness[at]:.2f}  {words[at]}")


def main() -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--yard", help="default: the embedded one, in your home")
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = arguments.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", parents=[common])
    training.add_argument("--steps", type=int, default=600)
    training.add_argument("--interval", type=int, default=100, help="steps between checkpoints")
    commands.add_parser("near", parents=[common]).add_argument("word")
    given = arguments.parse_args()
    if given.command == "train":
        train(given.yard, given.steps, given.interval)
    else:
        near(given.yard, given.word)


if __name__ == "__main__":
    main()
