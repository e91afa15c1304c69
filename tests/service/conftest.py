"""The fixtures of a service on a yard of its own."""

from __future__ import annotations

from service_world import any_world, url, world

__all__ = ["any_world", "url", "world"]
