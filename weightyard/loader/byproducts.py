"""By-products: what was loaded from a store elsewhere becomes this node's snapshot, afterwards.

A load does not wait for it, and does not fail by it. Most of the bytes are in the tensors that were
loaded, so that the store is hardly read again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weightyard.closing import Closing
from weightyard.errors import Cancelled, Protected
from weightyard.format.block import MIB
from weightyard.format.manifest import FileEntry
from weightyard.loader.building import Progress, Supply, take_snapshot
from weightyard.loader.loaded import Loaded, LoadedReader
from weightyard.loader.snapshots import Snapshots
from weightyard.logs import Log
from weightyard.records import Version
from weightyard.settings import Settings
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import Deadline
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import Catalogue
from weightyard.transfer.folder import read_folder
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader, ReadReport

_log = Log(__name__)

REST_BYTES = 64 * MIB
REST_SHARE = 8
"""A snapshot is worthwhile if no more of the version has to be read from the store again than
REST_BYTES or, if that is more, one part in REST_SHARE; the rest lies in the host's memory."""

NEARLY_DONE_BYTES = 1024 * MIB
NEARLY_DONE_S = 5.0
"""How long closing waits for the rest, if that is no more than NEARLY_DONE_BYTES."""

_ENDING_S = 10.0
"""How long closing waits for work it gave up to end: the disk may be slow to take a file."""


@dataclass(eq=False, slots=True)
class Byproduct:
    """A snapshot to be made of what was loaded."""

    version: Version
    loaded: Loaded
    store: Store
    reading_bytes: int
    """What reading may take of the host's memory."""
    bytes: int = field(init=False)
    left_bytes: int = field(init=False)
    """What is still to be done."""

    def __post_init__(self) -> None:
        self.bytes = sum(block.raw_bytes for block in self.loaded.manifest.blocks)
        self.left_bytes = self.bytes

    @property
    def is_worthwhile(self) -> bool:
        """Whether nearly all of it lies in the host's memory, so that little is read again."""
        return self.loaded.rest_bytes <= max(REST_BYTES, self.bytes // REST_SHARE)


class Byproducts(Closing):
    """Makes snapshots of what a yard loaded, one after the other, in a thread. Thread-safe.

    The thread ends when there is nothing to do. Nothing here raises: what failed is logged, as
    `snapshot.not_made`, and not tried again by this yard.
    """

    def __init__(self, snapshots: Snapshots, catalogue: Catalogue, settings: Settings) -> None:
        self._snapshots = snapshots
        self._catalogue = catalogue
        self._settings = settings
        self._stop = Cancel()
        self._lock = threading.Lock()
        self._to_make: deque[Byproduct] = deque()
        """The first one is being made."""
        self._failed: set[str] = set()
        self._thread: threading.Thread | None = None

    def add(self, byproduct: Byproduct) -> None:
        """Have a snapshot made, if that is worthwhile, is not planned yet and has not failed."""
        digest = byproduct.version.digest
        if not byproduct.is_worthwhile:
            return
        with self._lock:
            if not self._is_working:
                self._to_make.clear()  # after a fork: these are for the parent's thread
            known = {one.version.digest for one in self._to_make} | self._failed
            if digest in known or self._stop.is_cancelled:
                return
            self._to_make.append(byproduct)
            if len(self._to_make) > 1:
                return
            self._thread = threading.Thread(
                target=self._work, name="weightyard-snapshot", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as why:  # no more threads are to be had
                self._thread = None
                self._to_make.clear()
                _log.warning("snapshot.not_made", version=byproduct.version.ref, reason=why)

    def wait(self, seconds: float) -> bool:
        """Wait until there is nothing more to do, at most so long. Returns whether that is so."""
        with self._lock:  # `add` holds it until the thread is started and can be joined
            thread = self._thread
        if thread is None:
            return True
        thread.join(seconds)
        return not thread.is_alive()

    def close(self) -> None:
        """End the work: finish it if it is nearly done, else give it up and clean up."""
        with self._lock:
            left_bytes = sum(one.left_bytes for one in self._to_make)
        if left_bytes <= NEARLY_DONE_BYTES:
            self.wait(NEARLY_DONE_S)
        self._stop.cancel()
        if not self.wait(_ENDING_S):
            _log.warning("snapshot.not_ended", after_s=_ENDING_S)

    @property
    def is_closed(self) -> bool:
        """Whether what is not done by now will not be done."""
        return self._stop.is_cancelled

    @property
    def _is_working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _work(self) -> None:
        while True:
            byproduct = self._to_make[0]
            if not self._stop.is_cancelled:
                self._make(byproduct)
            with self._lock:
                self._to_make.popleft()
                if not self._to_make:
                    return
            del byproduct

    def _make(self, byproduct: Byproduct) -> None:
        ref = byproduct.version.ref
        try:
            self._take(byproduct)
        except Cancelled:
            _log.info("snapshot.given_up", version=ref, left_bytes=byproduct.left_bytes)
        except Protected as why:
            _log.info("snapshot.left_to_another", version=ref, reason=why)
        except Exception as why:  # noqa: BLE001  whoever loaded has what was asked for
            self._failed.add(byproduct.version.digest)
            _log.warning("snapshot.not_made", version=ref, reason=why)

    def _take(self, byproduct: Byproduct) -> None:
        manifest = byproduct.loaded.manifest
        began = time.monotonic()
        is_new = False
        store_reader = Reader(
            byproduct.store,
            self._catalogue,
            settings=self._settings,
            max_host_bytes=byproduct.reading_bytes,
        )

        def read_store(
            wanted: Sequence[Wanted], progress: Callable[[int], None] | None
        ) -> ReadReport:
            return store_reader.read(wanted, progress, cancel=self._stop)

        def told(done_bytes: int) -> None:
            byproduct.left_bytes -= done_bytes
            self._stop.check(f"making the snapshot of {byproduct.version.ref}")

        with LoadedReader(byproduct.loaded, read_store) as reader:

            def pull(files: Sequence[FileEntry], folder: Path, progress: Progress) -> None:
                nonlocal is_new
                is_new = True
                read_folder(reader, manifest, folder, files, progress)

            take_snapshot(
                self._snapshots,
                self._catalogue,
                byproduct.version,
                manifest,
                Supply(pull, lambda: reader),
                progress=told,
                deadline=Deadline.after(None, self._stop),
                is_patient=False,
            ).close()
        if is_new:
            _log.info(
                "snapshot.made",
                version=byproduct.version.ref,
                taken_bytes=reader.taken_bytes,
                read_bytes=reader.read_bytes,
                seconds=round(time.monotonic() - began, 3),
            )
