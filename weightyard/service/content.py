"""A version's content over REST: manifest, placements, files, replicas, locations."""

from __future__ import annotations

import gzip
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from weightyard.errors import NoSuchThing, Unsupported
from weightyard.format.manifest import Extent, Manifest
from weightyard.format.pack import Placement
from weightyard.names import BlockId, Digest, FilePath, ModelName, PackId, Ref
from weightyard.records import Role, Version
from weightyard.registry.registry import Registry
from weightyard.registry.uploads import Reading
from weightyard.service.auth import Caller, GuardedRoute, Principal, needs
from weightyard.service.etags import IfNoneMatch, is_same, quoted
from weightyard.service.locating import Answer, make_answer
from weightyard.service.openapi import AS_THE_CLIENT_HAS_IT, CONTENT_RANGE, ETAG
from weightyard.service.paging import After, Named, Number, number_after
from weightyard.service.problems import RESPONSES
from weightyard.service.ranges import Span, wanted_span
from weightyard.service.sending import FileBody, SentFile
from weightyard.service.state import Service, Yard
from weightyard.storage import layout
from weightyard.storage.hdfs import located
from weightyard.storage.store import Store
from weightyard.wire import (
    MAX_CLAIMED,
    BlockList,
    PackReplicas,
    Page,
    Placed,
    ReplicaRecord,
    placed,
)

router = APIRouter(route_class=GuardedRoute, tags=["content"], responses=RESPONSES)

_VERSION = "/models/{project}/{name}/versions/{number}"
_FOR_EVER = {"Cache-Control": "private, max-age=31536000, immutable"}
_LOCATED_AT_ONCE = 8

InVersion = Annotated[str, Path(examples=["model.safetensors"])]


@dataclass(frozen=True, slots=True)
class _Part:
    """Which part of something the client wants, and what it has of it already."""

    range: str | None
    if_range: str | None
    if_none_match: str | None


async def _part(
    range: Annotated[str | None, Header(description="One range", examples=["bytes=0-99"])] = None,
    if_range: Annotated[str | None, Header(max_length=200)] = None,
    if_none_match: IfNoneMatch = None,
) -> _Part:
    return _Part(range, if_range, if_none_match)


WantedPart = Annotated[_Part, Depends(_part)]


async def _manifest(yard: Service, model: ModelName, number: int) -> tuple[Version, Manifest]:
    version = await yard.ask(yard.registry.resolve_readable, model, number)
    digest = Digest(version.digest)
    known = yard.manifests.known(digest)
    if known is None:
        known = await yard.ask_store(yard.manifests.get, digest)
    return version, known


def _manifest_schema() -> dict[str, Any]:
    """Only the outline: docs/format.md tells the rest, and msgspec's references do not fit into an
    OpenAPI."""
    _, components = msgspec.json.schema_components([Manifest])
    inner = components["Manifest"]
    return {
        "type": "object",
        "description": "docs/format.md, section 6",
        "required": inner["required"],
        "properties": {
            name: {"type": "array"} if value.get("type") == "array" else value
            for name, value in inner["properties"].items()
        },
    }


_MANIFEST_EXAMPLE = {
    "format": 1,
    "block_bytes": 16777216,
    "blocks": [["5f" * 32, 12]],
    "files": [{"path": "config.json", "bytes": 12, "kind": "plain", "extents": [[0, 0, 12]]}],
    "tensors": [],
}


@router.get(
    _VERSION + "/manifest",
    response_class=Response,
    responses={
        200: {
            "description": "The manifest's JSON, whose BLAKE3-256 is the version's digest",
            "headers": ETAG,
            "content": {
                "application/json": {"schema": _manifest_schema(), "example": _MANIFEST_EXAMPLE}
            },
        },
        304: AS_THE_CLIENT_HAS_IT,
    },
)
@needs(Role.READ)
async def show_manifest(
    yard: Yard, model: Named, number: Number, if_none_match: IfNoneMatch = None
) -> Response:
    """What a version consists of: files, tensors, boxes, extents, blocks."""
    version, manifest = await _manifest(yard, model, number)
    headers = {"ETag": quoted(version.digest), **_FOR_EVER}
    if is_same(if_none_match, version.digest):
        return Response(status_code=304, headers=headers)
    text = await yard.ask(msgspec.json.encode, manifest)
    return Response(text, headers=headers, media_type="application/json")


