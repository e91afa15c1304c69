"""A loader's worker processes, when their rank is asked to end: they serve it to its last step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_ASKING = (signal.SIGTERM, signal.SIGINT)


def stay_on_signals(worker: int) -> None:
    """For `worker_init_fn` of a DataLoader: only its own process ends the worker by a signal.

    torchrun, schedulers and terminals signal a whole process group. A worker that ends of it makes
    the rank's next step fail, in which it would have saved. One whose rank is gone ends by itself.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "to be called in a worker process"
    # Taken by a thread since only so it is known who sent it; threads made later block it too.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    threading.Thread(target=_obey, args=(parent.pid,), daemon=True).start()


def staying(loader: Any) -> None:
    """Have the workers of a loader stay on signals, those that it starts from now on."""
    if hasattr(loader, "worker_init_fn") and not isinstance(loader.worker_init_fn, _Staying):
        loader.worker_init_fn = _Staying(loader.worker_init_fn)


class _Staying:
    """Besides what a user wants done; sent to workers that are not forked."""

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
