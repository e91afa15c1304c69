"""Wire: what goes over HTTP besides the records: bodies of requests, pages, and placements."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weightyard.errors import Refused
from weightyard.format.pack import (
    MAX_FOOTER_BYTES,
    MAX_PACK_BYTES,
    Placement,
    entry_bytes,
    read_entry,
)
from weightyard.names import MAX_STEP, BlockId, PackId
from weightyard.records import (
    MAX_HOLDER,
    MAX_LEASE_S,
    Nested,
    PolicyName,
    Publication,
    Record,
    Role,
)

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound="Body")

MAX_CLAIMED = 10_000
"""How many block ids one request may have."""

MAX_PACKS = 1000
"""How many packs one request may have."""

_HEX = r"^[0-9a-f]+$"
HexBlock = Annotated[str, Field(min_length=64, max_length=64, pattern=_HEX, examples=["5f" * 32])]
HexPack = Annotated[str, Field(min_length=32, max_length=32, pattern=_HEX, examples=["0a" * 16])]
Entry = Annotated[str, Field(max_length=MAX_FOOTER_BYTES, description="Base64 of a pack's entry")]
ShortText = Annotated[str, Field(max_length=1000)]


class Body(BaseModel):
    """The body of a request. Unknown fields are refused: a typo must not go unnoticed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def body(kind: type[_Body], **values: Any) -> _Body:
    """A caller's values as the body of a request. Raises Refused where the service would."""
    try:
        return kind.model_validate(values)
    except ValidationError as why:
        first = why.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refused(f"{where}: {first['msg']}") from None


class Page(Record, Generic[_T]):
    """A page of a list. `next` goes into `after` to get the next page; None: this was the last."""

    items: list[_T]
    next: str | None = None


class ModelMade(Body):
    """A model to make, without versions."""

    name: str = Field(max_length=200, examples=["team/bert"])


