"""Yard: a store and its one registry, and what people do with them."""

from __future__ import annotations

import getpass
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import ValidationError

from weightyard.closing import Closing
from weightyard.errors import (
    BadSetting,
    DeadlineExceeded,
    NoSuchThing,
    NotAllowed,
    RegistryUnavailable,
    Retryable,
    StoreUnavailable,
)
from weightyard.format.block import MAX_BLOCK_BYTES
from weightyard.format.manifest import FileEntry, Manifest
from weightyard.loader.building import Choice, Supply, take_snapshot
from weightyard.loader.interface import Loads
from weightyard.loader.offline import OfflineCatalogue, OfflineStore, recalled
from weightyard.loader.remembered import Remembered
from weightyard.loader.snapshot import Snapshot
from weightyard.loader.snapshots import Snapshots
from weightyard.logs import Log
from weightyard.names import AliasName, Digest, ModelName, Ref
from weightyard.records import (
    AliasMove,
    Cost,
    Diff,
    Model,
    Publication,
    Pushed,
    PushPlan,
    RememberedVersion,
    Retention,
    Version,
)
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.opening import open_store
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import ANYTHING, Anything, Catalogue
from weightyard.transfer.diff import diff_manifests
from weightyard.transfer.gather import Gathered, gather_files, is_wanted
from weightyard.transfer.preview import preview
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import translated
from weightyard.via import Outgoing, Via, ViaStore, chosen_via

if TYPE_CHECKING:
    import torch

    from weightyard.loader.follower import Follower
    from weightyard.registry.database import Database
    from weightyard.registry.registry import Registry

_log = Log(__name__)


