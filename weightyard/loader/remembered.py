"""Remembered: which versions refs meant, and what those consist of, as this node last saw it."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from weightyard.errors import YardError
from weightyard.format import manifest as manifests
from weightyard.format.manifest import Manifest
from weightyard.loader.recent import Recent
from weightyard.loader.snapshot import modified_s
from weightyard.logs import Log
from weightyard.names import Digest, Ref
from weightyard.records import Record, RememberedVersion, Version
from weightyard.transfer.private import keep_newest, private_folder, read_small, write_small

_log = Log(__name__)

MAX_RESOLUTIONS = 1000
MAX_MANIFESTS = 1000
MAX_MANIFEST_BYTES = 512 << 20
"""Of all manifests together, without those of snapshots."""

_MAX_RESOLUTION_BYTES = 4 << 20
_FRESH_S = 60.0
"""How old the note of a ref may be before it is written again, if it still means the same."""


_MOST_IN_MEMORY = 100_000
"""How many parts all manifests that are kept as objects may have: some MB."""


@dataclass(frozen=True, slots=True)
class _Noted:
    """A note of a ref as this process saw it last."""

    file: Path
    at: float
    """When it was written."""
    digest: str


class _Resolution(Record):
    yard: str
    ref: str
    at: datetime
    version: Version


class Remembered:
    """What this node knows of one yard. Thread-safe. Remembering never fails a load."""

    def __init__(self, cache: Path, yard: str) -> None:
        self._cache = cache.expanduser().absolute()
        self._yard = yard.rstrip("/")
        self._noted: Recent[str, _Noted] = Recent(MAX_RESOLUTIONS)
        self._manifests: Recent[str, Manifest] = Recent(_MOST_IN_MEMORY)

    @property
    def manifests(self) -> Path:
        return self._cache / "manifests"

    @property
    def resolutions(self) -> Path:
        return self._cache / "resolutions"

    def note(self, ref: Ref, version: Version) -> None:
        """Remember what a ref means now, and that the version's aliases mean the same."""
        aliases = (f"{version.model}@{alias}" for alias in version.aliases)
        try:
            for one in {str(ref), version.ref, *aliases}:
                self._note(one, version)
        except (YardError, OSError) as why:
            _log.warning("node.cannot_remember", ref=ref, reason=why)

    def recall(self, ref: Ref) -> RememberedVersion | None:
        """What a ref meant when this node last asked; None if it never did.

        For a digest it is enough that its manifest is here.
        """
        text = read_small(self._file(str(ref)), _MAX_RESOLUTION_BYTES)
        with suppress(ValidationError):
            found = _Resolution.model_validate_json(text or b"")
            if (found.yard, found.ref) == (self._yard, str(ref)):
                return RememberedVersion(**found.version.model_dump(), remembered_at=found.at)
        if isinstance(ref.selector, Digest) and (seen := modified_s(self._of(ref.selector))):
            at = datetime.fromtimestamp(seen, UTC)
            return RememberedVersion(
                model=str(ref.model),
                number=0,
                digest=ref.selector.hex,
                created=at,
                remembered_at=at,
            )
        return None

    def keep(self, digest: Digest, manifest: Manifest) -> None:
        """Remember a manifest."""
        try:
            file = self._of(digest)
            if not file.exists():
                private_folder(self.manifests)
                write_small(file, manifests.encode(manifest)[1])
                self.prune()
        except (YardError, OSError) as why:
            _log.warning("node.cannot_remember", manifest=digest, reason=why)

    def manifest(self, digest: Digest) -> Manifest | None:
        """A manifest that was remembered, checked against its digest."""
        if (known := self._manifests.get(digest.hex)) is not None:
            return known
        stored = read_small(self._of(digest), manifests.MAX_STORED_BYTES)
        if stored is None:
            return None
        try:
            found = manifests.decode(stored, digest)
            return self._manifests.keep(digest.hex, found, _parts(found))
        except YardError as why:
            _log.warning("node.manifest_dropped", manifest=digest, reason=why)
            self._of(digest).unlink(missing_ok=True)
            return None

    def prune(self) -> None:
        """Forget the oldest over the bounds; manifests of snapshots stay."""
        snapshots = self._cache / "snapshots"
        keep_newest(self.resolutions, MAX_RESOLUTIONS, MAX_RESOLUTIONS * _MAX_RESOLUTION_BYTES)
        kept = {file.name[:64] for file in snapshots.glob("[0-9a-f]*")}
        keep_newest(self.manifests, MAX_MANIFESTS, MAX_MANIFEST_BYTES, kept)

    def _note(self, ref: str, version: Version) -> None:
        noted = self._noted.get(ref)
        file = noted.file if noted is not None else self._file(ref)
        at = modified_s(file)
        if time.time() - at < _FRESH_S:
            if noted == _Noted(file, at, version.digest):
                return
            known = self.recall(Ref.parse(ref))
            if known is not None and known.digest == version.digest:
                self._noted.keep(ref, _Noted(file, at, version.digest), 1)
                return
        private_folder(self.resolutions)
        is_new = not file.exists()
        said = _Resolution(yard=self._yard, ref=ref, at=datetime.now(UTC), version=version)
        write_small(file, said.model_dump_json().encode())
        if is_new:
            self.prune()

    def _file(self, ref: str) -> Path:
        name = hashlib.blake2s(f"{self._yard}\n{ref}".encode(), digest_size=16).hexdigest()
        return self.resolutions / f"{name}.json"

    def _of(self, digest: Digest) -> Path:
        return self.manifests / digest.hex


def _parts(manifest: Manifest) -> int:
    extents = sum(len(file.extents) for file in manifest.files)
    extents += sum(len(box.extents) for tensor in manifest.tensors for box in tensor.boxes)
    return 1 + len(manifest.blocks) + len(manifest.tensors) + extents
