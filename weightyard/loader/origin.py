"""Origin: where the tensors of a version come from, its store or a snapshot on this node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightyard.errors import TooLarge
from weightyard.format.manifest import FileEntry, Manifest, TensorEntry
from weightyard.loader.asked import Asked
from weightyard.loader.choosing import MAX_INDEX_BYTES, choose, index_needed, read_index
from weightyard.loader.plan import TensorPlan
from weightyard.loader.report import LoadReport, Tally
from weightyard.records import Version
from weightyard.storage.deadline import NEVER, Deadline

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Destination:
    """Where tensors are to be."""

    device: torch.device
    targets: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors to fill, by name; the others are made."""
    ahead_bytes: int | None = None
    """How much may be read ahead of a caller that takes tensors in order; None: it takes all, in
    any order."""


class Origin(ABC):
    """A version whose tensors can be had."""

    in_use: object = None
    """What must live as long as its tensors do."""

    def __init__(self, version: Version, manifest: Manifest, tally: Tally) -> None:
        self.version = version
        self.manifest = manifest
        self.tally = tally

    @abstractmethod
    def head(self, file: FileEntry, length: int, asked: Asked) -> bytes:
        """The first bytes of a file."""

    @abstractmethod
    def tensors(
        self, plans: Sequence[TensorPlan], asked: Asked, to: Destination
    ) -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        """Tensors as they are whole, in the order of the plans if they are read ahead.

        Closing the iterator ends what is under way, and waits for it.
        """

    @abstractmethod
    def open_files(self, files: Iterable[int | None]) -> None:
        """Open files, by number; None: that of a state dict. Raises Damaged.

        They can be read from then on, even if they are removed meanwhile.
        """

    @abstractmethod
    def foresee(self, entries: Iterable[TensorEntry], asked: Asked) -> None:
        """Look up in one go all that reading any of these tensors needs to know."""

    @abstractmethod
    def held(self, deadline: Deadline = NEVER) -> AbstractContextManager[object]:
        """Inside, the bytes stay, whatever happens to the version."""

    @abstractmethod
    def recheck(self) -> None:
        """Verify in the background the bytes that this node keeps, if that is due."""

    @abstractmethod
    def report(self, device: object, **more: Any) -> LoadReport:
        """What was done so far; `more` is what only others know of it."""

    def chosen(self, asked: Asked) -> list[TensorEntry]:
        """The tensors asked for, in model order. Reads the index of a sharded model if it must."""
        return chosen(self.manifest, asked, lambda file: self.head(file, file.bytes, asked))

    def tallied(self, device: object, **more: Any) -> LoadReport:
        age_s = getattr(self.version, "age_s", None)  # of one that is remembered, offline
        return self.tally.report(self.version, str(device), resolved_s_ago=age_s, **more)


def chosen(
    manifest: Manifest, asked: Asked, read: Callable[[FileEntry], bytes]
) -> list[TensorEntry]:
    """The tensors asked for, in model order. `read` gives the index of a sharded model."""
    files = asked.file_patterns
    entry = index_needed(manifest, files)
    index = None
    if entry is not None:
        if entry.bytes > MAX_INDEX_BYTES:
            raise TooLarge(f"{entry.path} has {entry.bytes} bytes; at most {MAX_INDEX_BYTES}")
        index = read_index(read(entry))
    return choose(manifest, files, asked.tensor_patterns, index)