class Yard(Loads, Closing):
    """What `weightyard.open()` returns. Thread-safe; a context manager.

    Refs are `team/bert@prod`, `@v3`, `@<digest>`, `@latest` or nothing for the newest version.
    """

    def __init__(
        self,
        store: Store | Via,
        catalogue: Catalogue,
        *,
        block_bytes: int,
        settings: Settings | None = None,
        name: str = "",
    ) -> None:
        """`name`: the URL by which a user knows it; what this node remembers goes by it."""
        self._via = store if isinstance(store, Via) else ViaStore(store, catalogue)
        self.catalogue = catalogue
        self._block_bytes = block_bytes
        self._settings = settings or Settings()
        self.snapshots = Snapshots(self._settings.cache, self._settings.cache_max)
        self._remembered = Remembered(self._settings.cache, name)
        self._in_use: dict[Path, Snapshot] = {}

    @property
    def store(self) -> Store:
        """Where the packs are. Raises StoreUnavailable, Unsupported where bytes go elsewhere."""
        return self._via.store

    @property
    def reads_by_locations(self) -> bool:
        """Whether the service says where packs lie, so that reading asks no NameNode."""
        return self._via.reads_by_locations

    @property
    def registry(self) -> Registry:
        """The database behind this yard. Raises BadSetting if a service is in between."""
        from weightyard.registry.registry import Registry

        if not isinstance(self.catalogue, Registry):
            raise BadSetting(
                "this needs the yard's database: set WEIGHTYARD_STORE and WEIGHTYARD_DB instead of "
                "WEIGHTYARD_URL"
            )
        return self.catalogue

    @property
    def is_embedded(self) -> bool:
        """Whether store and database are of this one host: nobody reads from elsewhere."""
        return (
            not self.catalogue.is_service
            and isinstance(self.store, LocalStore)
            and self.registry.database.is_sqlite
        )

    def push(
        self,
        source: str | Path | Mapping[str, Any] | Gathered,
        name: str,
        *,
        alias: str | None = None,
        parent: str | None = None,
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        replication: int | None = None,
        policy: str | None = None,
        codec: Literal["auto", "raw"] = "auto",
        delta: Literal["off", "also", "only"] = "off",
        expect_latest: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Pushed:
        """Publish a folder, a file or a state dict as the next version of a model.

        A folder may lie in HDFS (`hdfs://…`): it is streamed. What the store has already is not
        sent again, so a push that was interrupted goes on where it stopped. Nothing is visible
        before all of it is. Raises Conflict, Refused, Retryable.
        """
        model = ModelName.parse(name)
        said: dict[str, Any] = {
            "message": message,
            "parent": str(Ref.parse(parent)) if parent is not None else None,
            "metrics": dict(metrics or {}),
            "tags": dict(tags or {}),
            "alias": AliasName(alias).text if alias is not None else None,
            "expect_latest": expect_latest,
            "replication": replication,
            "policy": policy,
        }
        _publication(said)  # refused before a source is read that may be large
        if isinstance(source, Gathered):
            return self._push(source, model, said, codec, delta, progress)
        with self.gather(source, include=include, exclude=exclude) as gathered:
            return self._push(gathered, model, said, codec, delta, progress)

    def _push(
        self,
        gathered: Gathered,
        model: ModelName,
        said: Mapping[str, Any],
        codec: Literal["auto", "raw"],
        delta: Literal["off", "also", "only"],
        progress: Callable[[int], None] | None,
    ) -> Pushed:
        publication = _publication({**said, "config": gathered.config})
        pushed = self._via.push(Outgoing(gathered, model, publication, codec, delta), progress)
        self._settle()
        return pushed

    def gather(
        self,
        source: str | Path | Mapping[str, Any],
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ) -> Gathered:
        """What a push of this source would consist of; `push` takes it as its source.

        For those who want to know how much it is first. Raises NoSuchThing, NotAllowed.
        """
        if isinstance(source, Mapping):
            from weightyard.loader.state import state_content

            return Gathered([state_content(source, self._block_bytes)])
        return gather_files(source, self._block_bytes, include, exclude, self._settings)

    def preview(
        self, gathered: Gathered, progress: Callable[[int], None] | None = None
    ) -> PushPlan:
        """What a push would send, without sending it."""
        return preview(gathered.contents, self.catalogue, progress or (lambda done_bytes: None))

    def pull(
        self,
        ref: str,
        folder: str | Path,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Path:
        """Put a version's files into a folder, bit for bit. Each appears when it is whole.

        Raises NoSuchThing, Conflict (a file is there already), Damaged, Retryable.
        """
        version = self._version_to_use(ref)
        manifest = self._manifest_of(version)
        target = Path(folder)
        files = [file for file in manifest.files if is_wanted(file.path, include, exclude)]
        if not files and manifest.files:
            raise NoSuchThing(f"{ref} has no file that fits; it has {_some(manifest.files)}")
        with translated(target):
            target.mkdir(parents=True, exist_ok=True)
        self._via.pull(version, manifest, files, target, progress)
        return target

    def snapshot(
        self,
        ref: str,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Path:
        """A folder of this node with a version's real files, for any server; made if need be.

        A pushed state dict is there as `model.safetensors`. Do not write into it: other versions
        may share its files. It is not evicted while this yard is open.
        Raises NoSuchThing, NotOnNode, StoreFull, Damaged, Retryable.
        """
        version = self._version_to_use(ref)
        found = None if include or exclude else self.snapshots.find(Digest(version.digest))
        if found is None:
            found = take_snapshot(
                self.snapshots,
                self.catalogue,
                version,
                self._manifest_of(version),
                Supply(
                    partial(self._via.pull, version), lambda: Reader(self.store, self.catalogue)
                ),
                Choice(include, exclude),
                progress,
            )
        self._in_use[found.path] = found
        return found.path

    def follow(
        self,
        ref: str,
        module: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
        *,
        applied: Version | str | None = None,
        files: str | Sequence[str] | None = None,
        tensors: str | Sequence[str] | None = None,
        verify: Literal["fast", "full"] = "fast",
        max_host_bytes: int | None = None,
        poll_s: float | None = None,
    ) -> Follower:
        """Bring in the versions a ref moves to, while the old one serves (docs/following.md).

        `module`: what is served, a module or tensors by name, which `apply` changes where they
        are; None: the caller takes what `changed` gives. `applied`: the version it holds now, or
        its ref, so that only what differs is read; what `load` gave knows it by itself. `files`,
        `tensors`, `verify`: as in `load`. A change that needs more than `max_host_bytes` of memory
        is refused. `poll_s`: how often to ask where no service tells; else WEIGHTYARD_POLL_S.
        Raises NoSuchThing, DoesNotFit and Retryable for `applied`; of what comes later, `failure`
        tells.
        """
        from weightyard.loader.asked import Asked
        from weightyard.loader.follower import Follower, Following
        from weightyard.loader.load import Weights
        from weightyard.loader.resident import Resident

        if applied is None and isinstance(module, Weights):
            applied = module.version
        following = Following(
            Ref.parse(ref),
            self.catalogue,
            lambda: self.store,
            self._manifest_of,
            Asked(files, tensors, verify=verify),
            max_host_bytes,
            self._settings.poll_s if poll_s is None else poll_s,
        )
        known = self.resolve(applied) if isinstance(applied, str) else applied
        return Follower(following, Resident(module), known)

    def manifest(self, ref: str) -> Manifest:
        """What a version consists of."""
        return self._manifest_of(self.resolve(ref))

    def resolve(self, ref: str) -> Version:
        """The version a ref means now. Raises NoSuchThing."""
        return self.catalogue.resolve(Ref.parse(ref))

    def models(self) -> list[Model]:
        return self.catalogue.models()

    def versions(self, name: str) -> list[Version]:
        """The newest first."""
        return self.catalogue.versions(ModelName.parse(name))

    def diff(self, before: str, after: str) -> Diff:
        """Tensors and files added, removed and changed, and the bytes both have."""
        return diff_manifests(self.manifest(before), self.manifest(after))

    def cost(self, ref: str) -> Cost:
        """What a version takes, shares with others, and would give back. Raises NoSuchThing."""
        if self.catalogue.is_service:
            return self.catalogue.cost(Ref.parse(ref))
        copies = self.store.stat(layout.YARD).replication  # as files are that nobody asked for
        return self.catalogue.cost(Ref.parse(ref), copies=copies)

    def keep(
        self, ref: str, *, replication: int | None = None, policy: str | None = None
    ) -> Version:
        """Ask for copies or an HDFS storage policy for a version; what is None stays as it is.

        Raises NoSuchThing, Unsupported.
        """
        if self.catalogue.is_service:
            return self.catalogue.keep(Ref.parse(ref), copies=replication, policy=policy)
        kept = self.registry.keep_on(self.store, Ref.parse(ref), copies=replication, policy=policy)
        self.registry.settle_replication(self.store)
        self._settle()
        return kept

    def delete(self, ref: str, *, reason: str = "") -> Version:
        """Take a version out of sight. Raises NoSuchThing, Protected."""
        removed = self.catalogue.remove(Ref.parse(ref), reason=reason)
        self._settle()
        return removed

    def delete_model(self, name: str) -> None:
        """Remove a model that has no versions any more. Raises NoSuchThing, Protected."""
        self.catalogue.remove_model(ModelName.parse(name))
        self._settle()

    def set_alias(
        self,
        name: str,
        alias: str,
        to: int | str | None,
        *,
        reason: str = "",
        expect: int | Anything | None = ANYTHING,
    ) -> AliasMove:
        """Put an alias on a version (its number, or a selector such as `v3`); None removes it.

        `expect=3`: only if it is on version 3 now; `expect=None`: only if there is no such alias.
        Raises NoSuchThing, AliasMoved.
        """
        model = ModelName.parse(name)
        number = self.resolve(f"{model}@{to}").number if isinstance(to, str) else to
        moved = self.catalogue.move_alias(
            model, AliasName(alias), number, reason=reason, expect=expect
        )
        self._settle()
        return moved

    def alias_log(self, name: str, alias: str, *, as_of: datetime | None = None) -> list[AliasMove]:
        """The moves of an alias, newest first."""
        return self.catalogue.alias_log(ModelName.parse(name), AliasName(alias), as_of=as_of)

    def rollback_alias(self, name: str, alias: str, *, reason: str = "") -> AliasMove:
        """Put an alias back where it was before its last move."""
        moved = self.catalogue.rollback_alias(
            ModelName.parse(name), AliasName(alias), reason=reason
        )
        self._settle()
        return moved

    def set_retention(self, name: str, retention: Retention | None) -> None:
        """Say which versions of a model gc may remove by itself; None: none."""
        self.catalogue.set_retention(ModelName.parse(name), retention)
        self._settle()

    def close(self) -> None:
        for snapshot in self._in_use.values():
            snapshot.close()
        self.catalogue.close()
        self._via.close()

    def _version_to_use(self, ref: str) -> Version:
        """A version; that it is used is noted, for retention by last use, and on this node."""
        parsed = Ref.parse(ref)
        try:
            version = self.resolve(ref)
        except Retryable as why:
            if self._settings.on_unavailable != "cached":
                raise
            if (known := recalled(self._remembered, parsed, str(why))) is None:
                raise
            return known
        if isinstance(version, RememberedVersion):
            return version
        self._remembered.note(parsed, version)
        try:
            self.catalogue.mark_used(Ref.parse(version.ref))
        except (Retryable, NotAllowed) as why:
            _log.warning("version.use_not_noted", version=version.ref, reason=why)
        return version

    def _manifest_to_use(self, ref: str) -> Manifest:
        return self._manifest_of(self._version_to_use(ref))

    def _manifest_of(self, version: Version) -> Manifest:
        """A version's manifest, as this node has it or else the yard. Raises NotOnNode."""
        self._via.expect(version)
        digest = Digest(version.digest)
        if (known := self._remembered.manifest(digest)) is not None:
            return known
        manifest = self._via.manifest(version)
        self._remembered.keep(digest, manifest)
        return manifest

    def _settle(self) -> None:
        """Write out the records of what was just done; if that fails, anyone can do it later."""
        if self.catalogue.is_service:
            return
        try:
            self.catalogue.flush_outbox(self.store)
        except Retryable as why:
            _log.warning("yard.records_wait", reason=why)


def open_yard(
    url: str | None = None, *, token: str | None = None, settings: Settings | None = None
) -> Yard:
    """Open a yard by its service's `http(s)://…`, or by its store: `hdfs://…` or a folder.

    Without a URL: WEIGHTYARD_URL; else WEIGHTYARD_STORE with WEIGHTYARD_DB; else a folder below
    WEIGHTYARD_HOME. A store without a database of its own gets an SQLite file: in the folder, or
    for HDFS below WEIGHTYARD_HOME, which makes it a yard of this one host.
    """
    settings = settings or Settings()
    chosen = chosen_url(url, settings)
    if settings.offline:
        return _open_offline(chosen, settings)
    try:
        if is_service(chosen):
            secret = settings.token.get_secret_value() if settings.token is not None else None
            return _open_service(str(chosen), token or secret, settings)
        if settings.via == "service":
            raise BadSetting("WEIGHTYARD_VIA=service needs a service: set WEIGHTYARD_URL")
        store = open_store(chosen, settings)
        return _open_database(store, settings, known_name(chosen, settings))
    except Retryable as why:
        if settings.on_unavailable != "cached":
            raise
        _log.warning("yard.unavailable", yard=known_name(chosen, settings), reason=why)
        return _open_offline(chosen, settings)


def known_name(chosen: str | None, settings: Settings) -> str:
    """What this node remembers a yard by."""
    folder = chosen or settings.home / "store"
    return str(folder) if "://" in str(folder) else str(Path(folder).expanduser().absolute())


def store_url(url: str | None, settings: Settings) -> str | None:
    """The store of the yard that would be opened; None: the default. For who runs a yard.

    Raises BadSetting if that is a service, which keeps its store and database to itself.
    """
    chosen = chosen_url(url, settings)
    if is_service(chosen):
        raise BadSetting(
            f"{chosen} is a service; this needs the yard's store and database: --yard STORE, or "
            "WEIGHTYARD_STORE and WEIGHTYARD_DB instead of WEIGHTYARD_URL"
        )
    return chosen


def chosen_url(url: str | None, settings: Settings) -> str | None:
    """The argument, else WEIGHTYARD_URL, else WEIGHTYARD_STORE; None: the default folder."""
    if url is None and settings.url is not None and settings.store is not None:
        raise BadSetting("WEIGHTYARD_URL and WEIGHTYARD_STORE are both set: unset one of them")
    return url or settings.url or settings.store


def current_user() -> str:
    """Who does things here, for history and audit, where no token says it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id may have no name
        return f"uid {os.getuid()}"


def is_service(url: str | None) -> bool:
    """Whether this is where a service is, rather than a store."""
    return url is not None and url.lower().startswith(("http://", "https://"))


def _open_service(url: str, token: str | None, settings: Settings) -> Yard:
    from weightyard.client.catalogue import HttpCatalogue

    with ExitStack() as opened:
        catalogue = HttpCatalogue(url, token, deadline_s=settings.deadline_s)
        opened.callback(catalogue.close)
        try:
            about = catalogue.about()
        except (RegistryUnavailable, DeadlineExceeded) as why:
            raise RegistryUnavailable(f"{url} does not answer: {why}") from why
        via = chosen_via(catalogue, about, settings)
        opened.pop_all()
    return Yard(via, catalogue, block_bytes=about.block_bytes, settings=settings, name=url)


def _open_offline(chosen: str | None, settings: Settings) -> Yard:
    """A yard of which only what is on this node can be had; nothing is connected to."""
    name = known_name(chosen, settings)
    catalogue = OfflineCatalogue(Remembered(settings.cache, name))
    return Yard(
        cast("Store", OfflineStore(name)),
        cast("Catalogue", catalogue),
        block_bytes=MAX_BLOCK_BYTES,  # nothing is pushed
        settings=settings,
        name=name,
    )


def _open_database(store: Store, settings: Settings, name: str) -> Yard:
    from weightyard.registry import binding, migrate
    from weightyard.registry.registry import Registry

    with ExitStack() as opened:
        opened.enter_context(store)
        database = open_database(store, settings)
        opened.callback(database.close)
        if database.is_sqlite:
            migrate.upgrade(database)
        registry = Registry(database, store=store, who=current_user())
        try:
            bound = binding.bind(database, store)
        except StoreUnavailable as why:
            raise StoreUnavailable(f"{store.url} does not answer: {why}") from why
        opened.pop_all()
    return Yard(store, registry, block_bytes=bound.block_bytes, settings=settings, name=name)


def open_database(store: Store, settings: Settings) -> Database:
    """The database of a store's registry, whatever its schema; the folder of a new one is made."""
    from weightyard.registry.database import Database

    database = Database(database_url(store, settings))
    if settings.db is None:
        folder = Path(str(database.url.database)).parent
        with translated(folder):
            folder.mkdir(parents=True, exist_ok=True)
    return database


def database_url(store: Store, settings: Settings) -> str:
    """Where a store's registry is: WEIGHTYARD_DB, or an SQLite file of its own."""
    if settings.db is not None:
        return settings.db
    if isinstance(store, LocalStore):
        folder = store.folder
    else:
        key = hashlib.blake2s(store.url.encode(), digest_size=8).hexdigest()
        folder = settings.home / "registries" / key
    return f"sqlite:///{folder / 'registry.db'}"


def _publication(said: Mapping[str, Any]) -> Publication:
    """Raises BadSetting where something is over its bound."""
    try:
        return Publication(**said)
    except ValidationError as why:
        first = why.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadSetting(f"{where}: {first['msg']}") from None


def _some(files: Sequence[FileEntry]) -> str:
    shown = ", ".join(file.path for file in files[:5])
    return shown if len(files) <= 5 else f"{shown} and {len(files) - 5} more"
