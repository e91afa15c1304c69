"""Settling: records of what was done are written into the store afterwards, in the background.

What counts is in the database by then, and so is what is still to be written: if this process is
killed, the next one writes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from weightyard.closing import Closing
from weightyard.errors import YardError
from weightyard.logs import Log

_log = Log(__name__)

_ENDING_S = 60.0
"""How long closing waits: longer than any call on a store tries."""


class Settling(Closing):
    """Writes out waiting records, in a thread that ends when none are left. Thread-safe.

    Nothing here raises: what could not be written is logged, as `yard.records_wait`, and waits on.
    """

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._is_wanted = False
        self._is_ending = False
        """The thread no longer looks for more to do, but may not have ended yet."""
        self._thread: threading.Thread | None = None

    def soon(self) -> None:
        """Have all records written that wait now, soon."""
        with self._lock:
            self._is_wanted = True
            if self._is_working and not self._is_ending:
                return
            self._is_ending = False
            # Not a daemon: a program that ends without closing its yard leaves no records behind.
            self._thread = threading.Thread(target=self._work, name="weightyard-records")
            try:
                self._thread.start()
            except RuntimeError as why:  # no more threads are to be had
                self._thread = None
                _log.warning("yard.records_wait", reason=why)

    def wait(self, seconds: float = _ENDING_S) -> bool:
        """Wait until there is nothing more to do, at most so long. Returns whether that is so."""
        with self._lock:  # `soon` holds it until the thread is started and can be joined
            thread = self._thread
        if thread is None:
            return True
        thread.join(seconds)
        return not thread.is_alive()

    def close(self) -> None:
        if not self.wait():
            _log.warning("yard.records_wait", reason=f"not written within {_ENDING_S:.0f} s")

    @property
    def _is_working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _work(self) -> None:
        while self._is_more():
            try:
                self._write()
            except YardError as why:
                _log.warning("yard.records_wait", reason=why)

    def _is_more(self) -> bool:
        """Whether there is more to do. If not, `soon` starts a new thread from now on."""
        with self._lock:
            is_wanted, self._is_wanted = self._is_wanted, False
            self._is_ending = not is_wanted
            return is_wanted
