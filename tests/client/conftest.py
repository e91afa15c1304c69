"""The fixtures of a service on a yard of its own, and of its clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cutting import Cutting
from opened import Opens
from service_world import LIMIT_S, World, any_world, url, world

from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.yard import Yard

__all__ = ["any_world", "url", "world"]


@pytest.fixture
def opens(world: World, url: str) -> Opens:
    def opened(where: str = url, **settings: object) -> Yard:
        return open_yard(
            where,
            token=world.secrets["writer"],
            settings=Settings(**{"deadline_s": LIMIT_S, **settings}),
        )

    return opened


@pytest.fixture
def cutting(url: str) -> Iterator[Cutting]:
    proxy = Cutting(url)
    yield proxy
    proxy.close()
