"""What this process has learned of a cluster by reading from it, shared by all its readers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from weightyard.storage.limit import AdaptiveLimit
from weightyard.storage.store import Store
from weightyard.transfer.cores import cores
from weightyard.transfer.estimates import Estimates
from weightyard.transfer.hedging import HedgeBudget, Pace
from weightyard.transfer.locations import Locations
from weightyard.transfer.whereabouts import Whereabouts

LEAST_FETCHES, MOST_FETCHES = 2, 64


def _limit() -> AdaptiveLimit:
    return AdaptiveLimit(first=max(4, 2 * cores()), lowest=LEAST_FETCHES, highest=MOST_FETCHES)


@dataclass(frozen=True, slots=True)
class Learned:
    """Kept while the process lives. Everything in it is thread-safe."""

    estimates: Estimates = field(default_factory=Estimates)
    pace: Pace = field(default_factory=Pace)
    hedges: HedgeBudget = field(default_factory=HedgeBudget)
    whereabouts: Whereabouts = field(default_factory=Whereabouts)
    limit: AdaptiveLimit = field(default_factory=_limit)
    locations: Locations = field(default_factory=Locations)


def learned_of(store: Store) -> Learned:
    """What is known of a store's cluster, shared by its stores, and of the store's own files."""
    parts = urlsplit(store.url)
    cluster = f"{parts.scheme}://{parts.netloc}"
    with _lock:
        of_cluster = _of_cluster.setdefault(cluster, Learned())
        if store.url not in _of_store:
            while len(_of_store) >= _MOST_STORES:
                del _of_store[next(iter(_of_store))]
            _of_store[store.url] = Learned(
                of_cluster.estimates,
                of_cluster.pace,
                of_cluster.hedges,
                of_cluster.whereabouts,
                of_cluster.limit,
            )
        return _of_store[store.url]


_MOST_STORES = 256
_lock = threading.Lock()
_of_cluster: dict[str, Learned] = {}
_of_store: dict[str, Learned] = {}
