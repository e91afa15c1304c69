"""Needs: what keeps a block, a pack or a manifest, as conditions in SQL.

A block is needed if it is in a list, or the base of a delta of such a block (deltas have depth 1).
Nothing here reads rows into memory: the database decides, by its indexes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, FromClause, and_, exists, func, or_, select

from weightyard.registry import schema
from weightyard.registry.database import is_one_of, now_ms
from weightyard.registry.schema import FileState, UploadState

_packs, _pins, _v, _leases = schema.packs, schema.pins, schema.versions, schema.read_leases


@dataclass(frozen=True, slots=True)
class Needs:
    """What is needed: now, or (given a condition on versions) once those versions have gone.

    A plan looks ahead: removed versions are purged, expired uploads have lost their pins.
    """

    leaving: ColumnElement[bool] | None = None

    def of_block(self, block: ColumnElement[int]) -> ColumnElement[bool]:
        """Whether some version needs a block, given by its row id."""
        delta = schema.placements.alias("delta")
        return or_(
            self._in_a_list(block),
            exists().where(delta.c.base_id == block, self._in_a_list(delta.c.block_id)),
        )

    def of_pack(self) -> ColumnElement[bool]:
        """Whether a row of `packs` holds a needed block."""
        inside = schema.placements.alias("inside")
        return exists().where(inside.c.pack_id == _packs.c.id, self.of_block(inside.c.block_id))

    def only_of_pack(self) -> ColumnElement[bool]:
        """Whether a row of `packs` holds a needed block that no live pack has besides."""
        inside = schema.placements.alias("inside")
        return exists().where(
            inside.c.pack_id == _packs.c.id,
            self.of_block(inside.c.block_id),
            ~_lies_in_a_live_pack(inside, but_not=inside.c.pack_id),
        )

    def of_placement(self, placement: FromClause) -> ColumnElement[bool]:
        """Whether a placement must stay: its block is needed, and no older live pack has it.

        Of equal placements the oldest pack keeps its own, whoever asks and in whichever order.
        """
        return and_(
            self.of_block(placement.c.block_id),
            ~_lies_in_a_live_pack(placement, before=placement.c.pack_id),
        )

    def of_manifest(self) -> ColumnElement[bool]:
        """Whether a version refers to a row of `manifests`, be it removed but not yet purged."""
        edge = schema.version_lists.alias("edge")
        refers = _v.c.manifest_id == schema.manifests.c.id
        if self.leaving is not None:
            return exists().where(refers, self._stays())
        held = exists().where(_leases.c.version_id == _v.c.id)
        has_edges = exists().where(edge.c.version_id == _v.c.id)
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
            return exists().where(lists.c.block_id == block)
        edge = schema.version_lists.alias("edge_of")
        return exists().where(
            lists.c.block_id == block,
            edge.c.list_id == lists.c.list_id,
            _v.c.id == edge.c.version_id,
            self._stays(),
        )

    def _stays(self) -> ColumnElement[bool]:
        assert self.leaving is not None
        held = exists().where(_leases.c.version_id == _v.c.id, _leases.c.until_ms > now_ms())
        return or_(and_(_v.c.removed_ms.is_(None), ~self.leaving), held)

    def _counts(self, upload: ColumnElement[int]) -> tuple[ColumnElement[bool], ...]:
        if self.leaving is None:
            return ()
        u = schema.uploads.alias("pinning")
        alive = (u.c.state == UploadState.OPEN, u.c.lease_ms > now_ms())
        return (exists().where(u.c.id == upload, *alive),)


def leaving(tx: Connection, version_rows: Sequence[int]) -> ColumnElement[bool]:
    """The condition that a version is one of these, however many they are."""
    if tx.dialect.name == "sqlite":  # takes 32,766 values at most, and this comes several times
        each = func.json_each(json.dumps(list(version_rows))).table_valued("value")
        return _v.c.id.in_(select(each.c.value))
    return is_one_of(tx, _v.c.id, list(version_rows))


def _lies_in_a_live_pack(
    placement: FromClause,
    *,
    but_not: ColumnElement[int] | None = None,
    before: ColumnElement[int] | None = None,
) -> ColumnElement[bool]:
    """Whether the same block, on the same base or none, lies in another live pack."""
    twin, home = schema.placements.alias("twin"), _packs.alias("home")
    which = home.c.id != but_not if before is None else home.c.id < before
    return exists().where(
        twin.c.block_id == placement.c.block_id,
        twin.c.base_id.is_not_distinct_from(placement.c.base_id),
        home.c.id == twin.c.pack_id,
        home.c.state == FileState.LIVE,
        which,
    )
