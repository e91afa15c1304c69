"""Manifests out of the store, the last few kept: they never change."""

from __future__ import annotations

import threading
from collections import OrderedDict

from weightyard.format.manifest import Manifest
from weightyard.names import Digest
from weightyard.storage.store import Store
from weightyard.transfer.publish import read_manifest

_KEPT = 32
_LARGEST_KEPT = 20_000
"""Blocks, files and tensors of a manifest that is kept; a larger one is read again."""


class Manifests:
    """Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: OrderedDict[Digest, Manifest] = OrderedDict()

    def get(self, digest: Digest) -> Manifest:
        """Raises FileMissing, ManifestInvalid, UnknownFormat."""
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
                return known
        manifest = read_manifest(self._store, digest)
        if len(manifest.blocks) + len(manifest.files) + len(manifest.tensors) <= _LARGEST_KEPT:
            with self._lock:
                self._known[digest] = manifest
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
        return manifest
