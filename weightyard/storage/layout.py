"""Where things lie below a store's root. The only place that builds store paths."""

from __future__ import annotations

from weightyard.errors import InvalidName
from weightyard.names import Digest, ModelName, PackId, UploadId
from weightyard.storage.store import StorePath

FOLDERS = tuple(StorePath(name) for name in ("packs", "manifests", "staging", "models", "journal"))
"""The folders `init` makes, each with the same owner, group and mode."""

PACKS, MANIFESTS, STAGING, MODELS, JOURNAL = FOLDERS

YARD = StorePath("yard.json")
"""Written once: format version, yard id, registry id, block size."""

OWNERS = StorePath("owners")
"""Who a store belongs to since it changed hands: numbered files, the highest counts."""

DAMAGED = StorePath("damaged")
"""Where `heal` puts files whose bytes are wrong, out of the way of good ones. Nobody reads them."""

TOP = frozenset((*FOLDERS, YARD, OWNERS, DAMAGED))
"""All that a yard has right below its root."""

_PROBE = "probe"


def pack(pack: PackId) -> StorePath:
    return StorePath(f"{PACKS}/{pack.hex[:2]}/{pack.hex}")


def manifest(digest: Digest) -> StorePath:
    return StorePath(f"{MANIFESTS}/{digest.hex[:2]}/{digest.hex}")


def has_checksums(path: StorePath) -> bool:
    """Whether a file says itself whether its bytes are right; records do not."""
    return path.text.partition("/")[0] in (PACKS.text, MANIFESTS.text)


def staging_folder(upload: UploadId) -> StorePath:
    """Where an upload stages its files; removed, empty, when it is done."""
    return StorePath(f"{STAGING}/{upload.hex}")


def staging(upload: UploadId, name: str, attempt: int = 0) -> StorePath:
    """A staging name. Never used twice: a dead writer may hold its name for 20 minutes."""
    return StorePath(f"{staging_folder(upload)}/{name}.{attempt}")


def probe(upload: UploadId, attempt: int = 0) -> StorePath:
    """The staging name of a small file that shows whether files can be written."""
    return staging(upload, _PROBE, attempt)


def is_probe(path: StorePath) -> bool:
    folder, _, name = path.text.rpartition("/")
    return folder.startswith(f"{STAGING}/") and name.startswith(f"{_PROBE}.")


def next_attempt(staged: StorePath) -> StorePath:
    """The staging name to use when writing under this one failed."""
    head, _, attempt = staged.text.rpartition(".")
    if not head or not attempt.isdecimal():
        raise InvalidName(f"{staged} is not a staging name")
    return StorePath(f"{head}.{int(attempt) + 1}")


def record(model: ModelName, number: int) -> StorePath:
    return StorePath(f"{MODELS}/{model.project}/{model.name}/v{number}.json")


def owner(generation: int) -> StorePath:
    return StorePath(f"{OWNERS}/{generation:06d}.json")


def set_aside(path: StorePath, attempt: int) -> StorePath:
    return StorePath(f"{DAMAGED}/{path.text.rpartition('/')[2]}.{attempt}")


def journal(sequence: int) -> StorePath:
    return StorePath(f"{JOURNAL}/{sequence:012d}.json")
