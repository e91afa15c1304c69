"""Sockets to DataNodes: opened in time, with the options that make large transfers fast."""

from __future__ import annotations

import functools
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from weightyard.storage.cancel import Cancel, ended_by
from weightyard.storage.hdfs.lookup import Address

TICK_S = 0.25
"""How often a silent socket is looked at."""

TICK = struct.pack("@ll", int(TICK_S), int(TICK_S % 1 * 1e6))
"""The same, as the kernel takes it."""

MOST_VIEWS = 512
"""How many buffers to give to the kernel at once; it takes 1024."""

_RECEIVE_BUFFER_BYTES = 4 * 1024 * 1024


def shut_down(opened: socket.socket) -> None:
    with suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


def connected(
    datanode: str, addresses: Sequence[Address], until: float, cancel: Cancel | None
) -> socket.socket:
    """A blocking socket with the options that make reads fast. The addresses share the time."""
    doing = f"connecting to {datanode}"
    failed: OSError = OSError("no time is left" if addresses else "it has no address")
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        limit_s = (until - time.monotonic()) / (len(addresses) - index)
        if limit_s <= 0:
            break
        opened = socket.socket(family, kind, protocol)
        try:
            # Without it every request waits 40 ms for the acknowledgement of the one before.
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _is_large_buffer_granted():
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            opened.settimeout(limit_s)
            with ended_by(cancel, partial(shut_down, opened), doing):
                opened.connect(address)
            opened.settimeout(None)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TICK)
        except BaseException as why:
            opened.close()
            if cancel is not None:
                cancel.check(doing)
            if not isinstance(why, OSError):
                raise
            failed = why
        else:
            return opened
    raise failed


@functools.cache
def _is_large_buffer_granted() -> bool:
    """Whether the kernel gives the buffer asked for (and doubles it, for its own needs).

    If net.core.rmem_max limits it, asking would leave less than the kernel takes by itself.
    """
    with socket.socket() as sample:
        sample.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        granted = sample.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    return granted >= 2 * _RECEIVE_BUFFER_BYTES


def drop(views: list[memoryview], done: int) -> None:
    """Drop the first bytes, which were sent or received: fewer than all there are."""
    while done >= len(views[0]):
        done -= len(views.pop(0))
    views[0] = views[0][done:]
