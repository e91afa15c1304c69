"""Events: the stream of what happens, as a service sends it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import httpx
from pydantic import ValidationError

from weightyard.client.connection import Connection, hang_up
from weightyard.errors import RegistryUnavailable
from weightyard.records import Event
from weightyard.storage.cancel import Cancel

_MAX_LINE_BYTES = 1 << 20
_MAX_EVENT_BYTES = 4 << 20


def events(connection: Connection, after: int | None, stop: Cancel) -> Iterator[Event | None]:
    """Events after the id `after`, or from now on; None for a sign that the service is still there.

    The first sign says that the stream has begun: what happens from then on is in it. When the
    service ends it, come back with the id of the last event. Raises what the service raises,
    RegistryUnavailable, Cancelled.
    """
    headers = {"Accept": "text/event-stream"}
    if after is not None:
        headers["Last-Event-ID"] = str(after)
    with connection.stream("/events", headers) as response:
        if "text/event-stream" not in response.headers.get("content-type", ""):
            raise RegistryUnavailable(f"service {connection.host}: its answer is no event stream")
        with stop.ending(partial(hang_up, response), "listening"):
            try:
                yield from parsed(response.iter_bytes())
            except httpx.TransportError as why:
                stop.check("listening")
                raise RegistryUnavailable(f"service {connection.host}: {why}") from why
            stop.check("listening")


def parsed(pieces: Iterable[bytes]) -> Iterator[Event | None]:
    """The events in a stream of text, and None for each comment. Raises RegistryUnavailable."""
    data: list[bytes] = []
    for line in _lines(pieces):
        if line.startswith(b":"):
            yield None
        elif line.startswith(b"data:"):
            data.append(line.removeprefix(b"data:").removeprefix(b" "))
            if sum(map(len, data)) > _MAX_EVENT_BYTES:
                raise RegistryUnavailable(f"an event of over {_MAX_EVENT_BYTES} bytes")
        elif not line and data:
            yield _event(b"\n".join(data))
            data = []


def _event(text: bytes) -> Event:
    try:
        return Event.model_validate_json(text)
    except ValidationError as why:
        said = why.errors()[0]["msg"]
        raise RegistryUnavailable(f"an event that is not weightyard's: {said}") from None


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise RegistryUnavailable(f"events with a line of over {_MAX_LINE_BYTES} bytes")
        for line in lines:
            yield line.removesuffix(b"\r")
