"""Previewing a push: what would be sent, without sending it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor

from weightyard.format import manifest as manifests
from weightyard.format.assembly import manifest_of
from weightyard.names import BlockId
from weightyard.records import PushPlan, PushPlanFile
from weightyard.transfer.catalogue import Catalogue
from weightyard.transfer.cores import cores
from weightyard.transfer.source import piece_id
from weightyard.transfer.writer import Content

_BATCH_BLOCKS = 1024


def preview(
    contents: Sequence[Content],
    catalogue: Catalogue,
    project: str,
    progress: Callable[[int], None] = lambda done_bytes: None,
) -> PushPlan:
    """Which bytes a push to a project would send.

    Hashes what is not known; claims and writes nothing.
    """
    names = _hashed(contents, progress)
    ids = [id for blocks in names for id in blocks]
    missing = _missing(catalogue, project, ids)
    files = _files(contents, names, missing)
    digest, _ = manifests.encode(manifest_of([content.split for content in contents], names))
    return PushPlan(
        digest=digest.hex,
        logical_bytes=sum(file.bytes for file in files),
        new_bytes=sum(file.new_bytes for file in files),
        blocks=len(set(ids)),
        blocks_new=len(missing),
        files=tuple(files),
    )


def _hashed(contents: Sequence[Content], progress: Callable[[int], None]) -> list[list[BlockId]]:
    """The names that the pieces of each content have as blocks."""
    cuts = [(piece, content.sources) for content in contents for piece in content.split.pieces]
    ids: list[BlockId] = []
    with ThreadPoolExecutor(max(2, cores()), "weightyard-hash") as workers:
        hashed = workers.map(lambda cut: piece_id(*cut), cuts)
        for id, (piece, _) in zip(hashed, cuts, strict=True):
            ids.append(id)
            progress(piece.raw_bytes)
    rest = iter(ids)
    return [[next(rest) for _ in content.split.pieces] for content in contents]


def _files(
    contents: Sequence[Content], names: Sequence[Sequence[BlockId]], missing: Set[BlockId]
) -> list[PushPlanFile]:
    """What would be sent of each file. A block that several files have counts for the first."""
    unsent = set(missing)
    files = []
    for content, blocks in zip(contents, names, strict=True):
        pieces, new_bytes = content.split.pieces, 0
        for block, piece in zip(blocks, pieces, strict=True):
            if block in unsent:
                unsent.remove(block)
                new_bytes += piece.raw_bytes
        path = content.split.files[0].path if content.split.files else ""
        total = sum(piece.raw_bytes for piece in pieces)
        files.append(PushPlanFile(path=path, bytes=total, new_bytes=new_bytes))
    return files


def _missing(catalogue: Catalogue, project: str, blocks: Sequence[BlockId]) -> set[BlockId]:
    unique = list(dict.fromkeys(blocks))
    missing = set(unique)
    for start in range(0, len(unique), _BATCH_BLOCKS):
        batch = unique[start : start + _BATCH_BLOCKS]
        missing -= catalogue.placements(batch, for_project=project).keys()
    return missing
