"""RegistryUpload: a writer's handle on one upload in the database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from weightyard.format.manifest import Manifest
from weightyard.format.pack import Placement
from weightyard.names import BlockId, Digest, FilePath, PackId, UploadId
from weightyard.records import Publication, Version
from weightyard.registry import commits, freshness, quotas, received, runs, uploads
from weightyard.registry.database import Database
from weightyard.registry.uploads import Reading
from weightyard.storage import layout
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import ManifestFile
from weightyard.transfer.durable import least_replicas, make_durable

_P = ParamSpec("_P")
_T = TypeVar("_T")


class RegistryUpload:
    """A `weightyard.transfer.catalogue.Upload` in a database."""

    def __init__(
        self,
        database: Database,
        upload: UploadId,
        publication: Publication,
        lease_s: float,
        reading: Reading | None = None,
        store: Store | None = None,
        stored: quotas.Stored | None = None,
    ) -> None:
        self._database = database
        self._id = upload
        self._publication = publication
        self._lease_s = lease_s
        self._reading = reading
        self._store = store
        self._stored = stored or quotas.Stored()

    @property
    def id(self) -> UploadId:
        return self._id

    def claim(self, blocks: Sequence[BlockId]) -> Mapping[BlockId, Sequence[Placement]]:
        self._database.write(lambda tx: uploads.revive(tx, self._id, blocks))
        return self._write(uploads.claim, blocks, self._reading)

    def begin_pack(self, pack: PackId) -> None:
        said = self._publication
        self.require_room()
        self._write(uploads.begin_pack, pack, said.replication, said.policy)

    def require_room(self, coming: Sequence[Placement] = ()) -> None:
        """Raises QuotaExceeded if there is no room for what was written, with what is coming."""
        self._database.read(lambda tx: quotas.require_room(tx, self._id, self._stored, coming))

    def add_pack(self, pack: PackId, pack_bytes: int, placements: Sequence[Placement]) -> None:
        self._write(uploads.add_pack, pack, pack_bytes, placements)

    def awaits_pack(self, pack: PackId) -> bool:
        """Whether a pack it began is still to be added. Raises UploadExpired for any other."""
        return self._write(uploads.awaits_pack, pack)

    def heartbeat(self) -> None:
        self._write(uploads.heartbeat, self._lease_s)

    def finish_rank(self, rank: int) -> None:
        self._write(runs.finish_rank, rank)

    def begin_manifest(self, file: ManifestFile) -> None:
        copies = self._publication.replication
        self._write(uploads.begin_manifest, file.digest, file.stored_bytes, copies)

    def commit(
        self, digest: Digest, manifest: Manifest, publication: Publication, key: str
    ) -> Version:
        if self._store is not None:
            freshness.require_newest(self._database, self._store)
            self._make_durable(self._store, publication)
        return self._write(commits.commit, digest, manifest, publication, key, self._reading)

    def _make_durable(self, store: Store, publication: Publication) -> None:
        """See that claimed packs have as many copies as this version asks for.

        Their writers may have asked for fewer. Raises UnderReplicated.
        """
        wanted = least_replicas(store, publication.replication)
        if wanted > 1:
            doubtful = self._database.read(lambda tx: uploads.doubtful_packs(tx, self._id, wanted))
            make_durable(store, [layout.pack(pack) for pack in doubtful], wanted)

    def committed(self, key: str) -> Version | None:
        """The version this upload became under a key, if its commit was done before."""
        return self._database.read(lambda tx: commits.find_done(tx, key, self._id))

    def put_file(self, path: FilePath, manifest: bytes) -> None:
        """Keep which blocks a received file became."""
        self._write(received.put, path, manifest)

    def received(self) -> list[bytes]:
        """The manifests of the files received so far, by path."""
        return self._database.write(lambda tx: received.manifests(tx, self._id))

    def abandon(self) -> None:
        self._database.write(lambda tx: uploads.abandon(tx, self._id))

    def _write(
        self,
        step: Callable[Concatenate[Connection, UploadId, _P], _T],
        *arguments: _P.args,
        **options: _P.kwargs,
    ) -> _T:
        """Run a step that may be repeated, once more if its answer was lost."""

        return self._database.write_twice(lambda tx: step(tx, self._id, *arguments, **options))
