"""HttpCatalogue: a service's catalogue, as if its registry were here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import NoneType
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote

import httpx

from weightyard.client.connection import Connection
from weightyard.client.fetching import fetch
from weightyard.client.locating import ServiceLocator
from weightyard.client.upload import HttpUpload
from weightyard.client.watching import watched
from weightyard.closing import Closing
from weightyard.errors import NoSuchThing
from weightyard.format import manifest as manifests
from weightyard.format.manifest import Manifest
from weightyard.format.pack import Placement
from weightyard.names import AliasName, BlockId, Digest, FilePath, ModelName, Ref, TokenName
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
    Token,
    Version,
)
from weightyard.settings import Settings
from weightyard.storage.cancel import Cancel
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import ANYTHING, Anything
from weightyard.transfer.watching import Sighting
from weightyard.wire import (
    MAX_CLAIMED,
    AliasTarget,
    Annotation,
    BlockList,
    Keeping,
    LeaseRenewed,
    LeaseWanted,
    Limits,
    ModelMade,
    OpenedUpload,
    Page,
    Placed,
    Reason,
    TokenWanted,
    body,
    placements_by_block,
)

_T = TypeVar("_T")

_PAGE = 1000


class HttpCatalogue(Closing):
    """What a Registry is, over HTTP. Thread-safe; a context manager.

    Errors are those the service raised. What may safely be repeated is, within `deadline_s`.
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
        """Which yard this is, and where its store."""
        return self.connection.get("/about", About)

    def placements(self, blocks: Sequence[BlockId]) -> Mapping[BlockId, Sequence[Placement]]:
        found: dict[BlockId, Sequence[Placement]] = {}
        for start in range(0, len(blocks), MAX_CLAIMED):
            wanted = BlockList(blocks=[block.hex for block in blocks[start : start + MAX_CLAIMED]])
            answer = self.connection.send("POST", "/placements", Placed, body=wanted, again=True)
            found |= placements_by_block(answer)
        return found

    def resolve(self, ref: Ref, *, deadline_s: float | None = None) -> Version:
        path = f"{_path(ref.model)}/resolve/{_selector(ref)}"
        return self.connection.get(path, Version, deadline_s=deadline_s)

    def watch(self, ref: Ref, *, poll_s: float, stop: Cancel) -> Iterator[Sighting]:
        resolve = partial(self.resolve, ref, deadline_s=0.0)
        return watched(self.connection, ref.model, resolve, poll_s, stop)

    def locator(self, settings: Settings) -> ServiceLocator:
        """Who tells where packs lie, for those who read DataNodes and ask no NameNode."""
        return ServiceLocator(self.connection, settings)

    def manifest(self, ref: Ref) -> Manifest:
        """What a version consists of, for those who cannot reach the store. Its digest is checked.

        Raises ManifestInvalid, NoSuchThing.
        """
        version = self.resolve(ref)
        path = f"{_path(ref.model)}/versions/{version.number}/manifest"
        text = self.connection.ask("GET", path, again=True).content
        return manifests.from_json(text, Digest(version.digest))

    def fetch_file(
        self,
        ref: Ref,
        path: FilePath,
        out: BinaryIO,
        progress: Callable[[int], None] = lambda done_bytes: None,
    ) -> int:
        """Write a file of a version into `out`, for those who cannot reach the store; its length.

        Goes on where it broke off. `progress` is told of bytes done. Raises NoSuchThing,
        RegistryUnavailable, Damaged.
        """
        target = f"{self._version_path(ref)}/files/{quote(path.text)}"
        return fetch(self.connection, target, out, progress)

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
        """What a version costs; how many copies there are the service knows better."""
        return self.connection.get(f"{self._version_path(ref)}/cost", Cost)

    def mark_used(self, ref: Ref) -> None:
        self.connection.send("POST", f"{self._version_path(ref)}/used", NoneType, again=True)

    def take_lease(self, ref: Ref, holder: str, seconds: float) -> ReadLease:
        # Repeated after a lost answer, it leaves a lease nobody renews, which ends by itself.
        wanted = body(LeaseWanted, holder=holder, seconds=seconds)
        path = f"{self._version_path(ref)}/leases"
        return self.connection.send("POST", path, ReadLease, body=wanted, again=True)

    def renew_lease(self, lease_id: int, seconds: float) -> ReadLease:
        wanted = body(LeaseRenewed, seconds=seconds)
        path = f"/leases/{lease_id}"
        return self.connection.send("PUT", path, ReadLease, body=wanted, again=True)

    def release_lease(self, lease_id: int) -> None:
        with suppress(NoSuchThing):
            self.connection.send("DELETE", f"/leases/{lease_id}", NoneType, again=True)

    def set_retention(self, name: ModelName, retention: Retention | None) -> None:
        path = f"{_path(name)}/retention"
        if retention is None:
            self.connection.send("DELETE", path, NoneType, again=True)
        else:
            self.connection.send("PUT", path, Model, body=retention, again=True)

    def alias(self, name: ModelName, alias: AliasName) -> int | None:
        try:
            return self.connection.get(_alias_path(name, alias), Alias).version
        except NoSuchThing:
            self.model(name)  # that there is no such model is another thing
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
        limit: int = 1000,
    ) -> list[AliasMove]:
        until = None if as_of is None else as_of.astimezone().isoformat()
        path = f"{_alias_path(name, alias)}/log"
        params = {"limit": min(limit, _PAGE), "as_of": until}
        return self.connection.get(path, Page[AliasMove], params).items

    def rollback_alias(self, name: ModelName, alias: AliasName, *, reason: str = "") -> AliasMove:
        path = f"{_alias_path(name, alias)}/rollback"
        return self.connection.send("POST", path, AliasMove, body=body(Reason, reason=reason))

    def open_upload(self, model: ModelName, publication: Publication) -> HttpUpload:
        # Repeated after a lost answer, it leaves an upload nobody uses, which ends by itself.
        opened = self.connection.send(
            "POST", f"{_path(model)}/uploads", OpenedUpload, body=publication, again=True
        )
        return HttpUpload(self.connection, opened)

    def create_token(self, name: TokenName, role: Role, projects: Sequence[str]) -> NewToken:
        wanted = body(TokenWanted, name=name.text, role=role, projects=list(projects))
        return self.connection.send("POST", "/tokens", NewToken, body=wanted)

    def tokens(self) -> list[Token]:
        return self.connection.get("/tokens", Page[Token]).items

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

    def _version_path(self, ref: Ref) -> str:
        """A version by its number: what is changed must be the one that was meant."""
        number = ref.selector if isinstance(ref.selector, int) else self.resolve(ref).number
        return f"{_path(ref.model)}/versions/{number}"

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


def _alias_path(model: ModelName, alias: AliasName) -> str:
    return f"{_path(model)}/aliases/{alias}"


def _selector(ref: Ref) -> str:
    return str(ref).partition("@")[2]
