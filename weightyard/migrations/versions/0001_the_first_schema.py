"""The first schema"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_table(
        "blocks",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("raw_bytes", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_blocks")),
        sa.UniqueConstraint("hash", name=op.f("uq_blocks_hash")),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_table(
        "journal",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_journal")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "lists",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lists")),
        sa.UniqueConstraint("digest", name=op.f("uq_lists_digest")),
    )
    op.create_table(
        "models",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("project", sa.String(length=96), nullable=False),
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("last_number", sa.Integer(), nullable=False),
        sa.Column("retention", sa.JSON(), nullable=True),
        sa.Column("removed_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
        sa.UniqueConstraint("project", "name", name=op.f("uq_models_project_name")),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )
    op.create_table(
        "quotas",
        sa.Column("project", sa.String(length=96), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=True),
        sa.Column("versions", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_quotas")),
    )
    op.create_table(
        "registry",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("registry_id", sa.String(length=32), nullable=False),
        sa.Column("yard_id", sa.String(length=32), nullable=True),
        sa.Column("block_bytes", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_registry")),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("role", sa.String(length=8), nullable=False),
        sa.Column("projects", sa.JSON(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("used_ms", sa.BigInteger(), nullable=True),
        sa.Column("revoked_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("name", name=op.f("uq_tokens_name")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_tokens_secret_hash")),
    )
    op.create_table(
        "uploads",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("project", sa.String(length=96), nullable=False),
        sa.Column("model", sa.String(length=96), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=10), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("lease_ms", sa.BigInteger(), nullable=False),
        sa.Column("publication", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
        sa.UniqueConstraint("name", name=op.f("uq_uploads_name")),
    )
    op.create_index("ix_uploads_state_lease_ms", "uploads", ["state", "lease_ms"], unique=False)
    op.create_table(
        "alias_moves",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("model_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("alias", sa.String(length=64), nullable=False),
        sa.Column("before", sa.Integer(), nullable=True),
        sa.Column("after", sa.Integer(), nullable=True),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_alias_moves_model_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alias_moves")),
    )
    op.create_index(
        "ix_alias_moves_model_id_alias", "alias_moves", ["model_id", "alias", "id"], unique=False
    )
    op.create_table(
        "list_blocks",
        sa.Column("list_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("block_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.ForeignKeyConstraint(["block_id"], ["blocks.id"], name=op.f("fk_list_blocks_block_id")),
        sa.ForeignKeyConstraint(["list_id"], ["lists.id"], name=op.f("fk_list_blocks_list_id")),
        sa.PrimaryKeyConstraint("list_id", "block_id", name=op.f("pk_list_blocks")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_list_blocks_block_id", "list_blocks", ["block_id"], unique=False)
    op.create_table(
        "manifests",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=10), nullable=False),
        sa.Column("state_ms", sa.BigInteger(), nullable=False),
        sa.Column("upload_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("replication", sa.Integer(), nullable=True),
        sa.Column("policy", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["upload_id"], ["uploads.id"], name=op.f("fk_manifests_upload_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_manifests")),
        sa.UniqueConstraint("name", name=op.f("uq_manifests_name")),
    )
    op.create_index(op.f("ix_manifests_state"), "manifests", ["state"], unique=False)
    op.create_table(
        "packs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=10), nullable=False),
        sa.Column("state_ms", sa.BigInteger(), nullable=False),
        sa.Column("upload_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("replication", sa.Integer(), nullable=True),
        sa.Column("policy", sa.String(length=64), nullable=True),
        sa.Column("settle", sa.String(length=8), nullable=True),
        sa.ForeignKeyConstraint(["upload_id"], ["uploads.id"], name=op.f("fk_packs_upload_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_packs")),
        sa.UniqueConstraint("name", name=op.f("uq_packs_name")),
    )
    op.create_index(op.f("ix_packs_settle"), "packs", ["settle"], unique=False)
    op.create_index(op.f("ix_packs_state"), "packs", ["state"], unique=False)
    op.create_index(op.f("ix_packs_upload_id"), "packs", ["upload_id"], unique=False)
    op.create_table(
        "upload_files",
        sa.Column(
            "upload_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["upload_id"], ["uploads.id"], name=op.f("fk_upload_files_upload_id")
        ),
        sa.PrimaryKeyConstraint("upload_id", "path", name=op.f("pk_upload_files")),
    )
    op.create_table(
        "manifest_pins",
        sa.Column(
            "upload_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column(
            "manifest_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.ForeignKeyConstraint(
            ["manifest_id"], ["manifests.id"], name=op.f("fk_manifest_pins_manifest_id")
        ),
        sa.ForeignKeyConstraint(
            ["upload_id"], ["uploads.id"], name=op.f("fk_manifest_pins_upload_id")
        ),
        sa.PrimaryKeyConstraint("upload_id", "manifest_id", name=op.f("pk_manifest_pins")),
    )
    op.create_index("ix_manifest_pins_manifest_id", "manifest_pins", ["manifest_id"], unique=False)
    op.create_table(
        "pins",
        sa.Column(
            "upload_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("pack_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.ForeignKeyConstraint(["pack_id"], ["packs.id"], name=op.f("fk_pins_pack_id")),
        sa.ForeignKeyConstraint(["upload_id"], ["uploads.id"], name=op.f("fk_pins_upload_id")),
        sa.PrimaryKeyConstraint("upload_id", "pack_id", name=op.f("pk_pins")),
    )
    op.create_index("ix_pins_pack_id", "pins", ["pack_id"], unique=False)
    op.create_table(
        "placements",
        sa.Column("pack_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("block_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("base_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("encoding", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["base_id"], ["blocks.id"], name=op.f("fk_placements_base_id")),
        sa.ForeignKeyConstraint(["block_id"], ["blocks.id"], name=op.f("fk_placements_block_id")),
        sa.ForeignKeyConstraint(["pack_id"], ["packs.id"], name=op.f("fk_placements_pack_id")),
        sa.PrimaryKeyConstraint("pack_id", "offset", name=op.f("pk_placements")),
    )
    op.create_index(
        "ix_placements_base_id",
        "placements",
        ["base_id"],
        unique=False,
        sqlite_where=sa.text("base_id IS NOT NULL"),
        postgresql_where=sa.text("base_id IS NOT NULL"),
    )
    op.create_index(op.f("ix_placements_block_id"), "placements", ["block_id"], unique=False)
    op.create_table(
        "versions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("model_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column(
            "manifest_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("parent_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("structure", sa.JSON(), nullable=False),
        sa.Column("files", sa.Integer(), nullable=False),
        sa.Column("tensors", sa.Integer(), nullable=False),
        sa.Column("logical_bytes", sa.BigInteger(), nullable=False),
        sa.Column("replication", sa.Integer(), nullable=True),
        sa.Column("policy", sa.String(length=64), nullable=True),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("used_ms", sa.BigInteger(), nullable=True),
        sa.Column("removed_ms", sa.BigInteger(), nullable=True),
        sa.Column("damaged_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["manifest_id"], ["manifests.id"], name=op.f("fk_versions_manifest_id")
        ),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_versions_model_id")),
        sa.ForeignKeyConstraint(["parent_id"], ["versions.id"], name=op.f("fk_versions_parent_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_versions")),
        sa.UniqueConstraint("model_id", "number", name=op.f("uq_versions_model_id_number")),
    )
    op.create_index(op.f("ix_versions_damaged_ms"), "versions", ["damaged_ms"], unique=False)
    op.create_index(op.f("ix_versions_manifest_id"), "versions", ["manifest_id"], unique=False)
    op.create_index(op.f("ix_versions_parent_id"), "versions", ["parent_id"], unique=False)
    op.create_table(
        "aliases",
        sa.Column("model_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("alias", sa.String(length=64), nullable=False),
        sa.Column(
            "version_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_aliases_model_id")),
        sa.ForeignKeyConstraint(
            ["version_id"], ["versions.id"], name=op.f("fk_aliases_version_id")
        ),
        sa.PrimaryKeyConstraint("model_id", "alias", name=op.f("pk_aliases")),
    )
    op.create_index(op.f("ix_aliases_version_id"), "aliases", ["version_id"], unique=False)
    op.create_table(
        "commits",
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column(
            "upload_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column(
            "version_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.ForeignKeyConstraint(["upload_id"], ["uploads.id"], name=op.f("fk_commits_upload_id")),
        sa.ForeignKeyConstraint(
            ["version_id"], ["versions.id"], name=op.f("fk_commits_version_id")
        ),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_commits")),
    )
    op.create_table(
        "read_leases",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column(
            "version_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version_id"], ["versions.id"], name=op.f("fk_read_leases_version_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_read_leases")),
    )
    op.create_index(op.f("ix_read_leases_version_id"), "read_leases", ["version_id"], unique=False)
    op.create_table(
        "version_lists",
        sa.Column(
            "version_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("list_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.ForeignKeyConstraint(["list_id"], ["lists.id"], name=op.f("fk_version_lists_list_id")),
        sa.ForeignKeyConstraint(
            ["version_id"], ["versions.id"], name=op.f("fk_version_lists_version_id")
        ),
        sa.PrimaryKeyConstraint("version_id", "list_id", name=op.f("pk_version_lists")),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_version_lists_list_id_version_id",
        "version_lists",
        ["list_id", "version_id"],
        unique=False,
    )


def downgrade() -> None:
    op.drop_index("ix_version_lists_list_id_version_id", table_name="version_lists")
    op.drop_table("version_lists")
    op.drop_index(op.f("ix_read_leases_version_id"), table_name="read_leases")
    op.drop_table("read_leases")
    op.drop_table("commits")
    op.drop_index(op.f("ix_aliases_version_id"), table_name="aliases")
    op.drop_table("aliases")
    op.drop_index(op.f("ix_versions_parent_id"), table_name="versions")
    op.drop_index(op.f("ix_versions_manifest_id"), table_name="versions")
    op.drop_index(op.f("ix_versions_damaged_ms"), table_name="versions")
    op.drop_table("versions")
    op.drop_index(op.f("ix_placements_block_id"), table_name="placements")
    op.drop_index(
        "ix_placements_base_id",
        table_name="placements",
        sqlite_where=sa.text("base_id IS NOT NULL"),
        postgresql_where=sa.text("base_id IS NOT NULL"),
    )
    op.drop_table("placements")
    op.drop_index("ix_pins_pack_id", table_name="pins")
    op.drop_table("pins")
    op.drop_index("ix_manifest_pins_manifest_id", table_name="manifest_pins")
    op.drop_table("manifest_pins")
    op.drop_table("upload_files")
    op.drop_index(op.f("ix_packs_upload_id"), table_name="packs")
    op.drop_index(op.f("ix_packs_state"), table_name="packs")
    op.drop_index(op.f("ix_packs_settle"), table_name="packs")
    op.drop_table("packs")
    op.drop_index(op.f("ix_manifests_state"), table_name="manifests")
    op.drop_table("manifests")
    op.drop_index("ix_list_blocks_block_id", table_name="list_blocks")
    op.drop_table("list_blocks")
    op.drop_index("ix_alias_moves_model_id_alias", table_name="alias_moves")
    op.drop_table("alias_moves")
    op.drop_index("ix_uploads_state_lease_ms", table_name="uploads")
    op.drop_table("uploads")
    op.drop_table("tokens")
    op.drop_table("registry")
    op.drop_table("quotas")
    op.drop_table("outbox")
    op.drop_table("models")
    op.drop_table("lists")
    op.drop_table("journal")
    op.drop_table("events")
    op.drop_table("blocks")
    op.drop_table("audit")
