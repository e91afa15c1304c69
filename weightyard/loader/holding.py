"""Holding: read leases on several versions at once, which come and go."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from weightyard.errors import YardError
from weightyard.loader.held import held
from weightyard.logs import Log
from weightyard.transfer.catalogue import Catalogue

_log = Log(__name__)


class Holding:
    """Read leases by ref. Used by one thread."""

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
