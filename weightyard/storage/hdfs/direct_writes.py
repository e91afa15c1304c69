"""Direct writes: new HDFS files are sent to DataNodes without a client library in between.

Why this is written by hand: docs/design/0010-direct-writes.md.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property

from weightyard.errors import YardError
from weightyard.logs import Log
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.lookup import Lookup
from weightyard.storage.hdfs.new_files import Defaults, NewBlock, NewFile, NewFiles, Target
from weightyard.storage.hdfs.pipeline import BadDataNode, Pipeline, WantsNoWriter
from weightyard.storage.hdfs.remote import MustBeEncrypted
from weightyard.storage.hdfs.rpc import NameNodeCalls, NotServed
from weightyard.storage.hdfs.sink import CannotWrite, Sink
from weightyard.storage.hdfs.wire import BlockAccess

_log = Log(__name__)

STALL_S = 10.0
"""How long acknowledgements may stay away. DataNodes wait for their disks now and then."""

_ANSWER_S = 10.0
_AVOIDED_S = 60.0
_GIVEN_UP_S = 600.0
_MOST_PIPELINES = 4  # tried for one block
_BEAT_EVERY_S = 5.0


class DirectWrites:
    """Writes files through DataNodes' own protocol. Thread-safe.

    If a DataNode fails in the middle, so does the file, and is written anew on others: most files
    are packs, and RetryingStore can give their bytes once more.
    """

    def __init__(self, cluster: Cluster, *, limit_s: float) -> None:
        self._client = f"weightyard-{secrets.token_hex(8)}"
        self._limit_s = limit_s
        self._calls = NameNodeCalls(
            cluster.namenodes, cluster.user, answer_s=min(_ANSWER_S, limit_s)
        )
        self._files = NewFiles(
            self._calls, self._client, by_hostname=cluster.uses_datanode_hostname
        )
        self._lookup = Lookup()
        self._lock = threading.Lock()
        self._avoided: dict[str, tuple[float, Target]] = {}
        self.why_not = (
            "the configuration asks for SASL or encryption of transfers"
            if cluster.is_transfer_protected
            else "the configuration asks for Kerberos"
            if cluster.is_kerberos
            else None
        )
        """Why files are not written this way; None: as far as is known, they are."""
        self._given_up_until = math.inf
        self._beats = _Beats()

    def create(
        self, path: str, mode: int, replication: int | None, block_bytes: int | None
    ) -> Sink:
        """Open a new file. Raises CannotWrite, and what the NameNode refuses."""
        if self.why_not is not None and time.monotonic() < self._given_up_until:
            raise CannotWrite(self.why_not)
        try:
            defaults = self._defaults
            if defaults.encrypts_transfers:
                raise self._given_up("DataNodes encrypt what they send")
            block_bytes = block_bytes or defaults.block_bytes
            file = self._files.create(path, mode, replication or defaults.replication, block_bytes)
        except (NotServed, MustBeEncrypted) as why:
            raise self._given_up(str(why)) from why
        if not file.is_plain:
            with suppress(YardError):  # it has the name that the next way needs
                self._files.delete(file)
            raise self._given_up(f"{path} is erasure-coded or encrypted")
        self.why_not = None
        return _DirectFile(self, file, block_bytes)

    def begin_block(self, file: NewFile, previous: BlockAccess | None) -> Pipeline:
        """The file's next block, ready to be written. Raises BadDataNode."""
        until = time.monotonic() + self._limit_s
        has_hung_up_always = True
        for tries_left in reversed(range(_MOST_PIPELINES)):
            block = self._add_block(file, previous, until)
            try:
                pipeline = Pipeline(
                    block, self._client, self._lookup, stall_s=min(STALL_S, self._limit_s)
                )
            except BadDataNode as why:
                has_hung_up_always &= isinstance(why, WantsNoWriter)
                if not tries_left or time.monotonic() >= until:
                    if has_hung_up_always:
                        self._given_up(f"{why}; it may want SASL or encryption")
                    raise
                self.avoid(why)
                self._files.abandon(file, block.access)
            else:
                self._beats.add(pipeline)
                return pipeline
        raise AssertionError("unreachable")

    def end_block(self, pipeline: Pipeline) -> None:
        self._beats.remove(pipeline)
        pipeline.close()

    def complete(self, file: NewFile, last: BlockAccess | None) -> None:
        self._files.complete(file, last, time.monotonic() + self._limit_s)

    def avoid(self, why: BadDataNode) -> None:
        """Do not write to these DataNodes for a while."""
        _log.warning("store.datanode_avoided", datanode=why.datanode, reason=why.reason)
        with self._lock:
            for target in why.targets:
                self._avoided[target.datanode] = (time.monotonic() + _AVOIDED_S, target)

    def close(self) -> None:
        self._calls.close()
        self._lookup.close()

    @cached_property
    def _defaults(self) -> Defaults:
        return self._files.defaults()

    def _add_block(self, file: NewFile, previous: BlockAccess | None, until: float) -> NewBlock:
        avoided = self._avoided_now()
        try:
            return self._files.add_block(file, previous, avoided, until)
        except YardError:
            if not avoided:
                raise
        # Better a DataNode that failed a moment ago than none.
        return self._files.add_block(file, previous, (), until)

    def _avoided_now(self) -> Sequence[Target]:
        now = time.monotonic()
        with self._lock:
            self._avoided = {
                name: (until, target)
                for name, (until, target) in self._avoided.items()
                if until > now
            }
            return [target for _, target in self._avoided.values()]

    def _given_up(self, reason: str) -> CannotWrite:
        """Leave writing to other ways for a while: what prevents this one may be mended."""
        _log.info("store.no_direct_writes", reason=reason)
        self.why_not, self._given_up_until = reason, time.monotonic() + _GIVEN_UP_S
        return CannotWrite(reason)


