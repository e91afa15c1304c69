"""Locations as a service tells them: all a reader needs to go straight to the DataNodes.

Block tokens are in them, which are secrets: an answer is never logged, and kept nowhere for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from weightyard.errors import InvalidName, RegistryUnavailable
from weightyard.storage.hdfs.protobuf import Malformed
from weightyard.storage.hdfs.wire import BlockAccess, BlockToken
from weightyard.storage.store import Location, Replica, Span, StorePath

MAX_FILES = 32_768
"""The most files in one answer: 4 TiB of packs."""

MAX_LOCATED_BYTES = 64 * 1024 * 1024
"""The longest JSON of one answer: two thousand bytes for each file."""

_Length = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=r"^[!-~]*$")]
_Address = Annotated[str, msgspec.Meta(max_length=512, pattern=r"^([!-~]+:[0-9]{1,5}|localhost)$")]
"""`localhost` is what a store in a local folder says, if ranks tell each other of its files."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where files lie, as told at one time."""

    stamp: str
    """Names that time: another answer has another stamp."""
    locations: Mapping[StorePath, Location]


class _Replica(msgspec.Struct):
    datanode: _Address
    host: _Name
    rack: _Name
    state: _Name

    def told(self, uses_hostname: bool) -> Replica:
        port = self.datanode.rpartition(":")[2]
        address = f"{self.host}:{port}" if uses_hostname else self.datanode
        return Replica(address, self.host, self.rack, self.state)


class _Block(msgspec.Struct):
    pool: _Name
    id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    generation: _Length
    length: _Length
    token: Annotated[str, msgspec.Meta(max_length=32 * 1024)]

    def __repr__(self) -> str:
        return f"{self.pool}:blk_{self.id}_{self.generation}"  # without the token


class _Span(msgspec.Struct):
    offset: _Length
    length: _Length
    block: _Block | None
    replicas: Annotated[list[_Replica], msgspec.Meta(max_length=512)]


class _File(msgspec.Struct):
    path: Annotated[str, msgspec.Meta(max_length=512)]
    bytes: _Length
    spans: Annotated[list[_Span], msgspec.Meta(max_length=4096)]


class _Answer(msgspec.Struct):
    stamp: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{1,64}$")]
    files: Annotated[list[_File], msgspec.Meta(max_length=MAX_FILES)]


def to_json(stamp: str, locations: Iterable[Location]) -> bytes:
    """An answer; spans that a single DataNode cannot serve have no block in it."""
    return msgspec.json.encode(_Answer(stamp, [_file(location) for location in locations]))


def from_json(text: bytes, *, uses_hostname: bool = False) -> Located:
    """What `to_json` was given. Raises RegistryUnavailable for what no service of ours would say.

    `uses_hostname`: DataNodes are to be reached by their names, whatever the service does.
    """
    try:
        answer = msgspec.json.decode(text, type=_Answer)
        found = [_location(file, uses_hostname) for file in answer.files]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidName, Malformed) as why:
        raise RegistryUnavailable(f"locations from the service: {why}") from None
    return Located(answer.stamp, {location.path: location for location in found})


def schema() -> dict[str, Any]:
    """The answer as OpenAPI describes things."""
    count = {"type": "integer", "minimum": 0}
    text = {"type": "string"}
    replica = _object(datanode=text, host=text, rack=text, state=text)
    block = _object(pool=text, id=count, generation=count, length=count, token=text)
    span = _object(
        offset=count,
        length=count,
        block={"anyOf": [block, {"type": "null"}]},
        replicas={"type": "array", "items": replica},
    )
    file = _object(path=text, bytes=count, spans={"type": "array", "items": span})
    return _object(stamp=text, files={"type": "array", "items": file})


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _file(location: Location) -> _File:
    return _File(
        location.path.text,
        location.length,
        [
            _Span(
                span.offset,
                span.length,
                _block(span.access),
                [_Replica(one.datanode, one.host, one.rack, one.state) for one in span.replicas],
            )
            for span in location.spans
        ],
    )


def _block(access: object) -> _Block | None:
    if not isinstance(access, BlockAccess):
        return None
    return _Block(
        access.pool, access.block, access.generation, access.length, access.token.to_url_string()
    )


def _location(file: _File, uses_hostname: bool) -> Location:
    path, spans, end = StorePath(file.path), [], 0
    for told in file.spans:
        if told.offset != end:
            raise Malformed(f"{path}: its spans do not follow each other")
        end += told.length
        replicas = tuple(one.told(uses_hostname) for one in told.replicas)
        spans.append(Span(told.offset, told.length, replicas, _access(told.block)))
    if end != file.bytes:
        raise Malformed(f"{path}: {file.bytes} bytes, but its spans have {end}")
    return Location(path, end, tuple(spans))


def _access(block: _Block | None) -> BlockAccess | None:
    if block is None:
        return None
    token = BlockToken.from_url_string(block.token)
    return BlockAccess(block.pool, block.id, block.generation, block.length, token)
