"""A small yard to crash in: how it begins, what is done to it, and what must hold afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from checkpointing import RUN, save
from pushing import BERT, push, read_back
from sqlalchemy import Connection, exists, select, update

from weightyard.errors import Conflict, YardError
from weightyard.names import AliasName, Digest, ModelName, Ref, UploadId
from weightyard.records import GcReport, Publication, Version
from weightyard.registry import binding, schema
from weightyard.registry.collect import GcOptions
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.registry.schema import FileState, UploadState
from weightyard.storage import layout
from weightyard.storage.store import Store
from weightyard.transfer.publish import read_manifest
from weightyard.transfer.writer import WriteOptions

GPT = ModelName("team", "gpt")
PROD = AliasName("prod")
OPTIONS = WriteOptions(threads=1, lanes=1, pack_bytes=150_000)
"""One thread, so that calls come in one order; two blocks fill a pack."""

AT_ONCE = GcOptions(grace_s=0, unsafe_grace=True)
"""gc that waits for nothing."""

MONTH_MS = 30 * 24 * 3600 * 1000
LIMIT_S = 60.0


def noise(seed: int, length: int = 66_000) -> bytes:
    """A tensor that is a block of its own: too large to be bundled."""
    return random.Random(seed).randbytes(length)


BEGINNING = {
    "team/bert@v1": [noise(1), noise(2)],
    "team/bert@v2": [noise(2), noise(3)],
    "team/gpt@v1": [noise(4)],
    "team/gpt@v2": [noise(5), b"small"],
}
"""What is published before anything crashes."""

PUSHED = [noise(2), noise(10), noise(11), noise(12)]
"""What `push` publishes: one block the store has, three in two packs that it has not."""

KEY = "the-key"
"""Under which `push` commits."""

SAVED = [noise(20), noise(2)]
"""What `save` publishes: two ranks, of which one has a block the store has."""


def begin(database: Database, store: Store) -> None:
    """A yard with a past: versions, removed ones, dead writers, all a month ago."""
    binding.bind(database, store)
    registry = Registry(database, who="alice")
    push(registry, store, *BEGINNING["team/bert@v1"], options=OPTIONS, alias="prod")
    push(registry, store, *BEGINNING["team/bert@v2"], options=OPTIONS)
    push(registry, store, *BEGINNING["team/gpt@v1"], model=GPT, options=OPTIONS)
    push(registry, store, *BEGINNING["team/gpt@v2"], model=GPT, options=OPTIONS)
    push(registry, store, noise(6), model=GPT, options=OPTIONS)
    registry.flush_outbox(store)
    registry.remove(Ref.parse("team/gpt@v3"))
    dead = registry.open_upload(BERT, Publication())
    with store.stage(layout.staging(dead.id, "pack")) as stage:
        stage.write(b"half a pack")
        stage.close()
    age(database)


def age(database: Database) -> None:
    """Let a month pass for what uploads and gc measure."""

    def work(tx: Connection) -> None:
        for table, columns in (
            (schema.packs, ("state_ms",)),
            (schema.manifests, ("state_ms",)),
            (schema.uploads, ("lease_ms", "created_ms")),
        ):
            tx.execute(update(table).values({one: table.c[one] - MONTH_MS for one in columns}))

    database.write(work)


def collect(registry: Registry, store: Store) -> None:
    """gc that waits for nothing; a collector that was just killed may hold the lock a moment."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            do_gc(registry, store)
        except Conflict:
            assert time.monotonic() < until, "gc stays locked"
            time.sleep(0.05)
        else:
            return


def do_push(registry: Registry, store: Store) -> None:
    push(registry, store, *PUSHED, options=OPTIONS, key=KEY, alias="prod", message="pushed")
    registry.flush_outbox(store)


def do_save(registry: Registry, store: Store) -> None:
    registry.begin_generation(RUN)
    save(registry, store, *SAVED, step=1200, options=OPTIONS)
    registry.flush_outbox(store)


