"""Lookup: the addresses of a DataNode's name, and whether they are this host's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from weightyard.errors import DataNodeFailed, StoreUnavailable
from weightyard.storage.watched import Watched

Address = tuple[Any, Any, int, str, Any]
"""As getaddrinfo gives them: family, kind, protocol, name, where."""

_MOST_KNOWN = 16_384


class Lookup:
    """Looks up DataNodes. A name server that is silent holds nobody for long. Thread-safe."""

    def __init__(self) -> None:
        self._calls = Watched()
        self._lock = threading.Lock()
        self._is_here: dict[str, bool] = {}

    def addresses(self, datanode: str, limit_s: float) -> Sequence[Address]:
        """The addresses of `host:port`. Raises DataNodeFailed."""
        host, _, port = datanode.rpartition(":")
        try:
            ask = partial(socket.getaddrinfo, host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            try:
                return ask(flags=socket.AI_NUMERICHOST)  # asks nobody
            except socket.gaierror:
                # A name server that is silent would hold the caller for half a minute.
                return self._calls.call("looking up its name", limit_s, ask)
        except (OSError, ValueError, StoreUnavailable) as why:
            raise DataNodeFailed(datanode, f"cannot connect: {why}") from why

    def is_here(self, datanode: str, limit_s: float) -> bool:
        """Whether a DataNode runs on this host; looked up once. Raises DataNodeFailed."""
        with self._lock:
            if (known := self._is_here.get(datanode)) is not None:
                return known
        found = any(map(_is_own, self.addresses(datanode, limit_s)))
        with self._lock:
            if len(self._is_here) >= _MOST_KNOWN:
                self._is_here.clear()
            self._is_here[datanode] = found
        return found

    def close(self) -> None:
        self._calls.close()


def _is_own(address: Address) -> bool:
    """Whether it is this host's: only then can a socket be bound to it."""
    family, kind, protocol, _, (host, _port, *rest) = address
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind((host, 0, *rest))
        except OSError:
            return False
    return True