@router.get(_VERSION + "/placements")
@needs(Role.READ)
async def version_placements(
    yard: Yard,
    caller: Caller,
    model: Named,
    number: Number,
    limit: Annotated[int, Query(ge=1, le=MAX_CLAIMED, description="Blocks at most")] = 2000,
    after: After = None,
) -> Placed:
    """Where the blocks of a version lie, and the bases they need."""
    _, manifest = await _manifest(yard, model, number)
    start = number_after(after) or 0
    blocks = [block.id for block in manifest.blocks[start : start + limit]]
    answer = await yard.ask(_placed_with_bases, yard.registry, blocks, caller.reading)
    end = start + limit
    return answer.model_copy(update={"next": str(end) if end < len(manifest.blocks) else None})


def _placed_with_bases(
    registry: Registry, blocks: Sequence[BlockId], reading: Reading | None
) -> Placed:
    return placed(_with_bases(registry, blocks, reading))


def _with_bases(
    registry: Registry, blocks: Sequence[BlockId], reading: Reading | None
) -> dict[BlockId, Sequence[Placement]]:
    found = dict(registry.placements(blocks, reading=reading))
    bases = {
        placement.encoding.base
        for placements in found.values()
        for placement in placements
        if placement.encoding.base is not None
    }
    found |= registry.placements([base for base in bases if base not in found], reading=reading)
    return found


@router.post("/placements")
@needs(Role.READ)
async def find_placements(
    yard: Yard,
    caller: Caller,
    body: BlockList,
    for_project: Annotated[
        str | None, Query(description="Only where an upload of this project would find them")
    ] = None,
) -> Placed:
    """Where blocks lie, among those one may read: nothing is told of other projects' blocks."""
    if for_project is not None:
        for_project = ModelName(for_project, "any").project
        caller.require(Role.READ, for_project)
    found = await yard.ask(
        yard.registry.placements, body.ids(), reading=caller.reading, for_project=for_project
    )
    return await yard.ask(placed, found)


@dataclass(frozen=True, slots=True)
class _Found:
    """A file or block of a version, with what its headers say even if its bytes are not sent."""

    version: Version
    manifest: Manifest
    extents: Sequence[Extent]
    bytes: int
    tag: str

    @property
    def headers(self) -> dict[str, str]:
        return {"ETag": quoted(self.tag), "Accept-Ranges": "bytes", **_FOR_EVER}


async def _file(yard: Service, model: ModelName, number: int, path: str) -> _Found:
    """Raises NoSuchThing, InvalidName."""
    wanted = FilePath(path)
    version, manifest = await _manifest(yard, model, number)
    for index, file in enumerate(manifest.files):
        if file.path == wanted.text:
            tag = f"{version.digest}-{index}"
            return _Found(version, manifest, file.extents, file.bytes, tag)
    raise NoSuchThing(f"{version.ref} has no file {wanted.text[:200]!a}")


async def _block(yard: Service, model: ModelName, number: int, block: BlockId) -> _Found:
    """Raises NoSuchThing."""
    version, manifest = await _manifest(yard, model, number)
    for index, entry in enumerate(manifest.blocks):
        if entry.hex == block.hex:
            extents = (Extent(index, 0, entry.raw_bytes),)
            return _Found(version, manifest, extents, entry.raw_bytes, block.hex)
    raise NoSuchThing(f"{version.ref} has no block {block}")


