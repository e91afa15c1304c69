"""The audit log: who did what. Only ever added to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, select

from weightyard.records import AuditEntry
from weightyard.registry import schema
from weightyard.registry.rows import clock, moment

_a = schema.audit


def record(
    tx: Connection, who: str, action: str, subject: str, detail: Mapping[str, Any] | None = None
) -> None:
    """Note something for operators only; `record_event` also tells listeners."""
    tx.execute(
        insert(_a).values(
            at_ms=clock(tx), who=who, action=action, subject=subject, detail=dict(detail or {})
        )
    )


def entries(tx: Connection, *, before: int | None = None, limit: int = 1000) -> list[AuditEntry]:
    """Entries, the newest first; with `before`, those with an id below it."""
    wanted = select(_a).order_by(_a.c.id.desc()).limit(limit)
    if before is not None:
        wanted = wanted.where(_a.c.id < before)
    return [
        AuditEntry(
            id=row.id,
            at=moment(row.at_ms),
            who=row.who,
            action=row.action,
            subject=row.subject,
            detail=row.detail,
        )
        for row in tx.execute(wanted)
    ]
