"""Offline: a yard of which only what is on this node can be had. Nothing is connected to."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from weightyard.errors import NotOnNode, Retryable
from weightyard.loader.remembered import Remembered
from weightyard.logs import Log
from weightyard.names import Ref
from weightyard.records import ReadLease, RememberedVersion, Version

_log = Log(__name__)


class OfflineCatalogue:
    """What this node remembers of a catalogue; whatever else is asked is refused."""

    is_service = True

    def __init__(self, remembered: Remembered, why: Retryable | None = None) -> None:
        """`why`: what the yard failed with when it was opened; None: it was not asked."""
        self._remembered = remembered
        self._why = why

    def require_asked(self) -> None:
        """Raise what opening the yard failed with, if it did: for who wants no old answer."""
        if self._why is not None:
            raise self._why.with_traceback(None)

    def resolve(self, ref: Ref, *, within_s: float = math.inf) -> Version:
        """The version a ref meant when this node last asked. Raises NotOnNode."""
        found = recalled(self._remembered, ref, str(self._why or "offline"))
        if found is None:
            raise NotOnNode(
                f"working offline, and this node never asked what {ref} means: use it once while "
                "the yard can be reached, or name a version by its digest"
            )
        return found

    def mark_used(self, ref: Ref, *, within_s: float = math.inf) -> None:
        """Nobody is there to be told."""

    def take_lease(
        self, ref: Ref, holder: str, seconds: float, *, within_s: float = math.inf
    ) -> ReadLease:
        """Always refused: there is nothing to hold. Raises NotOnNode."""
        raise _not_here(str(ref))

    def require_store(self, ref: str, *, may_map: bool) -> None:
        """Raises NotOnNode for who would read the store. `may_map`: a snapshot would do."""
        if may_map:
            raise _not_here(ref)
        raise NotOnNode(
            f"{ref}: the work is offline, where only snapshots are read: neither without the cache "
            "nor with verify='full'"
        )

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        _refuse(name)


class OfflineStore:
    """No store: whatever is asked of it is refused."""

    replicates = False

    def __init__(self, url: str) -> None:
        self.url = url

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(name)


def recalled(remembered: Remembered, ref: Ref, why: str) -> RememberedVersion | None:
    """What a ref meant, and a log line that says how long ago."""
    found = remembered.recall(ref)
    if found is not None:
        _log.warning(
            "ref.remembered", ref=ref, version=found.ref, age_s=round(found.age_s), reason=why
        )
    return found


def _not_here(ref: str) -> NotOnNode:
    return NotOnNode(
        f"{ref} has no snapshot on this node, and the work is offline: make one with "
        f"`weightyard path {ref}` while the yard can be reached; `weightyard cache ls` lists those "
        "there are"
    )


def _refuse(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotOnNode(
        f"the work is offline, and this needs the yard ({name}): only what has a snapshot on this "
        "node can be used; `weightyard cache ls` lists them"
    )
