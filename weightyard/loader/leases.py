"""Read leases: versions' bytes stay in the store while this process is at them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from weightyard.errors import NoSuchThing, NotAllowed, Retryable, YardError
from weightyard.logs import Log
from weightyard.names import Ref
from weightyard.records import ReadLease
from weightyard.transfer.catalogue import Catalogue

_log = Log(__name__)

LEASE_S = 600.0
"""How long bytes stay after the death of who held them."""

_RENEW_S = 60.0

_ENDING_S = 2.0
"""How long a renewal under way is waited for: who closes is not to hang where nobody answers."""


@contextmanager
def held(catalogue: Catalogue, ref: str) -> Iterator[None]:
    """Hold a read lease on a version, renewed in the background. Raises NoSuchThing.

    Where a lease cannot be had the work goes on without: gc then has no reason to wait, and a
    read of what it took is an error, never a wrong byte.
    """
    try:
        lease = catalogue.take_lease(Ref.parse(ref), _holder(), LEASE_S)
    except (Retryable, NotAllowed) as why:
        _log.warning("lease.not_taken", version=ref, reason=why)
        yield
        return
    done = threading.Event()
    renewing = threading.Thread(
        target=_renew, args=(catalogue, lease, done), name="weightyard-lease", daemon=True
    )
    renewing.start()
    try:
        yield
    finally:
        done.set()
        renewing.join(_ENDING_S)
        try:
            catalogue.release_lease(lease.id)
        except (Retryable, NotAllowed) as why:
            _log.warning("lease.not_released", version=ref, reason=why)  # it ends by itself


class Holding:
    """Read leases on several versions at once, which come and go. Used by one thread."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._leases: dict[str, ExitStack] = {}

    @property
    def refs(self) -> frozenset[str]:
        """Those to be held, whether or not a lease could be had."""
        return frozenset(self._leases)

    def hold(self, refs: Iterable[str]) -> None:
        """Hold these and no others: first the new ones, then the old ones are let go."""
        wanted = list(refs)
        for ref in wanted:
            if ref not in self._leases:
                self._leases[ref] = self._take(ref)
        for ref in self._leases.keys() - set(wanted):
            try:
                self._leases.pop(ref).close()
            except YardError as why:
                _log.warning("lease.not_released", version=ref, reason=why)  # it ends by itself

    def _take(self, ref: str) -> ExitStack:
        with ExitStack() as taking:
            try:
                taking.enter_context(held(self._catalogue, ref))
            except YardError as why:  # such as one that was removed: what is read of it will tell
                _log.warning("lease.not_taken", version=ref, reason=why)
            return taking.pop_all()


def _renew(catalogue: Catalogue, lease: ReadLease, done: threading.Event) -> None:
    while not done.wait(_RENEW_S):
        try:
            catalogue.renew_lease(lease.id, LEASE_S)
        except (NoSuchThing, NotAllowed) as why:
            _log.warning("lease.ended", version=lease.ref, reason=why)
            return
        except Retryable as why:
            _log.warning("lease.not_renewed", version=lease.ref, reason=why)


def _holder() -> str:
    return f"{socket.gethostname()[:150]} pid {os.getpid()}"
