"""Records: what a registry tells, the same in Python, REST and `--json`.

Their field names are an interface: fields may be added, never removed. Times are UTC.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from weightyard.names import MAX_STEP

MAX_LEVELS = 64
"""How deep lists and objects in what others wrote may nest. pydantic writes out 255 levels."""
_TOLD_LEVELS = 200
"""How deep older values may nest and still be told as they are, within other objects."""


class Record(BaseModel):
    """The base of all records. Frozen; ignores fields that a newer service may send."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def nests_deeper(value: object, levels: int = MAX_LEVELS) -> bool:
    """Whether there are more than so many lists and objects within each other."""
    inside: Iterable[object]
    match value:
        case dict():
            inside = value.values()
        case list() | tuple():
            inside = value
        case _:
            return False
    return levels == 0 or any(nests_deeper(one, levels - 1) for one in inside)


def tellable(kept: dict[str, Any]) -> dict[str, Any]:
    """What was stored, maybe before its depth was bounded, in a form that can be told.

    A value that nests too deeply to be written out becomes its JSON text.
    """
    if not nests_deeper(kept, _TOLD_LEVELS):
        return kept
    return {
        key: json.dumps(value, ensure_ascii=False)
        if nests_deeper(value, _TOLD_LEVELS - 1)
        else value
        for key, value in kept.items()
    }


def is_long(number: int) -> bool:
    """Whether a whole number has over 64 bits: not every program can read it."""
    return not -(1 << 63) <= number < 1 << 64


def _has_long(value: object) -> bool:
    match value:
        case int():
            return is_long(value)
        case dict():
            return any(map(_has_long, value.values()))
        case list() | tuple():
            return any(map(_has_long, value))
    return False


def _require_tellable(value: dict[str, Any]) -> dict[str, Any]:
    if nests_deeper(value):
        raise ValueError(f"it nests deeper than {MAX_LEVELS} levels")
    if _has_long(value):
        raise ValueError("a whole number in it has over 64 bits")
    return value


Nested = Annotated[dict[str, Any], AfterValidator(_require_tellable)]
"""An object that a writer chose, limited so that it can be told to others."""


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
    generation: int | None = Field(default=None, description="Of a run: see Run")
    latest_step: int | None = Field(default=None, description="Of a run: its newest checkpoint's")


class Run(Record):
    """A model whose versions are checkpoints of one training."""

    name: str = Field(examples=["team/run42"])
    generation: int = Field(description="Grows whenever a process takes the run over", examples=[3])
    latest: int | None = Field(default=None, description="Number of the newest checkpoint")
    latest_step: int | None = Field(default=None, description="Its step", examples=[1200])
    versions: int = Field(default=0, description="How many checkpoints there are now")
    created: datetime
    created_by: str = Field(examples=["alice"])


class Version(Record):
    """An immutable version of a model."""

    model: str = Field(examples=["team/bert"])
    number: int = Field(examples=[3])
    digest: str = Field(description="BLAKE3-256 of the manifest", examples=["5f" * 32])
    created: datetime
    author: str = ""
    message: str = ""
    parent: str | None = Field(
        default=None,
        description="The version it was made from; null also if one may not read that",
        examples=["team/bert@v2"],
    )
    step: int | None = Field(default=None, description="Of a checkpoint: the run's step")
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

    @property
    def etag(self) -> str:
        """Differs whenever anything that can change does, but for when it was last used.

        Without the parent, which some readers are not told: all are to have the same one.
        """
        text = self.model_dump_json(exclude={"last_used", "parent"})
        return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()


class Pushed(Version):
    """A version just published, and what that took."""

    new_bytes: int = Field(description="Raw bytes of the blocks the store did not have")
    stored_bytes: int = Field(description="Bytes of the packs written")
    packs_written: int


class RememberedVersion(Version):
    """What a ref meant when this node last asked, as the yard does not answer or must not be asked.

    A version that is known only by its digest has number 0, and nothing but its content is known.
    """

    remembered_at: datetime

    @property
    def ref(self) -> str:
        return f"{self.model}@v{self.number}" if self.number else f"{self.model}@{self.digest}"

    @property
    def age_s(self) -> float:
        return max(0.0, (datetime.now(UTC) - self.remembered_at).total_seconds())


class PushPlanFile(Record):
    """A file that would be pushed."""

    path: str
    bytes: int
    new_bytes: int
    """Raw bytes of blocks that neither the store nor a file before this one has."""


