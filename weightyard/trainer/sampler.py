"""GlobalOffsetSampler: which samples a rank gets, whatever the number of ranks was before.

Samples stand in one endless line: the order of epoch 0, then that of epoch 1, and so on. Each
order is a function of seed and epoch alone. Ranks take from the line in turns, so after equally
many samples on every rank what was consumed is the beginning of the line and nothing else. A place
in the line is all there is to save; any number of ranks can go on from there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler

from weightyard.errors import Refused
from weightyard.logs import Log
from weightyard.trainer.loader_workers import staying

_log = Log(__name__)

_T = TypeVar("_T")

MAX_COUNT = 1 << 53
"""Samples in an epoch, and epochs: exact in every JSON reader."""

_KEYS = ("epoch", "seed", "consumed", "length")


class GlobalOffsetSampler(Sampler[int]):
    """Gives each rank its samples; saved on four ranks it goes on with three or six.

    No sample of an epoch is lost or comes twice. All ranks get equally many: what is missing in
    the last turn of an epoch is taken from the beginning of the next one, which goes on after it.

        sampler = GlobalOffsetSampler(len(dataset), seed=1)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        run = TrainRun(yard, "team/run42", state={…, "data": sampler})
        while sampler.epoch < 10:
            for batch in sampler.batches(loader):
                …

    `batches` counts what the loop was given, not what workers fetched ahead. torchdata's
    StatefulDataLoader counts by itself: there `for batch in loader` and `"data": loader` do too.
    If neither is used, nobody counts: the saved place stays what it was, and a log line says so.
    Leave `set_epoch` out: the next iteration goes on where the last one ended.
    """

    def __init__(
        self,
        length: int,
        *,
        seed: int | None = 0,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        """`length`: of the dataset. `seed` None: in the dataset's own order, every epoch.

        `rank`, `ranks`: by default those of torch.distributed, or a single rank without it.
        Raises Refused.
        """
        if (rank is None) is not (ranks is None):
            raise Refused("a sampler needs rank and ranks, or neither")
        if rank is None or ranks is None:
            is_joined = dist.is_available() and dist.is_initialized()
            rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_joined else (0, 1)
        if not 0 <= rank < ranks:
            raise Refused(f"rank {rank} of {ranks} ranks: ranks count from 0")
        try:
            length = operator.index(length)
        except TypeError:
            raise Refused(
                f"a sampler takes len(dataset), a whole number, not a {type(length).__name__}"
            ) from None
        if not 0 < length <= MAX_COUNT:
            raise Refused(f"a dataset of {length} samples; 1 to {MAX_COUNT} can be sampled")
        self._length, self._rank, self._ranks = length, rank, ranks
        self._seed = None if seed is None else _counted(seed, "seed")
        self._place = 0
        self._end_of_pass: int | None = None
        self._has_given = False  # samples, since a state was loaded
        self._is_state_taken = False  # after those
        self._may_warn = True  # until somebody counts, or was told that nobody does

    @property
    def epoch(self) -> int:
        """The epoch of the next sample to be consumed."""
        return self._place // self._length

    @property
    def consumed(self) -> int:
        """How many samples of that epoch all ranks together have consumed."""
        return self._place % self._length

    def __iter__(self) -> Iterator[int]:
        """This rank's samples from here to the end of the epoch."""
        return _Pass(self, self._begin())

    def __len__(self) -> int:
        """How many samples an iteration would give now."""
        return self._turns_left(self._begin())

    def batches(self, loader: Iterable[_T]) -> Iterator[_T]:
        """The batches of a DataLoader over this sampler; each counts as consumed when it is given.

        Workers may be any number of batches ahead: what the loop was not given is given again
        after a resume, or by the next call if the loop is left early. With `drop_last`, what was
        dropped counts as consumed. The loader's workers stay when a signal asks the job to end.
        Raises Refused if the loader does not say its batch size, takes samples from another
        sampler, or gives batches out of order.
        """
        size = _batch_size(loader)
        _require_sampled(loader)
        staying(loader)
        self._end_of_pass = None
        self._may_warn = False
        numbers = torch.get_rng_state()
        iterator = iter(loader)  # a StatefulDataLoader puts the sampler where it was saved
        begin = self._place  # not `_begin()`: workers may already have fetched the pass to its end
        # The loader drew a seed for its workers from torch's random numbers. A job that was never
        # interrupted draws none inside an epoch and, if its workers stay, none after the first one.
        # So after a resume all later numbers would be different.
        stay = getattr(loader, "persistent_workers", False)
        if (begin if stay else begin % self._length) and getattr(loader, "generator", None) is None:
            torch.set_rng_state(numbers)
        turns = self._turns_left(begin)
        given = 0
        try:
            for batch in iterator:
                given = min(given + size, turns)
                self._place = begin + given * self._ranks
                yield batch
            self._place = begin + turns * self._ranks
        finally:
            self._end_of_pass = None

    def state_dict(self) -> dict[str, Any]:
        """The place in the line, the same on all ranks."""
        self._is_state_taken = self._has_given
        return self._state_at(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a sampler was, of any number of ranks. Its seed is taken over too.

        Raises Refused if it was over another number of samples: the line would be another one.
        """
        if set(state) != set(_KEYS):
            raise Refused(f"a sampler's state has {', '.join(_KEYS)}, not {sorted(state)!r:.200}")
        if state["length"] != self._length:
            raise Refused(
                f"the state is of a dataset of {state['length']!r:.40} samples, this one has "
                f"{self._length}: what was consumed of it cannot be told"
            )
        epoch, consumed = (_counted(state[key], key) for key in ("epoch", "consumed"))
        if consumed >= self._length:
            raise Refused(f"{consumed} of {self._length} samples consumed: the epoch would be over")
        self._seed = None if state["seed"] is None else _counted(state["seed"], "seed")
        self._place = epoch * self._length + consumed
        self._end_of_pass = None
        self._has_given = False

    def _note_given(self) -> None:
        """A pass gives a sample. Warns, once, if a state was taken that does not count them.

        Not before now: a StatefulDataLoader asks the sampler for its state before it asks the pass.
        """
        self._has_given = True
        if self._is_state_taken and self._may_warn:
            self._may_warn = False
            _log.warning(
                "sampler.not_counted",
                place=self._place,
                reason="a state was saved while samples are given that nobody counts: iterate "
                "over sampler.batches(loader)",
            )

    def _begin(self) -> int:
        """Where the next pass begins: behind the last one, even if nobody counted that."""
        return self._place if self._end_of_pass is None else self._end_of_pass

    def _turns_left(self, place: int) -> int:
        """How often the ranks take turns until the epoch of a place is used up."""
        return -(-(self._length - place % self._length) // self._ranks)

    def _state_at(self, place: int) -> dict[str, Any]:
        epoch, consumed = divmod(place, self._length)
        return dict(zip(_KEYS, (epoch, self._seed, consumed, self._length), strict=True))

    def _share(self, begin: int) -> NDArray[np.int64]:
        """This rank's samples of a pass that begins at a place, in order."""
        turns = np.arange(self._turns_left(begin), dtype=np.int64)
        epochs, at = np.divmod(begin + self._rank + turns * self._ranks, self._length)
        share = np.empty_like(at)
        for epoch in np.unique(epochs):  # the last turn may take from the next epoch
            here = epochs == epoch
            share[here] = order_of(self._seed, int(epoch), self._length)[at[here]]
        return share


class _Pass:
    """A rank's samples to the end of an epoch. torchdata saves and restores its place."""

    def __init__(self, sampler: GlobalOffsetSampler, begin: int) -> None:
        self._sampler, self._begin = sampler, begin
        self._share: NDArray[np.int64] | None = None
        self._given = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._share is None:
            self._share = self._sampler._share(self._begin)
        if self._given == len(self._share):
            self._sampler._end_of_pass = self._place
            raise StopIteration
        self._given += 1
        self._sampler._note_given()
        return int(self._share[self._given - 1])

    @property
    def _place(self) -> int:
        return self._begin + self._given * self._sampler._ranks

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state if all that was given so far were consumed."""
        self._sampler._may_warn = False
        return self._sampler._state_at(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._begin, self._share, self._given = self._sampler._place, None, 0


def order_of(seed: int | None, epoch: int, length: int) -> NDArray[np.int64]:
    """The order of an epoch's samples: the same everywhere, always.

    Sorts random keys. NumPy promises that a bit generator's words are the same in all versions. For
    its `permutation`, or torch's, nobody promises that, and a job may outlive an upgrade.
    """
    if seed is None:
        return np.arange(length)
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(length)
    return np.argsort(keys, kind="stable")


def _counted(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise Refused(f"{what} {value!r:.40} is not a number from 0 to {MAX_COUNT}")
    return value


def _chooser(loader: object) -> object:
    """What tells a loader which samples to fetch: those of a batch, or one after the other."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None) if batch_sampler is None else batch_sampler


def _require_sampled(loader: object) -> None:
    """Raises Refused for a loader whose samples torch's own samplers choose, or which gives batches
    in whatever order its workers end.

    A sampler of any other kind passes: it may have been made around this one.
    """
    chooser = _chooser(loader)
    found = getattr(chooser, "sampler", chooser)
    if any(kind is not Sampler and _is_of_torch(kind) for kind in type(found).__mro__):
        raise Refused(
            f"the loader takes its samples from a {type(found).__name__}, not from this sampler: "
            "make it with sampler=…, without shuffle"
        )
    if not getattr(loader, "in_order", True) and getattr(loader, "num_workers", 0) > 1:
        raise Refused(
            "a loader with in_order=False does not say which batches it has given: leave that out"
        )


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith(("torch.utils.data.", "torchdata."))


def _batch_size(loader: object) -> int:
    """Samples in a batch; the last of a pass may have fewer."""
    size = getattr(_chooser(loader), "batch_size", None)
    is_unbatched = getattr(loader, "batch_sampler", None) is None and hasattr(loader, "batch_size")
    if size is None and is_unbatched:
        return 1  # samples one by one
    if type(size) is not int or size < 1:
        raise Refused(
            f"{type(loader).__name__} does not say how many samples are in a batch: give it "
            "batch_size, or a batch_sampler that has one"
        )
    return size