class _DirectFile(Sink):
    def __init__(self, writes: DirectWrites, file: NewFile, block_bytes: int) -> None:
        self._writes = writes
        self._file = file
        self._block_bytes = block_bytes
        self._last: BlockAccess | None = None
        self._pipeline: Pipeline | None = None

    def write(self, data: memoryview) -> None:
        with self._blaming():
            while data:
                if self._pipeline is None:
                    self._pipeline = self._writes.begin_block(self._file, self._last)
                room = self._block_bytes - self._pipeline.taken
                self._pipeline.write(data[:room])
                data = data[room:]
                if self._pipeline.taken == self._block_bytes:
                    self._end_block(self._pipeline)

    def close(self) -> None:
        if self._pipeline is not None:
            with self._blaming():
                self._end_block(self._pipeline)
        self._writes.complete(self._file, self._last)

    def leave(self) -> None:
        if self._pipeline is not None:
            self._writes.end_block(self._pipeline)
            self._pipeline = None

    def _end_block(self, pipeline: Pipeline) -> None:
        self._last = pipeline.finish()
        self.leave()

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except BadDataNode as why:
            self._writes.avoid(why)
            raise


class _Beats:
    """Keeps DataNodes waiting for slow writers, by a thread that runs while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pipelines: set[Pipeline] = set()
        self._is_running = False

    def add(self, pipeline: Pipeline) -> None:
        with self._changed:
            self._pipelines.add(pipeline)
            if not self._is_running:
                threading.Thread(target=self._beat, name="weightyard-beats", daemon=True).start()
                self._is_running = True

    def remove(self, pipeline: Pipeline) -> None:
        with self._changed:
            self._pipelines.discard(pipeline)
            self._changed.notify()

    def _beat(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._pipelines, _BEAT_EVERY_S)
                pipelines = [*self._pipelines]
                self._is_running = bool(pipelines)
            if not pipelines:
                return
            for pipeline in pipelines:
                pipeline.beat()
