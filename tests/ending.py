"""Processes of tests that end with who started them, however that ended."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Have this process killed when the thread that started it is gone. A fork has to ask anew.

    `parent`: who forked this process, in case that one was gone before this was asked for.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
