"""Uses: notes which versions are loaded, on this node and in the registry."""

from __future__ import annotations

import time

from weightyard.errors import NoSuchThing, NotAllowed, Retryable, StoreFull
from weightyard.loader.recent import Recent
from weightyard.loader.remembered import Remembered
from weightyard.logs import Log
from weightyard.names import Ref
from weightyard.records import Version
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.transfer.catalogue import Catalogue

_log = Log(__name__)

_AGAIN_S = 60.0
"""For so long no further use of a version is noted: retention goes by days, and a process that
loads again and again should not ask the registry twice each time."""

_NOTING_S = 5.0
_NOTING = 0.25
"""A load waits for a service that says nothing for _NOTING_S, and for this part of its time."""

_MOST = 1000


class Uses:
    """What one yard knows to be noted. Thread-safe. Noting never fails a load."""

    def __init__(self, catalogue: Catalogue, remembered: Remembered) -> None:
        self._catalogue = catalogue
        self._remembered = remembered
        self._marked: Recent[str, float] = Recent(_MOST)

    def note(self, ref: Ref, version: Version, deadline: Deadline = NEVER) -> None:
        """A ref means this version, which is being loaded."""
        self._remembered.note(ref, version)
        now = time.monotonic()
        marked_at = self._marked.get(version.ref)
        if marked_at is not None and now - marked_at < _AGAIN_S:
            return
        try:
            left_s = deadline.part(_NOTING).left_at_most(_NOTING_S, f"noting a use of {ref}")
            self._catalogue.mark_used(Ref.parse(version.ref), within_s=left_s)
        except (Retryable, NotAllowed, StoreFull, NoSuchThing) as why:
            _log.warning("version.use_not_noted", version=version.ref, reason=why)
        else:
            self._marked.keep(version.ref, now, 1)
