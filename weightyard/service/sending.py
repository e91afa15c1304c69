"""Sending a file, a window at a time: while one is sent, the next is being read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from itertools import zip_longest
from typing import Self

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weightyard.errors import YardError
from weightyard.format.block import MIB
from weightyard.format.manifest import Extent, Manifest
from weightyard.logs import Log
from weightyard.service.ranges import Span
from weightyard.service.state import Service
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader

_log = Log(__name__)

WINDOW_BYTES = 16 * MIB
_SEND_BYTES = MIB
_SEND_TIMEOUT_S = 60.0
"""How long a client may take to receive one piece; after that it is taken for gone."""

_READ_THREADS = 4


def wanted_in(
    manifest: Manifest, extents: Sequence[Extent], span: Span, into: memoryview
) -> Iterator[Wanted]:
    """The parts of blocks that make up a span of a file, or of anything with these extents."""
    at = 0
    for extent in extents:
        begin, end = max(span.start, at), min(span.end, at + extent.length)
        if begin < end:
            part = into[begin - span.start : end - span.start]
            block = manifest.blocks[extent.block].id
            yield Wanted(block, extent.offset + begin - at, part)
        at += extent.length
        if at >= span.end:
            return


class FileBody:
    """Reads a span of a file or block; never more than two windows are in memory."""

    def __init__(
        self, yard: Service, manifest: Manifest, extents: Sequence[Extent], span: Span
    ) -> None:
        self._yard = yard
        self._manifest = manifest
        self._extents = extents
        self._reader = Reader(yard.store, yard.registry, threads=_READ_THREADS)
        self._windows = [
            Span(start, min(start + WINDOW_BYTES, span.end))
            for start in range(span.start, span.end, WINDOW_BYTES)
        ]

    async def windows(self) -> AsyncGenerator[memoryview, None]:
        """The bytes, window by window; the next is being read while one is used."""
        ahead: asyncio.Task[memoryview] | None = None
        try:
            for window, following in zip_longest(self._windows, self._windows[1:]):
                data = await (ahead or self._begin(window))
                ahead = self._begin(following) if following is not None else None
                yield data
        finally:
            if ahead is not None:
                # Not cancelled: its thread would go on, without being counted as at work.
                await asyncio.gather(ahead, return_exceptions=True)

    def _begin(self, window: Span) -> asyncio.Task[memoryview]:
        return asyncio.create_task(self._yard.send(self._read, window))

    def _read(self, window: Span) -> memoryview:
        into = memoryview(bytearray(window.length))
        self._reader.read(wanted_in(self._manifest, self._extents, window, into))
        return into


class _Leaving:
    """Notices when the client goes away: for the server it is no error to send to nobody."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_gone = False

    def __enter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    def __exit__(self, *why: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        with suppress(HTTPException):  # for a bad body, of which these requests need none
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.is_gone = True


class SentFile(Response):
    """A file's bytes as an answer. It begins only when the first of them are there.

    So a version that cannot be read is answered by a problem. An answer that breaks off later is
    shorter than its Content-Length, so that no client takes it for whole.
    """

    def __init__(
        self,
        body: FileBody,
        span: Span,
        turn: AbstractContextManager[None],
        yard: Service,
        *,
        status_code: int,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            None,
            status_code,
            {**headers, "Content-Length": str(span.length)},
            "application/octet-stream",
        )
        self._body = body
        self._turn = turn
        self._sent = yard.metrics.bytes.labels("out")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        begun = False
        with self._turn, _Leaving(receive) as leaving:
            try:
                async with aclosing(self._body.windows()) as windows:
                    async for window in windows:
                        if leaving.is_gone:
                            _log.info("file.unwanted", id=scope["weightyard.request_id"])
                            return
                        if not begun:
                            await send(start)
                            begun = True
                        await self._send(window, send)
            except (YardError, TimeoutError) as why:
                if not begun:
                    raise
                # Too late for a problem: only the missing bytes can tell that something went wrong.
                _log.warning("file.broke_off", id=scope["weightyard.request_id"], reason=why)
                return
            if not begun:
                await send(start)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, window: memoryview, send: Send) -> None:
        for at in range(0, len(window), _SEND_BYTES):
            piece = bytes(window[at : at + _SEND_BYTES])
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._sent.inc(len(piece))
