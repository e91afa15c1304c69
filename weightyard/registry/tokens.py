"""Tokens: who may do what. Secrets are random, shown once, and kept as hashes only."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from weightyard.errors import Conflict, NoSuchThing, Refused
from weightyard.names import ModelName, TokenName
from weightyard.records import EVERY_PROJECT, NewToken, Role, Token
from weightyard.registry import audit, schema
from weightyard.registry.database import now_ms
from weightyard.registry.rows import clock, moment

PREFIX = "wy_"
"""By which scanners of repositories and logs recognise a token that ended up there."""

_SECRET_BYTES = 32
_LONGEST = 128
_USE_NOTED_EVERY_MS = 60_000

_t = schema.tokens
# Built once: it runs with every request, and building takes longer than running it.
_BY_SECRET = select(_t).where(_t.c.secret_hash == bindparam("hashed"), _t.c.revoked_ms.is_(None))


def create(
    tx: Connection, name: TokenName, role: Role, projects: Sequence[str], *, who: str
) -> NewToken:
    """A new token with its secret, which nobody can look up later. Raises Conflict, InvalidName."""
    allowed = _parsed(projects)
    if tx.scalar(select(_t.c.id).where(_t.c.name == name.text)) is not None:
        raise Conflict(f"there is a token {name} already; names are not used twice")
    secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    tx.execute(
        insert(_t).values(
            name=name.text,
            secret_hash=_hash(secret),
            role=role.value,
            projects=list(allowed),
            created_ms=clock(tx),
        )
    )
    detail = {"role": role.value, "projects": list(allowed)}
    audit.record(tx, who, "token.created", name.text, detail)
    made = find_named(tx, name)
    assert made is not None
    return NewToken(**made.model_dump(), secret=secret)


def find(tx: Connection, secret: str) -> Token | None:
    """The token with this secret, unless it is revoked."""
    if not secret.startswith(PREFIX) or len(secret) > _LONGEST:
        return None
    wanted = _hash(secret)
    # The index looks for a hash of 256 random bits: the time it takes tells nothing of the secret.
    row = tx.execute(_BY_SECRET, {"hashed": wanted}).one_or_none()
    if row is None or not hmac.compare_digest(row.secret_hash, wanted):
        return None
    return _as_token(row)


def find_named(tx: Connection, name: TokenName) -> Token | None:
    """The token of this name, also if it is revoked: names are not used twice."""
    row = tx.execute(select(_t).where(_t.c.name == name.text)).one_or_none()
    return None if row is None else _as_token(row)


def list_tokens(
    tx: Connection, *, after: TokenName | None = None, limit: int = 1000
) -> list[Token]:
    """All tokens, revoked ones too, by name; with `after`, those after that name."""
    wanted = select(_t).order_by(_t.c.name).limit(limit)
    if after is not None:
        wanted = wanted.where(_t.c.name > after.text)
    return [_as_token(row) for row in tx.execute(wanted)]


def any_exist(tx: Connection) -> bool:
    """Whether a token was ever made: from then on nobody comes in without one."""
    return tx.scalar(select(_t.c.id).limit(1)) is not None


def revoke(tx: Connection, name: TokenName, *, who: str) -> Token:
    """End a token, for good. Raises NoSuchThing."""
    changed = tx.execute(
        update(_t)
        .where(_t.c.name == name.text, _t.c.revoked_ms.is_(None))
        .values(revoked_ms=now_ms())
    )
    if not changed.rowcount:
        raise NoSuchThing(f"no token {name}, or it is revoked already")
    audit.record(tx, who, "token.revoked", name.text)
    return _as_token(tx.execute(select(_t).where(_t.c.name == name.text)).one())


def note_use(tx: Connection, name: str) -> None:
    """Remember when a token was last used, to the minute."""
    long_ago = _t.c.used_ms.is_(None) | (_t.c.used_ms < now_ms() - _USE_NOTED_EVERY_MS)
    tx.execute(update(_t).where(_t.c.name == name, long_ago).values(used_ms=now_ms()))


def _parsed(projects: Sequence[str]) -> tuple[str, ...]:
    if not projects:
        raise Refused(f"a token needs projects, or {EVERY_PROJECT!r} for all of them")
    if EVERY_PROJECT in projects:
        return (EVERY_PROJECT,)
    return tuple(sorted({ModelName(project, "any").project for project in projects}))


def _hash(secret: str) -> bytes:
    # 256 random bits cannot be guessed, so a fast hash is as good as a slow one.
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _as_token(row: Row[Any]) -> Token:
    return Token(
        name=row.name,
        role=Role(row.role),
        projects=tuple(row.projects),
        created=moment(row.created_ms),
        last_used=moment(row.used_ms),
        revoked=moment(row.revoked_ms),
    )
