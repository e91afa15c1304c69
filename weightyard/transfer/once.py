"""Writing a small file under its final name: once, whole, whoever else writes it too."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from weightyard.errors import AlreadyThere, Conflict, FileMissing, Retryable, TooLarge, YardError
from weightyard.names import UploadId
from weightyard.storage import layout
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.storage.store import FileOptions, Location, Read, StagedFile, Store, StorePath
from weightyard.transfer.together import run_together

_STAGED_AT_ONCE = 8


def write_once(
    store: Store,
    upload: UploadId,
    path: StorePath,
    content: bytes,
    options: FileOptions | None = None,
) -> StagedFile | None:
    """Stage and publish. If the file is there already with this content, that is success.

    Returns what was published; None: it was there. Raises Conflict if it is there with other
    content, and what the store raises.
    """
    return write_each_once(store, upload, {path: content}, options).get(path)


def write_each_once(
    store: Store,
    upload: UploadId,
    files: Mapping[StorePath, bytes],
    options: FileOptions | None = None,
    *,
    is_same: Callable[[Store, StorePath, bytes], bool] | None = None,
) -> Mapping[StorePath, StagedFile]:
    """The same for several: staged together, published in order. Returns those published.

    So none is there before those in front of it are, and HDFS is waited for once, not each time.
    `is_same` says whether a file that is there already will do for this content.
    """
    staged: dict[StorePath, StagedFile] = {}

    def stage_one(path: StorePath) -> None:
        content = files[path]
        planned = replace(options or FileOptions(), planned_bytes=len(content))
        # A writer that was killed may have left a file: every attempt has names of its own.
        with store.stage(layout.staging(upload, secrets.token_hex(16)), planned) as stage:
            stage.write(content)
            staged[path] = stage.close()

    stages = [partial(stage_one, path) for path in files]
    try:
        run_together(min(len(stages), _STAGED_AT_ONCE), "weightyard-stage", stages)
        return {
            path: staged[path]
            for path, content in files.items()
            if _is_published(store, staged[path], path, content, is_same or is_there)
        }
    except YardError:
        # If this writer was away for long, gc has swept its upload and will not do so again.
        for one in staged.values():
            with suppress(YardError):
                store.delete(one.path)
        raise


def _is_published(
    store: Store,
    staged: StagedFile,
    path: StorePath,
    content: bytes,
    is_same: Callable[[Store, StorePath, bytes], bool],
) -> bool:
    """Give it its name; False: another file that will do has it. Raises Conflict."""
    try:
        store.publish(staged, path)
    except AlreadyThere:
        will_do = is_same(store, path, content)
        store.delete(staged.path)
        if not will_do:
            raise Conflict(f"{path} is there with other content") from None
        return False
    return True


def is_there(store: Store, path: StorePath, content: bytes) -> bool:
    """Whether there is such a file, with exactly this content."""
    return copies_there(store, path, content) is not None


def copies_there(store: Store, path: StorePath, content: bytes) -> int | None:
    """On how many DataNodes a file with exactly this content lies, and is meant to lie.

    None: there is no such file.
    """
    try:
        stat = store.stat(path)
        if stat.length != len(content):
            return None
        location = store.locate(path)
        if _read_located(store, location, stat.length) != content:
            return None
    except (FileMissing, TooLarge):
        return None
    return min([stat.replication, *(len(span.replicas) for span in location.spans)])


def read_whole(
    store: Store, path: StorePath, limit_bytes: int = 1 << 28, deadline: Deadline = NEVER
) -> bytes:
    """All of a small file. Raises FileMissing, TooLarge.

    The store's own limits hold besides the deadline.
    """
    location = store.locate(path, timeout_s=_left_s(deadline, path))
    return _read_located(store, location, limit_bytes, deadline)


def _read_located(
    store: Store, location: Location, limit_bytes: int, deadline: Deadline = NEVER
) -> bytes:
    if location.length > limit_bytes:
        raise TooLarge(f"{location.path} has {location.length} bytes, over {limit_bytes}")
    content = bytearray(location.length)
    store.read(
        location,
        [Read(0, memoryview(content))],
        timeout_s=_left_s(deadline, location.path),
        cancel=deadline.cancel,
    )
    return bytes(content)


def _left_s(deadline: Deadline, path: StorePath) -> float | None:
    """How long a store may take; None: as long as its own limits allow."""
    left_s = deadline.left(f"reading {path}")
    return None if math.isinf(left_s) else left_s


def read_each_replica(
    store: Store, path: StorePath, limit_bytes: int, deadline: Deadline = NEVER
) -> Iterator[bytes]:
    """All of a small file, from each replica in turn that answers."""
    location = store.locate(path, timeout_s=_left_s(deadline, path))
    if len(location.spans) != 1 or location.length > limit_bytes:
        return
    for replica in location.spans[0].replicas:
        content = bytearray(location.length)
        left_s = _left_s(deadline, path)
        with suppress(Retryable):
            store.read(location, [Read(0, memoryview(content))], replica=replica, timeout_s=left_s)
            yield bytes(content)