@router.head(
    _VERSION + "/files/{path:path}",
    response_class=Response,
    responses={
        200: {"description": "The file's length and ETag", "headers": ETAG},
        304: AS_THE_CLIENT_HAS_IT,
    },
)
@needs(Role.READ)
async def file_headers(
    yard: Yard, model: Named, number: Number, path: InVersion, if_none_match: IfNoneMatch = None
) -> Response:
    """A file's length and ETag. Its bytes are not read."""
    found = await _file(yard, model, number, path)
    if is_same(if_none_match, found.tag):
        return Response(status_code=304, headers=found.headers)
    return Response(
        headers={**found.headers, "Content-Length": str(found.bytes)},
        media_type="application/octet-stream",
    )


def _sent_bytes(what: str) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {"application/octet-stream": {}}
    part = {"description": "The bytes asked for", "headers": ETAG | CONTENT_RANGE}
    return {
        200: {"description": what, "headers": ETAG, "content": content},
        206: {**part, "content": content},
        304: AS_THE_CLIENT_HAS_IT,
    }


@router.get(
    _VERSION + "/files/{path:path}", response_class=Response, responses=_sent_bytes("The file")
)
@needs(Role.READ)
async def read_file(
    yard: Yard, caller: Caller, model: Named, number: Number, path: InVersion, wanted: WantedPart
) -> Response:
    """A file of a version, bit for bit, or a range of it."""
    return await _send(yard, caller, await _file(yard, model, number, path), wanted)


@router.get(
    _VERSION + "/blocks/{block}",
    response_class=Response,
    responses=_sent_bytes("The block's raw bytes"),
)
@needs(Role.READ)
async def read_block(
    yard: Yard,
    caller: Caller,
    model: Named,
    number: Number,
    block: Annotated[str, Path(examples=["5f" * 32])],
    wanted: WantedPart,
) -> Response:
    """A block of a version, or a range of it, such as of tensors that are in no file."""
    return await _send(yard, caller, await _block(yard, model, number, BlockId(block)), wanted)


async def _send(yard: Service, caller: Principal, found: _Found, wanted: _Part) -> Response:
    headers = found.headers
    if is_same(wanted.if_none_match, found.tag):
        return Response(status_code=304, headers=headers)
    is_other = wanted.if_range not in (None, quoted(found.tag))
    part = None if is_other else wanted_span(wanted.range, found.bytes)
    span = part or Span(0, found.bytes)
    headers["Content-Disposition"] = "attachment"  # never shown: it may be anyone's HTML
    if part is not None:
        headers["Content-Range"] = f"bytes {span.start}-{span.end - 1}/{found.bytes}"
    ref = found.version.ref
    with suppress(NoSuchThing):  # a removed version, read under a lease: its use is not noted
        await yard.note_use(ref, yard.registry.mark_used, Ref.parse(ref))
    return SentFile(
        FileBody(yard, found.manifest, found.extents, span),
        span,
        yard.turnstile.passed(caller.who),
        yard,
        status_code=200 if part is None else 206,
        headers=headers,
    )


@router.get(_VERSION + "/replicas")
@needs(Role.READ)
async def replicas(
    yard: Yard,
    caller: Caller,
    model: Named,
    number: Number,
    limit: Annotated[int, Query(ge=1, le=1000, description="Packs at most")] = 100,
    after: After = None,
) -> Page[PackReplicas]:
    """On which DataNodes the packs of a version are."""
    _, manifest = await _manifest(yard, model, number)
    blocks = [block.id for block in manifest.blocks]
    found = await yard.ask(yard.registry.placements, blocks, reading=caller.reading)
    names = sorted({placement.pack for some in found.values() for placement in some})
    # After a name, not a number of packs: gc may rewrite some between two pages.
    if after is not None:
        names = names[bisect_right(names, PackId(after)) :]
    items = await yard.send(_locate, yard.store, names[:limit])
    return Page(items=items, next=names[limit - 1].hex if limit < len(names) else None)


