"""HttpCatalogue: a service's catalogue, as if its registry were here."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import NoneType
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote

import httpx

from weightyard.client.blocks import ServiceReader
from weightyard.client.connection import Connection
from weightyard.client.fetching import fetch
from weightyard.client.locating import ServiceLocator
from weightyard.client.upload import HttpUpload, placements_at
from weightyard.client.watching import watched
from weightyard.closing import Closing
from weightyard.errors import NoSuchThing
from weightyard.format import manifest as manifests
from weightyard.format.manifest import Manifest
from weightyard.format.pack import Placement
from weightyard.names import (
    AliasName,
    BlockId,
    Digest,
    FilePath,
    ModelName,
    Ref,
    TokenName,
    UploadId,
)
from weightyard.records import (
    About,
    Alias,
    AliasMove,
    AuditEntry,
    Cost,
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
from weightyard.settings import Settings
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import ANYTHING, Anything
from weightyard.transfer.watching import Sighting
from weightyard.wire import (
    AliasTarget,
    Annotation,
    GenerationWanted,
    Keeping,
    LeaseRenewed,
    LeaseWanted,
    Limits,
    ModelMade,
    OpenedUpload,
    Page,
    Reason,
    TokenWanted,
    body,
)

_T = TypeVar("_T")

_PAGE = 1000
_RELEASE_S = 2.0


class HttpCatalogue(Closing):
    """What a Registry is, over HTTP. Thread-safe; a context manager.

    Raises the errors that the service raised. Requests that are safe to repeat are repeated, within
    `deadline_s`.
    """

    is_service = True

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        deadline_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.connection = Connection(url, token, deadline_s=deadline_s, transport=transport)

    def close(self) -> None:
        self.connection.close()

    def about(self) -> About:
        """Which yard this is, and where its store is."""
        return self.connection.get("/about", About)

    def placements(
        self,
        blocks: Sequence[BlockId],
        *,
        for_project: str | None = None,
        within_s: float = math.inf,
    ) -> Mapping[BlockId, Sequence[Placement]]:
        given = {"for_project": for_project}
        return placements_at(self.connection, "/placements", blocks, given, within_s=within_s)

    def resolve(
        self, ref: Ref, *, deadline_s: float | None = None, within_s: float = math.inf
    ) -> Version:
        """As `Registry.resolve`; `deadline_s` and `within_s` as for `Connection.ask`."""
        path = f"{_path(ref.model)}/resolve/{_selector(ref)}"
        return self.connection.get(path, Version, deadline_s=deadline_s, within_s=within_s)

    def watch(self, ref: Ref, *, poll_s: float, stop: Cancel) -> Iterator[Sighting]:
        resolve = partial(self.resolve, ref, deadline_s=0.0)
        return watched(self.connection, ref.model, resolve, poll_s, stop)

    def locator(self, settings: Settings) -> ServiceLocator:
        """Asks the service where packs lie, so that DataNodes are read without a NameNode."""
        return ServiceLocator(self.connection, settings)

    def manifest(self, version: Version, deadline: Deadline = NEVER) -> Manifest:
        """A version's manifest, for hosts that cannot reach the store. Its digest is checked.

        A removed version still has one while a reader holds it. Raises ManifestInvalid,
        NoSuchThing.
        """
        doing = f"asking for the manifest of {version.ref}"
        path = self._version_path(Ref.parse(version.ref), within_s=deadline.left(doing))
        left_s = deadline.left(doing)
        text = self.connection.ask("GET", f"{path}/manifest", again=True, within_s=left_s).content
        return manifests.from_json(text, Digest(version.digest))

    def fetch_file(
        self,
        ref: Ref,
        path: FilePath,
        out: BinaryIO,
        progress: Callable[[int], None] = lambda done_bytes: None,
        deadline: Deadline = NEVER,
    ) -> int:
        """Write a file of a version into `out`, for hosts that cannot reach the store.

        Returns its length. Resumes where a connection broke off. `progress` is told of bytes done.
        Raises NoSuchThing, RegistryUnavailable, Damaged.
        """
        target = f"{self._version_path(ref)}/files/{quote(path.text)}"
        return fetch(self.connection, target, out.write, progress, deadline)

    def reader(
        self, version: Version, manifest: Manifest, deadline: Deadline = NEVER
    ) -> ServiceReader:
        """A reader of a version's blocks, for hosts that cannot reach the store."""
        path = self._version_path(Ref.parse(version.ref))

        def get(block: BlockId, write: Callable[[bytes], object]) -> int:
            return fetch(self.connection, f"{path}/blocks/{block}", write, deadline=deadline)

        return ServiceReader(manifest, get)

    def model(self, name: ModelName) -> Model:
        return self.connection.get(_path(name), Model)

    def models(
        self,
        *,
        kind: str | None = "model",
        after: ModelName | None = None,
        limit: int = 1000,
    ) -> list[Model]:
        first = None if after is None else str(after)
        return self._pages("/models", Model, limit, first, {"kind": kind or "all"})

    def versions(
        self, name: ModelName, *, before: int | None = None, limit: int = 1000
    ) -> list[Version]:
        first = None if before is None else str(before)
        return self._pages(f"{_path(name)}/versions", Version, limit, first)

    def create_model(self, name: ModelName) -> Model:
        return self.connection.send(
            "POST", "/models", Model, body=body(ModelMade, name=str(name)), again=True
        )

    def remove_model(self, name: ModelName) -> None:
        self.connection.send("DELETE", _path(name), NoneType)

    def annotate(
        self, ref: Ref, changes: Mapping[str, Any], *, expect: str | None = None
    ) -> Version:
        headers = {"If-Match": f'"{expect}"'} if expect is not None else {}
        return self.connection.send(
            "PATCH",
            self._version_path(ref),
            Version,
            body=body(Annotation, **changes),
            headers=headers,
        )

    def remove(self, ref: Ref, *, reason: str = "") -> Version:
        return self.connection.send(
            "DELETE", self._version_path(ref), Version, params={"reason": reason}
        )

    def keep(self, ref: Ref, *, copies: int | None, policy: str | None) -> Version:
        """Ask for copies or a policy; the service tells its store. Raises as `Yard.keep`."""
        wanted = body(Keeping, replication=copies, policy=policy)
        path = f"{self._version_path(ref)}/replicas"
        return self.connection.send("PUT", path, Version, body=wanted, again=True)

    def cost(self, ref: Ref, *, copies: int = 1) -> Cost:
        """What a version costs. `copies` is not sent: the service knows its store's number."""
        return self.connection.get(f"{self._version_path(ref)}/cost", Cost)

    def mark_used(self, ref: Ref, *, within_s: float = math.inf) -> None:
        deadline = Deadline.after(within_s)
        path = f"{self._version_path(ref, within_s=within_s)}/used"
        left_s = deadline.left(f"noting that {ref} is used")
        self.connection.send("POST", path, NoneType, again=True, within_s=left_s)

    def take_lease(
        self, ref: Ref, holder: str, seconds: float, *, within_s: float = math.inf
    ) -> ReadLease:
        # Repeating it after a lost answer leaves a lease that nobody renews, which ends by itself.
        wanted = body(LeaseWanted, holder=holder, seconds=seconds)
        deadline = Deadline.after(within_s)
        path = f"{self._version_path(ref, within_s=within_s)}/leases"
        left_s = deadline.left(f"taking a lease on {ref}")
        return self.connection.send(
            "POST", path, ReadLease, body=wanted, again=True, within_s=left_s
        )

    def renew_lease(self, lease_id: int, seconds: float) -> ReadLease:
        # One try: the next renewal comes long before the lease ends.
        wanted = body(LeaseRenewed, seconds=seconds)
        path = f"/leases/{lease_id}"
        return self.connection.send("PUT", path, ReadLease, body=wanted, again=True, deadline_s=0.0)

    def release_lease(self, lease_id: int) -> None:
        # One short try: a lease that is not released ends by itself, and nobody waits for that.
        with suppress(NoSuchThing):
            path = f"/leases/{lease_id}"
            self.connection.send("DELETE", path, NoneType, deadline_s=0.0, within_s=_RELEASE_S)

    def set_retention(self, name: ModelName, retention: Retention | None) -> None:
        path = self._retention_path(name)
        if retention is None:
            self.connection.send("DELETE", path, NoneType, again=True)
        else:
            self.connection.send("PUT", path, Model, body=retention, again=True)

    def apply_retention(self, name: ModelName) -> list[str]:
        # Repeated after a lost answer, it does not return what was removed the first time.
        path = f"{self._retention_path(name)}/apply"
        return self.connection.send("POST", path, Page[str], again=True).items

    def run(self, name: ModelName) -> Run:
        return self.connection.get(_run_path(name), Run)

    def begin_generation(
        self, name: ModelName, *, expect: int | None = None, key: str | None = None
    ) -> Run:
        return self.connection.send(
            "POST",
            f"{_run_path(name)}/generations",
            Run,
            body=body(GenerationWanted, expect=expect),
            headers={"Idempotency-Key": key or secrets.token_hex(16)},
            again=True,
        )

    def alias(self, name: ModelName, alias: AliasName) -> int | None:
        try:
            return self.connection.get(_alias_path(name, alias), Alias).version
        except NoSuchThing:
            self.model(name)  # raises NoSuchThing if it is the model that is missing
            return None

    def move_alias(
        self,
        name: ModelName,
        alias: AliasName,
        to: int | None,
        *,
        reason: str = "",
        expect: int | Anything | None = ANYTHING,
    ) -> AliasMove:
        headers = {}
        if expect is None:
            headers["If-None-Match"] = "*"
        elif isinstance(expect, int):
            headers["If-Match"] = f'"v{expect}"'
        path = _alias_path(name, alias)
        if to is None:
            return self.connection.send(
                "DELETE", path, AliasMove, params={"reason": reason}, headers=headers
            )
        target = body(AliasTarget, version=to, reason=reason)
        return self.connection.send("PUT", path, AliasMove, body=target, headers=headers)

    def alias_log(
        self,
        name: ModelName,
        alias: AliasName,
        *,
        as_of: datetime | None = None,
        before: int | None = None,
        limit: int = 1000,
    ) -> list[AliasMove]:
        first = None if before is None else str(before)
        until = {} if as_of is None else {"as_of": as_of.astimezone().isoformat()}
        return self._pages(f"{_alias_path(name, alias)}/log", AliasMove, limit, first, until)

    def rollback_alias(self, name: ModelName, alias: AliasName, *, reason: str = "") -> AliasMove:
        path = f"{_alias_path(name, alias)}/rollback"
        return self.connection.send("POST", path, AliasMove, body=body(Reason, reason=reason))

    def open_upload(self, model: ModelName, publication: Publication) -> HttpUpload:
        # Repeating it after a lost answer leaves an upload that nobody uses, which ends by itself.
        opened = self.connection.send(
            "POST", f"{_path(model)}/uploads", OpenedUpload, body=publication, again=True
        )
        return HttpUpload(self.connection, opened)

    def join_upload(self, upload: UploadId) -> HttpUpload:
        opened = self.connection.get(f"/uploads/{upload}", OpenedUpload)
        return HttpUpload(self.connection, opened)

    def create_token(self, name: TokenName, role: Role, projects: Sequence[str]) -> NewToken:
        wanted = body(TokenWanted, name=name.text, role=role, projects=list(projects))
        return self.connection.send("POST", "/tokens", NewToken, body=wanted)

    def tokens(self, *, after: TokenName | None = None, limit: int = 1000) -> list[Token]:
        return self._pages("/tokens", Token, limit, None if after is None else after.text)

    def revoke_token(self, name: TokenName) -> Token:
        return self.connection.send("DELETE", f"/tokens/{quote(name.text, safe='')}", Token)

    def quota(self, project: str) -> Quota:
        return self.connection.get(f"/quotas/{ModelName(project, 'any').project}", Quota)

    def set_quota(self, project: str, *, stored_bytes: int | None, versions: int | None) -> Quota:
        path = f"/quotas/{ModelName(project, 'any').project}"
        limits = body(Limits, stored_bytes=stored_bytes, versions=versions)
        return self.connection.send("PUT", path, Quota, body=limits, again=True)

    def audit(self, *, before: int | None = None, limit: int = 1000) -> list[AuditEntry]:
        return self._pages("/audit", AuditEntry, limit, None if before is None else str(before))

    def flush_outbox(self, store: Store) -> int:
        """Nothing to do: the service writes its records by itself."""
        return 0

    def _version_path(self, ref: Ref, *, within_s: float = math.inf) -> str:
        """The path of a version, by its number: an alias might move before the change is made."""
        number = ref.selector
        if not isinstance(number, int):
            number = self.resolve(ref, within_s=within_s).number
        return f"{_path(ref.model)}/versions/{number}"

    def _retention_path(self, name: ModelName) -> str:
        """The path of a retention. That of a run writers may set, that of a model only admins."""
        is_run = self.model(name).kind == "run"
        return f"{_run_path(name) if is_run else _path(name)}/retention"

    def _pages(
        self,
        path: str,
        item: type[_T],
        limit: int,
        after: str | None,
        params: Mapping[str, str] | None = None,
    ) -> list[_T]:
        items: list[_T] = []
        while len(items) < limit:
            wanted = min(limit - len(items), _PAGE)
            kind = cast("type[Page[_T]]", Page[item])  # type: ignore[valid-type]
            found = self.connection.get(
                path, kind, {"limit": wanted, "after": after, **(params or {})}
            )
            items += found.items
            after = found.next
            if after is None:
                break
        return items


def _path(model: ModelName) -> str:
    return f"/models/{model.project}/{model.name}"


def _run_path(name: ModelName) -> str:
    return f"/runs/{name.project}/{name.name}"


def _alias_path(model: ModelName, alias: AliasName) -> str:
    return f"{_path(model)}/aliases/{alias}"


def _selector(ref: Ref) -> str:
    return str(ref).partition("@")[2]
