"""Via: which way a version's bytes go, straight to the store or through the service.

Straight from a store on HDFS means from its DataNodes; the service may tell where packs lie there.
This is the one place that decides. All else in a yard goes through the catalogue.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from weightyard.closing import Closing
from weightyard.errors import ForeignStore, Retryable, StoreUnavailable, Unsupported, YardError
from weightyard.format.assembly import manifest_of
from weightyard.format.manifest import FileEntry, Manifest
from weightyard.logs import Log
from weightyard.names import Digest, ModelName, Ref, UploadId
from weightyard.records import About, Publication, Pushed, Version
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.storage.opening import open_store
from weightyard.storage.store import FileOptions, Store
from weightyard.transfer.alive import kept_alive
from weightyard.transfer.appearing import appearing
from weightyard.transfer.bases import bases_of
from weightyard.transfer.catalogue import Catalogue, Upload
from weightyard.transfer.durable import least_replicas, require_kept
from weightyard.transfer.folder import is_there, read_folder
from weightyard.transfer.gather import Gathered
from weightyard.transfer.once import read_whole
from weightyard.transfer.publish import publish, read_manifest
from weightyard.transfer.reader import Reader, ReadsBlocks
from weightyard.transfer.source import FileSource, translated
from weightyard.transfer.verifying import require_content
from weightyard.transfer.writer import Content, WriteOptions, Writer

if TYPE_CHECKING:
    from weightyard.client.catalogue import HttpCatalogue
    from weightyard.client.upload import HttpUpload

_log = Log(__name__)

_PROBE_S = 5.0
"""How long it may take to find out whether the store can be reached."""

_RECHECK_S = 60.0
"""How long bytes go through the service before the store is tried again."""

_MAX_YARD_FILE_BYTES = 1 << 16

Progress = Callable[[int], None]
"""Called with how many more bytes are done, whenever some are."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A version that is to be published."""

    gathered: Gathered
    model: ModelName
    publication: Publication
    codec: Literal["auto", "raw"] = "auto"
    delta: Literal["off", "also", "only"] = "off"


@dataclass(frozen=True, slots=True)
class Incoming:
    """Files of a version that are to be put into a folder."""

    version: Version
    manifest: Manifest
    files: Sequence[FileEntry]
    folder: Path
    deadline: Deadline
    """How long a service is waited for."""


class Via(Closing):
    """A way for bytes. Thread-safe."""

    @property
    @abstractmethod
    def store(self) -> Store:
        """The store itself, for what only it can do. Raises StoreUnavailable, Unsupported."""

    @property
    def reads_by_locations(self) -> bool:
        """Whether the service tells where packs lie, so that no NameNode is asked."""
        return False

    def expect(self, version: Version) -> None:
        """Announce that a version will be read. Does not wait for anything."""

    @abstractmethod
    def manifest(self, version: Version, deadline: Deadline) -> Manifest:
        """A version's manifest, its digest checked. Raises Damaged, Retryable.

        `deadline`: how long it is waited for; a store has a deadline of its own besides.
        """

    @abstractmethod
    def reader(self, version: Version, manifest: Manifest, deadline: Deadline) -> ReadsBlocks:
        """A reader of a version's blocks. `deadline`: how long a service is waited for."""

    @abstractmethod
    def pull(self, incoming: Incoming, progress: Progress | None) -> None:
        """Put files of a version into a folder. Each appears when it is whole and verified.

        A file that is there already with this content stays. Raises Conflict (there is another
        file), Damaged, Retryable.
        """

    @abstractmethod
    def push(self, outgoing: Outgoing, progress: Progress | None) -> Pushed:
        """Publish a version: all of it, or nothing. Raises Conflict, Refused, Retryable.

        What the store has already is not sent again.
        """


class ViaStore(Via):
    """Bytes go straight to the store and come straight from it."""

    def __init__(self, store: Store, catalogue: Catalogue, settings: Settings) -> None:
        self._store = store
        self._catalogue = catalogue
        self._settings = settings

    @property
    def store(self) -> Store:
        return self._store

    def manifest(self, version: Version, deadline: Deadline) -> Manifest:
        try:
            return read_manifest(self._store, Digest(version.digest), deadline)
        except Retryable:
            # Raises DeadlineExceeded if the time is over: then that is why it failed.
            deadline.left(f"reading the manifest of {version.ref}")
            raise

    def reader(self, version: Version, manifest: Manifest, deadline: Deadline) -> Reader:
        return Reader(self._store, self._catalogue, settings=self._settings)

    def pull(self, incoming: Incoming, progress: Progress | None) -> None:
        reader = Reader(self._store, self._catalogue, settings=self._settings)
        read_folder(reader, incoming.manifest, incoming.folder, incoming.files, progress)

    def push(self, outgoing: Outgoing, progress: Progress | None) -> Pushed:
        require_kept(self._store, outgoing.publication.replication, outgoing.publication.policy)
        upload = self._catalogue.open_upload(outgoing.model, outgoing.publication)
        return self.push_under(upload, outgoing, progress)

    def push_under(self, upload: Upload, outgoing: Outgoing, progress: Progress | None) -> Pushed:
        return _push(outgoing, self, self._catalogue, upload, self._store, progress)

    def close(self) -> None:
        self._store.close()