def do_alias(registry: Registry, store: Store) -> None:
    registry.move_alias(BERT, PROD, 2, reason="better", expect=1)
    registry.flush_outbox(store)


def do_rm(registry: Registry, store: Store) -> None:
    registry.remove(Ref.parse("team/gpt@v1"))
    registry.flush_outbox(store)


def do_gc(registry: Registry, store: Store) -> GcReport:
    options = GcOptions(grace_s=0, unsafe_grace=True, pack_bytes=1 << 20)
    return registry.gc(store, options)


OPERATIONS: dict[str, Callable[[Registry, Store], object]] = {
    "push": do_push,
    "save": do_save,
    "alias": do_alias,
    "rm": do_rm,
    "gc": do_gc,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What whoever did an operation was told: that it is done, an error, or nothing at all."""

    is_done: bool
    error: str = ""
    said: str = ""
    is_expected: bool = True
    """Whether the error is one of weightyard's own."""
    is_reached: bool = True
    """Whether it came to the call that was to fail; whoever was killed there cannot say so."""


def verify(registry: Registry, store: Store, operation: str, outcome: Outcome) -> Iterator[str]:
    """What does not hold, after a restart. Then whoever crashed goes on, and gc runs."""
    if not outcome.is_expected:
        yield f"an error no caller can expect: {outcome.error}"
    while registry.flush_outbox(store):
        pass
    yield from _verify_state(registry, store, operation, outcome, read_data=False)
    if operation == "push":  # whoever was told nothing does it again
        yield from _verify_key(registry, store)
        version = push(registry, store, *PUSHED, options=OPTIONS)
        if read_back(registry, store, version) != PUSHED:
            yield "the same push, done again, is not what was pushed"
        registry.flush_outbox(store)
    if operation == "save":  # whoever takes the run over goes on with it
        do_save(registry, store)
        if registry.run(RUN).latest_step != 1200:
            yield "the run has not what was saved after it was taken over"
    age(registry.database)
    collect(registry, store)


def verify_collected(
    registry: Registry, store: Store, operation: str, outcome: Outcome
) -> Iterator[str]:
    """What does not hold after that."""
    yield from _verify_state(registry, store, operation, outcome, read_data=True)
    yield from find_orphans(registry.database, store)


def _verify_state(
    registry: Registry, store: Store, operation: str, outcome: Outcome, *, read_data: bool
) -> Iterator[str]:
    is_done = outcome.is_done
    for finding in registry.check(store, read_data=read_data).findings:
        yield f"check: {finding}"
    names = [BERT, GPT, *(ModelName.parse(run.name) for run in registry.models(kind="run"))]
    seen = {version.ref: version for name in names for version in registry.versions(name)}
    for ref in BEGINNING:
        if operation == "rm" and ref == "team/gpt@v1":
            if is_done and ref in seen:
                yield f"{ref} was removed, and is there"
        elif ref not in seen:
            yield f"{ref} is gone"
    pushed = [ref for ref in seen if ref not in BEGINNING]
    if operation in ("push", "save") and is_done and not pushed:
        yield "a version that was acknowledged is gone"
    yield from find_unreadable(registry, store, seen)
    yield from _verify_alias(registry, operation, is_done, seen)


def _verify_key(registry: Registry, store: Store) -> Iterator[str]:
    """Whoever lost the answer of a commit asks again under its key, and gets what there is."""
    before = registry.versions(BERT)
    commits, u = schema.commits, schema.uploads
    done = select(u.c.name).join(commits, commits.c.upload_id == u.c.id)
    name = registry.database.read(lambda tx: tx.scalar(done.where(commits.c.key == KEY)))
    if [version.number for version in before] != ([2, 1] if name is None else [3, 2, 1]):
        yield f"a push under one key made {[version.ref for version in before]}"
    if name is None:
        return
    said, digest = Publication(alias="prod", message="pushed"), Digest(before[0].digest)
    upload = registry.resume_upload(UploadId(name), said)
    again = upload.commit(digest, read_manifest(store, digest), said, KEY)
    if again != before[0] or registry.versions(BERT) != before:
        yield f"the same commit under the same key gave {again}, after {before[0]}"


def find_unreadable(registry: Registry, store: Store, seen: dict[str, Version]) -> Iterator[str]:
    """Versions that are visible, but not whole, or not what was pushed."""
    for ref, version in seen.items():
        try:
            contents = read_back(registry, store, version)
        except YardError as why:
            yield f"{ref} cannot be read: {why!r}"
            continue
        if contents != BEGINNING.get(ref, PUSHED if version.step is None else SAVED):
            yield f"{ref} has other bytes than were pushed"
        if version.damaged:
            yield f"{ref} is shown as damaged"


def _verify_alias(
    registry: Registry, operation: str, is_done: bool, seen: dict[str, Version]
) -> Iterator[str]:
    now = registry.alias(BERT, PROD)
    log = registry.alias_log(BERT, PROD)
    if log[0].after != now:
        yield f"alias is on {now}, its log says {log[0].after}"
    before, after = 1, {"alias": 2, "push": 3}.get(operation, 1)
    if now != after and (is_done or now != before):
        yield f"alias is on {now}, after {operation}"
    if f"team/bert@v{now}" not in seen:
        yield f"alias is on {now}, which is not there"


def find_orphans(database: Database, store: Store) -> Iterator[str]:
    """Files and rows that nobody needs, after gc."""
    packs, manifests, pins = schema.packs, schema.manifests, schema.pins
    for file in store.list(layout.STAGING):
        yield f"left in staging: {file.path}"
    for table, folder in ((packs, layout.PACKS), (manifests, layout.MANIFESTS)):
        live = select(table.c.name).where(table.c.state == FileState.LIVE)
        rows = set(database.read(lambda tx, live=live: tx.scalars(live).all()))  # type: ignore[misc]
        files = {file.path.text.rpartition("/")[2] for file in store.list(folder)}
        if rows != files:
            yield f"{table.name}: live rows {rows - files}, files {files - rows} without the other"
    p, lb, vl, v = schema.placements, schema.list_blocks, schema.version_lists, schema.versions
    needed = exists().where(p.c.pack_id == packs.c.id, p.c.block_id == lb.c.block_id)
    unfinished = (FileState.WRITING, FileState.CONDEMNED, FileState.DELETING, FileState.DAMAGED)
    ended = (UploadState.OPEN, UploadState.EXPIRED)
    left: dict[str, Any] = {
        "unneeded packs": select(packs.c.name).where(packs.c.state == FileState.LIVE, ~needed),
        "unfinished packs": select(packs.c.name).where(packs.c.state.in_(unfinished)),
        "unfinished manifests": select(manifests.c.name).where(manifests.c.state.in_(unfinished)),
        "uploads": select(schema.uploads.c.model).where(schema.uploads.c.state.in_(ended)),
        "pins": select(pins.c.pack_id),
        "manifest pins": select(schema.manifest_pins.c.manifest_id),
        "ranks": select(schema.upload_ranks.c.rank),
        "lists": select(schema.lists.c.id).where(
            ~exists().where(vl.c.list_id == schema.lists.c.id)
        ),
        "edges": select(vl.c.version_id)
        .join(v, v.c.id == vl.c.version_id)
        .where(v.c.removed_ms.is_not(None)),
        "blocks": select(schema.blocks.c.id).where(
            ~exists().where(p.c.block_id == schema.blocks.c.id)
        ),
        "outbox": select(schema.outbox.c.path),
    }
    for what, query in left.items():
        rows = database.read(lambda tx, query=query: tx.scalars(query).all())  # type: ignore[misc]
        if rows:
            yield f"left over {what}: {list(rows)}"
