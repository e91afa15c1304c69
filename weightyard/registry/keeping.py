"""Keeping: changing how many copies of a version there are, and on what kind of disk."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select, update

from weightyard.errors import Refused
from weightyard.names import Ref
from weightyard.records import Version
from weightyard.registry import outbox, replication, schema, versions
from weightyard.registry.rows import record_event

_packs, _manifests, _v = schema.packs, schema.manifests, schema.versions


def keep(tx: Connection, ref: Ref, *, copies: int | None, policy: str | None, who: str) -> Version:
    """Ask for copies, a policy, or both, for a version; what is None stays as it is.

    Its packs get more copies if they had fewer, and fewer if no other version asks for as many;
    `replication.settle` tells the store. Raises NoSuchThing, Refused if both are None.
    """
    if copies is None and policy is None:
        raise Refused("say copies, policy, or both")
    row = versions.hold(tx, versions.find(tx, ref), alone=True)
    asked: dict[str, Any] = {"replication": copies, "policy": policy}
    changes = {name: value for name, value in asked.items() if value is not None}
    replication.review_files_of(tx, row.id)  # some had more copies only for this version
    tx.execute(update(_v).where(_v.c.id == row.id).values(**changes))
    holding = _packs.c.id.in_(replication.packs_of(row.id))
    # In the order of ids, as claims lock packs.
    tx.execute(select(_packs.c.id).where(holding).order_by(_packs.c.id).with_for_update())
    replication.ask(tx, _packs, holding, copies, policy)
    replication.ask(tx, _manifests, _manifests.c.id == row.manifest_id, copies)
    version = versions.get(tx, row.id)
    record_event(tx, who, "version.kept", version.ref, changes)
    outbox.put_journal(tx, "annotated", version.ref, who, changes)
    return version
