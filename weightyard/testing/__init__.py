"""What proves a weightyard: a real mini-HDFS, and suites any store can be held to.

Names are imported when first used: a process that only needs one does not pay for the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightyard.testing.cluster import MiniCluster as MiniCluster
    from weightyard.testing.faults import FaultyStore as FaultyStore
    from weightyard.testing.store_contract import StoreContract as StoreContract

_HOMES = {
    "FaultyStore": "weightyard.testing.faults",
    "MiniCluster": "weightyard.testing.cluster",
    "StoreContract": "weightyard.testing.store_contract",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
