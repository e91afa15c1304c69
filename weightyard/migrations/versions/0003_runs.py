"""Runs: generations, steps, and the ranks of an upload"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column(
        "models", sa.Column("generation", sa.BigInteger(), nullable=False, server_default="0")
    )
    op.add_column("versions", sa.Column("step", sa.BigInteger(), nullable=True))
    op.create_index(
        "ix_versions_model_id_step",
        "versions",
        ["model_id", "step", "number"],
        sqlite_where=sa.text("step IS NOT NULL"),
        postgresql_where=sa.text("step IS NOT NULL"),
    )
    op.create_table(
        "upload_ranks",
        sa.Column("upload_id", _Id, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["upload_id"], ["uploads.id"], name=op.f("fk_upload_ranks_upload_id")
        ),
        sa.PrimaryKeyConstraint("upload_id", "rank", name=op.f("pk_upload_ranks")),
    )
