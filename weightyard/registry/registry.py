"""Registry: the catalogue in a database. Owns every transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection

from weightyard.errors import RegistryUnavailable
from weightyard.format.manifest import Manifest
from weightyard.format.pack import Placement
from weightyard.names import AliasName, BlockId, Digest, ModelName, PackId, Ref, UploadId
from weightyard.records import AliasMove, Model, Publication, Retention, Version
from weightyard.registry import aliases, commits, migrate, outbox, uploads, versions
from weightyard.registry.database import Database
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import ANYTHING, Anything, ManifestFile

_P = ParamSpec("_P")
_T = TypeVar("_T")

LEASE_S = 900.0
"""How long an upload lives without a sign of life."""


class Registry:
    """Models, versions and aliases, and where their blocks lie. Thread-safe.

    `who` is the name under which this process does things, where no other is given.
    """

    def __init__(self, database: Database, *, who: str = "", lease_s: float = LEASE_S) -> None:
        self.database = database
        self._who = who
        self._lease_s = lease_s
        migrate.require_current(database)

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def placements(self, blocks: Sequence[BlockId]) -> Mapping[BlockId, Sequence[Placement]]:
        return self.database.read(lambda tx: uploads.find_placements(tx, blocks))

    def resolve(self, ref: Ref) -> Version:
        return self.database.read(lambda tx: versions.resolve(tx, ref))

    def model(self, name: ModelName) -> Model:
        return self.database.read(lambda tx: versions.get_model(tx, name))

    def models(
        self,
        *,
        projects: Sequence[str] | None = None,
        kind: str | None = "model",
        after: ModelName | None = None,
        limit: int = 1000,
    ) -> list[Model]:
        return self.database.read(
            lambda tx: versions.list_models(
                tx, projects=projects, kind=kind, after=after, limit=limit
            )
        )

    def versions(
        self, name: ModelName, *, before: int | None = None, limit: int = 1000
    ) -> list[Version]:
        return self.database.read(
            lambda tx: versions.list_versions(tx, name, before=before, limit=limit)
        )

    def create_model(self, name: ModelName, *, who: str | None = None) -> Model:
        """Make a model without versions, or find it."""

        def work(tx: Connection) -> Model:
            versions.ensure_model(tx, name, self._or_me(who))
            return versions.get_model(tx, name)

        return self.database.write(work)

    def annotate(self, ref: Ref, changes: Mapping[str, Any], *, who: str | None = None) -> Version:
        """Change a version's message, metrics, tags or metadata; its content never changes."""
        return self.database.write(lambda tx: versions.annotate(tx, ref, self._or_me(who), changes))

    def remove(self, ref: Ref, *, who: str | None = None, reason: str = "") -> Version:
        """Take a version out of sight. Raises NoSuchThing, Protected."""
        return self.database.write(lambda tx: versions.remove(tx, ref, self._or_me(who), reason))

    def remove_model(self, name: ModelName, *, who: str | None = None) -> None:
        self.database.write(lambda tx: versions.remove_model(tx, name, self._or_me(who)))

    def mark_used(self, ref: Ref) -> None:
        """Note that a version is being loaded, for retention by last use."""
        self.database.write(lambda tx: versions.mark_used(tx, ref))

    def set_retention(
        self, name: ModelName, retention: Retention | None, *, who: str | None = None
    ) -> None:
        self.database.write(
            lambda tx: versions.set_retention(tx, name, retention, self._or_me(who))
        )

    def alias(self, name: ModelName, alias: AliasName) -> int | None:
        """The number of the version an alias is on, or None."""
        return self.database.read(lambda tx: aliases.current(tx, name, alias))

    def move_alias(
        self,
        name: ModelName,
        alias: AliasName,
        to: int | None,
        *,
        who: str | None = None,
        reason: str = "",
        expect: int | Anything | None = ANYTHING,
    ) -> AliasMove:
        """Put an alias on a version; None removes it. Raises NoSuchThing, AliasMoved."""
        return self.database.write(
            lambda tx: aliases.move(
                tx, name, alias, to, who=self._or_me(who), reason=reason, expect=expect
            )
        )

    def alias_log(
        self,
        name: ModelName,
        alias: AliasName,
        *,
        as_of: datetime | None = None,
        limit: int = 1000,
    ) -> list[AliasMove]:
        return self.database.read(lambda tx: aliases.log(tx, name, alias, as_of=as_of, limit=limit))

    def rollback_alias(
        self, name: ModelName, alias: AliasName, *, who: str | None = None, reason: str = ""
    ) -> AliasMove:
        return self.database.write(
            lambda tx: aliases.rollback(tx, name, alias, who=self._or_me(who), reason=reason)
        )

    def open_upload(
        self, model: ModelName, publication: Publication, *, who: str | None = None
    ) -> RegistryUpload:
        upload = UploadId.new()
        author = self._or_me(who)
        self.database.write(
            lambda tx: uploads.open_upload(tx, upload, model, author, self._lease_s)
        )
        return self.resume_upload(upload, publication)

    def resume_upload(self, upload: UploadId, publication: Publication) -> RegistryUpload:
        """A handle on an upload that is open already, such as one of another process."""
        return RegistryUpload(self.database, upload, publication, self._lease_s)

    def flush_outbox(self, store: Store) -> int:
        """Write records and journal entries that are waiting into the store."""
        return outbox.flush(self.database, store)

    def _or_me(self, who: str | None) -> str:
        return self._who if who is None else who


class RegistryUpload:
    """A `weightyard.transfer.catalogue.Upload` in a database."""

    def __init__(
        self, database: Database, upload: UploadId, publication: Publication, lease_s: float
    ) -> None:
        self._database = database
        self._id = upload
        self._publication = publication
        self._lease_s = lease_s

    @property
    def id(self) -> UploadId:
        return self._id

    def claim(self, blocks: Sequence[BlockId]) -> Mapping[BlockId, Sequence[Placement]]:
        self._database.write(lambda tx: uploads.revive(tx, blocks))
        return self._write(uploads.claim, blocks)

    def begin_pack(self, pack: PackId) -> None:
        said = self._publication
        self._write(uploads.begin_pack, pack, said.replication, said.policy)

    def add_pack(self, pack: PackId, pack_bytes: int, placements: Sequence[Placement]) -> None:
        self._write(uploads.add_pack, pack, pack_bytes, placements)

    def heartbeat(self) -> None:
        self._write(uploads.heartbeat, self._lease_s)

    def begin_manifest(self, file: ManifestFile) -> None:
        self._write(uploads.begin_manifest, file.digest, file.stored_bytes)

    def commit(
        self, digest: Digest, manifest: Manifest, publication: Publication, key: str
    ) -> Version:
        return self._write(commits.commit, digest, manifest, publication, key)

    def abandon(self) -> None:
        self._database.write(lambda tx: uploads.abandon(tx, self._id))

    def _write(
        self,
        step: Callable[Concatenate[Connection, UploadId, _P], _T],
        *arguments: _P.args,
        **options: _P.kwargs,
    ) -> _T:
        """Run a step that may be repeated, once more if its answer was lost."""

        def work(tx: Connection) -> _T:
            return step(tx, self._id, *arguments, **options)

        try:
            return self._database.write(work)
        except RegistryUnavailable:
            return self._database.write(work)
