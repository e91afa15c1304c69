"""The ways to load a version: at once, into a module, tensor by tensor, lazily."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from weightyard.format.manifest import Manifest
from weightyard.loader.asked import Asked
from weightyard.loader.batches import AHEAD_BYTES
from weightyard.loader.origin import Origin
from weightyard.loader.report import LoadReport, Tally
from weightyard.loader.snapshots import Snapshots
from weightyard.names import Digest
from weightyard.records import Version
from weightyard.settings import Settings
from weightyard.storage.deadline import Deadline
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import Catalogue

if TYPE_CHECKING:
    import torch

    from weightyard.loader.lazy import LazyWeights
    from weightyard.loader.load import Weights


class Loads(ABC):
    """What a yard can load.

    What the arguments mean that several of these take:

    `files`: paths or patterns of the files whose tensors are meant. Without it: the tensors of a
    pushed state dict; else `model.safetensors`; else the shards of its index; else the only file
    that has tensors.
    `tensors`: names or patterns; one that begins with `!` leaves out what fits it, and the last
    that fits a name decides.
    `slices`: what is wanted of a tensor, by name or pattern: what NumPy takes between brackets
    (integers, slices, `...`), or a layout (a DTensor, or a `weightyard.loader.layouts.Layout`):
    this rank's shard.
    `dtype`: floating-point tensors are cast to it.
    `verify`: "fast" checks the checksum of every chunk, "full" also the name of every block.
    `cache`: use this node's snapshot of the version if there is one (not with "full").
    `timeout`: seconds for all of it, then DeadlineExceeded.
    `progress`: is told of raw bytes, as they are done, from any thread.

    All of them raise NoSuchThing (and say what there is), Refused, Damaged, Retryable.
    """

    catalogue: Catalogue
    snapshots: Snapshots
    _settings: Settings

    @property
    @abstractmethod
    def store(self) -> Store:
        """Where the packs are."""

    @abstractmethod
    def _version_to_use(self, ref: str) -> Version:
        """The version a ref means; that it is used is noted."""

    @abstractmethod
    def _manifest_of(self, version: Version) -> Manifest:
        """What it consists of."""

    def load(
        self,
        ref: str,
        device: Any = "cpu",
        *,
        files: str | Sequence[str] | None = None,
        tensors: str | Sequence[str] | None = None,
        slices: Mapping[str, Any] | None = None,
        dtype: torch.dtype | str | None = None,
        group: Any = None,
        cache: bool = True,
        verify: Literal["fast", "full"] = "fast",
        timeout: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Weights:
        """A version's tensors by name, on a device. The arguments: see `Loads`.

        A dict that also has the `version` it is of and a `report`. Tied tensors come back tied.

        `group`: a process group of torch.distributed, all of whose ranks call this. The first one
        says which version the ref means; together they read one copy of what they want, each what
        is near to it, and exchange it. If one fails all do, with RankFailed, which names it.
        """
        from weightyard.loader.load import load

        asked = Asked(files, tensors, slices, dtype, verify, Deadline.after(timeout), progress)
        if group is None:
            return load(self._origin(ref, asked, cache=cache), asked, device)
        from weightyard.loader.peers import Peers
        from weightyard.loader.shared import load_shared

        tally = Tally()
        return load_shared(
            Peers(group, asked.deadline),
            lambda: self._version_to_use(ref),
            lambda version: self._origin_of(version, asked, tally, cache=cache),
            asked,
            device,
        )

    def load_into(
        self,
        module: torch.nn.Module,
        ref: str,
        *,
        strict: bool = True,
        atomic: bool = False,
        device: Any = "cpu",
        files: str | Sequence[str] | None = None,
        tensors: str | Sequence[str] | None = None,
        dtype: torch.dtype | str | None = None,
        cache: bool = True,
        verify: Literal["fast", "full"] = "fast",
        timeout: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> LoadReport:
        """Fill a module's parameters and persistent buffers. The arguments: see `Loads`.

        Keys and shapes are compared before any tensor is read; with `strict`, missing and
        unexpected keys raise DoesNotFit as other shapes always do. Of parameters that the module
        ties one name is enough. Of a DTensor this rank's shard is read, and no more.

        Parameters that have memory are filled where they are, and keep device and dtype. If that
        fails half-way some have their new values, some the old ones, and some of both: load
        again, or give the module up. With `atomic` all is loaded beside and copied when it is
        there: they have all the old values or, barring the copying itself, all the new ones, at
        the price of twice the memory.

        Parameters on meta get tensors of their own, on `device`, of `dtype` or else as they are
        stored, when all is loaded: if that fails they stay on meta.
        """
        from weightyard.loader.into import load_into

        asked = Asked(files, tensors, None, dtype, verify, Deadline.after(timeout), progress)
        origin = self._origin(ref, asked, cache=cache)
        return load_into(module, origin, asked, device=device, strict=strict, atomic=atomic)

    def stream(
        self,
        ref: str,
        device: Any = "cpu",
        *,
        files: str | Sequence[str] | None = None,
        tensors: str | Sequence[str] | None = None,
        slices: Mapping[str, Any] | None = None,
        dtype: torch.dtype | str | None = None,
        ahead_bytes: int = AHEAD_BYTES,
        cache: bool = True,
        verify: Literal["fast", "full"] = "fast",
        timeout: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """A version's tensors one after the other. The other arguments: see `Loads`.

        In model order: file by file, layer 2 before layer 10; tied ones right after each other.
        Each is the caller's: its memory is not used again. While one is worked on the next ones
        are read, at most `ahead_bytes` (and at least one tensor) ahead. Closing the iterator, or
        leaving it, ends the reading and its threads.
        """
        from weightyard.loader.load import stream

        asked = Asked(files, tensors, slices, dtype, verify, Deadline.after(timeout), progress)
        return stream(self._origin(ref, asked, cache=cache), asked, device, ahead_bytes)

    def safe_open(
        self,
        ref: str,
        device: Any = "cpu",
        *,
        files: str | Sequence[str] | None = None,
        cache: bool = True,
        verify: Literal["fast", "full"] = "fast",
    ) -> LazyWeights:
        """A version with the interface of safetensors' `safe_open`. The arguments: see `Loads`.

        `keys()`, `get_tensor(name)`, `get_slice(name)[…]`, `metadata()`; a context manager. Reads
        only what is looked at.
        """
        from weightyard.loader.lazy import LazyWeights

        asked = Asked(files, verify=verify)
        return LazyWeights(self._origin(ref, asked, cache=cache), asked, device)

    def _origin(self, ref: str, asked: Asked, *, cache: bool) -> Origin:
        """Where a ref's tensors are to be had."""
        tally = Tally()
        with tally.stage("resolve"):
            version = self._version_to_use(ref)
        return self._origin_of(version, asked, tally, cache=cache)

    def _origin_of(self, version: Version, asked: Asked, tally: Tally, *, cache: bool) -> Origin:
        """Where a version's tensors are to be had: on this node, else in the store."""
        with tally.stage("resolve"):
            manifest = self._manifest_of(version)
            asked.deadline.left(f"resolving {version.ref}")
        if cache and asked.verify == "fast":
            snapshot = self.snapshots.find(Digest(version.digest))
            if snapshot is not None:
                from weightyard.loader.mapped import SnapshotOrigin

                return SnapshotOrigin(version, manifest, tally, snapshot)
        from weightyard.loader.stored import StoreOrigin

        return StoreOrigin(version, manifest, tally, self.store, self.catalogue, self._settings)
