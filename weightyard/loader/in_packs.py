"""Tensors that lie raw in packs on this host: mapped where they are and checked, not copied."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightyard import codec
from weightyard.errors import BlockCorrupt
from weightyard.format.block import CHUNK_BYTES, Codec
from weightyard.format.manifest import BlockEntry, Extent
from weightyard.format.pack import Placement
from weightyard.loader.plan import TensorPlan
from weightyard.loader.rechecking import recheck_behind
from weightyard.loader.state import torch_dtype
from weightyard.loader.verified import Pack, Verified, covers, is_due
from weightyard.logs import Log
from weightyard.names import BlockId, PackId
from weightyard.storage import layout
from weightyard.storage.local import HERE
from weightyard.storage.stitched import FileRun, can_stitch, have_at_hand, stitched
from weightyard.storage.store import ReadPath
from weightyard.transfer.cores import cores
from weightyard.transfer.replicas import Distance
from weightyard.transfer.report import ReadReport

if TYPE_CHECKING:
    import torch

_log = Log(__name__)

LEAST_BYTES = CHUNK_BYTES
"""Shorter tensors are copied: Linux limits the mappings of a process, by default to 65530."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Neighbouring chunks of a raw block: the stored bytes are the ones wanted."""

    placement: Placement
    first: int
    last: int

    @property
    def pack(self) -> PackId:
        return self.placement.pack

    @property
    def start(self) -> int:
        """Where they begin in the pack."""
        return self.placement.offset + self.first * CHUNK_BYTES

    @property
    def length(self) -> int:
        return self.placement.encoding.raw_span(self.first, self.last)[1]


