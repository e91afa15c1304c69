"""A service on a yard of its own: in this process, or on a real port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from service_world import World, make_world, served


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A yard on SQLite and a folder, with tokens, called in this process."""
    with make_world(tmp_path) as made:
        yield made


@pytest.fixture(params=["sqlite", "postgresql"])
def any_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """The same on either database."""
    url = request.getfixturevalue("postgres")() if request.param == "postgresql" else None
    with make_world(tmp_path, url) as made:
        yield made


@pytest.fixture
def url(world: World) -> Iterator[str]:
    """Where `world` is served, by a real server on a real port."""
    with served(world.app) as found:
        yield found
