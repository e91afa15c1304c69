"""HttpUpload: a lease on a service, under which one version is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import NoneType

from weightyard.client.connection import Connection
from weightyard.client.sending import Sending
from weightyard.format.manifest import Manifest
from weightyard.format.pack import Placement
from weightyard.names import BlockId, Digest, PackId, UploadId
from weightyard.records import Publication, Version
from weightyard.storage import layout
from weightyard.storage.deadline import Deadline
from weightyard.storage.store import StorePath
from weightyard.transfer.catalogue import ManifestFile
from weightyard.transfer.reader import pack_index
from weightyard.transfer.source import Source
from weightyard.wire import (
    MAX_CLAIMED,
    AddedPack,
    BlockList,
    Commit,
    ManifestBegun,
    OpenedUpload,
    PackSteps,
    Placed,
    entries_of,
    placements_by_block,
)


class HttpUpload:
    """A `weightyard.transfer.catalogue.Upload` over HTTP. Every step may be repeated."""

    def __init__(self, connection: Connection, opened: OpenedUpload) -> None:
        self._connection = connection
        self._id = UploadId(opened.id)
        self._path = f"/uploads/{opened.id}"

    @property
    def id(self) -> UploadId:
        return self._id

    def claim(self, blocks: Sequence[BlockId]) -> Mapping[BlockId, Sequence[Placement]]:
        return placements_at(self._connection, f"{self._path}/claims", blocks)

    def begin_pack(self, pack: PackId) -> None:
        self._step(PackSteps(begin=[pack.hex]))

    def add_pack(self, pack: PackId, pack_bytes: int, placements: Sequence[Placement]) -> None:
        added = AddedPack(pack=pack.hex, bytes=pack_bytes, entries=entries_of(placements))
        self._step(PackSteps(add=[added]))

    def heartbeat(self) -> None:
        self._connection.send("POST", f"{self._path}/heartbeat", NoneType, again=True)

    def finish_rank(self, rank: int) -> None:
        self._connection.send("PUT", f"{self._path}/ranks/{rank}", NoneType, again=True)

    def begin_manifest(self, file: ManifestFile) -> None:
        body = ManifestBegun(digest=file.digest.hex, stored_bytes=file.stored_bytes)
        self._connection.send("POST", f"{self._path}/manifest", NoneType, body=body, again=True)

    def commit(
        self, digest: Digest, manifest: Manifest, publication: Publication, key: str
    ) -> Version:
        """Commit. The service reads the manifest from the store; it is not sent.

        If no answer comes, it is asked for again under the same key: a caller that gave up here
        might push again, and so publish a second version.
        """
        return self._connection.send(
            "POST",
            f"{self._path}/commit",
            Version,
            body=Commit(digest=digest.hex, publication=publication),
            headers={"Idempotency-Key": key},
            again=True,
            is_long=True,
        )

    def put_stored(self, path: StorePath, content: Source) -> None:
        """Send a pack that was begun, or a manifest, through the service into the store.

        For hosts that cannot reach it. Raises PackInvalid, BlockCorrupt, ManifestInvalid, and
        QuotaExceeded before a byte of a pack is sent.
        """
        folder, _, name = path.text.split("/")
        if folder == layout.PACKS.text:
            held = pack_index(PackId(name), content.length, content.read_at)
            coming = AddedPack(pack=name, bytes=content.length, entries=entries_of(held))
            self._step(PackSteps(send=[coming]))
        self._connection.put(f"{self._path}/{folder}/{name}", Sending(content))

    def abandon(self) -> None:
        self._connection.send("DELETE", self._path, NoneType, again=True)

    def _step(self, steps: PackSteps) -> None:
        self._connection.send("POST", f"{self._path}/packs", NoneType, body=steps, again=True)


def placements_at(
    connection: Connection,
    path: str,
    blocks: Sequence[BlockId],
    params: Mapping[str, str | None] | None = None,
    *,
    within_s: float = math.inf,
) -> dict[BlockId, Sequence[Placement]]:
    """Where blocks lie, by requests to a path for as many blocks each as the service takes."""
    deadline = Deadline.after(within_s)
    found: dict[BlockId, Sequence[Placement]] = {}
    for start in range(0, len(blocks), MAX_CLAIMED):
        wanted = BlockList(blocks=[block.hex for block in blocks[start : start + MAX_CLAIMED]])
        left_s = deadline.left("asking where blocks lie")
        answer = connection.send(
            "POST", path, Placed, body=wanted, params=params, again=True, within_s=left_s
        )
        found |= placements_by_block(answer)
    return found