def _locate(store: Store, packs: Sequence[PackId]) -> list[PackReplicas]:
    with ThreadPoolExecutor(_LOCATED_AT_ONCE, "weightyard-locate") as threads:
        locations = list(threads.map(lambda pack: store.locate(layout.pack(pack)), packs))
    return [
        PackReplicas(
            pack=pack.hex,
            bytes=location.length,
            replicas=[
                ReplicaRecord(
                    datanode=replica.datanode,
                    host=replica.host,
                    rack=replica.rack,
                    state=replica.state,
                )
                for replica in dict.fromkeys(r for span in location.spans for r in span.replicas)
            ],
        )
        for pack, location in zip(packs, locations, strict=True)
    ]


_LOCATED_EXAMPLE = {
    "stamp": "8d0c5f",
    "files": [
        {
            "path": "packs/0a/" + "0a" * 16,
            "bytes": 134217728,
            "spans": [
                {
                    "offset": 0,
                    "length": 134217728,
                    "block": {
                        "pool": "BP-1",
                        "id": 1073741825,
                        "generation": 1001,
                        "length": 134217728,
                        "token": "…",
                    },
                    "replicas": [
                        {
                            "datanode": "10.0.0.1:9866",
                            "host": "dn1",
                            "rack": "/a",
                            "state": "normal",
                        }
                    ],
                }
            ],
        }
    ],
}
_LOCATED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Where files lie, with block tokens: not to be kept for long, nor logged",
        "content": {"application/json": {"schema": located.schema(), "example": _LOCATED_EXAMPLE}},
    }
}
Stale = Annotated[
    str | None,
    Query(
        pattern=r"^[0-9a-f]{1,64}$",
        description="The stamp of an answer by which something could not be read: a newer answer "
        "is given, for which the store may be asked again",
    ),
]


@router.get(_VERSION + "/locations", response_class=Response, responses=_LOCATED)
@needs(Role.READ)
async def locations(
    request: Request,
    yard: Yard,
    caller: Caller,
    model: Named,
    number: Number,
    stale: Stale = None,
) -> Response:
    """Where all packs of a version lie, with what it takes to read them: for readers that reach
    DataNodes, but no NameNode. Packs that are gone by now are left out."""
    _require_telling(yard)
    version, manifest = await _manifest(yard, model, number)
    # Callers that may read different projects may be told of different packs: one answer for each.
    key = (version.digest, None if caller.projects is None else frozenset(caller.projects))

    def make(is_forced: bool) -> Answer:
        blocks = [block.id for block in manifest.blocks]
        found = _with_bases(yard.registry, blocks, caller.reading)
        packs = sorted({placement.pack for some in found.values() for placement in some})
        return make_answer(yard.store, [layout.pack(pack) for pack in packs], is_forced)

    return _sent(
        request, await yard.located.get(key, lambda now: yard.send(make, now), stale=stale)
    )


@router.get("/about/location", response_class=Response, responses=_LOCATED)
@needs(Role.READ)
async def location(request: Request, yard: Yard, stale: Stale = None) -> Response:
    """Where `yard.json` lies: by reading it, readers find out whether they reach DataNodes."""
    _require_telling(yard)

    def make(is_forced: bool) -> Answer:
        return make_answer(yard.store, [layout.YARD], is_forced)

    return _sent(
        request, await yard.located.get(None, lambda now: yard.send(make, now), stale=stale)
    )


def _require_telling(yard: Service) -> None:
    if not yard.settings.tell_locations:
        raise Unsupported("this service tells no locations: WEIGHTYARD_TELL_LOCATIONS is off")


def _sent(request: Request, answer: Answer) -> Response:
    headers = {"Cache-Control": "no-store"}  # there are tokens in it
    content = answer.compressed
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
    else:
        content = gzip.decompress(content)
    return Response(content, headers=headers, media_type="application/json")
