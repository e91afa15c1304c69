"""Finding out where this process is in a cluster's topology."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterable

from weightyard.storage.store import Replica
from weightyard.transfer.replicas import Place


class Whereabouts:
    """This process's place: as it was told, else as that of a DataNode on the same host.

    Thread-safe. Looks nothing up in the network: a name service that hangs must not hold a read.
    """

    def __init__(self) -> None:
        self._names = frozenset({"localhost", socket.gethostname().lower()})
        self._lock = threading.Lock()
        self._is_here: dict[str, bool] = {}
        self._found = Place()

    def place(self, replicas: Iterable[Replica], told_rack: str | None = None) -> Place:
        """Where this process is, as far as it is known after a look at these replicas."""
        with self._lock:
            if self._found.host is None:
                for replica in replicas:
                    if self._is_local(replica):
                        self._found = Place(replica.rack, replica.host)
                        break
            found = self._found
        return Place(told_rack, found.host) if told_rack is not None else found

    def _is_local(self, replica: Replica) -> bool:
        known = self._is_here.get(replica.datanode)
        if known is None:
            address = replica.datanode.rpartition(":")[0].strip("[]")
            known = any(self._is_own(name.lower()) for name in (replica.host, address))
            if len(self._is_here) >= _MOST_KNOWN:
                self._is_here.clear()
            self._is_here[replica.datanode] = known
        return known

    def _is_own(self, name: str) -> bool:
        if is_own_address(name) or name in self._names:
            return True
        # One side may have the domain and the other not; addresses have dots too.
        return not _is_address(name) and any(
            name.partition(".")[0] == own.partition(".")[0] and ("." not in name or "." not in own)
            for own in self._names - {"localhost"}
        )


def is_own_address(address: str) -> bool:
    """Whether an address is one of this host's: packets sent to it would also come from it.

    Connecting a datagram socket chooses the sender's address and sends nothing.
    """
    if not _is_address(address):
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sample:
            sample.connect((address, 9))
            return bool(sample.getsockname()[0] == address)
    except OSError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_MOST_KNOWN = 4096
