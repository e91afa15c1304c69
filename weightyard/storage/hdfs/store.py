"""HdfsStore: packs, manifests and records in a folder of HDFS."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hdfs_native import FileStatus
from typing_extensions import Buffer

from weightyard import jitter
from weightyard.errors import (
    BadSetting,
    FileMissing,
    InvalidName,
    Refused,
    StoreUnavailable,
    Unsupported,
    YardError,
)
from weightyard.logs import Log
from weightyard.names import UploadId
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.datanode import DataNodeReader
from weightyard.storage.hdfs.diagnosis import Diagnosis
from weightyard.storage.hdfs.direct_writes import DirectWrites
from weightyard.storage.hdfs.fallbacks import (
    Fallback,
    LibhdfsReads,
    NativeReads,
    WebHdfsReads,
    WhenNeeded,
)
from weightyard.storage.hdfs.namenode import Locator, NameNode
from weightyard.storage.hdfs.native import Namespace
from weightyard.storage.hdfs.reading import Reading
from weightyard.storage.hdfs.short_circuit import ShortCircuit
from weightyard.storage.hdfs.sink import Way
from weightyard.storage.hdfs.writing import Writing, create
from weightyard.storage.store import (
    Again,
    FileOptions,
    FileStat,
    Location,
    Ownership,
    Read,
    ReadPath,
    Replica,
    Served,
    Stage,
    StagedFile,
    Store,
    StorePath,
)

_log = Log(__name__)

_PROBING_S, _PROBE_PAUSE_S = 5.0, 0.1
"""For how long writing a probe is begun again, and after what pause: with encrypted transfers some
writes fail at once although the next one works (docs/hdfs.md)."""
_READ_SILENCE_S = 3.0
"""How long hdfs-native waits for a DataNode when it reads, before it asks the next. A write that
gives one up may fail as a whole, so there it waits longer. Connections that it kept are tried
first, each for as long; it keeps them for three seconds, so that one of them at most is."""

UNCHECKED_PATHS = (ReadPath.SHORT_CIRCUIT, ReadPath.DIRECT)

READ_PATHS = (*UNCHECKED_PATHS, ReadPath.LIBHDFS, ReadPath.NATIVE, ReadPath.WEBHDFS)
"""The ways bytes can come, best first."""

CHECKED_PATHS = (ReadPath.NATIVE, ReadPath.WEBHDFS, ReadPath.LIBHDFS)
"""The ways that look at HDFS's own checksums; the others leave checking to the reader.

