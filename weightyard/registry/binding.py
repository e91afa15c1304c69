"""Binding: a store belongs to one registry, and each knows the other."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from sqlalchemy import Connection, select, update

from weightyard.errors import (
    BadSetting,
    Conflict,
    FileMissing,
    ForeignStore,
    ManifestInvalid,
    UnknownFormat,
)
from weightyard.names import UploadId
from weightyard.registry import schema
from weightyard.registry.chores import small_files
from weightyard.registry.database import Database
from weightyard.registry.schema import Dedup
from weightyard.storage import layout
from weightyard.storage.opening import folder_of
from weightyard.storage.store import Ownership, Store, StorePath
from weightyard.transfer.once import read_whole, write_once

YARD_FORMAT = 1
OWNER_FORMAT = 1

MAX_BINDING_BYTES = 1 << 16
"""Of `yard.json` and of an owner's file."""


class YardFile(msgspec.Struct, frozen=True):
    """`yard.json`, written once when a store is made."""

    format: int
    yard_id: str
    registry_id: str
    block_bytes: int
    dedup: Dedup = Dedup.YARD


class Owner(msgspec.Struct, frozen=True):
    """`owners/<generation>.json`: the store changed hands. Without any, yard.json names the owner.

    A rebuilt registry keeps its id and gets the next generation, so that the database it replaces
    is refused, should it turn up again.
    """

    format: int
    generation: Annotated[int, msgspec.Meta(ge=0, lt=10**6)]
    registry_id: str
    nonce: str
    """Random, so that of two that take a store over at once, one sees that the other was first."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a registry and its store agree on."""

    yard_id: str
    registry_id: str
    block_bytes: int
    dedup: Dedup


_T = TypeVar("_T", YardFile, Owner)


def bind(
    database: Database,
    store: Store,
    ownership: Ownership | None = None,
    *,
    dedup: Dedup | None = None,
) -> Bound:
    """Make sure that store and registry belong together; on first use, make the yard.

    `ownership` is for the folders of a new yard. `dedup` is chosen when a yard is made, and stays.
    Raises ForeignStore, naming both, if one of them belongs to another; BadSetting for a yard that
    was made with another `dedup`, and, unless `ownership` is given, if a new yard would lie among
    other files.
    """
    mine = database.read(lambda tx: tx.execute(select(schema.registry)).one())
    found = read_yard_file(store)
    if found is None:
        if mine.yard_id is not None:
            raise ForeignStore(
                f"registry {mine.registry_id} belongs to yard {mine.yard_id}, but {store.url} has "
                "no yard.json: is it the right store?"
            )
        if ownership is None:  # nobody said that a yard is to be made here
            require_vacant(store, database.files_in(folder_of(store)))
        store.init(ownership)
        made = YardFile(
            YARD_FORMAT,
            secrets.token_hex(16),
            mine.registry_id,
            mine.block_bytes,
            dedup or Dedup.YARD,
        )
        try:
            with small_files(database, store, "bind") as upload:
                write_once(store, upload, layout.YARD, msgspec.json.encode(made))
        except Conflict:  # another process made the yard meanwhile
            made = read_yard_file(store) or made
        found = made
    owner = read_owner(store, found)
    if owner.registry_id != mine.registry_id or mine.yard_id not in (None, found.yard_id):
        raise ForeignStore(
            f"{store.url} (yard {found.yard_id}) belongs to registry {owner.registry_id}; this is "
            f"registry {mine.registry_id}. `weightyard rebuild --adopt` would take it over"
        )
    if owner.generation != mine.generation:
        raise ForeignStore(
            f"{store.url} (yard {found.yard_id}) belongs to registry {owner.registry_id} as it was "
            f"rebuilt ({owner.generation} times); this is an older copy of it ({mine.generation})"
        )
    if dedup not in (None, found.dedup):
        raise BadSetting(
            f"{store.url} was made with dedup={found.dedup}, which cannot change: its packs are "
            "shared that way"
        )
    if mine.yard_id is None:
        database.write(lambda tx: _remember(tx, found))
    return Bound(found.yard_id, owner.registry_id, found.block_bytes, found.dedup)


def require_vacant(store: Store, database_files: str | None) -> None:
    """Make no yard of a folder that has other files: somebody may have mistyped its name.

    A yard changes the folder's mode, and a push of the folder would push the yard's files, too.
    `database_files`: what the names of the registry's own files begin with, if they lie there.
    Raises BadSetting.
    """
    if read_yard_file(store) is not None:
        return
    try:
        names = sorted(path.text for path in store.top() if path not in layout.TOP)
    except FileMissing:  # a folder still to be made
        return
    others = [
        name
        for name in names
        if not (name.startswith(".") or name == "lost+found")
        and not (database_files and name.startswith(database_files))
    ]
    if others:
        raise BadSetting(
            f"{store.url} is no yard, and other files are in it ({', '.join(others[:3])}"
            f"{', …' if len(others) > 3 else ''}): name another folder, or make a yard of this one "
            "by `weightyard init`"
        )


def take_over(
    tx: Connection, store: Store, upload: UploadId, yard: YardFile, registry_id: str
) -> None:
    """Make the store belong to this database, under the given registry id, and to no other.

    The file that says so is written before the transaction ends. If the transaction then fails,
    nobody owns the store until somebody takes it over, but never do two. `upload`, under which the
    file is written, has its row already.
    """
    generation = read_owner(store, yard).generation + 1
    owner = Owner(OWNER_FORMAT, generation, registry_id, secrets.token_hex(16))
    write_once(store, upload, layout.owner(owner.generation), msgspec.json.encode(owner))
    _remember(tx, yard)
    tx.execute(update(schema.registry).values(registry_id=registry_id, generation=owner.generation))


def read_yard_file(store: Store) -> YardFile | None:
    """A store's yard.json, or None if it has none. Raises UnknownFormat, ManifestInvalid."""
    try:
        return _read(store, layout.YARD, YardFile, YARD_FORMAT)
    except FileMissing:
        return None


def read_owner(store: Store, yard: YardFile) -> Owner:
    """Who a store belongs to now. Raises UnknownFormat, ManifestInvalid."""
    newest = max((file.path for file in store.list(layout.OWNERS)), default=None)
    if newest is None:
        return Owner(OWNER_FORMAT, 0, yard.registry_id, "")
    owner = _read(store, newest, Owner, OWNER_FORMAT)
    if layout.owner(owner.generation) != newest:
        raise ManifestInvalid(f"{store.url}/{newest}: says it is generation {owner.generation}")
    return owner


def _remember(tx: Connection, found: YardFile) -> None:
    tx.execute(
        update(schema.registry).values(
            yard_id=found.yard_id, block_bytes=found.block_bytes, dedup=found.dedup
        )
    )


def _read(store: Store, path: StorePath, kind: type[_T], known: int) -> _T:
    content = read_whole(store, path, MAX_BINDING_BYTES)
    try:
        found = msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise ManifestInvalid(f"{store.url}/{path}: {str(why)[:200]}") from None
    if found.format > known:
        raise UnknownFormat(path.text, found.format, known)
    return found
