"""Fetching a file through the service, resuming where a connection broke off."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import httpx

from weightyard.client.connection import ANSWER_S, Connection, hang_up
from weightyard.errors import Conflict, Retryable, Unsupported
from weightyard.storage.cancel import ended_by
from weightyard.storage.deadline import NEVER, Deadline

_PAUSE_S = 0.2
_GIVE_UP_S = 30.0
"""How long no byte may arrive before the service is taken for gone."""


def fetch(
    connection: Connection,
    path: str,
    write: Callable[[bytes], object],
    progress: Callable[[int], None] = lambda done_bytes: None,
    deadline: Deadline = NEVER,
) -> int:
    """Hand the file at a path to `write`, piece by piece. Returns its length.

    `progress` is told of bytes done. Raises what the service raises, Conflict if the file changed
    meanwhile, DeadlineExceeded, Cancelled.
    """
    done_bytes = 0
    file_bytes: int | None = None
    tag: str | None = None
    progress_at = time.monotonic()
    while done_bytes != file_bytes:
        # Ranges count the file's own bytes, so no proxy may compress them.
        headers = {"Accept-Encoding": "identity"}
        if done_bytes:
            headers["Range"] = f"bytes={done_bytes}-"
            if tag is not None:
                headers["If-Range"] = tag
        answer_s = deadline.left_at_most(ANSWER_S, f"fetching {path}")
        try:
            with connection.stream(path, headers, answer_s=answer_s) as response:
                if done_bytes and response.status_code != 206:
                    raise Conflict(f"{path} changed while it was read: begin again")
                tag = response.headers.get("etag")
                if file_bytes is None:
                    file_bytes = _length(connection, response)
                with ended_by(deadline.cancel, partial(hang_up, response), f"fetching {path}"):
                    for piece in response.iter_bytes():
                        write(piece)
                        done_bytes += len(piece)
                        progress(len(piece))
                        progress_at = time.monotonic()
        except Retryable:
            if time.monotonic() - progress_at > _GIVE_UP_S:
                raise
            time.sleep(_PAUSE_S)
    return done_bytes


def _length(connection: Connection, response: httpx.Response) -> int:
    """The length of an answer. Without it one cannot tell whether all of it came."""
    said = response.headers.get("content-length", "")
    if not (said.isascii() and said.isdecimal() and len(said) < 19):
        raise Unsupported(f"service {connection.host}: its answer, or a proxy's, has no length")
    return int(said)
