"""Statistics for SQLite, so that its plans are those of a large registry

SQLite plans by what ANALYZE found, and nobody runs that. Without, it takes all tables for equally
large: at a million blocks a claim then reads a whole table, and gc does not end. Statistics that
ship keep the plans the same everywhere; to write them so is a documented way to steer SQLite
(https://sqlite.org/optoverview.html, "Manual Control Of Query Plans Using SQLITE_STAT Tables").
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# Table, index, and: rows, then rows that are equal in the first column of the index, the first
# two… What ANALYZE says of 10,000 versions of 1,000 lists over 1,000,000 blocks, in 1,000 models.
_STATISTICS = (
    ("registry", None, "1"),
    ("models", "sqlite_autoindex_models_1", "1000 20 1"),
    ("versions", "sqlite_autoindex_versions_1", "10000 10 1"),
    ("versions", "ix_versions_manifest_id", "10000 1"),
    ("versions", "ix_versions_parent_id", "10000 2"),
    ("versions", "ix_versions_damaged_ms", "10000 10000"),
    ("manifests", "sqlite_autoindex_manifests_1", "10000 1"),
    ("manifests", "ix_manifests_state", "10000 10000"),
    ("manifests", "ix_manifests_settle", "10000 10000"),
    ("packs", "sqlite_autoindex_packs_1", "10000 1"),
    ("packs", "ix_packs_state", "10000 10000"),
    ("packs", "ix_packs_upload_id", "10000 10"),
    ("packs", "ix_packs_settle", "10000 10000"),
    ("blocks", "sqlite_autoindex_blocks_1", "1000000 1"),
    ("placements", "sqlite_autoindex_placements_1", "1000000 100 1"),
    ("placements", "ix_placements_block_id", "1000000 1"),
    ("lists", "sqlite_autoindex_lists_1", "1000000 1"),
    ("list_blocks", "list_blocks", "1000000 1 1"),
    ("list_blocks", "ix_list_blocks_block_id", "1000000 1"),
    ("version_lists", "version_lists", "10000000 1000 1"),
    ("version_lists", "ix_version_lists_list_id_version_id", "10000000 10 1"),
    ("aliases", "sqlite_autoindex_aliases_1", "1000 2 1"),
    ("aliases", "ix_aliases_version_id", "1000 1"),
)


def upgrade() -> None:
    if op.get_bind().dialect.name != "sqlite":
        return  # PostgreSQL looks for itself
    load = sa.text("ANALYZE sqlite_master")  # looks at no table, but makes that of the statistics
    op.execute(load)
    statistics = sa.table("sqlite_stat1", sa.column("tbl"), sa.column("idx"), sa.column("stat"))
    op.execute(statistics.delete())
    op.bulk_insert(
        statistics,
        [{"tbl": table, "idx": index, "stat": said} for table, index, said in _STATISTICS],
    )
    op.execute(load)
