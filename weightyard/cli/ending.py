"""Ending: signals end a command by an exception, so that it gives back what it holds."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

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


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    _exit(number)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    raise KeyboardInterrupt


def _exit(number: int) -> NoReturn:
    sys.exit(128 + number)
