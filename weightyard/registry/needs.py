"""Needs: whether anything still needs a block, a pack or a manifest, as conditions in SQL.

A block is needed if it is in a list, or the base of a delta of such a block (deltas have depth 1).
Where projects share nothing, a pack need not keep what only others need, who have it themselves.
Nothing here reads rows into memory: the database decides, by its indexes (`rows.some`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    and_,
    any_,
    bindparam,
    exists,
    func,
    or_,
    select,
)
from sqlalchemy.dialects.postgresql import ARRAY

from weightyard.registry import schema
from weightyard.registry.database import now_ms
from weightyard.registry.rows import some
from weightyard.registry.schema import Dedup, FileState, UploadState

_packs, _pins, _v, _leases = schema.packs, schema.pins, schema.versions, schema.read_leases


@dataclass(frozen=True, slots=True)
class Leaving:
    """Versions of which gc is about to let go: what only they need will be needed no more."""

    rows: Sequence[int]
    is_sqlite: bool

    @classmethod
    def of(cls, tx: Connection, due: Sequence[int]) -> Leaving:
        """Versions that are `due` for removal, and removed ones of which gc can let go."""
        edge = schema.version_lists.alias("edge")
        has_edges = exists().where(edge.c.version_id == _v.c.id)
        let_go = has_edges, ~_is_held(), ~is_claimed_from(*_alive(_pins.c.upload_id))
        removed = select(_v.c.id).where(_v.c.removed_ms.is_not(None), *let_go)
        return cls([*due, *tx.scalars(removed)], tx.dialect.name == "sqlite")

    def has(self, version: ColumnElement[int]) -> ColumnElement[bool]:
        """Whether a version is one of them, however many they are."""
        if self.is_sqlite:  # takes 32,766 values at most, and this comes several times
            each = func.json_each(json.dumps(list(self.rows))).table_valued("value")
            return version.in_(select(each.c.value))
        return version == any_(bindparam(None, list(self.rows), ARRAY(BigInteger), unique=True))


@dataclass(frozen=True, slots=True)
class Needs:
    """What is needed now; or, with `leaving`, what will be once those versions have gone.

    `gc --dry-run` looks ahead like that: as if gc had let go of them, and of expired uploads' pins.
    """

    leaving: Leaving | None = None
    are_apart: bool = False
    """Whether projects share nothing."""

    @classmethod
    def of_yard(cls, tx: Connection, leaving: Leaving | None = None) -> Needs:
        dedup = tx.scalar(select(schema.registry.c.dedup))
        return cls(leaving, are_apart=dedup == Dedup.PROJECT)

    def of_block(self, block: ColumnElement[int]) -> ColumnElement[bool]:
        """Whether some version needs a block, given by its row id."""
        delta = schema.placements.alias("delta")
        return or_(
            self._in_a_list(block),
            some(delta.c.base_id == block, self._in_a_list(delta.c.block_id)),
        )

    def of_block_in(self, placement: FromClause) -> ColumnElement[bool]:
        """Whether the block of a placement is needed, and this copy of it, or an equal one."""
        block = placement.c.block_id
        if not self.are_apart:
            return self.of_block(block)
        lists, edge = schema.list_blocks.alias("lists_of"), schema.version_lists.alias("edge_of")
        version, model = _v.alias("version_of"), schema.models.alias("model_of")
        delta, far = schema.placements.alias("delta"), _packs.alias("delta_home")
        home = _packs.alias("home")
        its_pack = home.c.id == placement.c.pack_id
        its_list = lists.c.block_id == block, edge.c.list_id == lists.c.list_id
        its_model = version.c.id == edge.c.version_id, model.c.id == version.c.model_id
        stays = () if self.leaving is None else (~self.leaving.has(edge.c.version_id),)
        its_delta = delta.c.base_id == block, far.c.id == delta.c.pack_id
        is_used = self._in_a_list(delta.c.block_id)
        by_version = _relies_on(home, lists.c.block_id, model.c.project)
        by_delta = _relies_on(home, delta.c.base_id, far.c.project)
        return or_(
            some(its_pack, *its_list, *its_model, *stays, by_version),
            some(its_pack, *its_delta, is_used, by_delta),
        )

    def of_pack(self) -> ColumnElement[bool]:
        """Whether a row of `packs` holds a needed block."""
        inside = schema.placements.alias("inside")
        return some(inside.c.pack_id == _packs.c.id, self.of_block_in(inside))

    def only_of_pack(self) -> ColumnElement[bool]:
        """Whether a row of `packs` holds a needed block that no live pack has as well.

        In place of a delta, the whole block in another pack will do.
        """
        inside = schema.placements.alias("inside")
        return some(
            inside.c.pack_id == _packs.c.id,
            self.of_block(inside.c.block_id),
            ~_lies_in_another_live_pack(inside),
        )

    def of_placement(self, placement: FromClause) -> ColumnElement[bool]:
        """Whether a placement must stay: its block is needed, and no older live pack has it."""
        return and_(self.of_block_in(placement), ~lies_in_an_older_pack(placement))

    def of_manifest(self) -> ColumnElement[bool]:
        """Whether a version, maybe one removed but not yet purged, has this row of `manifests`."""
        edge = schema.version_lists.alias("edge")
        refers = _v.c.manifest_id == schema.manifests.c.id
        has_edges = exists().where(edge.c.version_id == _v.c.id)
        if self.leaving is not None:
            stays = or_(_v.c.removed_ms.is_(None), has_edges)
            return exists().where(refers, or_(_is_held(), stays & ~self.leaving.has(_v.c.id)))
        held = exists().where(_leases.c.version_id == _v.c.id)
        return exists().where(refers, or_(_v.c.removed_ms.is_(None), held, has_edges))

    def pinned_pack(self, but_for: int | None = None) -> ColumnElement[bool]:
        """Whether an upload (other than one) holds a row of `packs`."""
        others = () if but_for is None else (_pins.c.upload_id != but_for,)
        return exists().where(
            _pins.c.pack_id == _packs.c.id, *others, *self._counts(_pins.c.upload_id)
        )

    def pinned_manifest(self) -> ColumnElement[bool]:
        pins = schema.manifest_pins
        return exists().where(
            pins.c.manifest_id == schema.manifests.c.id, *self._counts(pins.c.upload_id)
        )

    def _in_a_list(self, block: ColumnElement[int]) -> ColumnElement[bool]:
        lists = schema.list_blocks.alias("lists_of")
        if self.leaving is None:
            return some(lists.c.block_id == block)
        edge = schema.version_lists.alias("edge_of")
        # The newest version first: if any that has the list stays, it is most likely that one.
        stays = ~self.leaving.has(edge.c.version_id)
        in_use = some(edge.c.list_id == lists.c.list_id, stays, first=edge.c.version_id.desc())
        return some(lists.c.block_id == block, in_use)

    def _counts(self, upload: ColumnElement[int]) -> tuple[ColumnElement[bool], ...]:
        return () if self.leaving is None else _alive(upload)


def is_claimed_from(*pins: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whether an upload may have claimed blocks of a removed version, which so must stay a while.

    A token that reads only some projects may commit only blocks that their versions have, removed
    ones included (`uploads.Reading`). If gc let go of the version, an upload could not commit what
    it claimed. So the version stays while an upload, by a pin that fits `pins`, holds a pack with
    its blocks that another upload wrote. Uploads opened after the removal do not count: where there
    is always an upload, nothing that shares a pack with it would ever go.
    """
    edge, lists = schema.version_lists.alias("edge_of"), schema.list_blocks.alias("lists_of")
    inside, home = schema.placements.alias("inside"), _packs.alias("home")
    blocks = edge.c.version_id == _v.c.id, lists.c.list_id == edge.c.list_id
    held = inside.c.block_id == lists.c.block_id, _pins.c.pack_id == inside.c.pack_id
    claimed = home.c.id == inside.c.pack_id, home.c.upload_id.is_distinct_from(_pins.c.upload_id)
    u = schema.uploads.alias("holding")
    before = u.c.id == _pins.c.upload_id, u.c.created_ms <= _v.c.removed_ms
    # Most of the time there are no pins at all, so that no block has to be looked at.
    is_any_held = exists(select(_pins.c.pack_id))
    return and_(is_any_held, some(*blocks, *held, *claimed, *before, *pins))