class PushPlan(Record):
    """What a push would send."""

    digest: str
    """The digest of the version it would publish."""
    logical_bytes: int
    new_bytes: int
    blocks: int
    blocks_new: int
    files: tuple[PushPlanFile, ...] = ()


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
    number: int | None = Field(
        default=None, description="Which of the alias's moves it is; the first is 1"
    )


class KeepBest(Record):
    """Keep the versions that are best by one of their metrics, of those that have it."""

    metric: str = Field(min_length=1, max_length=200, examples=["loss"])
    mode: Literal["min", "max"] = "min"
    count: int = Field(default=1, ge=1, le=10_000)


class Retention(Record):
    """Which versions of a model may go. One that has an alias, or that others need, never does.

    A version stays if any of these rules keeps it.
    """

    keep_last: int | None = Field(default=None, ge=1, le=1_000_000, description="Keep the newest N")
    ttl_s: int | None = Field(
        default=None, ge=0, le=10**10, description="Keep for so long after the last use"
    )
    keep_every: int | None = Field(
        default=None, ge=1, le=MAX_STEP, description="Of a run: keep steps that are multiples of it"
    )
    keep_best: KeepBest | None = None


class Cost(Record):
    """What a version costs, and what removing it would give back."""

    ref: str
    logical_bytes: int
    unique_bytes: int
    """Raw bytes of blocks no other version needs."""
    stored_bytes: int
    """Encoded bytes of all its blocks, whole and as deltas."""
    unique_stored_bytes: int
    """Encoded bytes of blocks no other version needs: what removing it frees, in time."""
    replicated_bytes: int
    """Stored bytes times the copies of their packs."""
    packs: int
    """How many packs its blocks lie in."""
    namenode_objects: int = 0
    """Files and HDFS blocks of its packs, its manifest, its record and its entry of the journal."""
    cold_load_bytes: int
    """Stored bytes a reader that has nothing must fetch, bases of deltas included."""
    shared_with: dict[str, int] = Field(default_factory=dict)
    """Ref → raw bytes in common, the most first."""
    shared_with_is_complete: bool = False
    """Whether these are all that share any. If very many may, only some are looked at."""


MAX_LEASE_S = 30 * 24 * 3600.0
"""How long a reader may hold a version without renewing its lease."""

MAX_HOLDER = 200


class ReadLease(Record):
    """Says that a reader is still using a version, so that its bytes stay."""

    id: int
    ref: str = Field(examples=["team/bert@v3"])
    holder: str = Field(description="Who reads", examples=["serving-7"])
    until: datetime
    author: str | None = Field(
        default=None, description="Who took it, and may renew and end it", examples=["alice"]
    )


class GcItem(Record):
    """Something that gc removed, or would."""

    kind: Literal["version", "pack", "manifest"]
    name: str = Field(description="A ref, a pack's name or a digest")
    bytes: int
    why: str


class GcReport(Record):
    """What gc did; with `dry_run`, what it would do now."""

    dry_run: bool
    grace_s: float
    uploads_expired: int = 0
    versions_removed: int = Field(default=0, description="By retention")
    versions_purged: int = Field(default=0, description="Removed ones whose blocks were let go")
    lists_removed: int = 0
    blocks_removed: int = 0
    packs_condemned: int = Field(default=0, description="Not needed; deleted after the grace")
    condemned_bytes: int = 0
    packs_revived: int = Field(default=0, description="Condemned before, and needed again")
    packs_waiting: int = Field(default=0, description="Dry run: condemned, grace not yet over")
    waiting_bytes: int = 0
    packs_deleted: int = 0
    manifests_condemned: int = 0
    manifests_deleted: int = 0
    deleted_bytes: int = Field(default=0, description="Of packs and manifests, each counted once")
    unfinished_removed: int = Field(default=0, description="Packs whose writer gave up")
    staged_removed: int = Field(default=0, description="Files left in staging")
    packs_rewritten: int = 0
    packs_made: int = Field(default=0, description="By rewriting")
    rewritten_bytes: int = 0
    items: tuple[GcItem, ...] = Field(default=(), description="What and why, at most 1000")
    items_in_all: int = 0
    failed: tuple[str, ...] = Field(
        default=(), description="What stays, as it, or the rule for it, cannot be read"
    )


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


MAX_RANKS = 1 << 20


class Checkpoint(Record):
    """How a version of a run is published."""

    step: int = Field(ge=0, le=MAX_STEP, examples=[1200])
    generation: int = Field(
        ge=1, le=MAX_STEP, description="The run's generation when the writer took it over"
    )
    ranks: int = Field(
        ge=1, le=MAX_RANKS, description="How many write it; each says when it has finished"
    )


PolicyName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$", description="HDFS's own", examples=["COLD"])
]


