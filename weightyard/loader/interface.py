"""The ways to load a version: at once, into a module, tensor by tensor, lazily."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from weightyard.errors import (
    BadSetting,
    Cancelled,
    DeadlineExceeded,
    StoreUnavailable,
    Unsupported,
    YardError,
)
from weightyard.format.manifest import Manifest
from weightyard.loader.asked import Asked, deadline_of
from weightyard.loader.batches import AHEAD_BYTES
from weightyard.loader.budget import Budget
from weightyard.loader.byproducts import Byproduct, Byproducts
from weightyard.loader.loaded import Loaded
from weightyard.loader.offline import OfflineCatalogue
from weightyard.loader.origin import Origin
from weightyard.loader.report import LoadReport, OnLoadEvent, Tally
from weightyard.loader.snapshot import Snapshot
from weightyard.loader.snapshots import Snapshots
from weightyard.logs import Log
from weightyard.names import Digest
from weightyard.records import RememberedVersion, Version
from weightyard.settings import Settings
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.storage.opening import folder_of
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import Catalogue

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from weightyard.loader.lazy import LazyWeights
    from weightyard.loader.load import Weights
    from weightyard.loader.stored import StoreOrigin


_log = Log(__name__)

OnUnavailable: TypeAlias = Literal["fail", "cached"] | None


class Loads(ABC):
    """What a yard can load.

    What the arguments mean that several of these take:

    `files`: paths or patterns of the files whose tensors are meant. Without it: the tensors of a
    pushed state dict; else `model.safetensors`; else the shards of its index; else the only file
    that has tensors.
    `tensors`: names or patterns; one that begins with `!` leaves out what fits it, and the last
    that fits a name decides. What is the name of a tensor, brackets and all, is not a pattern.
    `slices`: what is wanted of a tensor, by name or pattern: what NumPy takes between brackets
    (integers, slices, `...`), or a layout (a DTensor, or a `weightyard.loader.layouts.Layout`):
    this rank's shard.
    `device`: where the tensors go: a torch.device, its name ("cpu", "cuda:0") or its number.
    `dtype`: what floating-point tensors are cast to: a floating-point torch.dtype or its name
    ("bfloat16"). Others stay what they are.
    `verify`: "fast" checks the checksum of every chunk, "full" also the name of every block.
    `cache`: use this node's snapshot of the version if there is one, and do not wait for checks
    that this node has made before; if all of it was loaded from a store elsewhere, leave a snapshot
    (not with "full").
    `timeout`: seconds for all of it, then DeadlineExceeded; but a database that does not say what a
    ref means is waited for until its own deadline.
    `progress`: is told of raw bytes, as they are done, from any thread.
    `on_unavailable`: "cached" goes on with what this node last knew where the yard does not
    answer, "fail" does not; None: as the yard was opened.
    `device_decode`: planes are merged and deltas added on the device, not on the host; not with
    "full", nor with a group. It changes nothing for tensors on the host.
    `max_host_bytes`: what may be used of the host's memory besides the tensors that stay there.
    `max_device_extra_bytes`: the same of the device's memory, with `device_decode`.

    All of them raise NoSuchThing (and say what there is), Refused, Damaged, Retryable.
    """

    catalogue: Catalogue
    snapshots: Snapshots
    byproducts: Byproducts
    on_event: OnLoadEvent | None = None
    """Is told of what happens to reads and of every load that ends, from any thread."""
    _settings: Settings

    @property
    @abstractmethod
    def store(self) -> Store:
        """Where the packs are."""

    @abstractmethod
    def _version_to_use(
        self, ref: str, on_unavailable: OnUnavailable = None, deadline: Deadline = NEVER
    ) -> Version:
        """The version a ref means. Notes that it is used."""

    @abstractmethod
    def _manifest_of(self, version: Version, deadline: Deadline = NEVER) -> Manifest:
        """What a version consists of."""

    @abstractmethod
    def _take_snapshot(
        self,
        version: Version,
        *,
        progress: Callable[[int], None] | None,
        deadline: Deadline,
        on_bytes: Callable[[int], None],
    ) -> Snapshot:
        """This node's snapshot of a version, made if need be, whichever way its bytes come.

        `on_bytes` is told of bytes that came because this node did not have them.
        """

    @abstractmethod
    def _expect(self, version: Version) -> None:
        """Be told that a version's packs may be asked for."""

    def use(self, ref: str) -> tuple[Version, Manifest]:
        """The version a ref means, and what it consists of. Notes that it is used."""
        version = self._version_to_use(ref)
        return version, self._manifest_of(version)

    def stored(self, version: Version, manifest: Manifest) -> StoreOrigin:
        """A version in the store, with the manifest that another process gave."""
        from weightyard.loader.stored import StoreOrigin

        self._expect(version)
        tally = Tally(self.on_event)
        return StoreOrigin(
            version,
            manifest,
            tally,
            self.store,
            self.catalogue,
            self._settings,
            expect=self._expect,
        )

    def load(
        self,
        ref: str,
        device: torch.device | str | int = "cpu",
        *,
        files: str | Sequence[str] | None = None,
        tensors: str | Sequence[str] | None = None,
        slices: Mapping[str, Any] | None = None,
        dtype: torch.dtype | str | None = None,
        group: ProcessGroup | None = None,
        cache: bool = True,
        verify: Literal["fast", "full"] = "fast",
        timeout: float | None = None,
        progress: Callable[[int], None] | None = None,
        on_unavailable: OnUnavailable = None,
        device_decode: bool = False,
        max_host_bytes: int | None = None,
        max_device_extra_bytes: int | None = None,
    ) -> Weights:
        """A version's tensors by name, on a device. The arguments: see `Loads`.

        A dict that also has the `version` it is of and a `report`. Tied tensors come back tied.

        `group`: a process group of torch.distributed, all of whose ranks call this. The first one
        says which version the ref means; together they read one copy of what they want, each what
        is near to it, and exchange it. If one fails all do, with RankFailed, which names it.
        """
        from weightyard.loader.load import load

        def ask() -> Asked:
            if device_decode and group is not None:
                raise BadSetting(
                    "device_decode: ranks exchange decoded bytes; leave it or group= out"
                )
            return Asked(
                files=files,
                tensors=tensors,
                slices=slices,
                dtype=dtype,
                verify=verify,
                deadline=deadline_of(timeout),
                progress=progress,
                device_decode=device_decode,
                budget=Budget(max_host_bytes, max_device_extra_bytes),
            )

        tally = Tally(self.on_event)
        if group is None:
            asked = ask()
            with tally.watched(ref):
                origin = self._origin(ref, asked, on_unavailable, tally, cache=cache)
                return load(origin, asked, device)
        from weightyard.loader.peers import Peers
        from weightyard.loader.shared import asked_together, load_shared

        ranks = Peers(group)
        asked = asked_together(ranks, ask)
        with tally.watched(ref):
            return load_shared(
                ranks,
                lambda: self._version_to_use(ref, on_unavailable, asked.deadline),
                lambda version, asked: self._origin_of(
                    version, asked, tally, cache=cache, leaves=False
                ),
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
        device: torch.device | str | int = "cpu",
        files: str | Sequence[str] | None = None,
        tensors: str | Sequence[str] | None = None,
        dtype: torch.dtype | str | None = None,
        cache: bool = True,
        verify: Literal["fast", "full"] = "fast",
        timeout: float | None = None,
        progress: Callable[[int], None] | None = None,
        on_unavailable: OnUnavailable = None,
        device_decode: bool = False,
        max_host_bytes: int | None = None,
        max_device_extra_bytes: int | None = None,
    ) -> LoadReport:
        """Fill a module's parameters and persistent buffers. The arguments: see `Loads`.

        Keys, shapes and kinds are compared before any tensor is read; with `strict`, missing and
        unexpected keys raise DoesNotFit as other shapes always do, and dtypes that differ unless
        both are floats; else the report names these keys. For parameters that the module ties, one
        of their names is enough. Of a DTensor only this rank's shard is read.

        Parameters that have memory are filled where they are, and keep device and dtype. If that
        fails half-way some have their new values, some the old ones, and some of both: load
        again, or give the module up. With `atomic` all is loaded beside and copied when it is
        there: they have all the old values or, barring the copying itself, all the new ones, at
        the price of twice the memory.

        Parameters on meta get tensors of their own, on `device`, of `dtype` or else as they are
        stored, when all is loaded: if that fails they stay on meta.
        """
        from weightyard.loader.into import load_into

        asked = Asked(
            files=files,
            tensors=tensors,
            dtype=dtype,
            verify=verify,
            deadline=deadline_of(timeout),
            progress=progress,
            device_decode=device_decode,
            budget=Budget(max_host_bytes, max_device_extra_bytes),
        )
        tally = Tally(self.on_event)
        with tally.watched(ref):
            origin = self._origin(ref, asked, on_unavailable, tally, cache=cache)
            return load_into(module, origin, asked, device=device, strict=strict, atomic=atomic)

    def stream(
        self,
        ref: str,
        device: torch.device | str | int = "cpu",
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
        on_unavailable: OnUnavailable = None,
        device_decode: bool = False,
        max_host_bytes: int | None = None,
        max_device_extra_bytes: int | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """A version's tensors one after the other. The other arguments: see `Loads`.

        In model order: file by file, layer 2 before layer 10; tied ones right after each other.
        Each is the caller's: its memory is not used again. While one is worked on the next ones
        are read, at most `ahead_bytes` (and at least one tensor) ahead. Closing the iterator, or
        leaving it, ends the reading and its threads.
        """
        from weightyard.loader.load import stream

        asked = Asked(
            files=files,
            tensors=tensors,
            slices=slices,
            dtype=dtype,
            verify=verify,
            deadline=deadline_of(timeout),
            progress=progress,
            device_decode=device_decode,
            budget=Budget(max_host_bytes, max_device_extra_bytes),
        )
        tally = Tally(self.on_event)
        with tally.watched(ref):
            origin = self._origin(ref, asked, on_unavailable, tally, cache=cache)
            return stream(origin, asked, device, ahead_bytes)

    def safe_open(
        self,
        ref: str,
        device: torch.device | str | int = "cpu",
        *,
        files: str | Sequence[str] | None = None,
        cache: bool = True,
        verify: Literal["fast", "full"] = "fast",
        on_unavailable: OnUnavailable = None,
    ) -> LazyWeights:
        """A version with the interface of safetensors' `safe_open`. The arguments: see `Loads`.

        `keys()`, `get_tensor(name)`, `get_tensors()`, `get_slice(name)[…]`, `metadata()`; a context
        manager. Reads only what is looked at.
        """
        from weightyard.loader.lazy import LazyWeights

        asked = Asked(files, verify=verify)
        origin = self._origin(ref, asked, on_unavailable, cache=cache, leaves=False)
        return LazyWeights(origin, asked, device)

    def _origin(
        self,
        ref: str,
        asked: Asked,
        on_unavailable: OnUnavailable = None,
        tally: Tally | None = None,
        *,
        cache: bool,
        leaves: bool = True,
    ) -> Origin:
        """Where a ref's tensors come from."""
        tally = tally or Tally(self.on_event)
        with tally.stage("resolve"):
            version = self._version_to_use(ref, on_unavailable, asked.deadline)
        return self._origin_of(version, asked, tally, cache=cache, leaves=leaves)

    def _origin_of(
        self, version: Version, asked: Asked, tally: Tally, *, cache: bool, leaves: bool
    ) -> Origin:
        """Where a version's tensors come from: from this node, else from the store.

        Where the store cannot be reached they are brought to this node. `leaves`: what is loaded
        from the store may become a snapshot.
        """
        with tally.stage("resolve"):
            manifest = self._manifest_of(version, asked.deadline)
            asked.deadline.left(f"resolving {version.ref}")
        is_told = False
        may_map = cache and asked.verify == "fast"
        snapshot = self.snapshots.find(Digest(version.digest)) if may_map else None
        if snapshot is None:
            if isinstance(self.catalogue, OfflineCatalogue):
                self.catalogue.require_store(version.ref, may_map=may_map)
            try:
                store = self.store
            except (StoreUnavailable, Unsupported):
                # Bytes come through the service, which is slow: so once for the whole node.
                if not may_map:
                    raise
                snapshot = self._bring(version, asked, tally, tally.through_service)
                is_told = True
            else:
                leaves = leaves and may_map and self._may_leave(version, store)
                if leaves and self._settings.cache_loads == "first":
                    snapshot = self._bring_first(version, asked, tally)
                    is_told = snapshot is not None
        if snapshot is not None:
            from weightyard.loader.mapped import SnapshotOrigin

            return SnapshotOrigin(version, manifest, tally, snapshot, is_told=is_told)
        from weightyard.loader.stored import StoreOrigin

        def leave(loaded: Loaded) -> None:
            byproduct = Byproduct(version, loaded, store, asked.budget.reading_bytes)
            self.byproducts.add(byproduct)

        return StoreOrigin(
            version,
            manifest,
            tally,
            store,
            self.catalogue,
            self._settings,
            leave if leaves and asked.is_all else None,
            self._expect,
            self._settings.cache if may_map else None,
        )

    def _bring(
        self, version: Version, asked: Asked, tally: Tally, on_bytes: Callable[[int], None]
    ) -> Snapshot:
        """This node's snapshot of a version, made unless another process makes it."""
        with tally.stage("snapshot"):
            return self._take_snapshot(
                version, progress=asked.progress, deadline=asked.deadline, on_bytes=on_bytes
            )

    def _bring_first(self, version: Version, asked: Asked, tally: Tally) -> Snapshot | None:
        """The same, if all of it is wanted and there is room for it; else None.

        Making it does not bound its memory: so none is made for a caller that sets a bound.
        """
        is_bounded = asked.budget.max_host_bytes is not None
        if not asked.is_whole or asked.files is not None or is_bounded:
            return None
        try:
            return self._bring(version, asked, tally, partial(tally.moved, "snapshot"))
        except (Cancelled, DeadlineExceeded):
            raise
        except YardError as why:  # a full disk must not keep anybody from the store
            _log.warning("snapshot.not_made", version=version.ref, reason=why)
            return None

    def _may_leave(self, version: Version, store: Store) -> bool:
        """Whether to leave a snapshot: not of what lies on this host anyway, nor offline."""
        return (
            self._settings.cache_loads is not False
            and folder_of(store) is None
            and not isinstance(version, RememberedVersion)
        )