class ViaDataNodes(ViaStore):
    """Bytes come straight from DataNodes; the service tells all else. For reading only.

    Needs no NameNode, and no Kerberos.
    """

    def __init__(self, store: Store, catalogue: HttpCatalogue, settings: Settings) -> None:
        """`store`: one that asks the service where packs lie."""
        super().__init__(store, catalogue, settings)
        self._service = catalogue

    @property
    def reads_by_locations(self) -> bool:
        return True

    def manifest(self, version: Version, deadline: Deadline) -> Manifest:
        return self._service.manifest(version, deadline)


class ViaService(Via):
    """Bytes go through the service, for hosts that do not reach the store.

    Files are pulled one by one, as they are. What is new is pushed in packs, as into the store.
    """

    def __init__(self, catalogue: HttpCatalogue, why: YardError) -> None:
        """`why`: the error for calls that need the store itself."""
        self._catalogue = catalogue
        self._why = why
        self.since = time.monotonic()

    @property
    def store(self) -> Store:
        raise type(self._why)(*self._why.args)

    def manifest(self, version: Version, deadline: Deadline) -> Manifest:
        return self._catalogue.manifest(version, deadline)

    def reader(self, version: Version, manifest: Manifest, deadline: Deadline) -> ReadsBlocks:
        return self._catalogue.reader(version, manifest, deadline)

    def pull(self, incoming: Incoming, progress: Progress | None) -> None:
        ref = Ref.parse(incoming.version.ref)
        told = progress or (lambda done_bytes: None)
        for file in incoming.files:
            target = incoming.folder.joinpath(*file.name.parts)
            if is_there(incoming.manifest, file, target):
                told(file.bytes)
                continue
            with appearing(target) as partial:
                with translated(target), partial.open("wb") as out:
                    self._catalogue.fetch_file(ref, file.name, out, told, incoming.deadline)
                require_content(incoming.manifest, file, FileSource(partial))

    def push(self, outgoing: Outgoing, progress: Progress | None) -> Pushed:
        upload = self._catalogue.open_upload(outgoing.model, outgoing.publication)
        return self.push_under(upload, outgoing, progress)

    def push_under(
        self, upload: HttpUpload, outgoing: Outgoing, progress: Progress | None
    ) -> Pushed:
        from weightyard.client.store import ServiceStore

        with ServiceStore(upload, self._catalogue.connection.host) as store:
            return _push(outgoing, self, self._catalogue, upload, store, progress)

    def close(self) -> None:
        pass  # the catalogue belongs to the yard, which closes it


class ViaEither(Via):
    """The best way that works from here, found out on first use.

    For reading, the first of these: from DataNodes, as the service tells where; from the store, by
    its NameNode; through the service. A host that can read the store may not be able to write it,
    so the way for pushes is found out separately. While bytes go through the service, the store is
    tried again every minute: it may only have been away for a moment.
    """

    def __init__(self, catalogue: HttpCatalogue, about: About, settings: Settings) -> None:
        self._catalogue = catalogue
        self._about = about
        self._settings = settings
        self._locator = catalogue.locator(settings)
        self._lock = threading.Lock()
        self._reading: Via | None = None
        self._writing: ViaStore | ViaService | None = None

    @property
    def store(self) -> Store:
        return self._for_reading().store

    @property
    def reads_by_locations(self) -> bool:
        return self._for_reading().reads_by_locations

    def expect(self, version: Version) -> None:
        self._locator.expect(version)

    def manifest(self, version: Version, deadline: Deadline) -> Manifest:
        return self._for_reading().manifest(version, deadline)

    def reader(self, version: Version, manifest: Manifest, deadline: Deadline) -> ReadsBlocks:
        return self._for_reading().reader(version, manifest, deadline)

    def pull(self, incoming: Incoming, progress: Progress | None) -> None:
        self._for_reading().pull(incoming, progress)

    def push(self, outgoing: Outgoing, progress: Progress | None) -> Pushed:
        # First, so that the file with which the store is tried has a row, should this be killed.
        upload = self._catalogue.open_upload(outgoing.model, outgoing.publication)
        return self._for_writing(upload.id).push_under(upload, outgoing, progress)

    def close(self) -> None:
        for way in (self._reading, self._writing):
            if way is not None:
                way.close()

    def _for_reading(self) -> Via:
        with self._lock:
            if self._reading is None or _is_due(self._reading):
                self._reading = self._from_datanodes() or self._to_store(_require_reading)
            return self._reading

    def _for_writing(self, upload: UploadId) -> ViaStore | ViaService:
        reading = self._for_reading()
        with self._lock:
            if self._writing is None or _is_due(self._writing):
                if isinstance(reading, ViaService):
                    self._writing = reading
                else:
                    self._writing = self._to_store(
                        lambda store, about: _require_writing(store, upload)
                    )
            return self._writing

    def _from_datanodes(self) -> ViaDataNodes | None:
        """This way, if a DataNode lets this host read the yard's own file; else None."""
        if not self._about.store.startswith(("hdfs://", "viewfs://")):
            return None
        from weightyard.storage.hdfs.store import (  # its clients are slow to import
            UNCHECKED_PATHS,
            HdfsStore,
        )

        locator, url = self._locator, self._about.store
        try:
            with HdfsStore(
                url, self._hurried, read_paths=UNCHECKED_PATHS, locator=locator
            ) as store:
                _require_reading(store, self._about)
        except YardError as why:
            _log.info("bytes.not_by_locations", store=url, reason=why)
            return None
        opened = open_store(url, self._settings, locator=locator)
        return ViaDataNodes(opened, self._catalogue, self._settings)

    def _to_store(self, require: Callable[[Store, About], None]) -> ViaStore | ViaService:
        """Straight to the store, if a short try works; else through the service, with a notice."""
        url = self._about.store
        try:
            with open_store(url, self._hurried, patient=False) as store:
                require(store, self._about)
        except YardError as why:
            _log.warning("bytes.through_service", store=url, reason=why)
            return ViaService(
                self._catalogue, StoreUnavailable(f"{url} cannot be used from here ({why})")
            )
        return ViaStore(open_store(url, self._settings), self._catalogue, self._settings)

    @property
    def _hurried(self) -> Settings:
        deadline_s = min(self._settings.deadline_s, _PROBE_S)
        return self._settings.model_copy(update={"deadline_s": deadline_s})


