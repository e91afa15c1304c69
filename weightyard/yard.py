"""Yard: a store and its one registry, and what people do with them."""

from __future__ import annotations

import getpass
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ValidationError

from weightyard.errors import (
    BadSetting,
    DeadlineExceeded,
    NoSuchThing,
    NotAllowed,
    RegistryUnavailable,
    Retryable,
    StoreUnavailable,
    Unsupported,
    UploadExpired,
)
from weightyard.format.assembly import manifest_of
from weightyard.format.manifest import FileEntry, Manifest
from weightyard.logs import Log
from weightyard.names import AliasName, BlockId, Digest, ModelName, Ref
from weightyard.records import (
    AliasMove,
    Cost,
    Diff,
    Model,
    Publication,
    Pushed,
    PushPlan,
    Retention,
    Version,
)
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.opening import open_store
from weightyard.storage.store import FileOptions, Store
from weightyard.transfer.bases import bases_of
from weightyard.transfer.catalogue import ANYTHING, Anything, Catalogue, Upload
from weightyard.transfer.diff import diff_manifests
from weightyard.transfer.folder import read_folder
from weightyard.transfer.gather import Gathered, gather_files, is_wanted
from weightyard.transfer.preview import preview
from weightyard.transfer.publish import publish, read_manifest
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import translated
from weightyard.transfer.writer import Content, WriteOptions, Writer

if TYPE_CHECKING:
    import torch

    from weightyard.registry.database import Database
    from weightyard.registry.registry import Registry

_log = Log(__name__)

_HEARTBEAT_S = 60.0


