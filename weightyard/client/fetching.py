"""Fetching a file through the service, going on where a connection broke off."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import BinaryIO

from weightyard.client.connection import Connection
from weightyard.errors import Conflict, Retryable

_PAUSE_S = 0.2
_GIVE_UP_S = 30.0
"""Without a byte for so long, the service is not there."""


def fetch(
    connection: Connection,
    path: str,
    out: BinaryIO,
    progress: Callable[[int], None] = lambda done_bytes: None,
) -> int:
    """Write what is at a path into `out`; returns the length. `progress` is told of bytes done.

    Raises what the service raises, Conflict if it became another file meanwhile.
    """
    done_bytes = 0
    file_bytes: int | None = None
    tag: str | None = None
    progress_at = time.monotonic()
    while done_bytes != file_bytes:
        headers = {"Range": f"bytes={done_bytes}-"} if done_bytes else {}
        if done_bytes and tag is not None:
            headers["If-Range"] = tag
        try:
            with connection.stream(path, headers) as response:
                if done_bytes and response.status_code != 206:
                    raise Conflict(f"{path} changed while it was read: begin again")
                tag = response.headers.get("etag")
                if file_bytes is None:
                    file_bytes = int(response.headers["content-length"])
                for piece in response.iter_bytes():
                    out.write(piece)
                    done_bytes += len(piece)
                    progress(len(piece))
                    progress_at = time.monotonic()
        except Retryable:
            if time.monotonic() - progress_at > _GIVE_UP_S:
                raise
            time.sleep(_PAUSE_S)
    return done_bytes
