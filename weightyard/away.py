"""Away: a yard that did not answer when it was opened, and that is used as soon as it does."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightyard import jitter
from weightyard.errors import Retryable, YardError
from weightyard.loader.offline import OfflineCatalogue
from weightyard.loader.remembered import Remembered
from weightyard.logs import Log
from weightyard.names import Ref
from weightyard.storage.cancel import Cancel
from weightyard.transfer.catalogue import Catalogue
from weightyard.transfer.watching import Sighting, pause
from weightyard.via import Via

if TYPE_CHECKING:
    from weightyard.records import ReadLease, Version

_log = Log(__name__)

WAIT_S = 0.5
"""How long a call waits to see whether the yard answers by now."""

AGAIN_S = 5.0
"""How long after it last did not answer the yard may be tried again, give or take a fifth."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A yard that answers."""

    via: Via
    catalogue: Catalogue
    block_bytes: int

    def close(self) -> None:
        self.catalogue.close()
        self.via.close()


class AwayCatalogue(OfflineCatalogue):
    """What this node remembers of a catalogue, until the yard answers; then the catalogue itself.

    A call tries the yard again, in a thread, if the last try is long enough ago. Only the call that
    began a try waits for it, and no longer than WAIT_S: what it finds later is for the next calls.
    Without calls nothing is tried. Thread-safe.
    """

    def __init__(
        self,
        name: str,
        remembered: Remembered,
        why: Retryable,
        open_again: Callable[[], Opened],
    ) -> None:
        """`why`: the error with which the yard was not opened. `open_again` tries it once more.

        It raises Retryable while the yard does not answer. Other errors are an answer, which
        callers get.
        """
        super().__init__(remembered, why)
        self._name = name
        self._because = why
        self.on_back: Callable[[Opened], None] = lambda opened: None
        """Called when the yard answers, before callers see it."""
        self._open_again = open_again
        self._lock = threading.Lock()
        self._opened: Opened | None = None
        self._refusal: YardError | None = None
        self._look_at = _next_look()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def itself(self) -> Catalogue | None:
        """The yard's own catalogue, or None if it does not answer. Raises its refusal."""
        thread = self._looking() if self._opened is None else None
        if thread is not None:
            thread.join(WAIT_S)
        with self._lock:
            if self._opened is not None:
                return self._opened.catalogue
            if self._refusal is not None:
                raise self._refusal.with_traceback(None)
            return None

    def resolve(self, ref: Ref, *, within_s: float = math.inf) -> Version:
        back = self.itself()
        resolving = super().resolve if back is None else back.resolve
        return resolving(ref, within_s=within_s)

    def watch(self, ref: Ref, *, poll_s: float, stop: Cancel) -> Iterator[Sighting]:
        """Yields why the yard does not answer, now and then, until it does; then as the yard."""
        while not stop.is_cancelled:
            try:
                back = self.itself()
            except YardError as why:
                yield why
            else:
                if back is not None:
                    yield from back.watch(ref, poll_s=poll_s, stop=stop)
                    return
                yield self._because
            pause(jitter.about(min(poll_s, AGAIN_S)), stop)

    def mark_used(self, ref: Ref, *, within_s: float = math.inf) -> None:
        if (back := self.itself()) is not None:
            back.mark_used(ref, within_s=within_s)

    def take_lease(
        self, ref: Ref, holder: str, seconds: float, *, within_s: float = math.inf
    ) -> ReadLease:
        back = self.itself()
        taking = super().take_lease if back is None else back.take_lease
        return taking(ref, holder, seconds, within_s=within_s)

    def require_asked(self) -> None:
        if self.itself() is None:
            super().require_asked()

    def require_store(self, ref: str, *, may_map: bool) -> None:
        if self.itself() is None:
            super().require_store(ref, may_map=may_map)

    def require_back(self, what: str) -> None:
        """Raises NotOnNode while the yard is away: for `what`, which needs the yard itself."""
        if self.itself() is None:
            super().__getattr__(what)

    def close(self) -> None:
        """Close what was opened. Does not wait for a try that is under way."""
        with self._lock:
            self._is_closed = True
            opened = self._opened
        if opened is not None:
            opened.close()

    def __getattr__(self, name: str) -> Any:
        back = None if name.startswith("_") else self.itself()
        return super().__getattr__(name) if back is None else getattr(back, name)

    def _looking(self) -> threading.Thread | None:
        """Begin a try if one is due and none is under way. Returns its thread, or None."""
        with self._lock:
            is_looking = self._thread is not None and self._thread.is_alive()
            if is_looking or self._is_closed or time.monotonic() < self._look_at:
                return None
            thread = threading.Thread(target=self._look, name="weightyard-away", daemon=True)
            try:
                thread.start()
            except RuntimeError as why:  # no more threads can be started
                _log.warning("yard.not_looked_after", yard=self._name, reason=why)
                return None
            self._thread = thread
            return thread

    def _look(self) -> None:
        why: Exception
        try:
            opened = self._open_again()
        except Exception as failure:  # noqa: BLE001  in this thread nobody would see it
            why = failure
        else:
            self._come_back(opened)
            return
        with self._lock:
            self._look_at = _next_look()
            if isinstance(why, Retryable):
                self._why = self._because = why
                self._refusal = None
            elif isinstance(why, YardError):
                self._refusal = why
            else:
                _log.warning("yard.not_looked_after", yard=self._name, reason=repr(why))

    def _come_back(self, opened: Opened) -> None:
        with self._lock:
            if not self._is_closed:
                self.is_service = opened.catalogue.is_service
                self.on_back(opened)
                self._opened = opened
                _log.info("yard.back", yard=self._name)
                return
        opened.close()


def _next_look() -> float:
    return time.monotonic() + jitter.about(AGAIN_S)
