"""What a registry tells: the same records by Python, by REST and by `--json`.

Their field names are an interface: they are only ever added to. Times are UTC.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """Frozen, and silent about fields a newer service may send."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Model(Record):
    """A line of versions."""

    name: str = Field(examples=["team/bert"])
    kind: Literal["model", "run"] = "model"
    created: datetime
    created_by: str = Field(examples=["alice"])
    latest: int | None = Field(default=None, description="Number of the newest version")
    versions: int = Field(default=0, description="How many versions there are now")
    aliases: dict[str, int] = Field(default_factory=dict, examples=[{"prod": 3}])
    retention: Retention | None = None


class Version(Record):
    """An immutable version of a model."""

    model: str = Field(examples=["team/bert"])
    number: int = Field(examples=[3])
    digest: str = Field(description="BLAKE3-256 of the manifest", examples=["5f" * 32])
    created: datetime
    author: str = ""
    message: str = ""
    parent: str | None = Field(default=None, examples=["team/bert@v2"])
    metrics: dict[str, float] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    structure: dict[str, Any] = Field(
        default_factory=dict,
        description="The model's config, its number of parameters, and its dtypes",
        examples=[{"config": {"layers": 12}, "parameters": 110000000, "dtypes": {"BF16": 200}}],
    )
    aliases: tuple[str, ...] = ()
    files: int = 0
    tensors: int = 0
    logical_bytes: int = 0
    replication: int | None = None
    policy: str | None = None
    last_used: datetime | None = None
    damaged: bool = Field(default=False, description="`check` found bytes of it missing or wrong")

    @property
    def ref(self) -> str:
        return f"{self.model}@v{self.number}"


class Pushed(Version):
    """A version just published, and what that took."""

    new_bytes: int = Field(description="Raw bytes of the blocks the store did not have")
    stored_bytes: int = Field(description="Bytes of the packs written")
    packs_written: int


class Diff(Record):
    """How two versions differ. Tensors are named `file:tensor`; those of a state dict `tensor`."""

    tensors_added: tuple[str, ...] = ()
    tensors_removed: tuple[str, ...] = ()
    tensors_changed: tuple[str, ...] = ()
    tensors_same: int = 0
    files_added: tuple[str, ...] = ()
    files_removed: tuple[str, ...] = ()
    files_changed: tuple[str, ...] = ()
    files_same: int = 0
    before_bytes: int = 0
    """Raw bytes of the older one's blocks, each counted once."""
    after_bytes: int = 0
    shared_bytes: int = 0
    """Raw bytes of the blocks both have."""


class AliasMove(Record):
    """One move of an alias. `before` None: it was made; `after` None: it was removed."""

    model: str
    alias: str
    before: int | None
    after: int | None
    who: str
    at: datetime
    reason: str = ""


class Retention(Record):
    """Which versions of a model may go; one with an alias, or that others need, never does."""

    keep_last: int | None = Field(default=None, ge=1, description="Keep the newest N")
    ttl_s: int | None = Field(default=None, ge=0, description="Keep for so long after the last use")


class Cost(Record):
    """What a version costs, and what removing it would give back."""

    ref: str
    logical_bytes: int
    unique_bytes: int
    """Raw bytes of blocks no other version needs."""
    stored_bytes: int
    """Encoded bytes of all its blocks."""
    unique_stored_bytes: int
    """Encoded bytes of blocks no other version needs: what removing it frees, in time."""
    replicated_bytes: int
    """Stored bytes times the copies of their packs."""
    packs: int
    """NameNode objects: each pack is a file and a block."""
    cold_load_bytes: int
    """Stored bytes a reader that has nothing must fetch, bases of deltas included."""
    shared_with: dict[str, int] = Field(default_factory=dict)
    """Ref → raw bytes in common, the most first."""


class AuditEntry(Record):
    """Something somebody did."""

    id: int
    at: datetime
    who: str
    action: str
    subject: str
    detail: dict[str, Any] = Field(default_factory=dict)


class Event(Record):
    """Something that happened; ids only grow, so that a listener can resume."""

    id: int
    at: datetime
    kind: str = Field(examples=["version.published", "alias.moved", "version.removed"])
    subject: str = Field(examples=["team/bert@v3"])
    detail: dict[str, Any] = Field(default_factory=dict)


class Publication(Record):
    """What a writer says of the version it publishes."""

    message: str = Field(default="", max_length=10_000)
    parent: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict, max_length=1000)
    tags: dict[str, str] = Field(default_factory=dict, max_length=1000)
    metadata: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, Any] | None = Field(default=None, description="The model's config.json")
    alias: str | None = None
    expect_latest: int | None = Field(
        default=None, description="Publish only if this is the newest version; 0: none yet"
    )
    replication: int | None = Field(default=None, ge=1, le=512)
    policy: str | None = None


Model.model_rebuild()
