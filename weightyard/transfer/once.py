"""Writing a small file under its final name: once, whole, whoever else writes it too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from weightyard.errors import AlreadyThere, Conflict, Retryable, TooLarge
from weightyard.names import UploadId
from weightyard.storage import layout
from weightyard.storage.store import FileOptions, Read, Store, StorePath


def write_once(
    store: Store,
    upload: UploadId,
    path: StorePath,
    content: bytes,
    options: FileOptions | None = None,
) -> None:
    """Stage and publish. If the file is there already with this content, that is success.

    Raises Conflict if it is there with other content, and what the store raises.
    """
    name = path.text.rpartition("/")[2]
    with store.stage(layout.staging(upload, name), options) as stage:
        stage.write(content)
        staged = stage.close()
    try:
        store.publish(staged, path)
    except AlreadyThere:
        same = store.stat(path).length == len(content) and read_whole(store, path) == content
        store.delete(staged.path)
        if not same:
            raise Conflict(f"{path} is there with other content") from None


def read_whole(store: Store, path: StorePath, limit_bytes: int = 1 << 28) -> bytes:
    """All of a small file. Raises FileMissing, TooLarge."""
    location = store.locate(path)
    if location.length > limit_bytes:
        raise TooLarge(f"{path} has {location.length} bytes, over {limit_bytes}")
    content = bytearray(location.length)
    store.read(location, [Read(0, memoryview(content))])
    return bytes(content)


def read_each_replica(store: Store, path: StorePath, limit_bytes: int) -> Iterator[bytes]:
    """All of a small file from one replica after the other, those that answer."""
    location = store.locate(path)
    if len(location.spans) != 1 or location.length > limit_bytes:
        return
    for replica in location.spans[0].replicas:
        content = bytearray(location.length)
        with suppress(Retryable):
            store.read(location, [Read(0, memoryview(content))], replica=replica)
            yield bytes(content)
