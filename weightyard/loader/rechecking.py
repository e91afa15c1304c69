"""Rechecking: bytes that this node uses unchecked are verified in the background, once a day."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from weightyard.loader.locks import Lock

RECHECK_S = 24 * 3600.0
"""What is in use is verified again when its last verification is so long ago."""

_rechecking = threading.Lock()


def recheck_behind(verify: Callable[[], object], alone: Lock) -> threading.Thread:
    """Verify in the background, at low priority. `alone`: held meanwhile, so only one process does.

    Nobody waits for it: a process may end at any time.
    """
    thread = threading.Thread(
        target=_run, args=(verify, alone), name="weightyard-recheck", daemon=True
    )
    thread.start()
    return thread


def _run(verify: Callable[[], object], alone: Lock) -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    # One after the other: a process that loads ten models should not feel it.
    with alone, _rechecking:
        verify()