def _is_due(way: Via) -> bool:
    """Whether to look for a better way. Only ViaService is replaced: it needs no closing."""
    return isinstance(way, ViaService) and time.monotonic() > way.since + _RECHECK_S


def chosen_via(catalogue: HttpCatalogue, about: About, settings: Settings) -> Via:
    """The way that WEIGHTYARD_VIA chooses, for a yard behind a service."""
    match settings.via:
        case "store":
            return ViaStore(open_store(about.store, settings), catalogue, settings)
        case "service":
            why = Unsupported("WEIGHTYARD_VIA=service keeps this host from the store: unset it")
            return ViaService(catalogue, why)
        case "auto":
            return ViaEither(catalogue, about, settings)


def _push(
    outgoing: Outgoing,
    via: Via,
    catalogue: Catalogue,
    upload: Upload,
    store: Store,
    progress: Progress | None,
) -> Pushed:
    """Write what is new under an upload, and publish it. The same for all ways."""
    publication, contents = outgoing.publication, outgoing.gathered.contents
    options = WriteOptions(
        replication=publication.replication,
        policy=publication.policy,
        min_replicas=least_replicas(store, publication.replication),
        compress=outgoing.codec == "auto",
        delta=outgoing.delta,
    )
    with kept_alive(upload):
        bases: ReadsBlocks | None = None
        if outgoing.delta != "off" and publication.parent is not None:
            parent = catalogue.resolve(Ref.parse(publication.parent))
            base = via.manifest(parent, NEVER)
            bases = via.reader(parent, base, NEVER)
            contents = [
                Content(content.split, content.sources, bases_of(content.split, base))
                for content in contents
            ]
        writer = Writer(store, upload, options, progress, bases)
        blocks = writer.write(contents)
        version = publish(
            store,
            upload,
            manifest_of([content.split for content in contents], blocks),
            publication,
            secrets.token_hex(16),
            min_replicas=options.min_replicas,
        )
    report = writer.report
    return Pushed(
        **version.model_dump(),
        new_bytes=report.new_bytes,
        stored_bytes=report.stored_bytes,
        packs_written=report.packs_written,
    )


class _YardFile(msgspec.Struct):
    yard_id: str


def _require_reading(store: Store, about: About) -> None:
    """Require that the store can be read, and that it is the service's.

    A folder's path, or a cluster's name, may mean another one on this host.
    """
    content = read_whole(store, layout.YARD, _MAX_YARD_FILE_BYTES)
    try:
        found = msgspec.json.decode(content, type=_YardFile).yard_id
    except msgspec.DecodeError as why:
        raise ForeignStore(f"{store.url}/{layout.YARD} is not a yard's: {why}") from None
    if found != about.yard_id:
        raise ForeignStore(f"{store.url} is yard {found} here, {about.yard_id} for the service")


def _require_writing(store: Store, upload: UploadId) -> None:
    """Require that a file can be written into the store, under an upload. It is removed again."""
    with store.stage(layout.probe(upload), FileOptions(planned_bytes=1)) as stage:
        stage.write(b"?")
        staged = stage.close()
    store.delete(staged.path)
    store.delete(layout.staging_folder(upload))
