"""Byte ranges of a file, as RFC 9110 says. One range a request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus

from starlette.exceptions import HTTPException

_ONE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes start … end - 1 of a file."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def wanted_span(header: str | None, file_bytes: int) -> Span | None:
    """What a Range header asks for; None: the whole file.

    A header that is not well formed does not count. Raises 416 for bytes the file does not have,
    and for more than one range: many tiny ones cost more than the file.
    """
    if header is None or not header.lower().startswith("bytes="):
        return None
    if "," in header:
        raise _refused("one range a request", file_bytes)
    found = _ONE.fullmatch(header.replace(" ", "").lower())
    if found is None or found[0] == "bytes=-":
        return None
    first, last = found[1], found[2]
    if not first:
        start, end = max(0, file_bytes - int(last)), file_bytes
    else:
        start, end = int(first), min(int(last) + 1, file_bytes) if last else file_bytes
        if last and int(last) < int(first):
            return None
    if start >= end:
        raise _refused(f"the file has {file_bytes} bytes", file_bytes)
    return Span(start, end)


def _refused(why: str, file_bytes: int) -> HTTPException:
    return HTTPException(
        HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
        why,
        headers={"Content-Range": f"bytes */{file_bytes}"},
    )
