"""Rewriting: merges small packs, and moves what is still needed out of mostly dead ones.

Blocks are copied as they are stored, each checked. A block that an older pack has too is left out,
but only after it was read there: otherwise the copy here might be the last good one. A new pack is
written under an upload of its own, by the same rules as any writer's; one transaction then makes it
live and takes the placements of the old packs away. Whoever read those placements before still
finds the old files until the grace is over.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeAlias

import numpy as np
from sqlalchemy import Connection, and_, case, delete, func, literal_column, select

from weightyard import codec
from weightyard.errors import Damaged, Retryable, YardError
from weightyard.format.block import MIB
from weightyard.format.pack import PACK_HEADER, PackBuilder, Placement, read_entry
from weightyard.logs import Log
from weightyard.names import BlockId, PackId, UploadId
from weightyard.registry import schema, uploads
from weightyard.registry.chores import LEASE_S, open_chore
from weightyard.registry.database import Database, is_one_of, now_ms
from weightyard.registry.locking import change, lock
from weightyard.registry.needs import Needs, is_older_twin, lies_in_an_older_pack
from weightyard.registry.schema import FileState, UploadState
from weightyard.storage import layout
from weightyard.storage.store import FileOptions, Read, Stage, Store
from weightyard.transfer.durable import require_replicas

_log = Log(__name__)

_packs, _placements = schema.packs, schema.placements

_SMALL = 4
"""A pack is small if it is under 1 / this of the limit, …"""
_TOGETHER = 4
"""… and so many of them are worth merging."""
_DEAD = 2
"""A pack is mostly dead if under 1 / this of it must stay."""
_AT_ONCE = 2000
"""About how many packs one run rewrites; the rest is for the next."""
_WINDOW = 1000
_RUN_BYTES = 16 * MIB
_REPLICAS_TIMEOUT_S = 30.0

_Key: TypeAlias = tuple[BlockId, BlockId | None]
"""A block and the base it is stored on. A pack has each such pair at most once."""


@dataclass(frozen=True, slots=True)
class OldPack:
    """A pack that should go, and how much of it must stay."""

    id: int
    name: str
    bytes: int
    block_bytes: int
    """Stored bytes of all its blocks."""
    kept_bytes: int
    """Stored bytes of the blocks that must stay."""
    replication: int | None
    policy: str | None
    project: str | None
    """Whose uploads may claim from it; None: everybody's."""

    @property
    def is_mostly_dead(self) -> bool:
        return self.kept_bytes * _DEAD < self.block_bytes

    @property
    def settings(self) -> tuple[int, str, str]:
        return (self.replication or 0, self.policy or "", self.project or "")


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Packs that gave their blocks to a new one."""

    packs: Sequence[OldPack]
    new_bytes: int
    """Length of the new pack; 0 if there is none, as older packs had everything already."""

    @property
    def why(self) -> str:
        return "rewritten: few of its bytes are needed, or it was small"


def plan(
    tx: Connection, needs: Needs, pack_bytes: int, passed: Callable[[int], None] = lambda id: None
) -> list[list[OldPack]]:
    """Groups of packs with the same settings; what must stay of a group fits into one new pack.

    `passed` is told the id of the pack up to which all were looked at.
    """
    chosen: list[OldPack] = []
    after: int | None = 0
    while after is not None and len(chosen) < _AT_ONCE:
        after, found = _candidates(tx, needs, pack_bytes, after)
        chosen += found
        if after is not None:
            passed(after)
    chosen.sort(key=lambda pack: (pack.settings, pack.id))
    groups: list[list[OldPack]] = []
    for _, alike in groupby(chosen, key=lambda pack: pack.settings):
        room = 0.0
        for index, pack in enumerate(alike):
            if index == 0 or pack.kept_bytes > room:
                groups.append([])
                room = 0.98 * pack_bytes
            groups[-1].append(pack)
            room -= pack.kept_bytes
    return [
        group
        for group in groups
        if len(group) >= _TOGETHER or any(pack.is_mostly_dead for pack in group)
    ]


def _candidates(
    tx: Connection, needs: Needs, pack_bytes: int, after: int
) -> tuple[int | None, list[OldPack]]:
    """Small and mostly dead packs among the next `_WINDOW`; and the id after which to go on."""
    free = and_(_packs.c.state == FileState.LIVE, ~needs.pinned_pack())
    ahead = select(_packs).where(free, _packs.c.id > after).order_by(_packs.c.id)
    rows = tx.execute(ahead.limit(_WINDOW)).all()
    if not rows:
        return None, []
    sizes = _sizes(tx, needs, [row.id for row in rows])
    packs = [
        OldPack(
            row.id, row.name, row.bytes, *sizes[row.id], row.replication, row.policy, row.project
        )
        for row in rows
        if row.id in sizes
    ]
    return rows[-1].id, [
        pack for pack in packs if pack.bytes * _SMALL < pack_bytes or pack.is_mostly_dead
    ]


def _sizes(tx: Connection, needs: Needs, packs: Sequence[int]) -> dict[int, tuple[int, int]]:
    """For packs that hold a needed block: bytes of all blocks, and of those that must stay."""
    p = _placements.alias("p")
    # Each block is looked at once: it is dead (NULL), kept by an older pack, or kept here.
    fate = case((needs.of_block_in(p), case((lies_in_an_older_pack(p), 0), else_=1)))
    rows = tx.execute(
        select(p.c.pack_id, fate.label("fate"), func.sum(p.c.stored_bytes))
        .where(is_one_of(tx, p.c.pack_id, packs))
        .group_by(p.c.pack_id, literal_column("fate"))
    )
    sizes: dict[int, dict[int | None, int]] = {}
    for pack, its_fate, size in rows:
        sizes.setdefault(pack, {})[its_fate] = int(size)
    return {
        pack: (sum(by_fate.values()), by_fate.get(1, 0))
        for pack, by_fate in sizes.items()
        if by_fate.keys() != {None}
    }


class Rewriting:
    """Carries a plan out. Packs that cannot be read stay as they are, and are named in `failed`."""

    def __init__(
        self, database: Database, store: Store, needs: Needs, pack_bytes: int, min_replicas: int
    ) -> None:
        self.failed: list[str] = []
        self._database = database
        self._store = store
        self._needs = needs
        self._pack_bytes = pack_bytes
        self._min_replicas = min_replicas
        self._upload = UploadId.new()

    def run(self, groups: Sequence[Sequence[OldPack]]) -> Iterator[Rewritten]:
        self._database.write(lambda tx: open_chore(tx, self._upload, "gc"))
        try:
            for group in groups:
                self._database.write(lambda tx: uploads.heartbeat(tx, self._upload, LEASE_S))
                if (done := self._rewrite(group)) is not None:
                    yield done
            self._store.delete(layout.staging_folder(self._upload))
        except BaseException:
            with suppress(YardError):  # it expires by itself, later
                self._database.write(lambda tx: uploads.abandon(tx, self._upload))
            raise
        self._database.write(self._end)

    def _rewrite(self, group: Sequence[OldPack]) -> Rewritten | None:
        held = self._database.write(lambda tx: self._hold(tx, group))
        copy = _Copy(PackBuilder(PackId.new(), self._pack_bytes))
        kept = [
            (pack, self._database.read(partial(self._kept, pack=pack)))
            for pack in group
            if pack.id in held and self._are_twins_good(pack, copy)
        ]
        if any(placements for _, placements in kept):
            self._write(group[0], copy, kept)
        else:
            copy.done = [pack for pack, _ in kept]
        moved = self._database.write(lambda tx: self._switch(tx, copy))
        return Rewritten(moved, copy.builder.pack_bytes if copy.new else 0) if moved else None

    def _write(
        self,
        like: OldPack,
        copy: _Copy,
        kept: Sequence[tuple[OldPack, Sequence[Placement]]],
    ) -> None:
        """Write the new pack, until it is whole and durable; nobody knows of it yet."""
        pack = copy.builder.pack

        def begin(tx: Connection) -> None:
            opened = uploads.fence(tx, self._upload)
            uploads.insert_pack(tx, opened, pack, like.replication, like.policy, like.project)

        self._database.write(begin)
        name = layout.staging(self._upload, pack.hex)
        planned_bytes = min(self._pack_bytes, sum(old.bytes for old, _ in kept))
        options = FileOptions(like.replication, planned_bytes, like.policy)
        with self._store.stage(name, options) as stage:
            stage.write(PACK_HEADER)
            for old, placements in kept:
                try:
                    if not self._copy_pack(old, placements, copy, stage):
                        break
                except _Unreadable as why:
                    self._leave(old, str(why))
            if not copy.new:
                return
            stage.write(copy.builder.finish())
            self._store.publish(stage.close(), layout.pack(pack))
        wanted = min(self._min_replicas, like.replication or self._min_replicas)
        require_replicas(self._store, layout.pack(pack), wanted, _REPLICAS_TIMEOUT_S)

    def _are_twins_good(self, old: OldPack, copy: _Copy) -> bool:
        """Read, in older packs, what is left out of the copy of a pack; False if any of it is bad.

        Then the pack stays as it is, until `check` has found out which one is damaged.
        """
        twins = self._database.read(lambda tx: self._twins(tx, old))
        for pack, inside in groupby(twins, key=lambda twin: twin.pack):
            try:
                for run in _runs(inside):
                    self._read(pack, run)
            except _Unreadable as why:
                self._leave(old, f"what it shares with pack {pack} cannot be read there: {why}")
                return False
        copy.twins.update(twins)
        return True

    def _leave(self, old: OldPack, why: str) -> None:
        self.failed.append(f"pack {old.name}: {why}")
        _log.warning("pack.not_rewritten", pack=old.name, reason=why)

    def _copy_pack(
        self, old: OldPack, placements: Sequence[Placement], copy: _Copy, stage: Stage
    ) -> bool:
        """Copy what must stay of one pack; False if the new pack has no room for all of it."""
        missing = [placement for placement in placements if _key(placement) not in copy.new]
        for run in _runs(missing):
            stored = self._read(PackId(old.name), run)
            for placement, data in zip(run, stored, strict=True):
                if not copy.builder.fits(placement.encoding):
                    return False
                copy.new[_key(placement)] = copy.builder.add(placement.encoding)
                stage.write(data)
        copy.done.append(old)
        return True

    def _read(self, pack: PackId, run: Sequence[Placement]) -> list[memoryview]:
        """The stored bytes of neighbouring blocks, from whichever replica has them right."""
        start, end = run[0].offset, run[-1].end
        try:
            location = self._store.locate(layout.pack(pack))
        except (Retryable, Damaged) as why:
            raise _Unreadable(str(why)) from why
        replicas = location.spans[0].replicas if len(location.spans) == 1 else ()
        failed: YardError | None = None
        for replica in (None, *replicas):
            into = np.empty(end - start, np.uint8).data
            try:
                self._store.read(location, [Read(start, into)], replica=replica)
                stored = [into[one.offset - start : one.end - start] for one in run]
                for placement, data in zip(run, stored, strict=True):
                    codec.verify(placement.encoding, data)
            except (Retryable, Damaged) as why:
                failed = why
            else:
                return stored
        raise _Unreadable(str(failed)) from failed

    def _hold(self, tx: Connection, group: Sequence[OldPack]) -> Container[int]:
        """Pin the old packs, so that no other run takes them away while they are read."""
        opened = uploads.fence(tx, self._upload)
        return uploads.pin_live(tx, opened.row_id, [pack.id for pack in group])

    def _kept(self, tx: Connection, pack: OldPack) -> list[Placement]:
        """The placements of a pack that must stay, in their order."""
        p = _placements.alias("p")
        entries = tx.scalars(
            select(p.c.encoding)
            .where(p.c.pack_id == pack.id, self._needs.of_placement(p))
            .order_by(p.c.offset)
        )
        return [read_entry(entry, PackId(pack.name)) for entry in entries]

    def _twins(self, tx: Connection, pack: OldPack) -> list[Placement]:
        """The oldest placements, in older packs, of what is needed of a pack but need not stay."""
        p, twin, home = _placements.alias("p"), _placements.alias("twin"), _packs.alias("home")
        rows = tx.execute(
            select(twin.c.encoding, home.c.name)
            .where(p.c.pack_id == pack.id, self._needs.of_block_in(p))
            .where(is_older_twin(p, twin, home))
            .order_by(home.c.id, twin.c.offset)
        )
        oldest: dict[_Key, Placement] = {}
        for entry, name in rows:
            placement = read_entry(entry, PackId(name))
            oldest.setdefault(_key(placement), placement)
        return list(oldest.values())

    def _switch(self, tx: Connection, copy: _Copy) -> list[OldPack]:
        """Make the new pack live, and take the old ones' placements away: all at once.

        An old pack stays as it is if a writer has claimed it meanwhile, or if more of it is needed
        by now than was copied, or read elsewhere.
        """
        opened = uploads.fence(tx, self._upload)
        ids = [pack.id for pack in copy.done]
        free = and_(
            is_one_of(tx, _packs.c.id, ids),
            _packs.c.state == FileState.LIVE,
            ~self._needs.pinned_pack(but_for=opened.row_id),
        )
        locked = set(lock(tx, _packs, free))
        moved = [
            pack
            for pack in copy.done
            if pack.id in locked
            and all(_key(one) in copy.new for one in self._kept(tx, pack))
            and copy.twins.issuperset(self._twins(tx, pack))
        ]
        if not moved:
            return []
        if copy.new:
            builder = copy.builder
            uploads.add_pack(tx, self._upload, builder.pack, builder.pack_bytes, builder.placements)
        gone = [pack.id for pack in moved]
        tx.execute(delete(_placements).where(is_one_of(tx, _placements.c.pack_id, gone)))
        change(tx, _packs, gone, state=FileState.DELETING, state_ms=now_ms())
        return moved

    def _end(self, tx: Connection) -> None:
        uploads.close(tx, uploads.fence(tx, self._upload, alone=True).row_id, UploadState.COMMITTED)


class _Unreadable(Exception):
    """A pack cannot be read now: it stays as it is, and the next one is rewritten."""


class _Copy:
    """A new pack in the making: what it has, and which old packs it replaces, with older packs."""

    def __init__(self, builder: PackBuilder) -> None:
        self.builder = builder
        self.new: dict[_Key, Placement] = {}
        self.twins: set[Placement] = set()
        """What is not in this one as older packs have it, where it was read and is right."""
        self.done: list[OldPack] = []


def _key(placement: Placement) -> _Key:
    return (placement.encoding.block, placement.encoding.base)


def _runs(placements: Iterable[Placement]) -> Iterator[list[Placement]]:
    """Placements in runs near enough for one request each, which fetches little besides."""
    run: list[Placement] = []
    for placement in placements:
        if run and (
            placement.end - run[0].offset > _RUN_BYTES or placement.offset - run[-1].end > MIB
        ):
            yield run
            run = []
        run.append(placement)
    if run:
        yield run
