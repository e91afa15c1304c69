"""Registry: the catalogue in a database. Owns every transaction."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import Connection

from weightyard.closing import Closing
from weightyard.errors import YardError
from weightyard.format.pack import Placement
from weightyard.names import (
    AliasName,
    BlockId,
    ModelName,
    Ref,
    TokenName,
    UploadId,
)
from weightyard.records import (
    AliasMove,
    AuditEntry,
    CheckReport,
    Cost,
    Event,
    GcReport,
    HealReport,
    Model,
    NewToken,
    Publication,
    Quota,
    ReadLease,
    Retention,
    Role,
    Run,
    Token,
    Version,
)
from weightyard.registry import (
    aliases,
    audit,
    check,
    collect,
    commits,
    cost,
    events,
    freshness,
    heal,
    keeping,
    leases,
    migrate,
    outbox,
    policies,
    preview,
    quotas,
    replication,
    retention,
    runs,
    tokens,
    uploads,
    versions,
)
from weightyard.registry.collect import GcOptions
from weightyard.registry.database import Database
from weightyard.registry.progress import Progress, silent
from weightyard.registry.unchanged import Unchanged
from weightyard.registry.upload import RegistryUpload
from weightyard.registry.uploads import OpenUpload, Reading
from weightyard.storage.cancel import Cancel
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import ANYTHING, Anything
from weightyard.transfer.watching import Sighting, polled

_P = ParamSpec("_P")
_T = TypeVar("_T")

LEASE_S = 900.0
"""How long an upload lives without a sign of life."""

_NOTING_S = 2.0
"""How long a load may wait for other writers in order to note that it uses a version."""


class Registry(Closing):
    """Models, versions and aliases, and where their blocks lie. Thread-safe.

    `who` is the name under which this process does things, where no other is given. With `store`,
    all that changes something raises ForeignStore if the database is older than its store.
    """

    is_service = False

    def __init__(
        self,
        database: Database,
        *,
        store: Store | None = None,
        who: str = "",
        lease_s: float = LEASE_S,
    ) -> None:
        self.database = database
        self._store = store
        self._who = who
        self._lease_s = lease_s
        self._looks = freshness.BriefLooks(store) if store is not None else None
        self._stored = quotas.Stored()
        self._resolved: Unchanged[Ref, Version] = Unchanged(database)
        migrate.require_current(database)

    def close(self) -> None:
        if self._looks is not None:
            self._looks.close()
        self.database.close()

    def placements(
        self,
        blocks: Sequence[BlockId],
        *,
        reading: Reading | None = None,
        for_project: str | None = None,
        within_s: float = math.inf,
    ) -> Mapping[BlockId, Sequence[Placement]]:
        return self.database.read(
            lambda tx: uploads.find_placements(tx, blocks, reading, for_project)
        )

    def resolve(self, ref: Ref, *, within_s: float = math.inf) -> Version:
        return self._resolved.get(
            ref, lambda: self.database.ask(partial(versions.resolve, ref=ref))
        )

    def resolve_readable(self, name: ModelName, number: int) -> Version:
        """A version; also a removed one that a reader still holds. Raises NoSuchThing."""
        return self.database.read(lambda tx: versions.resolve_readable(tx, name, number))

    def watch(self, ref: Ref, *, poll_s: float, stop: Cancel) -> Iterator[Sighting]:
        return polled(partial(self.resolve, ref), poll_s, stop)

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

        return self._change(work)

    def annotate(
        self,
        ref: Ref,
        changes: Mapping[str, Any],
        *,
        who: str | None = None,
        expect: str | None = None,
    ) -> Version:
        """Change a version's message, metrics, tags or metadata; its content never changes.

        With `expect`, only if its `etag` is this one. Raises NoSuchThing, Changed, BadSetting.
        """
        return self._change(
            lambda tx: versions.annotate(tx, ref, self._or_me(who), changes, expect)
        )

    def remove(
        self,
        ref: Ref,
        *,
        who: str | None = None,
        reason: str = "",
        projects: Sequence[str] | None = None,
    ) -> Version:
        """Take a version out of sight. Raises NoSuchThing, Protected.

        `projects`: those whose versions may be named as what keeps it.
        """
        return self._change(
            lambda tx: versions.remove(tx, ref, self._or_me(who), reason, projects=projects)
        )

    def remove_model(self, name: ModelName, *, who: str | None = None) -> None:
        self._change(lambda tx: versions.remove_model(tx, name, self._or_me(who)))

    def mark_used(self, ref: Ref, *, within_s: float = math.inf) -> None:
        """Note that a version is being loaded, for retention by last use.

        At most once a minute, so that a thousand nodes that start together do not write a thousand
        times. A load does not wait long for it. Raises RegistryUnavailable.
        """
        if not self.database.read(lambda tx: versions.is_use_noted(tx, ref)):
            refs = self._resolved.keys(lambda version: version.ref == str(ref))
            self.database.write_soon(lambda tx: versions.mark_used(tx, ref), _NOTING_S)
            with suppress(YardError):
                for one in refs:  # this write made their answers stale; no load has to ask again
                    self.resolve(one)

    def set_retention(
        self, name: ModelName, retention: Retention | None, *, who: str | None = None
    ) -> None:
        """Set a model's rules for which versions may go. Raises NoSuchThing, Refused."""
        self._change(lambda tx: versions.set_retention(tx, name, retention, self._or_me(who)))

    def apply_retention(self, name: ModelName, *, who: str | None = None) -> list[str]:
        """Remove versions that the model's rules let go, return their refs. Raises NoSuchThing."""
        self._require_newest()
        return [due.ref for due in retention.apply(self.database, self._or_me(who), name)]

    def run(self, name: ModelName) -> Run:
        """Raises NoSuchThing."""
        return self.database.read(lambda tx: runs.get(tx, name))

    def begin_generation(
        self,
        name: ModelName,
        *,
        expect: int | None = None,
        key: str | None = None,
        who: str | None = None,
    ) -> Run:
        """Take a run over. Raises RunTakenOver, Conflict."""
        key, who = key or secrets.token_hex(16), self._or_me(who)
        self._require_newest()
        taking = partial(runs.begin_generation, name=name, expect=expect, key=key, who=who)
        return self.database.write_twice(taking)

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
        return self._change(
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
        before: int | None = None,
        limit: int = 1000,
    ) -> list[AliasMove]:
        return self.database.read(
            lambda tx: aliases.log(tx, name, alias, as_of=as_of, before=before, limit=limit)
        )

    def rollback_alias(
        self, name: ModelName, alias: AliasName, *, who: str | None = None, reason: str = ""
    ) -> AliasMove:
        return self._change(
            lambda tx: aliases.rollback(tx, name, alias, who=self._or_me(who), reason=reason)
        )

    def open_upload(
        self, model: ModelName, publication: Publication, *, who: str | None = None
    ) -> RegistryUpload:
        upload = UploadId.new()
        author = self._or_me(who)

        def work(tx: Connection) -> Publication:
            runs.require_may_begin(tx, model, publication)
            stored = quotas.require(tx, model.project, more_versions=1)
            if stored is not None:
                self._stored.note(upload, stored)
            said = commits.name_parent(tx, publication)
            uploads.open_upload(tx, upload, model, author, self._lease_s, said)
            return said

        return self.resume_upload(upload, self._change(work))

    def join_upload(self, upload: UploadId) -> RegistryUpload:
        """An upload that another process opened. Raises UploadExpired."""
        opened = self.database.read(lambda tx: uploads.join(tx, upload))
        return self.resume_upload(upload, opened.publication)

    def find_upload(self, upload: UploadId) -> OpenUpload:
        """Whose an upload is, and what its writer said of the version. Raises UploadExpired."""
        return self.database.read(lambda tx: uploads.find_open(tx, upload))

    def resume_upload(
        self, upload: UploadId, publication: Publication, *, reading: Reading | None = None
    ) -> RegistryUpload:
        """A handle on an upload that is open already, such as one of another process.

        With `reading`, it claims and publishes only blocks that the token may read.
        """
        return RegistryUpload(
            self.database, upload, publication, self._lease_s, reading, self._store, self._stored
        )

    def create_token(
        self, name: TokenName, role: Role, projects: Sequence[str], *, who: str | None = None
    ) -> NewToken:
        """A new token; its secret is not shown again. `*` stands for all projects."""
        return self.database.write(
            lambda tx: tokens.create(tx, name, role, projects, who=self._or_me(who))
        )

    def tokens(self, *, after: TokenName | None = None, limit: int = 1000) -> list[Token]:
        """All tokens, revoked ones too, by name; with `after`, those after that name."""
        return self.database.read(lambda tx: tokens.list_tokens(tx, after=after, limit=limit))

    def revoke_token(self, name: TokenName, *, who: str | None = None) -> Token:
        """End a token, for good. Raises NoSuchThing."""
        return self.database.write(lambda tx: tokens.revoke(tx, name, who=self._or_me(who)))

    def token_of(self, secret: str) -> Token | None:
        """The token with this secret, unless it is revoked."""
        return self.database.read(lambda tx: tokens.find(tx, secret))

    def token_named(self, name: TokenName) -> Token | None:
        """The token of this name, also if it is revoked."""
        return self.database.read(lambda tx: tokens.find_named(tx, name))

    def has_tokens(self) -> bool:
        """Whether a token was ever made."""
        return self.database.read(tokens.any_exist)

    def note_token_use(self, name: str) -> None:
        self.database.write(lambda tx: tokens.note_use(tx, name))

    def quota(self, project: str) -> Quota:
        """How much a project may store, and how much it does."""
        return self.database.read(lambda tx: quotas.get(tx, project))

    def set_quota(
        self,
        project: str,
        *,
        stored_bytes: int | None,
        versions: int | None,
        who: str | None = None,
    ) -> Quota:
        """Limit what a project may store; None lifts a limit."""
        return self.database.write(
            lambda tx: quotas.put(
                tx, project, stored_bytes=stored_bytes, versions=versions, who=self._or_me(who)
            )
        )

    def audit(self, *, before: int | None = None, limit: int = 1000) -> list[AuditEntry]:
        """Who did what, the newest first."""
        return self.database.read(lambda tx: audit.entries(tx, before=before, limit=limit))

    def events(
        self, after: int, *, projects: Sequence[str] | None = None, limit: int = 1000
    ) -> list[Event]:
        """What happened after an event, the oldest first."""
        return self.database.read(
            lambda tx: events.after(tx, after, projects=projects, limit=limit)
        )

    def newest_event(self) -> int:
        return self.database.read(events.newest)

    def check(self, store: Store, *, read_data: bool = False) -> CheckReport:
        """Compare the catalogue with the store; see `weightyard.registry.check`."""
        return check.check(self.database, store, read_data=read_data, who=self._who)

    def heal(self, store: Store, report: CheckReport) -> HealReport:
        """Do what can be done about a check's findings; see `weightyard.registry.heal`."""
        return heal.heal(self.database, store, report, who=self._who)

    def flush_outbox(self, store: Store) -> int:
        """Write waiting records and journal entries into the store; returns how many.

        Also tells the store how to keep files of which more copies were asked for meanwhile.
        """
        done = outbox.flush(self.database, store)
        replication.settle(self.database, store)
        return done

    def gc(
        self,
        store: Store,
        options: GcOptions | None = None,
        *,
        dry_run: bool = False,
        who: str | None = None,
        progress: Progress = silent,
    ) -> GcReport:
        """Take away what nobody needs; with `dry_run`, say what that would be.

        Raises BadSetting for a grace too short, ForeignStore for a database older than its store,
        Conflict if gc is running already.
        """
        options = options or GcOptions()
        if dry_run:
            options.require_safe()
            freshness.require_newest_of_all(self.database, store)
            return self.database.read(lambda tx: preview.preview(tx, options, progress))
        return collect.collect(self.database, store, options, self._or_me(who), progress)

    def keep(
        self, ref: Ref, *, copies: int | None, policy: str | None, who: str | None = None
    ) -> Version:
        """Ask for copies or a policy; `settle_replication` tells the store.

        Raises NoSuchThing, Refused.
        """
        return self._change(
            lambda tx: keeping.keep(tx, ref, copies=copies, policy=policy, who=self._or_me(who))
        )

    def keep_on(
        self,
        store: Store,
        ref: Ref,
        *,
        copies: int | None,
        policy: str | None,
        who: str | None = None,
    ) -> Version:
        """As `keep`, if the store can do it. Raises NoSuchThing, Unsupported."""
        policies.require_possible(self.database, store, ref, policy)
        return self.keep(ref, copies=copies, policy=policy, who=who)

    def settle_replication(self, store: Store) -> int:
        """Tell the store of files that are to be kept otherwise; returns how many there were."""
        return replication.settle(self.database, store)

    def cost(self, ref: Ref, *, copies: int = 1, shown: int = cost.SHOWN) -> Cost:
        """What a version takes, shares, and would give back. Raises NoSuchThing.

        `copies` is how often the store keeps a pack unless asked otherwise.
        """
        return self.database.read(lambda tx: cost.cost(tx, ref, copies=copies, shown=shown))

    def freed_by_removing(self, ref: Ref) -> int:
        """Stored bytes of a version that nobody else needs. Raises NoSuchThing."""
        return self.database.read(lambda tx: cost.freed_by_removing(tx, ref))

    def take_lease(
        self,
        ref: Ref,
        holder: str,
        seconds: float,
        *,
        who: str | None = None,
        within_s: float = math.inf,
    ) -> ReadLease:
        """Keep a version's bytes for a reader, even if it is removed. Raises NoSuchThing."""
        author = self._or_me(who)
        return self.database.write(lambda tx: leases.take(tx, ref, holder, seconds, author))

    def find_lease(self, lease_id: int) -> ReadLease:
        """Which version a lease is on, and whose it is. Raises NoSuchThing."""
        return self.database.read(lambda tx: leases.find(tx, lease_id))

    def renew_lease(self, lease_id: int, seconds: float) -> ReadLease:
        """Raises NoSuchThing if the lease has ended: its bytes may go from now on."""
        return self.database.write(lambda tx: leases.renew(tx, lease_id, seconds))

    def release_lease(self, lease_id: int) -> None:
        """Idempotent."""
        self.database.write(lambda tx: leases.release(tx, lease_id))

    def _change(self, work: Callable[[Connection], _T]) -> _T:
        """Write a change, unless the database is older than its store."""
        self._require_newest()
        return self.database.write(work)

    def _require_newest(self) -> None:
        if self._looks is not None:
            self._looks.require_newest(self.database)

    def _or_me(self, who: str | None) -> str:
        return self._who if who is None else who