class Yard:
    """What `weightyard.open()` returns. Thread-safe; a context manager.

    Refs are `team/bert@prod`, `@v3`, `@<digest>`, `@latest` or nothing for the newest version.
    """

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        *,
        block_bytes: int,
        settings: Settings | None = None,
    ) -> None:
        self.store = store
        self.catalogue = catalogue
        self._block_bytes = block_bytes
        self._settings = settings or Settings()

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
        from weightyard.registry.registry import Registry

        return (
            isinstance(self.store, LocalStore)
            and isinstance(self.catalogue, Registry)
            and self.catalogue.database.is_sqlite
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
        contents, parent = gathered.contents, publication.parent
        replication, policy = publication.replication, publication.policy
        reader = Reader(self.store, self.catalogue)
        if delta != "off" and parent is not None:
            base = self.manifest(parent)
            contents = [
                Content(content.split, content.sources, bases_of(content.split, base))
                for content in contents
            ]
        options = WriteOptions(
            replication=replication,
            policy=policy,
            min_replicas=min(2, replication or 2) if self.store.replicates else 1,
            compress=codec == "auto",
            delta=delta,
        )
        with self._upload(model, publication) as upload:
            writer = Writer(self.store, upload, options, progress, reader)
            blocks = writer.write(contents)
            manifest = manifest_of([content.split for content in contents], blocks)
            version = publish(self.store, upload, manifest, publication, secrets.token_hex(16))
        self._settle()
        report = writer.report
        return Pushed(
            **version.model_dump(),
            new_bytes=report.new_bytes,
            stored_bytes=report.stored_bytes,
            packs_written=report.packs_written,
        )

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
        manifest = self._manifest_to_use(ref)
        target = Path(folder)
        files = [file for file in manifest.files if is_wanted(file.path, include, exclude)]
        if not files and manifest.files:
            raise NoSuchThing(f"{ref} has no file that fits; it has {_some(manifest.files)}")
        with translated(target):
            target.mkdir(parents=True, exist_ok=True)
        read_folder(Reader(self.store, self.catalogue), manifest, target, files, progress)
        return target

    def load(self, ref: str, device: Any = "cpu") -> dict[str, torch.Tensor]:
        """A version's tensors by name. Raises NoSuchThing, Damaged, Retryable."""
        from weightyard.loader.load import load_tensors

        return load_tensors(Reader(self.store, self.catalogue), self._manifest_to_use(ref), device)

    def manifest(self, ref: str) -> Manifest:
        """What a version consists of."""
        return read_manifest(self.store, Digest(self.resolve(ref).digest))

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
        copies = self.store.stat(layout.YARD).replication  # as files are that nobody asked for
        return self.catalogue.cost(Ref.parse(ref), copies=copies)

    def keep(
        self, ref: str, *, replication: int | None = None, policy: str | None = None
    ) -> Version:
        """Ask for copies or an HDFS storage policy for a version; what is None stays as it is.

        Raises NoSuchThing, Unsupported.
        """
        if not self.store.replicates:
            raise Unsupported(f"{self.store.url} keeps one copy: use an hdfs:// store")
        version = self.resolve(ref)
        if policy is not None:
            self._try_policy(version, policy)
        kept = self.registry.keep(Ref.parse(version.ref), copies=replication, policy=policy)
        self.registry.settle_replication(self.store)
        self._settle()
        return kept

    def delete(self, ref: str, *, reason: str = "") -> Version:
        """Take a version out of sight. Raises NoSuchThing, Protected."""
        removed = self.catalogue.remove(Ref.parse(ref), reason=reason)
        self._settle()
        return removed

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
        self.catalogue.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _manifest_to_use(self, ref: str) -> Manifest:
        """A version's manifest; that it is used is noted, for retention by last use."""
        version = self.resolve(ref)
        try:
            self.catalogue.mark_used(Ref.parse(version.ref))
        except (Retryable, NotAllowed) as why:
            _log.warning("version.use_not_noted", version=version.ref, reason=why)
        return read_manifest(self.store, Digest(version.digest))

    def _try_policy(self, version: Version, policy: str) -> None:
        """Set a policy on one pack of a version: a store that has no such policy says so here."""
        manifest = read_manifest(self.store, Digest(version.digest))
        blocks = [BlockId(block.hex) for block in manifest.blocks[:1]]
        for placements in self.catalogue.placements(blocks).values():
            self.store.adjust(layout.pack(placements[0].pack), FileOptions(policy=policy))

    @contextmanager
    def _upload(self, model: ModelName, publication: Publication) -> Iterator[Upload]:
        """An upload that is kept alive, and abandoned if the work fails."""
        upload = self.catalogue.open_upload(model, publication)
        done = threading.Event()
        beats = threading.Thread(
            target=_keep_alive, args=(upload, done), name="weightyard-heartbeat", daemon=True
        )
        beats.start()
        try:
            yield upload
        except BaseException:
            _abandon(upload)
            raise
        finally:
            done.set()
            beats.join()

    def _settle(self) -> None:
        """Write out the records of what was just done; if that fails, anyone can do it later."""
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
    if is_service(chosen):
        secret = settings.token.get_secret_value() if settings.token is not None else None
        return _open_service(str(chosen), token or secret, settings)
    return _open_database(open_store(chosen, settings), settings)


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
        store = open_store(about.store, settings)
        opened.pop_all()
    return Yard(store, catalogue, block_bytes=about.block_bytes, settings=settings)


def _open_database(store: Store, settings: Settings) -> Yard:
    from weightyard.registry import binding, migrate
    from weightyard.registry.registry import Registry

    with ExitStack() as opened:
        opened.enter_context(store)
        database = open_database(store, settings)
        opened.callback(database.close)
        if database.is_sqlite:
            migrate.upgrade(database)
        registry = Registry(database, who=current_user())
        try:
            bound = binding.bind(database, store)
        except StoreUnavailable as why:
            raise StoreUnavailable(f"{store.url} does not answer: {why}") from why
        opened.pop_all()
    return Yard(store, registry, block_bytes=bound.block_bytes, settings=settings)


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


def _keep_alive(upload: Upload, done: threading.Event) -> None:
    while not done.wait(_HEARTBEAT_S):
        try:
            upload.heartbeat()
        except UploadExpired as why:
            _log.warning("upload.expired", upload=upload.id, reason=why)
            return  # the writer is told by its next call
        except Retryable as why:
            _log.warning("upload.heartbeat_failed", upload=upload.id, reason=why)


def _abandon(upload: Upload) -> None:
    try:
        upload.abandon()
    except Retryable as why:
        _log.warning("upload.not_abandoned", upload=upload.id, reason=why)  # its lease will end
