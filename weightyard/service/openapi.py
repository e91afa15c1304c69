"""OpenAPI: completes the service's schema with examples, problems of each operation, headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import BaseModel

from weightyard import errors, wire
from weightyard.errors import YardError
from weightyard.records import (
    About,
    Alias,
    AliasMove,
    AuditEntry,
    Cost,
    Model,
    NewToken,
    Publication,
    Quota,
    ReadLease,
    Retention,
    Role,
    Run,
    Token,
    Version,
)
from weightyard.service import operate, problems

_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_NEVER_CONFLICTS = re.compile(r"/(placements|used|leases|heartbeat)\b")
_STORES = re.compile(r"/uploads/{upload}/(files|packs|manifests|commit)\b")
_METHODS = frozenset(("get", "head", "put", "post", "patch", "delete"))

ETAG = {"ETag": {"description": "The ETag of the answer", "schema": {"type": "string"}}}
LOCATION = {"Location": {"description": "Where the version is", "schema": {"type": "string"}}}
CONTENT_RANGE = {
    "Content-Range": {
        "description": "Which bytes, and of how many",
        "schema": {"type": "string"},
        "example": "bytes 0-99/4096",
    }
}
AS_THE_CLIENT_HAS_IT: dict[str, Any] = {"description": "As the client has it", "headers": ETAG}
TAGGED: dict[int | str, dict[str, Any]] = {200: {"headers": ETAG}}
"""The responses of a route whose answers have an ETag, …"""
CACHED: dict[int | str, dict[str, Any]] = {**TAGGED, 304: AS_THE_CLIENT_HAS_IT}
"""… and of one that also does not send again what the client has."""


def complete(schema: dict[str, Any]) -> None:
    """Add to a schema what the framework cannot know."""
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {})["Problem"] = problems.Problem.model_json_schema()
    components["responses"] = {str(status): _declared(status) for status in _KINDS}
    for method, path, operation in operations(schema):
        _add_examples(operation)
        for status in _failing(method, path, operation):
            shared = {"$ref": f"#/components/responses/{status}"}
            operation["responses"].setdefault(str(status), shared)
        operation["responses"] = dict(sorted(operation["responses"].items()))


def operations(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every operation of a schema, with its method and path."""
    for path, found in schema["paths"].items():
        for method, operation in found.items():
            if method in _METHODS:
                yield method, path, operation


_KINDS: Mapping[int, type[YardError]] = {
    400: errors.InvalidName,
    401: errors.Unauthenticated,
    403: errors.NotAllowed,
    404: errors.NoSuchThing,
    409: errors.Conflict,
    410: errors.UploadExpired,
    412: errors.AliasMoved,
    413: errors.TooLarge,
    416: errors.Refused,
    422: errors.Refused,
    503: errors.RegistryUnavailable,
    507: errors.StoreFull,
}
"""An error for each status, for the example."""

_HEADERS: Mapping[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}, "example": "Bearer"}},
    416: {"Content-Range": {"schema": {"type": "string"}, "example": "bytes */4096"}},
    503: {
        "Retry-After": {
            "description": "Seconds",
            "schema": {"type": "string"},
            "example": str(problems.RETRY_AFTER_S),
        }
    },
}


def _declared(status: int) -> dict[str, Any]:
    kind = _KINDS[status]
    title = problems.title_of(kind)
    example = {
        "type": f"urn:weightyard:problem:{kind.code}",
        "title": title,
        "status": status,
        "detail": title,
        "code": kind.code,
        "request_id": "5f0c6a1d2b3e4f50",
    }
    if status == 412:
        example |= {"detail": "team/bert@prod is on v2, not on v1", "current": 2}
    return {
        "description": title,
        **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
        "content": {problems.MEDIA_TYPE: {"schema": _PROBLEM, "example": example}},
    }


