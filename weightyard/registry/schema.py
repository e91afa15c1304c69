"""The tables. Changed only together with a migration in `weightyard/migrations`."""

from __future__ import annotations

import enum

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite gives out row ids by itself for INTEGER PRIMARY KEY only.
Id = BigInteger().with_variant(Integer, "sqlite")
Millis = BigInteger
"""Milliseconds since the epoch by the database's clock."""


class FileState(enum.StrEnum):
    """The life of a pack or manifest. It only goes forward, but a claim revives a condemned one."""

    WRITING = "writing"
    """Has a row, perhaps a staged file; nobody may claim it."""
    LIVE = "live"
    CONDEMNED = "condemned"
    """Nobody needed it when gc looked. Still whole; a claim makes it live again."""
    DELETING = "deleting"
    """Its placements are gone; its file goes once nobody can be reading it any more."""
    GONE = "gone"
    """The row is kept for a while, so that a file which a late writer still brings is noticed."""
    DAMAGED = "damaged"
    """`check` found its file missing, short or wrong."""


class UploadState(enum.StrEnum):
    OPEN = "open"
    COMMITTED = "committed"
    EXPIRED = "expired"
    SWEPT = "swept"
    """Ended so long ago that nothing of it can be in staging any more."""


class Dedup(enum.StrEnum):
    """How far equal blocks are shared."""

    YARD = "yard"
    """In the whole yard: equal content is stored once."""
    PROJECT = "project"
    """Within projects: equal content of two is stored twice, and neither learns of the other's."""


class Settle(enum.StrEnum):
    """What is left to do so that the store keeps a file as its row says."""

    ADJUST = "adjust"
    """Tell the store."""
    REVIEW = "review"
    """A version that asked for this is gone: ask the others, then tell the store."""


