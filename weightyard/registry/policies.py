"""Policies: whether a store has a storage policy is tried out on one pack of the version."""

from __future__ import annotations

from sqlalchemy import Connection, select

from weightyard.errors import Unsupported
from weightyard.names import PackId, Ref
from weightyard.registry import schema, versions
from weightyard.registry.database import Database
from weightyard.registry.schema import FileState
from weightyard.storage import layout
from weightyard.storage.store import FileOptions, Store

_packs, _p = schema.packs, schema.placements
_lb, _vl = schema.list_blocks, schema.version_lists


def require_possible(database: Database, store: Store, ref: Ref, policy: str | None) -> None:
    """Require that the store keeps copies and has this policy. Raises NoSuchThing, Unsupported."""
    if not store.replicates:
        raise Unsupported(f"{store.url} keeps one copy: use an hdfs:// store")
    pack = database.read(lambda tx: _one_pack(tx, ref))
    if policy is not None and pack is not None:
        store.adjust(layout.pack(pack), FileOptions(policy=policy))


def _one_pack(tx: Connection, ref: Ref) -> PackId | None:
    version = versions.find(tx, ref)
    name = tx.scalar(
        select(_packs.c.name)
        .join(_p, _p.c.pack_id == _packs.c.id)
        .join(_lb, _lb.c.block_id == _p.c.block_id)
        .join(_vl, _vl.c.list_id == _lb.c.list_id)
        .where(_vl.c.version_id == version.id, _packs.c.state == FileState.LIVE)
        .limit(1)
    )
    return PackId(name) if name is not None else None
