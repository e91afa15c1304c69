"""ETags: name the state that a client saw, so that it changes, or fetches, only what fits it."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

from fastapi import Header, Response

from weightyard.errors import Refused
from weightyard.records import Record
from weightyard.transfer.catalogue import ANYTHING, Anything

_TAG = re.compile(r'(?:W/)?"([\x21\x23-\x7e]{0,128})"')

# As long as all headers together may be: a client that kept many answers names all their ETags.
IfMatch = Annotated[str | None, Header(description="Do it only if this is the ETag now")]
IfNoneMatch = Annotated[
    str | None, Header(description="`*`: only if there is nothing yet; or ETags")
]


def quoted(tag: str) -> str:
    return f'"{tag}"'


def one_tag(header: str | None) -> str | None:
    """The one ETag of an If-Match header. Raises Refused."""
    if header is None:
        return None
    found = _TAG.fullmatch(header.strip())
    if found is None or header.strip().startswith("W/"):
        raise Refused("If-Match takes one ETag, exactly as it was given")
    return found[1]


def record_tag(record: Record) -> str:
    """An ETag that differs whenever anything in a record does."""
    return hashlib.blake2s(record.model_dump_json().encode(), digest_size=16).hexdigest()


def alias_tag(number: int) -> str:
    return f"v{number}"


def expected_number(if_match: str | None, if_none_match: str | None) -> int | Anything | None:
    """Where an alias is expected to be: a version, nowhere (None), or anywhere. Raises Refused."""
    if if_none_match is not None:
        if if_none_match.strip() != "*" or if_match is not None:
            raise Refused("If-None-Match takes only `*` here, and no If-Match beside it")
        return None
    tag = one_tag(if_match)
    if tag is None:
        return ANYTHING
    if not re.fullmatch(r"v[1-9][0-9]{0,8}", tag, re.ASCII):
        raise Refused('If-Match takes the ETag of the alias, such as "v3"')
    return int(tag[1:])


def tagged(response: Response, tag: str, if_none_match: str | None = None) -> Response | None:
    """Give an answer its ETag. Returns a 304 to send instead if the client has it already."""
    response.headers["ETag"] = quoted(tag)
    if not is_same(if_none_match, tag):
        return None
    return Response(status_code=304, headers={"ETag": quoted(tag)})


def is_same(if_none_match: str | None, tag: str) -> bool:
    """Whether the client has what it asks for already, by its If-None-Match."""
    if if_none_match is None:
        return False
    tags = {found[1] for found in _TAG.finditer(if_none_match)}
    return if_none_match.strip() == "*" or tag in tags
