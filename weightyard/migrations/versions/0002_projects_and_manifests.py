"""Packs of one project, copies of manifests"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "registry", sa.Column("dedup", sa.String(length=8), nullable=False, server_default="yard")
    )
    op.add_column("packs", sa.Column("project", sa.String(length=96), nullable=True))
    op.add_column("manifests", sa.Column("settle", sa.String(length=8), nullable=True))
    op.create_index(op.f("ix_manifests_settle"), "manifests", ["settle"])
