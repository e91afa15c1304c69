"""Ending: signals end a command by an exception, so that it gives back what it holds."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from weightyard.storage.cancel import Cancel

LOOK_S = 0.5
"""How soon a command that waits looks whether a signal came whose exception was lost."""

_received: list[int] = []


def end_by_signals() -> None:
    """Have SIGTERM end this process as SIGINT does; a SIGINT that is ignored stays so."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def require_going_on() -> None:
    """Raises SystemExit if a signal said to end, for commands that otherwise go on until one does.

    What a signal's handler raises is lost if it comes while Python finalizes an object.
    """
    if _received:
        _exit(_received[0])


@contextmanager
def ended_by_signals(waiting: Cancel) -> Iterator[None]:
    """Inside, a signal also cancels what is waited for; after it, see `require_going_on`."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            if _received:
                waiting.cancel()
                return

    threading.Thread(target=look, name="weightyard-signals", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    _exit(number)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    raise KeyboardInterrupt


def _exit(number: int) -> NoReturn:
    sys.exit(128 + number)