class Publication(Record):
    """What a writer says of the version it publishes."""

    message: str = Field(default="", max_length=10_000)
    parent: str | None = None
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict, max_length=1000, description="Finite: JSON has no other numbers"
    )
    tags: dict[str, str] = Field(default_factory=dict, max_length=1000)
    metadata: Nested = Field(default_factory=dict)
    config: Nested | None = Field(default=None, description="The model's config.json")
    alias: str | None = None
    expect_latest: int | None = Field(
        default=None,
        ge=0,
        le=999_999_999,
        description="Publish only if this is the newest version; 0: none yet",
    )
    replication: int | None = Field(default=None, ge=1, le=512)
    policy: PolicyName | None = None
    checkpoint: Checkpoint | None = Field(
        default=None,
        description="Versions of a run have one, those of a model none",
        examples=[{"step": 1200, "generation": 3, "ranks": 8}],
    )


class Alias(Record):
    """Where an alias is now."""

    model: str = Field(examples=["team/bert"])
    alias: str = Field(examples=["prod"])
    version: int = Field(examples=[3])


class Role(enum.StrEnum):
    """What a token may do in its projects; each includes the ones before."""

    READ = "read"
    WRITE = "write"
    """Publishes and annotates versions, moves aliases; sets which checkpoints of runs stay."""
    ADMIN = "admin"
    """Removes, sets retention; with all projects: quotas, tokens, the audit log."""


EVERY_PROJECT = "*"


class Token(Record):
    """A token of the service, without its secret."""

    name: str = Field(examples=["nightly-ci"])
    role: Role
    projects: tuple[str, ...] = Field(examples=[["team"]], description="`*` stands for all")
    created: datetime
    last_used: datetime | None = Field(default=None, description="To the minute")
    revoked: datetime | None = None


class NewToken(Token):
    """A token just made: the only time its secret is shown."""

    secret: str = Field(examples=["wy_…"])


class Quota(Record):
    """How much a project may store, and how much it does. None: no limit."""

    project: str = Field(examples=["team"])
    stored_bytes: int | None = Field(default=None, ge=0, le=1 << 62)
    versions: int | None = Field(default=None, ge=0, le=1 << 30)
    used_stored_bytes: int = 0
    used_versions: int = 0


class About(Record):
    """What a client must know of a yard to move bytes by itself."""

    yard_id: str
    registry_id: str
    store: str = Field(examples=["hdfs://cluster/weightyard"])
    block_bytes: int = Field(examples=[16777216])
    weightyard: str = Field(description="The service's version", examples=["0.1.0"])


class Finding(Record):
    """Something `check` found, and what to do about it."""

    code: str = Field(
        description="Stable: missing, short, damaged, replica-damaged, unreachable, "
        "under-replicated, replication-low, block-missing, unknown-file, unknown-record, "
        "record-missing, record-damaged, record-different, records-late, record-blocked, "
        "journal-missing, journal-damaged",
        examples=["damaged"],
    )
    subject: str = Field(description="A path below the store's root, or a version's ref")
    detail: str
    advice: str
    versions: tuple[str, ...] = Field(
        default=(), description="Refs of versions that need it, at most 100"
    )


class CheckReport(Record):
    """Where catalogue and store do not agree."""

    packs: int = 0
    manifests: int = 0
    stored_bytes: int = 0
    read_bytes: int = Field(default=0, description="Read to verify, all replicas together")
    replicas_named: bool = Field(
        default=True, description="False: the way bytes were read lets no one choose replicas"
    )
    findings: tuple[Finding, ...] = ()
    more_findings: int = Field(default=0, description="How many more were found than are listed")
    damaged_versions: tuple[str, ...] = Field(default=(), description="At most 100")

    @property
    def is_clean(self) -> bool:
        return not self.findings and not self.damaged_versions


class HealReport(Record):
    """What `heal` did about a check's findings."""

    healed: tuple[str, ...] = Field(default=(), description="Subjects that are well now")
    left: tuple[Finding, ...] = Field(default=(), description="What it could do nothing about")


class RebuildReport(Record):
    """What came back from a store without its registry."""

    registry_id: str
    yard_id: str
    models: int = 0
    versions: int = 0
    packs: int = 0
    blocks: int = 0
    alias_moves: int = 0
    damaged: tuple[str, ...] = Field(
        default=(), description="Versions that came back, but whose content did not: push it again"
    )
    lost: tuple[str, ...] = Field(
        default=(), description="What is missing or cannot be read, each with the reason"
    )
    not_kept: tuple[str, ...] = Field(
        default=(), description="What only the database had: make it again where it is needed"
    )


Model.model_rebuild()
