"""Alike: what several ranks call by one name is one tensor, and a checkpoint has one of it.

What all ranks have, one of them saves for all. If another rank had a tensor of another shape by the
same name, such as a layer of another pipeline stage, it would not be saved at all, and no resume
could tell whose tensor it loads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from weightyard.errors import Refused
from weightyard.trainer.job import Job
from weightyard.trainer.packing import Items


def require_alike(job: Job, items: Iterable[Items]) -> None:
    """See that all ranks that have a tensor have it in one shape and dtype. All ranks call it.

    Raises Refused, the same on all of them.
    """
    mine: dict[str, str] = {}

    def look() -> str:
        for one in items:
            for fqn, value in one.items():
                if isinstance(value, torch.Tensor):
                    shape = getattr(value, "global_shape", value.shape)
                    mine[fqn] = f"{list(shape)} of {value.dtype}"
        return hashlib.blake2s(repr(sorted(mine.items())).encode()).hexdigest()

    if len(set(job.all(look, "comparing the state"))) > 1:  # as in a pipeline
        _compare(job.all(lambda: mine, "comparing the state"))


def _compare(of_ranks: Iterable[Mapping[str, str]]) -> None:
    seen: dict[str, tuple[int, str]] = {}
    for rank, tensors in enumerate(of_ranks):
        for fqn, kind in tensors.items():
            first, known = seen.setdefault(fqn, (rank, kind))
            if kind != known:
                raise Refused(
                    f"{fqn} is {known} on rank {first} and {kind} on rank {rank}, and a checkpoint "
                    "has one of each name: give what is another tensor another name"
                )
