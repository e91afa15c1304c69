"""Yard: a store and its one registry, and what people do with them."""

from __future__ import annotations

import fnmatch
import getpass
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from weightyard.errors import BadSetting, FileMissing, Retryable, UploadExpired
from weightyard.format.assembly import manifest_of
from weightyard.format.manifest import FileEntry, Manifest
from weightyard.logs import Log
from weightyard.names import AliasName, Digest, ModelName, Ref
from weightyard.records import AliasMove, Diff, Model, Publication, Pushed, Version
from weightyard.settings import Settings
from weightyard.storage.local import LocalStore
from weightyard.storage.opening import open_store
from weightyard.storage.store import Store
from weightyard.transfer.bases import bases_of
from weightyard.transfer.catalogue import ANYTHING, Anything, Catalogue, Upload
from weightyard.transfer.diff import diff_manifests
from weightyard.transfer.folder import folder_contents, read_folder
from weightyard.transfer.publish import publish, read_manifest
from weightyard.transfer.reader import Reader
from weightyard.transfer.writer import Content, WriteOptions, Writer

if TYPE_CHECKING:
    import torch

    from weightyard.registry.registry import Registry

_log = Log(__name__)

_HEARTBEAT_S = 60.0
_MAX_CONFIG_BYTES = 1 << 20


class Yard:
    """What `weightyard.open()` returns. Thread-safe; a context manager.

    Refs are `team/bert@prod`, `@v3`, `@<digest>`, `@latest` or nothing for the newest version.
    """

    def __init__(self, store: Store, catalogue: Catalogue, *, block_bytes: int) -> None:
        self.store = store
        self.catalogue = catalogue
        self._block_bytes = block_bytes

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

    def push(
        self,
        source: str | Path | Mapping[str, Any],
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

        What the store has already is not sent again, so a push that was interrupted goes on where
        it stopped. Nothing is visible before all of it is. Raises Conflict, Refused, Retryable.
        """
        contents, config = self._contents(source, include, exclude)
        publication = Publication(
            message=message,
            parent=str(Ref.parse(parent)) if parent is not None else None,
            metrics=dict(metrics or {}),
            tags=dict(tags or {}),
            config=config,
            alias=AliasName(alias).text if alias is not None else None,
            expect_latest=expect_latest,
            replication=replication,
            policy=policy,
        )
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
        with self._upload(ModelName.parse(name), publication) as upload:
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
        manifest = self.manifest(ref)
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        files = [file for file in manifest.files if _is_wanted(file.path, include, exclude)]
        if not files and manifest.files:
            raise FileMissing(f"{ref} has no file that fits; it has {_some(manifest.files)}")
        reader = Reader(self.store, self.catalogue)
        for file in files:
            read_folder(reader, manifest, target, [file])
            if progress is not None:
                progress(file.bytes)
        return target

    def load(self, ref: str, device: Any = "cpu") -> dict[str, torch.Tensor]:
        """A version's tensors by name. Raises NoSuchThing, Damaged, Retryable."""
        from weightyard.loader.load import load_tensors

        return load_tensors(Reader(self.store, self.catalogue), self.manifest(ref), device)

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

    def _contents(
        self,
        source: str | Path | Mapping[str, Any],
        include: Sequence[str] | None,
        exclude: Sequence[str] | None,
    ) -> tuple[list[Content], dict[str, Any] | None]:
        if isinstance(source, Mapping):
            from weightyard.loader.state import state_content

            return [state_content(source, self._block_bytes)], None
        contents = folder_contents(
            Path(source),
            self._block_bytes,
            lambda path: _is_wanted(path.text, include, exclude),
        )
        return contents, _config_of(Path(source))

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
    if url is None and settings.url is not None and settings.store is not None:
        raise BadSetting("WEIGHTYARD_URL and WEIGHTYARD_STORE are both set: unset one of them")
    url = url or settings.url
    if url is not None and url.lower().startswith(("http://", "https://")):
        secret = settings.token.get_secret_value() if settings.token is not None else None
        return _open_service(url, token or secret, settings)
    return _open_database(open_store(url, settings), settings)


def _open_service(url: str, token: str | None, settings: Settings) -> Yard:
    from weightyard.client.catalogue import HttpCatalogue

    catalogue = HttpCatalogue(url, token)
    about = catalogue.about()
    return Yard(open_store(about.store, settings), catalogue, block_bytes=about.block_bytes)


def _open_database(store: Store, settings: Settings) -> Yard:
    from weightyard.registry import binding, migrate
    from weightyard.registry.database import Database
    from weightyard.registry.registry import Registry

    url = settings.db or _sqlite_beside(store, settings)
    database = Database(url)
    if database.is_sqlite:
        migrate.upgrade(database)
    registry = Registry(database, who=getpass.getuser())
    bound = binding.bind(database, store)
    return Yard(store, registry, block_bytes=bound.block_bytes)


def _sqlite_beside(store: Store, settings: Settings) -> str:
    if isinstance(store, LocalStore):
        folder = store.folder
    else:
        key = hashlib.blake2s(store.url.encode(), digest_size=8).hexdigest()
        folder = settings.home / "registries" / key
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'registry.db'}"


def _config_of(source: Path) -> dict[str, Any] | None:
    """The model's config.json, if it has one that is a JSON object of a sensible size."""
    file = source / "config.json"
    try:
        if not file.is_file() or file.stat().st_size > _MAX_CONFIG_BYTES:
            return None
        config = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _is_wanted(path: str, include: Sequence[str] | None, exclude: Sequence[str] | None) -> bool:
    def fits(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)

    return (include is None or fits(include)) and not (exclude is not None and fits(exclude))


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
