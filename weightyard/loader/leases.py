"""Read leases: the bytes of versions stay in the store while this process reads them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from weightyard.errors import NoSuchThing, NotAllowed, Retryable, StoreFull, YardError
from weightyard.logs import Log
from weightyard.names import Ref
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.transfer.catalogue import Catalogue

_log = Log(__name__)

LEASE_S = 600.0
"""How long bytes stay after the process that held a lease died."""

_RENEW_S = 60.0

_TAKING = 0.5
"""The part of a load's time that taking a lease may use: reading needs some, too."""

_ENDING_S = 2.0
"""How long releasing waits for a renewal under way: it must not hang where nobody answers."""


@contextmanager
def held(catalogue: Catalogue, ref: str, deadline: Deadline = NEVER) -> Iterator[None]:
    """Hold a read lease on a version, taken in half of the time there is. Raises NoSuchThing.

    While no lease can be had the work goes on without: gc may then remove what is being read, and
    reading that is an error, never a wrong byte.
    """
    lease = _Lease(catalogue, ref)
    try:
        lease.take(deadline.part(_TAKING))
    except (Retryable, NotAllowed, StoreFull) as why:
        _log.warning("lease.not_taken", version=ref, reason=why)
    lease.keep()
    try:
        yield
    finally:
        lease.release()


class Holding:
    """Read leases on several versions at once, which come and go. Used by one thread."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._leases: dict[str, _Lease] = {}

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
            self._leases.pop(ref).release()

    def _take(self, ref: str) -> _Lease:
        lease = _Lease(self._catalogue, ref)
        try:
            lease.take()
        except YardError as why:  # such as a version that was removed: reading it will tell
            _log.warning("lease.not_taken", version=ref, reason=why)
        lease.keep()
        return lease


class _Lease:
    """A read lease on a version. Call order: take → keep → release.

    It is renewed in the background, and taken again where there is none: gc removes leases that
    could not be renewed in time, as in an outage.
    """

    def __init__(self, catalogue: Catalogue, ref: str) -> None:
        self._catalogue = catalogue
        self._ref = Ref.parse(ref)
        self._id: int | None = None
        self._is_over = threading.Event()
        self._keeping = threading.Thread(target=self._keep, name="weightyard-lease", daemon=True)

    def take(self, deadline: Deadline = NEVER) -> None:
        left_s = deadline.left(f"taking a lease on {self._ref}")
        self._id = self._catalogue.take_lease(self._ref, _holder(), LEASE_S, within_s=left_s).id

    def keep(self) -> None:
        self._keeping.start()

    def release(self) -> None:
        self._is_over.set()
        self._keeping.join(_ENDING_S)
        try:
            if self._id is not None:
                self._catalogue.release_lease(self._id)
        except YardError as why:
            _log.warning("lease.not_released", version=self._ref, reason=why)  # it ends by itself

    def _keep(self) -> None:
        while not self._is_over.wait(_RENEW_S):
            try:
                self._renew()
            except (NoSuchThing, NotAllowed) as why:
                _log.warning("lease.ended", version=self._ref, reason=why)
                return
            except YardError as why:
                _log.warning("lease.not_renewed", version=self._ref, reason=why)
            except Exception:
                # `release` does not wait for long: the catalogue may be closed by now.
                if not self._is_over.is_set():
                    raise

    def _renew(self) -> None:
        """Raises NoSuchThing if the version is gone too."""
        if self._id is not None:
            try:
                self._catalogue.renew_lease(self._id, LEASE_S)
            except NoSuchThing:
                self._id = None
            else:
                return
        self.take()
        _log.info("lease.taken_again", version=self._ref)


def _holder() -> str:
    return f"{socket.gethostname()[:150]} pid {os.getpid()}"
