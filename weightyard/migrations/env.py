"""Run by Alembic, on the connection that weightyard.registry.migrate gives it."""

from __future__ import annotations

from alembic import context

from weightyard.registry import schema

context.configure(
    connection=context.config.attributes["connection"], target_metadata=schema.metadata
)
context.run_migrations()