def _failing(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[int]:
    """The statuses of problems an operation may answer with; rare ones are under `default`."""
    if operation.get("security") == []:
        return
    taken = {one["name"].lower() for one in operation.get("parameters", ())}
    yield from (401, 403, 503)
    if taken or "requestBody" in operation:
        yield from (400, 422)
    if "{" in path:
        yield 404
    if "requestBody" in operation:
        yield 413
    if method not in ("get", "head") and not _NEVER_CONFLICTS.search(path):
        yield 409
    if "{upload}" in path:
        yield 410
    if "if-match" in taken:
        yield 412
    if "range" in taken:
        yield 416
    if _STORES.search(path) and method in ("put", "post"):
        yield 507


def _add_examples(operation: dict[str, Any]) -> None:
    bodies = [operation["requestBody"]] if "requestBody" in operation else []
    for one in (*bodies, *operation["responses"].values()):
        content = one.get("content", {}).get("application/json")
        if content is None or "example" in content or "examples" in content:
            continue
        if (example := _example(content["schema"])) is not None:
            content["example"] = example


def _example(schema: Mapping[str, Any]) -> Any:
    """An example of a value that a schema describes; None if there is none."""
    for option in schema.get("anyOf", ()):
        if (found := _example(option)) is not None:
            return found
    name = schema.get("$ref", "").rpartition("/")[2]
    if name.startswith("Page_"):
        kind = name.removeprefix("Page_").removesuffix("_")
        items = _EXAMPLES.get(kind, "team/run42@v7")
        return {"items": [items], "next": None}
    return _EXAMPLES.get(name)


_THEN = datetime(2026, 11, 17, 12, 0, tzinfo=UTC)
_BLOCK, _PACK = "5f" * 32, "0a" * 16
_ENTRY = "Xw=="
_TOKEN = {"name": "nightly-ci", "role": Role.WRITE, "projects": ("team",), "created": _THEN}

_RECORDS: tuple[BaseModel, ...] = (
    Model(
        name="team/bert",
        created=_THEN,
        created_by="alice",
        latest=3,
        versions=3,
        aliases={"prod": 2},
        retention=Retention(keep_last=10),
    ),
    Run(
        name="team/run42",
        generation=3,
        latest=7,
        latest_step=1200,
        versions=7,
        created=_THEN,
        created_by="alice",
    ),
    Version(
        model="team/bert",
        number=3,
        digest=_BLOCK,
        created=_THEN,
        author="alice",
        message="more data",
        parent="team/bert@v2",
        metrics={"accuracy": 0.93},
        tags={"task": "qa"},
        metadata={"dataset": {"name": "squad", "rows": 87599}},
        structure={"config": {"layers": 12}, "parameters": 110000000, "dtypes": {"BF16": 200}},
        aliases=("prod",),
        files=2,
        tensors=200,
        logical_bytes=220001024,
    ),
    Cost(
        ref="team/bert@v3",
        logical_bytes=220001024,
        unique_bytes=2362368,
        stored_bytes=147400704,
        unique_stored_bytes=1582080,
        replicated_bytes=442202112,
        packs=2,
        namenode_objects=10,
        cold_load_bytes=147400704,
        shared_with={"team/bert@v2": 217638656},
        shared_with_is_complete=True,
    ),
    Alias(model="team/bert", alias="prod", version=3),
    AliasMove(
        model="team/bert",
        alias="prod",
        before=2,
        after=3,
        who="alice",
        at=_THEN,
        reason="better on the eval set",
        number=2,
    ),
    ReadLease(
        id=7,
        ref="team/bert@v3",
        holder="serving-7",
        until=_THEN + timedelta(hours=1),
        author="alice",
    ),
    AuditEntry(
        id=42,
        at=_THEN,
        who="alice",
        action="alias.move",
        subject="team/bert@prod",
        detail={"before": 2, "after": 3},
    ),
    Token(**_TOKEN),
    NewToken(**_TOKEN, secret="wy_…"),
    Quota(
        project="team",
        stored_bytes=1 << 40,
        versions=1000,
        used_stored_bytes=147400704,
        used_versions=3,
    ),
    About(
        yard_id=_PACK,
        registry_id="1b" * 16,
        store="hdfs://cluster/weightyard",
        block_bytes=16777216,
        weightyard="0.1.0",
    ),
    operate.Health(),
    operate.Readiness(status="ok", database=True, store=True),
    wire.OpenedUpload(id=_PACK, model="team/bert", lease_s=900, block_bytes=16777216),
    wire.Placed(packs=[wire.PackIndex(pack=_PACK, entries=[_ENTRY])]),
    wire.PackReplicas(
        pack=_PACK,
        bytes=134217728,
        replicas=[
            wire.ReplicaRecord(datanode="10.0.0.1:9866", host="dn1", rack="/a", state="normal")
        ],
    ),
    wire.ReceivedFile(
        path="model.safetensors",
        bytes=220001024,
        new_bytes=2362368,
        stored_bytes=1582080,
        packs_written=1,
    ),
)

_BODIES: tuple[BaseModel, ...] = (
    Publication(message="more data", metrics={"loss": 0.31}, alias="prod"),
    Retention(keep_last=10, ttl_s=2592000),
    wire.ModelMade(name="team/bert"),
    wire.Annotation(tags={"task": "qa"}, metrics={"accuracy": 0.93}),
    wire.Keeping(replication=5),
    wire.AliasTarget(version=3, reason="better on the eval set"),
    wire.Reason(reason="latency"),
    wire.GenerationWanted(expect=2),
    wire.LeaseWanted(holder="serving-7", seconds=3600),
    wire.LeaseRenewed(seconds=3600),
    wire.TokenWanted(name="nightly-ci", role=Role.WRITE, projects=["team"]),
    wire.Limits(stored_bytes=1 << 40, versions=1000),
    wire.BlockList(blocks=[_BLOCK]),
    wire.PackSteps(begin=[_PACK]),
    wire.ManifestBegun(digest=_BLOCK, stored_bytes=4096),
    wire.Commit(digest=_BLOCK),
)

_EXAMPLES: Mapping[str, Any] = {
    type(one).__name__: one.model_dump(mode="json") for one in _RECORDS
} | {type(one).__name__: one.model_dump(mode="json", exclude_unset=True) for one in _BODIES}