def raw_chunks_of(
    plan: TensorPlan,
    blocks: Sequence[BlockEntry],
    placements: Mapping[BlockId, Sequence[Placement]],
) -> tuple[Chunks, ...]:
    """The chunks that make up a tensor, one after the other; empty if it is not so made. Pure.

    Only whole chunks can be checked, so a tensor that has only a part of one will not do.
    """
    if len(plan.fetches) != 1 or plan.is_picked or plan.bytes < LEAST_BYTES:
        return ()
    found = []
    for extent in plan.fetches[0].extents:
        entry = blocks[extent.block]
        raw = [one for one in placements.get(entry.id, ()) if _is_raw(one)]
        if not raw or not _is_of_chunks(extent, entry):
            return ()
        end = extent.offset + extent.length
        found.append(Chunks(raw[0], extent.offset // CHUNK_BYTES, -(-end // CHUNK_BYTES)))
    return tuple(found)


def _is_raw(placement: Placement) -> bool:
    return placement.encoding.codec is Codec.RAW and placement.encoding.base is None


def _is_of_chunks(extent: Extent, block: BlockEntry) -> bool:
    end = extent.offset + extent.length
    return not extent.offset % CHUNK_BYTES and (not end % CHUNK_BYTES or end == block.raw_bytes)


@dataclass(frozen=True, slots=True)
class _Lying:
    """A tensor, where it lies, and the memory it is mapped to."""

    plan: TensorPlan
    chunks: Sequence[Chunks]
    runs: Sequence[FileRun]
    memory: memoryview


def checked(
    folder: Path,
    wanted: Iterable[tuple[TensorPlan, Sequence[Chunks]]],
    verified: Verified | None = None,
) -> Generator[tuple[TensorPlan, torch.Tensor, ReadReport]]:
    """Tensors, mapped out of packs below a store's folder, and what it took to check every chunk.

    `verified`: knows what was checked before, and need not be now.

    Left out are tensors that have no chunks, cannot be mapped, or have wrong bytes: reading them
    the usual way will look elsewhere, or say what is wrong. When the iterator ends or is closed no
    thread is left, except one that checks again what was last checked long ago.
    """
    began_s = time.time()
    pool = ThreadPoolExecutor(cores(), "weightyard-check")
    try:
        lying = [one for plan, chunks in wanted if (one := _mapped(folder, plan, chunks))]
        files = {run.file for one in lying for run in one.runs}
        known = verified.of(files) if verified is not None else {}
        begun = [
            (
                one,
                None
                if covers(known, one.runs)
                else [pool.submit(_check, *part) for part in _parts(one)],
            )
            for one in lying
        ]
        fresh: list[FileRun] = []
        for one, checks in begun:
            try:
                report = _reported(one, checks or ())
            except (BlockCorrupt, OSError) as why:
                _log.info("load.not_mapped", tensor=one.plan.name, reason=why)
                continue
            if checks is not None:
                fresh += one.runs
            yield one.plan, _tensor(one), report
        if verified is not None:
            if fresh:
                verified.add(known, fresh, began_s)
            _recheck_due(folder, verified, known, [one for one, checks in begun if checks is None])
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _recheck_due(
    folder: Path, verified: Verified, known: Mapping[Path, Pack], used: Iterable[_Lying]
) -> None:
    """Have what was last checked long ago checked again in the background."""
    now_s = time.time()
    overdue = [(one.plan, one.chunks) for one in used if is_due(known, one.runs, now_s)]
    if overdue and (alone := verified.alone()) is not None:
        recheck_behind(lambda: _recheck(folder, verified, overdue), alone)


def _recheck(
    folder: Path, verified: Verified, wanted: Sequence[tuple[TensorPlan, Sequence[Chunks]]]
) -> None:
    """Maps packs anew: memory that was handed out may have been changed by its owner."""
    for plan, chunks in wanted:
        began_s = time.time()
        if (one := _mapped(folder, plan, chunks)) is None:
            continue
        known = verified.of(run.file for run in one.runs)
        try:
            for part in _parts(one):
                _check(*part)
        except (BlockCorrupt, OSError) as why:
            _log.warning("pack.damaged", tensor=plan.name, pack=one.chunks[0].pack, reason=why)
            verified.forget(run.file for run in one.runs)
        else:
            verified.add(known, one.runs, began_s)


def _mapped(folder: Path, plan: TensorPlan, chunks: Sequence[Chunks]) -> _Lying | None:
    runs = _runs(folder, chunks)
    if not runs or not can_stitch(runs):
        return None
    try:
        return _Lying(plan, chunks, runs, stitched(runs))
    except OSError as why:
        _log.info("load.not_mapped", tensor=plan.name, reason=why)
        return None


def _tensor(one: _Lying) -> torch.Tensor:
    """A tensor that keeps its memory mapped for as long as it lives."""
    import torch

    return torch.frombuffer(one.memory, dtype=torch_dtype(one.plan.dtype)).view(one.plan.shape)


def _reported(one: _Lying, checks: Sequence[Future[float]]) -> ReadReport:
    """Raises what a check raises."""
    moved = one.plan.bytes
    return ReadReport(
        raw_bytes=moved,
        decoded_bytes=moved,
        stored_bytes=moved,
        requests=len(one.chunks),
        by_path=Counter({ReadPath.LOCAL: moved}),
        by_datanode=Counter({HERE.datanode: moved}),
        by_host=Counter({HERE.host: moved}),
        by_distance=Counter({Distance.SAME_HOST: moved}),
        decode_s=sum(check.result() for check in checks),
    )


def _parts(lying: _Lying) -> Iterator[tuple[Chunks, memoryview]]:
    at = 0
    for one in lying.chunks:
        yield one, lying.memory[at : at + one.length]
        at += one.length


def _runs(folder: Path, chunks: Sequence[Chunks]) -> list[FileRun]:
    """Where chunks lie, neighbours as one."""
    runs: list[FileRun] = []
    for one in chunks:
        file, start, length = folder / layout.pack(one.pack).text, one.start, one.length
        if runs and (runs[-1].file, runs[-1].end) == (file, start):
            start = runs.pop().start
            length = one.start + one.length - start
        runs.append(FileRun(file, start, length))
    return runs


def _check(chunks: Chunks, memory: memoryview) -> float:
    """Returns the seconds it took. Raises BlockCorrupt, OSError."""
    began = time.monotonic()
    have_at_hand(memory)
    codec.verify(
        chunks.placement.encoding, memory, first_chunk=chunks.first, last_chunk=chunks.last
    )
    return time.monotonic() - began