class Annotation(Body):
    """What may change of a version. What is left out stays."""

    message: str | None = Field(default=None, max_length=10_000)
    metrics: dict[str, float] | None = Field(
        default=None, max_length=1000, examples=[{"accuracy": 0.93}]
    )
    tags: dict[str, str] | None = Field(default=None, max_length=1000, examples=[{"task": "qa"}])
    metadata: Nested | None = None

    def changes(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class Keeping(Body):
    """How a version is to be kept. What is left out stays as it is."""

    replication: int | None = Field(default=None, ge=1, le=512, examples=[3])
    policy: PolicyName | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.replication is None and self.policy is None:
            raise ValueError("say replication, policy, or both")
        return self


class AliasTarget(Body):
    """The version an alias should be on."""

    version: int = Field(ge=1, le=999_999_999, examples=[3])
    reason: ShortText = ""


class Reason(Body):
    """Why something is done, for the history."""

    reason: ShortText = ""


class GenerationWanted(Body):
    """Takes a run over; with `expect`, only from that generation."""

    expect: int | None = Field(
        default=None, ge=0, le=MAX_STEP, description="0: only if it is new", examples=[2]
    )


LeaseSeconds = Annotated[
    float, Field(gt=0, le=MAX_LEASE_S, description="For how long, from now", examples=[3600])
]


class LeaseWanted(Body):
    """A lease that a reader wants on a version."""

    holder: str = Field(min_length=1, max_length=MAX_HOLDER, examples=["serving-7"])
    seconds: LeaseSeconds


class LeaseRenewed(Body):
    """For how much longer a reader wants its lease."""

    seconds: LeaseSeconds


class TokenWanted(Body):
    """A token to make."""

    name: str = Field(max_length=96, examples=["nightly-ci"])
    role: Role
    projects: list[str] = Field(min_length=1, max_length=1000, examples=[["team"]])


class Limits(Body):
    """How much a project may store. None: no limit."""

    stored_bytes: int | None = Field(default=None, ge=0, le=1 << 62)
    versions: int | None = Field(default=None, ge=0, le=1 << 30)


class OpenedUpload(Record):
    """An upload that was begun."""

    id: str = Field(examples=["0a" * 16])
    model: str = Field(examples=["team/bert"])
    lease_s: float = Field(description="It ends after so many seconds without a sign of life")
    block_bytes: int


class BlockList(Body):
    """Blocks by their ids."""

    blocks: list[HexBlock] = Field(max_length=MAX_CLAIMED)

    def ids(self) -> list[BlockId]:
        return [BlockId(block) for block in self.blocks]


class PackIndex(Record):
    """Placements in one pack: its entries as docs/format.md gives them, in base64."""

    pack: HexPack
    entries: list[Entry] = Field(max_length=MAX_CLAIMED * 8)


class Placed(Record):
    """Where blocks lie, pack by pack. Blocks that lie nowhere are left out."""

    packs: list[PackIndex]
    next: str | None = None


class AddedPack(Body):
    """A pack that is published and durable, or about to be sent, and what it holds."""

    pack: HexPack
    bytes: int = Field(ge=1, le=MAX_PACK_BYTES)
    entries: list[Entry] = Field(max_length=MAX_CLAIMED * 8)


class PackSteps(Body):
    """Packs about to be written, packs about to be sent, and packs in the store."""

    begin: list[HexPack] = Field(default_factory=list, max_length=MAX_PACKS)
    send: list[AddedPack] = Field(default_factory=list, max_length=MAX_PACKS)
    add: list[AddedPack] = Field(default_factory=list, max_length=MAX_PACKS)


class ManifestBegun(Body):
    """A manifest about to be written."""

    digest: HexBlock
    stored_bytes: int = Field(ge=1, le=1 << 30)


class Commit(Body):
    """Makes an upload a version.

    `digest` names a manifest that was written to the store; without it, the version is made of
    the files the service received. `publication` replaces what was said at the beginning.
    """

    digest: HexBlock | None = None
    publication: Publication | None = None


class ReceivedFile(Record):
    """A file the service put into the store for an upload."""

    path: str
    bytes: int
    new_bytes: int = Field(description="Raw bytes of blocks the store did not have")
    stored_bytes: int = Field(description="Bytes of the packs written")
    packs_written: int = 0


class ReplicaRecord(Record):
    """One copy of a pack's bytes."""

    datanode: str
    host: str
    rack: str
    state: str


class PackReplicas(Record):
    """Where the copies of a pack are."""

    pack: HexPack
    bytes: int
    replicas: list[ReplicaRecord]


def placed(placements: Mapping[BlockId, Sequence[Placement]]) -> Placed:
    """Placements as they go over HTTP."""
    packs: dict[PackId, list[str]] = {}
    for found in placements.values():
        for placement in found:
            packs.setdefault(placement.pack, []).append(_to_base64(entry_bytes(placement)))
    return Placed(
        packs=[PackIndex(pack=pack.hex, entries=entries) for pack, entries in packs.items()]
    )


def placements_by_block(answer: Placed) -> dict[BlockId, list[Placement]]:
    """The placements in an answer, by block. Raises PackInvalid, Refused."""
    found: dict[BlockId, list[Placement]] = {}
    for index in answer.packs:
        for placement in placements_in(index.pack, index.entries):
            found.setdefault(placement.encoding.block, []).append(placement)
    return found


def placements_in(pack: str, entries: Iterable[str]) -> list[Placement]:
    """The placements of one pack. Raises PackInvalid, Refused."""
    found = []
    for entry in entries:
        try:
            raw = base64.b64decode(entry, validate=True)
        except (binascii.Error, ValueError):
            raise Refused(f"pack {pack}: an entry is not base64") from None
        found.append(read_entry(raw, PackId(pack)))
    return found


def entries_of(placements: Iterable[Placement]) -> list[str]:
    return [_to_base64(entry_bytes(placement)) for placement in placements]


def _to_base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
