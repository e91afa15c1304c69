"""Binding: a store belongs to one registry, and each knows the other."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection, select, update

from weightyard.errors import FileMissing, ForeignStore, ManifestInvalid, UnknownFormat
from weightyard.names import UploadId
from weightyard.registry import schema
from weightyard.registry.database import Database
from weightyard.storage import layout
from weightyard.storage.store import Store
from weightyard.transfer.once import read_whole, write_once

YARD_FORMAT = 1


class YardFile(msgspec.Struct, frozen=True):
    """`yard.json`, written once when a store is made."""

    format: int
    yard_id: str
    registry_id: str
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Bound:
    """What a registry and its store agree on."""

    yard_id: str
    registry_id: str
    block_bytes: int


def bind(database: Database, store: Store) -> Bound:
    """Make sure that store and registry belong together; on first use, make them.

    Raises ForeignStore, naming both, if one of them belongs to another.
    """
    mine = database.read(lambda tx: tx.execute(select(schema.registry)).one())
    found = read_yard_file(store)
    if found is None:
        if mine.yard_id is not None:
            raise ForeignStore(
                f"registry {mine.registry_id} belongs to yard {mine.yard_id}, but {store.url} has "
                "no yard.json: is it the right store?"
            )
        store.init()
        made = YardFile(YARD_FORMAT, secrets.token_hex(16), mine.registry_id, mine.block_bytes)
        upload = UploadId.new()
        write_once(store, upload, layout.YARD, msgspec.json.encode(made))
        store.delete(layout.staging_folder(upload))
        found = made
    if found.registry_id != mine.registry_id or mine.yard_id not in (None, found.yard_id):
        raise ForeignStore(
            f"{store.url} (yard {found.yard_id}) belongs to registry {found.registry_id}; this is "
            f"registry {mine.registry_id}. `weightyard rebuild --adopt` would take it over"
        )
    if mine.yard_id is None:
        database.write(lambda tx: _remember(tx, found))
    return Bound(found.yard_id, found.registry_id, found.block_bytes)


def _remember(tx: Connection, found: YardFile) -> None:
    tx.execute(update(schema.registry).values(yard_id=found.yard_id, block_bytes=found.block_bytes))


def read_yard_file(store: Store) -> YardFile | None:
    """A store's yard.json, or None if it has none. Raises UnknownFormat, ManifestInvalid."""
    try:
        content = read_whole(store, layout.YARD, 1 << 16)
    except FileMissing:
        return None
    try:
        found = msgspec.json.decode(content, type=YardFile)
    except msgspec.DecodeError as why:
        raise ManifestInvalid(f"{store.url}/{layout.YARD}: {why}") from None
    if found.format > YARD_FORMAT:
        raise UnknownFormat("yard.json", found.format, YARD_FORMAT)
    return found
