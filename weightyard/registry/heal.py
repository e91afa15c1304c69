"""Heal: what can be done about a check's findings without the content being pushed again.

A pack is never repaired in place: its good blocks go into a new pack, then the old one is marked
as damaged, so that nobody reads it any more, and gc removes it. A manifest's name is its digest, so
a good one takes the same name; the bad file is moved aside before, never deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, count
from typing import Any

from sqlalchemy import Connection, Row, Table, exists, select

from weightyard.errors import AlreadyThere, Damaged, FileMissing, NoSuchThing, Refused, Retryable
from weightyard.format import manifest as manifests
from weightyard.format.pack import MAX_PACK_BYTES, PACK_HEADER, PackBuilder, Placement
from weightyard.logs import Log
from weightyard.names import BlockId, Digest, PackId, Ref, UploadId
from weightyard.records import CheckReport, Finding, HealReport
from weightyard.registry import damage, freshness, history, outbox, schema, uploads, versions
from weightyard.registry.check import placements_in
from weightyard.registry.chores import open_chore, small_files
from weightyard.registry.database import Database
from weightyard.registry.examine import read_good_block, read_good_manifest
from weightyard.registry.schema import FileState
from weightyard.storage import layout
from weightyard.storage.store import FileOptions, StagedFile, Store, StorePath
from weightyard.transfer.durable import least_replicas, require_replicas
from weightyard.transfer.once import read_whole, write_once

_log = Log(__name__)

_BAD = ("damaged", "short", "replica-damaged", "missing")


def heal(database: Database, store: Store, report: CheckReport, *, who: str = "") -> HealReport:
    """Do what can be done about each finding. May be repeated.

    Raises ForeignStore for a database older than its store, and what the store raises.
    """
    freshness.require_newest_of_all(database, store)
    healing = _Healing(database, store, who)
    healed: list[str] = []
    left: list[Finding] = []
    healing.clear_the_way()
    while outbox.flush(database, store):
        pass
    blocked = {path.text for path, _ in outbox.set_aside(database, store)}
    for finding in report.findings:
        if finding.subject in healed:
            continue
        if finding.code == "record-blocked":
            is_well = finding.subject not in blocked
        else:
            is_well = healing.heal(finding)
        if is_well:
            healed.append(finding.subject)
        else:
            left.append(finding)
    database.write(damage.mark_versions)
    outbox.flush(database, store)
    return HealReport(
        healed=tuple(healed),
        left=tuple(finding for finding in left if finding.subject not in healed),
    )


class _Healing:
    def __init__(self, database: Database, store: Store, who: str) -> None:
        self._database = database
        self._store = store
        self._who = who

    def clear_the_way(self) -> None:
        """Move unreadable files away whose names records or journal entries need."""
        for path, obstacle in outbox.set_aside(self._database, self._store):
            if obstacle is outbox.Obstacle.UNREADABLE:
                with suppress(FileMissing):
                    self._set_aside(path)
        self._database.write(outbox.try_again)

    def heal(self, finding: Finding) -> bool:
        """Do what can be done about a finding. Returns whether all is well now."""
        folder = finding.subject.partition("/")[0]
        name = finding.subject.rpartition("/")[2]
        match folder, finding.code:
            case _, "records-late":
                return True  # `heal` has written all that waited
            case "packs", "replication-low":
                return self._raise_replication(schema.packs, name, layout.pack(PackId(name)))
            case "manifests", "replication-low":
                return self._raise_replication(
                    schema.manifests, name, layout.manifest(Digest(name))
                )
            case "packs", code if code in _BAD:
                return self._rewrite(PackId(name))
            case "manifests", code if code in _BAD:
                return self._restore(Digest(name))
            case "models", "record-missing" | "record-damaged":
                return self._record_again(StorePath(finding.subject))
        return False

    def _raise_replication(self, table: Table, name: str, path: StorePath) -> bool:
        row = self._row(table, name)
        if row is not None:
            self._store.adjust(path, FileOptions(replication=row.replication))
        return row is not None

    def _rewrite(self, pack: PackId) -> bool:
        """Put those blocks of a pack that lie nowhere else, and are good, into a new one."""
        row = self._row(schema.packs, pack.hex)
        if row is None:
            return True  # nobody needed it any more
        alone = self._database.read(lambda tx: _only_there(tx, row.id, pack))
        good = _GoodBlocks(self._store, alone)
        try:
            if (first := next(good, None)) is not None:
                self._write_pack(row, chain([first], good))
        except Retryable as why:
            _log.warning("heal.failed", pack=pack, reason=why)
            return False
        if not good.lost:
            mark = partial(
                damage.mark, table=schema.packs, row_id=row.id, who=self._who, why="rewritten"
            )
            self._database.write(mark)
        return not good.lost

    def _write_pack(self, old: Row[Any], blocks: Iterable[tuple[Placement, memoryview]]) -> None:
        upload = UploadId.new()
        self._database.write(partial(open_chore, upload=upload, chore="heal"))
        builder = PackBuilder(PackId.new(), MAX_PACK_BYTES)
        path = layout.pack(builder.pack)

        def begin(tx: Connection) -> None:
            opened = uploads.fence(tx, upload)
            uploads.insert_pack(tx, opened, builder.pack, old.replication, old.policy, old.project)

        self._database.write(begin)
        options = FileOptions(old.replication, old.bytes, old.policy)
        with self._store.stage(layout.staging(upload, builder.pack.hex), options) as stage:
            stage.write(PACK_HEADER)
            for placement, stored in blocks:
                builder.add(placement.encoding)
                stage.write(stored)
            stage.write(builder.finish())
            self._store.publish(stage.close(), path)
        copies = least_replicas(self._store, old.replication)
        require_replicas(self._store, path, copies, timeout_s=60)
        add = partial(
            uploads.add_pack,
            upload=upload,
            pack=builder.pack,
            pack_bytes=builder.pack_bytes,
            placements=builder.placements,
        )
        self._database.write(add)
        self._database.write(partial(uploads.abandon, upload=upload))

    def _restore(self, digest: Digest) -> bool:
        """Write a manifest anew from a good replica, or from one that was set aside."""
        row = self._row(schema.manifests, digest.hex)
        if row is None:
            return True
        path = layout.manifest(digest)
        options = FileOptions()
        try:
            options = FileOptions(self._store.stat(path).replication)
            stored = read_good_manifest(self._store, digest) or self._aside(digest)
            self._set_aside(path)
        except FileMissing:
            stored = self._aside(digest)
        if stored is None:
            return False
        with small_files(self._database, self._store, "heal") as upload:
            write_once(self._store, upload, path, stored, options)
        self._database.write(
            partial(damage.unmark, table=schema.manifests, row_id=row.id, who=self._who)
        )
        return True

    def _set_aside(self, path: StorePath) -> None:
        """Move a file out of the way. Not deleted: it may be all that is left of something."""
        length = self._store.stat(path).length
        for attempt in count():
            with suppress(AlreadyThere):
                self._store.publish(StagedFile(path, length), layout.set_aside(path, attempt))
                return

    def _aside(self, digest: Digest) -> bytes | None:
        """A good copy of a manifest among the files that were set aside.

        There is one if an earlier `heal` set the file aside and did not get to writing it anew.
        """
        for file in self._store.list(layout.DAMAGED):
            if file.path.text.rpartition("/")[2].startswith(digest.hex):
                with suppress(Damaged, Retryable):
                    stored = read_whole(self._store, file.path, manifests.MAX_STORED_BYTES)
                    manifests.decode(stored, digest)
                    return stored
        return None

    def _record_again(self, path: StorePath) -> bool:
        """Have a record written as the version is now; an unreadable one is moved aside."""
        version = history.record_of(path)
        if version is None:
            return False
        try:
            history.read_version(self._store, path)
            return True  # somebody has put it back since the check
        except FileMissing:
            pass
        except Retryable as why:
            _log.warning("heal.failed", path=path, reason=why)
            return False
        except (Damaged, Refused):
            self._set_aside(path)
        ref = Ref(*version)

        def work(tx: Connection) -> None:
            with suppress(NoSuchThing):  # removed meanwhile
                outbox.put_record(tx, versions.resolve(tx, ref))

        self._database.write(work)
        return True

    def _row(self, table: Table, name: str) -> Row[Any] | None:
        """The row of a file that is in use."""
        in_use = (*damage.READABLE, FileState.DAMAGED)
        wanted = select(table).where(table.c.name == name, table.c.state.in_(in_use))
        return self._database.read(lambda tx: tx.execute(wanted).one_or_none())


class _GoodBlocks(Iterator[tuple[Placement, memoryview]]):
    """Placements with their stored bytes, from whichever replica has them right."""

    def __init__(self, store: Store, placements: Iterable[Placement]) -> None:
        self._store = store
        self._placements = iter(placements)
        self.lost: list[BlockId] = []

    def __next__(self) -> tuple[Placement, memoryview]:
        for placement in self._placements:
            try:
                return placement, read_good_block(self._store, placement)
            except Damaged:
                self.lost.append(placement.encoding.block)
        raise StopIteration


def _only_there(tx: Connection, pack_row: int, pack: PackId) -> list[Placement]:
    """The placements of those blocks of a pack that lie in no other readable pack as a whole."""
    p, packs = schema.placements.alias("elsewhere"), schema.packs
    b = schema.blocks
    elsewhere = exists().where(
        p.c.block_id == b.c.id,
        p.c.pack_id != pack_row,
        p.c.base_id.is_(None),
        packs.c.id == p.c.pack_id,
        packs.c.state.in_(damage.READABLE),
    )
    inside = select(schema.placements.c.block_id).where(schema.placements.c.pack_id == pack_row)
    alone = set(tx.scalars(select(b.c.hash).where(b.c.id.in_(inside), ~elsewhere)))
    return [
        placement
        for placement in placements_in(tx, pack_row, pack)
        if placement.encoding.block.raw in alone
    ]