registry = Table(
    "registry",
    metadata,
    Column("id", Id, primary_key=True),
    Column("registry_id", String(32), nullable=False),
    Column("yard_id", String(32)),
    Column("block_bytes", BigInteger, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("dedup", String(8), nullable=False, server_default=Dedup.YARD.value),
)

models = Table(
    "models",
    metadata,
    Column("id", Id, primary_key=True),
    Column("project", String(96), nullable=False),
    Column("name", String(96), nullable=False),
    Column("kind", String(8), nullable=False),
    Column("created_ms", Millis, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("last_number", Integer, nullable=False),
    Column("retention", JSON),
    Column("removed_ms", Millis),
    # Only of runs. Never goes back, not even if the run is removed and begun again.
    Column("generation", BigInteger, nullable=False, server_default="0"),
    # The key with which it was taken over last: the same request again has the same key.
    Column("generation_key", String(128)),
    UniqueConstraint("project", "name"),
)

versions = Table(
    "versions",
    metadata,
    Column("id", Id, primary_key=True),
    Column("model_id", ForeignKey("models.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("manifest_id", ForeignKey("manifests.id"), nullable=False, index=True),
    Column("parent_id", ForeignKey("versions.id"), index=True),
    Column("author", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("structure", JSON, nullable=False),
    Column("files", Integer, nullable=False),
    Column("tensors", Integer, nullable=False),
    Column("logical_bytes", BigInteger, nullable=False),
    Column("replication", Integer),
    Column("policy", String(64)),
    Column("created_ms", Millis, nullable=False),
    Column("used_ms", Millis),
    Column("removed_ms", Millis),
    Column("damaged_ms", Millis, index=True),
    Column("step", BigInteger),
    UniqueConstraint("model_id", "number"),
    Index(
        "ix_versions_model_id_step",
        "model_id",
        "step",
        "number",
        sqlite_where=text("step IS NOT NULL"),
        postgresql_where=text("step IS NOT NULL"),
    ),
)

manifests = Table(
    "manifests",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("state", String(10), nullable=False, index=True),
    Column("state_ms", Millis, nullable=False),
    Column("upload_id", ForeignKey("uploads.id")),
    Column("bytes", BigInteger, nullable=False),
    Column("replication", Integer),
    Column("policy", String(64)),
    Column("settle", String(8), index=True),
)

packs = Table(
    "packs",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(32), nullable=False, unique=True),
    Column("state", String(10), nullable=False, index=True),
    Column("state_ms", Millis, nullable=False),
    Column("upload_id", ForeignKey("uploads.id"), index=True),
    Column("bytes", BigInteger, nullable=False),
    Column("replication", Integer),
    Column("policy", String(64)),
    Column("settle", String(8), index=True),
    # Whose uploads may claim from it; NULL: everybody's. Set if projects do not share blocks.
    Column("project", String(96)),
)

blocks = Table(
    "blocks",
    metadata,
    Column("id", Id, primary_key=True),
    Column("hash", LargeBinary(32), nullable=False, unique=True),
    Column("raw_bytes", Integer, nullable=False),
)

placements = Table(
    "placements",
    metadata,
    Column("pack_id", ForeignKey("packs.id"), primary_key=True),
    Column("offset", BigInteger, primary_key=True),
    Column("block_id", ForeignKey("blocks.id"), nullable=False, index=True),
    Column("base_id", ForeignKey("blocks.id")),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("encoding", LargeBinary, nullable=False),
    # Without the placements that have no base, which are most: with them, SQLite would take the
    # index for useless.
    Index(
        "ix_placements_base_id",
        "base_id",
        sqlite_where=text("base_id IS NOT NULL"),
        postgresql_where=text("base_id IS NOT NULL"),
    ),
)

# version → list → block: a tensor or file that did not change adds one row to `version_lists`, not
# one for each block.
lists = Table(
    "lists",
    metadata,
    Column("id", Id, primary_key=True),
    Column("digest", LargeBinary(32), nullable=False, unique=True),
)

list_blocks = Table(
    "list_blocks",
    metadata,
    Column("list_id", ForeignKey("lists.id"), primary_key=True),
    Column("block_id", ForeignKey("blocks.id"), primary_key=True),
    Index("ix_list_blocks_block_id", "block_id"),
    sqlite_with_rowid=False,
)

version_lists = Table(
    "version_lists",
    metadata,
    Column("version_id", ForeignKey("versions.id"), primary_key=True),
    Column("list_id", ForeignKey("lists.id"), primary_key=True),
    # With the version, so that gc finds the newest version of a list that thousands share.
    Index("ix_version_lists_list_id_version_id", "list_id", "version_id"),
    sqlite_with_rowid=False,
)

uploads = Table(
    "uploads",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(32), nullable=False, unique=True),
    Column("project", String(96), nullable=False),
    Column("model", String(96), nullable=False),
    Column("author", Text, nullable=False),
    Column("state", String(10), nullable=False),
    Column("created_ms", Millis, nullable=False),
    Column("lease_ms", Millis, nullable=False),
    Column("publication", JSON),
    Index("ix_uploads_state_lease_ms", "state", "lease_ms"),
)

# Files that a service received for an upload: the blocks of each, until the version is made.
upload_files = Table(
    "upload_files",
    metadata,
    Column("upload_id", ForeignKey("uploads.id"), primary_key=True),
    Column("path", Text, primary_key=True),
    Column("manifest", LargeBinary, nullable=False),
)

# Ranks that have added all their packs of a checkpoint.
upload_ranks = Table(
    "upload_ranks",
    metadata,
    Column("upload_id", ForeignKey("uploads.id"), primary_key=True),
    Column("rank", Integer, primary_key=True),
)

commits = Table(
    "commits",
    metadata,
    Column("key", String(128), primary_key=True),
    Column("upload_id", ForeignKey("uploads.id"), nullable=False),
    Column("version_id", ForeignKey("versions.id"), nullable=False),
)

pins = Table(
    "pins",
    metadata,
    Column("upload_id", ForeignKey("uploads.id"), primary_key=True),
    Column("pack_id", ForeignKey("packs.id"), primary_key=True),
    Index("ix_pins_pack_id", "pack_id"),
)

manifest_pins = Table(
    "manifest_pins",
    metadata,
    Column("upload_id", ForeignKey("uploads.id"), primary_key=True),
    Column("manifest_id", ForeignKey("manifests.id"), primary_key=True),
    Index("ix_manifest_pins_manifest_id", "manifest_id"),
)

read_leases = Table(
    "read_leases",
    metadata,
    Column("id", Id, primary_key=True),
    Column("version_id", ForeignKey("versions.id"), nullable=False, index=True),
    Column("holder", Text, nullable=False),
    Column("until_ms", Millis, nullable=False),
    Column("author", Text),
)

aliases = Table(
    "aliases",
    metadata,
    Column("model_id", ForeignKey("models.id"), primary_key=True),
    Column("alias", String(64), primary_key=True),
    Column("version_id", ForeignKey("versions.id"), nullable=False, index=True),
)

alias_moves = Table(
    "alias_moves",
    metadata,
    Column("id", Id, primary_key=True),
    Column("model_id", ForeignKey("models.id"), nullable=False),
    Column("alias", String(64), nullable=False),
    Column("before", Integer),
    Column("after", Integer),
    Column("who", Text, nullable=False),
    Column("at_ms", Millis, nullable=False),
    Column("reason", Text, nullable=False),
    Index("ix_alias_moves_model_id_alias", "model_id", "alias", "id"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Id, primary_key=True),
    Column("at_ms", Millis, nullable=False),
    Column("who", Text, nullable=False),
    Column("action", String(64), nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", JSON, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", Id, primary_key=True),
    Column("at_ms", Millis, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", JSON, nullable=False),
)

# The numbers of journal entries that were given out; the entries are in the outbox or the store.
journal = Table(
    "journal",
    metadata,
    Column("id", Id, primary_key=True),
    Column("at_ms", Millis, nullable=False),
    sqlite_autoincrement=True,
)

outbox = Table(
    "outbox",
    metadata,
    Column("id", Id, primary_key=True),
    Column("path", Text, nullable=False),
    Column("content", LargeBinary, nullable=False),
    Column("created_ms", Millis, nullable=False),
    Column("set_aside_ms", Millis),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(96), nullable=False, unique=True),
    Column("secret_hash", LargeBinary(32), nullable=False, unique=True),
    Column("role", String(8), nullable=False),
    Column("projects", JSON, nullable=False),
    Column("created_ms", Millis, nullable=False),
    Column("used_ms", Millis),
    Column("revoked_ms", Millis),
)

quotas = Table(
    "quotas",
    metadata,
    Column("project", String(96), primary_key=True),
    Column("stored_bytes", BigInteger),
    Column("versions", Integer),
)
