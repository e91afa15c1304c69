"""Catalogue: what the transfer engines need to know and say about blocks, packs and versions."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from weightyard.format.manifest import Manifest
from weightyard.format.pack import Placement
from weightyard.names import AliasName, BlockId, Digest, ModelName, PackId, Ref, UploadId
from weightyard.records import (
    AliasMove,
    Cost,
    Model,
    Publication,
    ReadLease,
    Retention,
    Run,
    Version,
)
from weightyard.storage.cancel import Cancel
from weightyard.storage.store import Store
from weightyard.transfer.watching import Sighting


class Placements(Protocol):
    """What a reader asks. Thread-safe.

    `within_s`: as of a Catalogue.
    """

    def placements(
        self, blocks: Sequence[BlockId], *, within_s: float = math.inf
    ) -> Mapping[BlockId, Sequence[Placement]]:
        """Where blocks lie. A block the store does not have is left out."""


class Packing(Protocol):
    """What a writer of packs says. Thread-safe.

    Call order: claim → for each pack begin_pack → (its file is staged and published) → add_pack.
    Every call may raise UploadExpired: stop, nothing more of this upload will count.
    """

    @property
    def id(self) -> UploadId:
        """Names the staging folder."""

    def claim(self, blocks: Sequence[BlockId]) -> Mapping[BlockId, Sequence[Placement]]:
        """Where blocks lie that need not be written again; they are held for this upload."""

    def begin_pack(self, pack: PackId) -> None:
        """Say that a pack is about to be written. Always before it has a file."""

    def add_pack(self, pack: PackId, pack_bytes: int, placements: Sequence[Placement]) -> None:
        """Say that a pack is published and durable. From here on its blocks can be claimed.

        May be repeated after a lost answer.
        """


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A manifest as it lies, or will lie, in the store."""

    digest: Digest
    stored_bytes: int


class Upload(Packing, Protocol):
    """A lease under which one version is written.

    Call order: as Packing, heartbeat now and then → begin_manifest → (its file is published) →
    commit, or abandon. The ranks of a checkpoint write under one upload: one opens it, the others
    join it; each adds its packs and then says finish_rank, and one of them commits.
    """

    def heartbeat(self) -> None:
        """Stay alive for another lease. Raises UploadExpired if it is too late."""

    def finish_rank(self, rank: int) -> None:
        """Say that all packs of a checkpoint's rank are added. May be repeated.

        Raises Refused for a rank the checkpoint does not have.
        """

    def begin_manifest(self, file: ManifestFile) -> None:
        """Say that a manifest is about to be written. Always before it has a file."""

    def commit(
        self, digest: Digest, manifest: Manifest, publication: Publication, key: str
    ) -> Version:
        """Make the version visible: all of it, or nothing.

        Repeating it with the same key after a lost answer returns the same version. Raises
        VersionMoved, AliasMoved, KeyReused, UploadExpired, QuotaExceeded, BlockMissing; for a
        checkpoint RunTakenOver and RanksMissing; Conflict if a run is given a version that is no
        checkpoint, or another model one that is.
        """

    def abandon(self) -> None:
        """Give up: what only this upload held may be collected. Idempotent."""


class Anything(enum.Enum):
    """Says that nothing is expected, where None is an expectation: that there is no such alias."""

    ANYTHING = "anything"


ANYTHING = Anything.ANYTHING


