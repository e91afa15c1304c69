"""Under which key a run was taken over, so that this can be repeated after a lost answer"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("generation_key", sa.String(128), nullable=True))
