"""Who took a read lease, and which entries of the outbox cannot be written"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Of leases taken before nobody knows: they last as long as they were asked for, and whoever
    # cannot renew one any more takes another.
    op.add_column("read_leases", sa.Column("author", sa.Text(), nullable=True))
    op.add_column("outbox", sa.Column("set_aside_ms", sa.BigInteger(), nullable=True))