class Catalogue(Placements, Protocol):
    """Models, versions and aliases, and where blocks lie: a registry, or a service that has one.

    Thread-safe. Every call may raise Retryable and NotAllowed; `who` and `reason` are for history.
    `within_s`: how long to wait for a service that says nothing, then DeadlineExceeded; a database
    has deadlines of its own.
    """

    is_service: bool
    """Whether it looks after its store by itself: writes records, and tells it what to keep."""

    def placements(
        self,
        blocks: Sequence[BlockId],
        *,
        for_project: str | None = None,
        within_s: float = math.inf,
    ) -> Mapping[BlockId, Sequence[Placement]]:
        """Where blocks lie; `for_project`: where an upload of this project would find them.

        A block the store does not have is left out.
        """

    def resolve(self, ref: Ref, *, within_s: float = math.inf) -> Version:
        """The version a ref means now. Raises NoSuchThing."""

    def watch(self, ref: Ref, *, poll_s: float, stop: Cancel) -> Iterator[Sighting]:
        """What a ref means, from time to time and soon after it changes, until stopped.

        Without a service to tell of changes, every `poll_s` or so. Where the meaning cannot be
        found out, the error is given instead, and the watching goes on.
        """

    def model(self, name: ModelName) -> Model:
        """One model. Raises NoSuchThing."""

    def models(
        self,
        *,
        kind: str | None = "model",
        after: ModelName | None = None,
        limit: int = 1000,
    ) -> list[Model]:
        """Models in the order of their names, those behind `after`."""

    def versions(
        self, name: ModelName, *, before: int | None = None, limit: int = 1000
    ) -> list[Version]:
        """Versions of a model, newest first, with numbers below `before`. Raises NoSuchThing."""

    def cost(self, ref: Ref, *, copies: int = 1) -> Cost:
        """What a version takes, shares, and would give back. Raises NoSuchThing.

        `copies`: how many copies the store keeps of a pack if nobody asked for more.
        """

    def keep(self, ref: Ref, *, copies: int | None, policy: str | None) -> Version:
        """Ask for copies or an HDFS storage policy; what is None stays. Raises NoSuchThing.

        A service tells its store of it; with a registry, the caller has to.
        """

    def annotate(
        self, ref: Ref, changes: Mapping[str, Any], *, expect: str | None = None
    ) -> Version:
        """Change a version's message, metrics, tags or metadata. Raises NoSuchThing.

        With `expect`, only if its `etag` is this one. Raises Changed.
        """

    def remove(self, ref: Ref, *, reason: str = "") -> Version:
        """Take a version out of sight. Raises NoSuchThing, Protected."""

    def remove_model(self, name: ModelName) -> None:
        """Remove a model that has no versions. Raises NoSuchThing, Protected."""

    def mark_used(self, ref: Ref, *, within_s: float = math.inf) -> None:
        """Note that a version is being loaded."""

    def take_lease(
        self, ref: Ref, holder: str, seconds: float, *, within_s: float = math.inf
    ) -> ReadLease:
        """Keep a version's bytes for a reader, even if it is removed. Raises NoSuchThing.

        Counts until it is released, or not renewed for so long. `holder` is for people.
        """

    def renew_lease(self, lease_id: int, seconds: float) -> ReadLease:
        """Keep the bytes for so long from now. Raises NoSuchThing: it has ended, they may go."""

    def release_lease(self, lease_id: int) -> None:
        """Give a lease up. One that is not there any more is no error."""

    def set_retention(self, name: ModelName, retention: Retention | None) -> None:
        """Which versions gc may remove by itself. Raises NoSuchThing.

        Raises Refused for a rule about steps on a model that is no run.
        """

    def apply_retention(self, name: ModelName) -> list[str]:
        """Remove now what the model's rule lets go, without waiting for gc. Returns the refs.

        Without a rule nothing goes. Raises NoSuchThing.
        """

    def run(self, name: ModelName) -> Run:
        """One run. Raises NoSuchThing, also for a model that is no run."""

    def begin_generation(
        self, name: ModelName, *, expect: int | None = None, key: str | None = None
    ) -> Run:
        """Take over a run, which may be a new one: its generation grows by one, from 0.

        From then on no commit of an older generation succeeds. With `expect`, only if the run is
        now at that generation (a new or removed run: 0); of several callers that expect the same,
        one succeeds. Repeating it with the same key after a lost answer returns the same
        generation, unless another took the run over since.
        Raises RunTakenOver, which has the current one; Conflict for a model that is no run.
        """

    def alias(self, name: ModelName, alias: AliasName) -> int | None:
        """The number of the version an alias is on, or None."""

    def move_alias(
        self,
        name: ModelName,
        alias: AliasName,
        to: int | None,
        *,
        reason: str = "",
        expect: int | Anything | None = ANYTHING,
    ) -> AliasMove:
        """Put an alias on a version; None removes it. Raises NoSuchThing, AliasMoved."""

    def alias_log(
        self,
        name: ModelName,
        alias: AliasName,
        *,
        as_of: datetime | None = None,
        before: int | None = None,
        limit: int = 1000,
    ) -> list[AliasMove]:
        """The moves of an alias, newest first: those up to a time, with numbers below `before`."""

    def rollback_alias(self, name: ModelName, alias: AliasName, *, reason: str = "") -> AliasMove:
        """Put an alias back on the version it was on before. Each repetition goes one further back.

        Raises NoSuchThing.
        """

    def open_upload(self, model: ModelName, publication: Publication) -> Upload:
        """Begin a version of a model, which need not exist yet.

        Raises as commit would if the model cannot get such a publication: RunTakenOver, Conflict.
        """

    def join_upload(self, upload: UploadId) -> Upload:
        """An upload that another process opened, to write under it, too. Raises UploadExpired."""

    def flush_outbox(self, store: Store) -> int:
        """Write waiting records into the store; a service does this by itself."""

    def close(self) -> None:
        """Give up connections. Idempotent."""


class MemoryCatalogue:
    """Where blocks lie, as this process knows: what it wrote, and what pack footers told it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._placements: dict[BlockId, list[Placement]] = {}
        self.packs: dict[PackId, Sequence[Placement]] = {}

    def placements(
        self, blocks: Sequence[BlockId], *, within_s: float = math.inf
    ) -> Mapping[BlockId, Sequence[Placement]]:
        with self._lock:
            known = ((block, self._placements.get(block)) for block in blocks)
            return {block: tuple(found) for block, found in known if found}

    def add_pack(self, pack: PackId, placements: Sequence[Placement]) -> None:
        with self._lock:
            self.packs[pack] = tuple(placements)
            for placement in placements:
                self._placements.setdefault(placement.encoding.block, []).append(placement)

    def upload(self) -> Packing:
        """Write packs that this catalogue will know."""
        return _MemoryUpload(self)


class _MemoryUpload:
    """Does not say when packs begin: nobody else knows of what this process leaves when it dies."""

    def __init__(self, catalogue: MemoryCatalogue) -> None:
        self._catalogue = catalogue
        self._id = UploadId.new()

    @property
    def id(self) -> UploadId:
        return self._id

    def claim(self, blocks: Sequence[BlockId]) -> Mapping[BlockId, Sequence[Placement]]:
        return self._catalogue.placements(blocks)

    def begin_pack(self, pack: PackId) -> None:
        pass

    def add_pack(self, pack: PackId, pack_bytes: int, placements: Sequence[Placement]) -> None:
        self._catalogue.add_pack(pack, placements)
