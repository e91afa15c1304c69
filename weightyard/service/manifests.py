"""Manifests out of the store, the last few kept: they never change."""

from __future__ import annotations

import threading
from collections import OrderedDict

from weightyard.format.manifest import Manifest
from weightyard.names import Digest
from weightyard.storage.store import Store
from weightyard.transfer.publish import read_manifest

_MOST_ENTRIES = 640_000
"""Blocks, files and tensors of all manifests that are kept; a larger one is read each time."""


class Manifests:
    """Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: OrderedDict[Digest, Manifest] = OrderedDict()
        self._entries = 0

    def known(self, digest: Digest) -> Manifest | None:
        """One that is kept, for which the store is not asked."""
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
            return known

    def get(self, digest: Digest) -> Manifest:
        """Raises FileMissing, ManifestInvalid, UnknownFormat."""
        if (known := self.known(digest)) is not None:
            return known
        manifest = read_manifest(self._store, digest)
        if _entries(manifest) <= _MOST_ENTRIES:
            with self._lock:
                if digest not in self._known:
                    self._known[digest] = manifest
                    self._entries += _entries(manifest)
                while self._entries > _MOST_ENTRIES:
                    _, oldest = self._known.popitem(last=False)
                    self._entries -= _entries(oldest)
        return manifest


def _entries(manifest: Manifest) -> int:
    # One more: even empty ones are not to be kept without end.
    return 1 + len(manifest.blocks) + len(manifest.files) + len(manifest.tensors)
