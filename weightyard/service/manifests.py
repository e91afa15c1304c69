"""Manifests: reads them from the store, and keeps those used last, since they never change."""

from __future__ import annotations

import threading
from collections import OrderedDict

from weightyard.format.manifest import Manifest
from weightyard.names import Digest
from weightyard.storage.store import Store
from weightyard.transfer.publish import read_manifest

_MOST_ENTRIES = 640_000
"""How many blocks, files and tensors all kept manifests have. A larger one is not kept."""


class Manifests:
    """The manifests of a store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: OrderedDict[Digest, Manifest] = OrderedDict()
        self._entries = 0

    def known(self, digest: Digest) -> Manifest | None:
        """A manifest that is kept, or None; the store is not asked."""
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
    # One more, so that the number of empty ones is limited, too.
    return 1 + len(manifest.blocks) + len(manifest.files) + len(manifest.tensors)
