"""A loader's worker processes outlast signals: they serve their rank up to its last step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_ASKING = (signal.SIGTERM, signal.SIGINT)


def stay_on_signals(worker: int) -> None:
    """For a DataLoader's `worker_init_fn`: only signals from its own rank's process end the worker.

    torchrun, schedulers and terminals signal a whole process group. If a worker ended then, the
    rank's next step would fail, in which it wants to save. A worker whose rank is gone ends by
    itself.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "to be called in a worker process"
    # A thread takes signals, since only that tells who sent them; later threads block them too.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    threading.Thread(target=_obey, args=(parent.pid,), daemon=True).start()


def staying(loader: Any) -> None:
    """Have the workers that a loader starts from now on stay when signals come."""
    if hasattr(loader, "worker_init_fn") and not isinstance(loader.worker_init_fn, _Staying):
        loader.worker_init_fn = _Staying(loader.worker_init_fn)


class _Staying:
    """Besides what the user wants done. A class, as workers that are not forked are sent it."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        stay_on_signals(worker)
        if self._then is not None:
            self._then(worker)


def _obey(parent: int | None) -> None:
    while signal.sigwaitinfo(_ASKING).si_pid != parent:
        pass
    os._exit(0)  # as torch's own handler does