Files that need them are small, and no reason to start libhdfs's JVM: so that comes last.
"""


@dataclass(frozen=True, slots=True)
class Probed:
    """What was found out by writing a small file and reading it."""

    ways: Mapping[ReadPath, str | None]
    """For each way to read: None if it works, else why not. Empty if there was nothing to read."""
    not_written: YardError | None
    """Why no file could be written. What was read then is `yard.json`, if there is one."""


class HdfsStore(Store):
    """Files below one folder of HDFS. Tries nothing twice: wrap it in a RetryingStore.

    New files and folders take their modes from the root folder, which `init` sets.
    """

    replicates = True

    def __init__(
        self,
        url: str,
        settings: Settings | None = None,
        *,
        read_paths: Sequence[ReadPath] = READ_PATHS,
        locator: Locator | None = None,
        writes_directly: bool = True,
    ) -> None:
        """`read_paths`: the ways that may be used; `locator`: asked instead of a NameNode.

        `writes_directly`: whether to send new files to DataNodes, if those take them.
        """
        self.url = url
        self._settings = settings or Settings()
        self._cluster = Cluster.of(url, self._settings)
        self._lock = threading.Lock()
        self._namenode_used: NameNode | None = None
        self._namespace_used: Namespace | None = None
        self._namespace_to_read_used: Namespace | None = None
        self._writes_directly = writes_directly
        self._direct_writes_used: DirectWrites | None = None
        self._locator = locator
        self._diagnosis = Diagnosis(self._locate, self._data_node_reader())
        self._reading = self._reading_by(read_paths)
        careful = [path for path in CHECKED_PATHS if path in read_paths]
        self._careful = self._reading_by(careful) if careful else self._reading
        self._mode: int | None = None
        if locator is None:
            _ = self._namenode, self._namespace  # raises now what is wrong with the settings

    def init(self, ownership: Ownership | None = None) -> None:
        if not self._cluster.root:  # its mode and owner are everyone's
            where = f"{self._cluster.url}/weightyard"
            raise BadSetting(f"{self.url} is HDFS's root: name a folder, such as {where}")
        ownership = ownership or Ownership()
        for folder in (self._root, *map(self._cluster.at, layout.FOLDERS)):
            try:
                self._namespace.make_folder(folder, ownership.folder_mode)
            except FileMissing as why:  # there is a file
                raise Refused(str(why)) from None
            self._namespace.own(folder, ownership)
        self._mode = ownership.folder_mode

    def stage(self, path: StorePath, options: FileOptions | None = None) -> Stage:
        options = options or FileOptions()
        writing = create(
            self._namespace,
            self._ways_to_write(),
            self._cluster.at(path),
            self._folder_mode(),
            options.replication,
            options.planned_bytes,
        )
        is_counted = options.counts_replicas and self._locator is None
        stage = _HdfsStage(path, writing, self._spread if is_counted else None)
        if options.policy is not None:
            # Before the first byte: blocks are placed by the policy at the time they are allocated.
            try:
                self._namenode.set_policy(path, options.policy, self._deadline(None), is_empty=True)
            except BaseException:
                stage.abort()
                raise
        return stage

    def publish(self, staged: StagedFile, path: StorePath) -> None:
        self._namespace.rename(
            self._cluster.at(staged.path), self._cluster.at(path), self._folder_mode()
        )

    def stat(self, path: StorePath) -> FileStat:
        status = self._namespace.status(self._cluster.at(path))
        if status.isdir:
            raise FileMissing(f"{path} is a folder, not a file")
        return _stat(path, status)

    def list(self, folder: StorePath) -> Iterator[FileStat]:
        for path, status in self._named(self._namespace.list(self._cluster.at(folder))):
            yield _stat(path, status)

    def top(self) -> Sequence[StorePath]:
        entries = self._namespace.entries(self._cluster.root)
        return [path for path, _ in self._named(entries)]

    def _named(self, found: Iterable[FileStatus]) -> Iterator[tuple[StorePath, FileStatus]]:
        """Files with their paths, without those that no store writes."""
        prefix = f"{self._cluster.root}/"
        for status in found:
            try:
                yield StorePath(status.path.removeprefix(prefix)), status
            except InvalidName:
                _log.warning("store.foreign_file", file=status.path)

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        return self._locate(path, self._deadline(timeout_s))

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        is_checked_by_reader = replica is not None or layout.has_checksums(location.path)
        reading = self._reading if is_checked_by_reader else self._careful
        return reading.read(location, reads, replica, self._deadline(timeout_s, cancel))

    def delete(self, path: StorePath) -> bool:
        return self._namespace.delete(self._cluster.at(path))

    def adjust(self, path: StorePath, options: FileOptions) -> None:
        self.stat(path)
        if options.replication is not None:
            self._namespace.set_replication(self._cluster.at(path), options.replication)
        if options.policy is not None:
            self._namenode.set_policy(path, options.policy, self._deadline(None))

    def probe(self) -> Probed:
        """Write a small file and read it each way.

        For those who want to know before the first load; reading finds out by itself.
        """
        content, upload = secrets.token_bytes(64 * 1024), UploadId.new()
        folder = layout.staging_folder(upload)
        try:
            staged = self._put_probe(upload, content)
        except YardError as why:
            with suppress(YardError):  # who may not write may not delete either
                self.delete(folder)
            return Probed(self._ways_to_read(layout.YARD), why)
        try:
            return Probed(self._ways_to_read(staged.path, content), None)
        finally:
            self.delete(staged.path)
            self.delete(folder)

    def why_not_written_directly(self) -> str | None:
        """Why new files go by hdfs-native; None: as far as is known, straight to DataNodes.

        What the configuration does not say shows when a file is written, such as a probe's.
        """
        used = self._direct_writes_used
        return None if used is None else used.why_not

    def _put_probe(self, upload: UploadId, content: bytes) -> StagedFile:
        """Tries a few times: one write that fails proves nothing yet."""
        until, attempt = time.monotonic() + _PROBING_S, 0
        while True:
            try:
                name = layout.probe(upload, attempt)
                with self.stage(name, FileOptions(planned_bytes=len(content))) as stage:
                    stage.write(content)
                    return stage.close()
            except StoreUnavailable as why:
                if time.monotonic() > until:
                    raise
                attempt += 1
                _log.info("probe.tried_again", attempt=attempt, reason=why)
            time.sleep(jitter.about(_PROBE_PAUSE_S))

    def close(self) -> None:
        self._reading.close()
        self._careful.close()
        self._diagnosis.close()
        if self._namenode_used is not None:
            self._namenode_used.close()
        for namespace in (self._namespace_used, self._namespace_to_read_used):
            if namespace is not None:
                namespace.close()
        if self._direct_writes_used is not None:
            self._direct_writes_used.close()

    @property
    def _namenode(self) -> NameNode:
        """Made when needed: a reader with a locator may have no Kerberos, or no address for it."""
        with self._lock:
            if self._namenode_used is None:
                self._namenode_used = NameNode(self._cluster)
            return self._namenode_used

    @property
    def _namespace(self) -> Namespace:
        with self._lock:
            if self._namespace_used is None:
                self._namespace_used = Namespace(self._cluster, limit_s=self._settings.deadline_s)
            return self._namespace_used

    @property
    def _namespace_to_read(self) -> Namespace:
        """Whose client leaves a silent DataNode sooner: hdfs-native has one such limit for all."""
        with self._lock:
            if self._namespace_to_read_used is None:
                self._namespace_to_read_used = Namespace(
                    self._cluster, limit_s=self._settings.deadline_s, silence_s=_READ_SILENCE_S
                )
            return self._namespace_to_read_used

    def _ways_to_write(self) -> Sequence[Way]:
        """The best first."""
        if not self._writes_directly:
            return [self._namespace.create]
        with self._lock:
            if self._direct_writes_used is None:
                limit_s = self._settings.deadline_s
                self._direct_writes_used = DirectWrites(self._cluster, limit_s=limit_s)
        return [self._direct_writes_used.create, self._namespace.create]

    @property
    def _root(self) -> str:
        return self._cluster.root or "/"

    def _ways_to_read(
        self, path: StorePath, content: bytes | None = None
    ) -> Mapping[ReadPath, str | None]:
        """Nothing if the file is not there. `content`: what is in it, if that is known."""
        try:
            location = self.locate(path)
        except FileMissing:
            return {}
        return {way: self._try(way, location, content) for way in READ_PATHS}

    def _try(self, way: ReadPath, location: Location, content: bytes | None) -> str | None:
        got = bytearray(location.length)
        reading = self._reading_by((way,))
        try:
            reading.read(location, [Read(0, memoryview(got))], None, self._deadline(None))
        except YardError as why:
            return str(why)
        finally:
            reading.close()
        return None if content in (None, got) else "returned other bytes than were written"

    def _reading_by(self, paths: Sequence[ReadPath]) -> Reading:
        cluster = self._cluster
        ways: dict[ReadPath, Callable[[], Fallback]] = {
            ReadPath.LIBHDFS: lambda: LibhdfsReads(cluster, self._settings),
            ReadPath.NATIVE: lambda: NativeReads(cluster, self._namespace_to_read),
            ReadPath.WEBHDFS: lambda: WebHdfsReads(self._namenode),
        }
        fallbacks = [WhenNeeded(path, ways[path]) for path in paths if path in ways]
        direct = self._data_node_reader() if ReadPath.DIRECT in paths else None
        why_not = self._why_not(paths) if direct is None else None
        socket_path = cluster.domain_socket if ReadPath.SHORT_CIRCUIT in paths else None
        short_circuit = None if socket_path is None else ShortCircuit(socket_path)
        return Reading(direct, fallbacks, why_not, self._diagnosis.find_damage, short_circuit)

    def _why_not(self, paths: Sequence[ReadPath]) -> Unsupported | None:
        """Why the ways among these that are no fallbacks do not serve."""
        if ReadPath.DIRECT in paths:
            return Unsupported("the configuration asks for SASL or encryption of transfers")
        if ReadPath.SHORT_CIRCUIT not in paths:
            return None
        if self._cluster.domain_socket is None:
            return Unsupported("the configuration does not ask for short-circuit reads")
        return Unsupported("no DataNode of this host hands out its files")

    def _data_node_reader(self) -> DataNodeReader | None:
        """None if the configuration says that DataNodes do not answer in the clear."""
        if self._cluster.is_transfer_protected:
            return None
        return DataNodeReader(f"weightyard-{secrets.token_hex(4)}")

    def _locate(self, path: StorePath, deadline: Deadline) -> Location:
        return (self._locator or self._namenode).locate(path, deadline)

    def _spread(self, path: StorePath) -> Location:
        """Where a file lies, only to count replicas: does not ask whether they can be read."""
        return self._namenode.spread(path, self._deadline(None))

    def _folder_mode(self) -> int:
        if self._mode is None:
            self._mode = self._namespace.status(self._root).permission & 0o777
        return self._mode

    def _deadline(self, timeout_s: float | None, cancel: Cancel | None = None) -> Deadline:
        limit_s = self._settings.deadline_s if timeout_s is None else timeout_s
        return Deadline.after(limit_s, cancel)


class _HdfsStage(Stage):
    def __init__(
        self, path: StorePath, writing: Writing, spread: Callable[[StorePath], Location] | None
    ) -> None:
        self._path = path
        self._writing = writing
        self._spread = spread
        self._replicas: int | None = None

    def write(self, data: Buffer, again: Again | None = None) -> None:
        self._writing.write(data)

    def close(self) -> StagedFile:
        return StagedFile(self._path, self._writing.close(self._counted), self._replicas)

    def abort(self) -> None:
        self._writing.abort()

    def _counted(self) -> int | None:
        """The file's length, from the answer that also tells its replicas; None: not known."""
        if self._spread is None:
            return None
        try:
            found = self._spread(self._path)
        except YardError as why:  # the file is closed: this is no reason to write it again
            _log.warning("store.not_counted", file=self._path, reason=why)
            return None
        self._replicas = min((len(span.replicas) for span in found.spans), default=None)
        return found.length


def _stat(path: StorePath, status: FileStatus) -> FileStat:
    return FileStat(
        path, status.length, status.replication or 1, modified_s=status.modification_time / 1000
    )