def _relies_on(
    home: FromClause, block: ColumnElement[int], project: ColumnElement[str]
) -> ColumnElement[bool]:
    """Whether a project that needs a block relies on the pack `home`, which has it.

    It does if the pack is its own, or if it has none with the whole block: after a rebuild its
    packs may be another project's. Its own stays, so no two packs go because of each other.
    """
    copy, own = schema.placements.alias("own_copy"), _packs.alias("own_home")
    has_one = some(
        copy.c.block_id == block,
        copy.c.base_id.is_(None),
        own.c.id == copy.c.pack_id,
        own.c.state == FileState.LIVE,
        own.c.project == project,
    )
    return or_(home.c.project == project, ~has_one)


def _alive(upload: ColumnElement[int]) -> tuple[ColumnElement[bool], ...]:
    """Whether an upload, by its row id, is open and has not expired."""
    u = schema.uploads.alias("pinning")
    alive = (u.c.state == UploadState.OPEN, u.c.lease_ms > now_ms())
    return (exists().where(u.c.id == upload, *alive),)


def _is_held() -> ColumnElement[bool]:
    """Whether a reader holds a row of `versions`."""
    return exists().where(_leases.c.version_id == _v.c.id, _leases.c.until_ms > now_ms())


def lies_in_an_older_pack(placement: FromClause) -> ColumnElement[bool]:
    """Whether an older live pack has the same placement.

    Of equal placements the one in the oldest pack stays, so that all runs agree which one it is.
    """
    twin, home = schema.placements.alias("twin"), _packs.alias("home")
    return some(is_older_twin(placement, twin, home))


def is_older_twin(placement: FromClause, twin: FromClause, home: FromClause) -> ColumnElement[bool]:
    """Whether `twin`, in the pack `home`, equals a placement, and that pack is older and live."""
    own = _packs.alias("own")
    return and_(
        twin.c.block_id == placement.c.block_id,
        twin.c.base_id.is_not_distinct_from(placement.c.base_id),
        home.c.id == twin.c.pack_id,
        home.c.id < placement.c.pack_id,
        home.c.state == FileState.LIVE,
        # Where projects share nothing, each keeps its own copy.
        own.c.id == placement.c.pack_id,
        home.c.project.is_not_distinct_from(own.c.project),
    )


def _lies_in_another_live_pack(placement: FromClause) -> ColumnElement[bool]:
    twin, home = schema.placements.alias("twin"), _packs.alias("home")
    return some(
        twin.c.block_id == placement.c.block_id,
        or_(twin.c.base_id.is_(None), twin.c.base_id == placement.c.base_id),
        home.c.id == twin.c.pack_id,
        home.c.id != placement.c.pack_id,
        home.c.state == FileState.LIVE,
    )
