"""Uploads over REST: claims, packs and files, until a commit makes them a version."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Path, Request, Response
from fastapi.openapi.models import Example

from weightyard.errors import Refused, Retryable, StoreFull, UploadExpired
from weightyard.logs import Log
from weightyard.names import AliasName, Digest, FilePath, PackId, Ref
from weightyard.records import Publication, Role, Version
from weightyard.registry.registry import LEASE_S
from weightyard.registry.upload import RegistryUpload
from weightyard.registry.uploads import OpenUpload
from weightyard.service.auth import Caller, GuardedRoute, Opened, Principal, needs
from weightyard.service.etags import quoted
from weightyard.service.openapi import ETAG, LOCATION
from weightyard.service.paging import Named
from weightyard.service.problems import RESPONSES
from weightyard.service.receiving import (
    assemble,
    check_pack,
    config_in,
    put_manifest,
    store_file,
    store_pack,
)
from weightyard.service.spool import SpooledFile
from weightyard.service.state import Service, Yard
from weightyard.storage import layout
from weightyard.transfer.catalogue import ManifestFile
from weightyard.transfer.durable import least_replicas, make_durable, require_kept
from weightyard.transfer.publish import publish, read_manifest
from weightyard.wire import (
    BlockList,
    Commit,
    ManifestBegun,
    OpenedUpload,
    PackSteps,
    Placed,
    ReceivedFile,
    placed,
    placements_in,
)

_log = Log(__name__)

router = APIRouter(route_class=GuardedRoute, tags=["uploads"], responses=RESPONSES)

_PUBLICATIONS: dict[str, Example] = {
    "with an alias": {
        "value": {"message": "more data", "metrics": {"loss": 0.31}, "alias": "prod"}
    },
    "only after version 3": {"value": {"parent": "team/bert@v3", "expect_latest": 3}},
}

_BUFFER_BYTES = 1 << 20
_HEARTBEAT_S = 60.0

Packed = Annotated[str, Path(examples=["0a" * 16])]
Digested = Annotated[str, Path(examples=["5f" * 32])]


def _raw_body(description: str) -> dict[str, Any]:
    return {
        "requestBody": {
            "description": description,
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string"}}},
        }
    }


def _checked(yard: Service, caller: Principal, publication: Publication) -> Publication:
    """Returns what a writer said, if its names are valid, it may read the parent, and the store
    can keep files as asked. Raises otherwise."""
    require_kept(yard.store, publication.replication, publication.policy)
    if publication.alias is not None:
        AliasName(publication.alias)
    if publication.parent is not None:
        caller.require_model(Role.READ, Ref.parse(publication.parent).model)
    return publication


def _handle(yard: Service, caller: Principal, opened: OpenUpload) -> RegistryUpload:
    return yard.registry.resume_upload(opened.upload, opened.publication, reading=caller.reading)


@router.post("/models/{project}/{name}/uploads", status_code=201)
@needs(Role.WRITE)
async def open_upload(
    yard: Yard,
    caller: Caller,
    model: Named,
    body: Annotated[Publication | None, Body(openapi_examples=_PUBLICATIONS)] = None,
) -> OpenedUpload:
    """Begin a version of a model, which need not exist yet. What is said here need not be said
    again at the commit."""
    said = _checked(yard, caller, body or Publication())
    upload = await yard.ask(yard.registry.open_upload, model, said, who=caller.who)
    return OpenedUpload(
        id=upload.id.hex,
        model=str(model),
        lease_s=LEASE_S,
        block_bytes=yard.bound.block_bytes,
    )


@router.post("/uploads/{upload}/claims")
@needs(Role.WRITE)
async def claim(yard: Yard, caller: Caller, opened: Opened, body: BlockList) -> Placed:
    """Which of these blocks, among those one may read, are in the store. They are kept for the
    upload, and need not be written again."""
    found = await yard.ask(_handle(yard, caller, opened).claim, body.ids())
    return await yard.ask(placed, found)


@router.post("/uploads/{upload}/packs", status_code=204)
@needs(Role.WRITE)
async def packs(yard: Yard, caller: Caller, opened: Opened, body: PackSteps) -> None:
    """Say that packs are about to be written (`begin`), or that they are in the store (`add`).

    What is said of a pack is compared with the pack. May be repeated. Whoever sends packs through
    the service may announce them (`send`), to learn whether the project's quota has room for them.
    """
    handle = _handle(yard, caller, opened)
    replicas = least_replicas(yard.store, opened.publication.replication)
    for name in body.begin:
        await yard.ask(handle.begin_pack, PackId(name))
    for coming in body.send:
        placements = await yard.ask(placements_in, coming.pack, coming.entries)
        await yard.ask(handle.require_room, placements)
    for added in body.add:
        pack = PackId(added.pack)
        placements = await yard.ask(placements_in, added.pack, added.entries)
        await yard.ask_store(check_pack, yard.store, pack, added.bytes, placements, replicas)
        await yard.ask(handle.add_pack, pack, added.bytes, placements)


@router.post("/uploads/{upload}/heartbeat", status_code=204)
@needs(Role.WRITE)
async def heartbeat(yard: Yard, caller: Caller, opened: Opened) -> None:
    """Keep an upload alive, for as long as a lease lasts."""
    await yard.ask(_handle(yard, caller, opened).heartbeat)


@router.post("/uploads/{upload}/manifest", status_code=204)
@needs(Role.WRITE)
async def begin_manifest(yard: Yard, caller: Caller, opened: Opened, body: ManifestBegun) -> None:
    """Say that a manifest is about to be written to the store."""
    file = ManifestFile(Digest(body.digest), body.stored_bytes)
    await yard.ask(_handle(yard, caller, opened).begin_manifest, file)


@router.delete("/uploads/{upload}", status_code=204)
@needs(Role.WRITE)
async def abandon(yard: Yard, caller: Caller, opened: Opened) -> None:
    """Give an upload up: gc may collect what only it held. May be repeated."""
    await yard.ask(_handle(yard, caller, opened).abandon)


@router.put(
    "/uploads/{upload}/files/{path:path}",
    openapi_extra=_raw_body("The file, as it is"),
)
@needs(Role.WRITE)
async def receive_file(
    yard: Yard,
    caller: Caller,
    opened: Opened,
    path: Annotated[str, Path(examples=["model.safetensors"])],
    request: Request,
) -> ReceivedFile:
    """Send a file through the service, which splits, encodes and packs it."""
    name = FilePath.from_url(path)
    handle = _handle(yard, caller, opened)
    async with _received(yard, caller, handle, request) as file:
        return await yard.move(store_file, yard, handle, opened.publication, name, file)


@router.put(
    "/uploads/{upload}/packs/{pack}",
    status_code=204,
    openapi_extra=_raw_body("The pack, as docs/format.md gives it"),
)
@needs(Role.WRITE)
async def receive_pack(
    yard: Yard, caller: Caller, opened: Opened, pack: Packed, request: Request
) -> None:
    """Send, through the service, a pack that was begun: for clients that cannot reach the store.

    Every block is decoded and its id checked before the pack is put into the store; the bases of
    deltas must be blocks one may read. Then `add` the pack. May be repeated.
    """
    name = PackId(pack)
    handle = _handle(yard, caller, opened)
    awaited = await yard.ask(handle.awaits_pack, name)
    async with _received(yard, caller, handle, request) as file:
        if awaited:
            await yard.move(store_pack, yard, handle, opened.publication, name, file)


@router.put(
    "/uploads/{upload}/manifests/{digest}",
    status_code=204,
    openapi_extra=_raw_body("The manifest as stored, of which docs/format.md tells"),
)
@needs(Role.WRITE)
async def receive_manifest(
    yard: Yard, caller: Caller, opened: Opened, digest: Digested, request: Request
) -> None:
    """Send a manifest through the service: for clients that cannot reach the store. Then commit.

    May be repeated.
    """
    name = Digest(digest)
    handle = _handle(yard, caller, opened)
    async with _received(yard, caller, handle, request) as file:
        await yard.move(put_manifest, yard, handle, opened.publication, name, file)


@asynccontextmanager
async def _received(
    yard: Service, caller: Principal, upload: RegistryUpload, request: Request
) -> AsyncIterator[pathlib.Path]:
    """Receive the body of a request into a local file. The upload stays alive meanwhile.

    Raises Refused and UploadExpired before a byte is read, TooLarge, StoreUnavailable, StoreFull.
    """
    _require_whole(request)
    announced = request.headers.get("content-length", "")
    expected = int(announced) if announced.isdecimal() and len(announced) < 19 else None
    with yard.turnstile.passed(caller.who):
        await yard.ask(upload.heartbeat)
        async with _kept_alive(yard, upload):
            with yard.spool.open(expected) as file:
                await _receive(yard, request, file)
                yield file.finish()


def _require_whole(request: Request) -> None:
    """See that the body is what is to be stored, not a part of it or compressed. Raises Refused.

    `curl --continue-at` sends only the rest of a file, which would be taken for all of it.
    """
    for name in ("Content-Range", "Content-Encoding"):
        if name in request.headers:
            raise Refused(f"send the whole file, as it is, without {name}")


async def _receive(yard: Service, request: Request, file: SpooledFile) -> None:
    buffer = bytearray()
    async for piece in request.stream():
        buffer += piece
        yard.metrics.bytes.labels("in").inc(len(piece))
        if len(buffer) >= _BUFFER_BYTES:
            await yard.ask(file.write, bytes(buffer))
            buffer.clear()
    await yard.ask(file.write, bytes(buffer))


@asynccontextmanager
async def _kept_alive(yard: Service, upload: RegistryUpload) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            try:
                await yard.ask(upload.heartbeat)
            except (Retryable, StoreFull) as why:
                _log.warning("upload.heartbeat_failed", upload=upload.id, reason=why)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@router.post(
    "/uploads/{upload}/commit", status_code=201, responses={201: {"headers": ETAG | LOCATION}}
)
@needs(Role.WRITE)
async def commit(
    yard: Yard,
    caller: Caller,
    opened: Opened,
    response: Response,
    body: Commit | None = None,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=128,
            description="Repeating a commit with the same key gives the same version",
        ),
    ] = None,
) -> Version:
    """Make the version visible: all of it, or nothing. May be repeated with the same key."""
    said = body or Commit()
    publication = _checked(yard, caller, said.publication or opened.publication)
    handle = _handle(yard, caller, opened)
    key = caller.own_key(idempotency_key or opened.upload.hex)
    if said.digest is not None:
        version = await yard.commit(_commit_written, yard, handle, said.digest, publication, key)
    else:
        version = await yard.commit(_commit_received, yard, handle, publication, key)
    response.headers["ETag"] = quoted(version.etag)
    response.headers["Location"] = f"/api/v1/models/{version.model}/versions/{version.number}"
    return caller.shown(version)


def _commit_written(
    yard: Service, handle: RegistryUpload, digest: str, publication: Publication, key: str
) -> Version:
    """Commit a version whose manifest the client wrote."""
    manifest = read_manifest(yard.store, Digest(digest))
    for file in manifest.files:
        FilePath.of_new(file.path)
    replicas = least_replicas(yard.store, publication.replication)
    make_durable(yard.store, [layout.manifest(Digest(digest))], replicas)
    return handle.commit(Digest(digest), manifest, publication, key)


def _commit_received(
    yard: Service, handle: RegistryUpload, publication: Publication, key: str
) -> Version:
    """Commit a version of the files that the service received."""
    if (done := handle.committed(key)) is not None:
        return done
    try:
        manifest = assemble(handle.received())
        if publication.config is None:
            publication = publication.model_copy(update={"config": config_in(yard, manifest)})
        replicas = least_replicas(yard.store, publication.replication)
        return publish(yard.store, handle, manifest, publication, key, min_replicas=replicas)
    except UploadExpired:
        if (done := handle.committed(key)) is not None:  # the same request, sent before, did it
            return done
        raise
