"""Rebuild: a registry made from a store alone.

Packs tell what they hold, manifests what versions consist of, records which versions there are, and
the journal what was changed since. One transaction makes all of it, or nothing. Before it ends, the
store is marked as this registry's, so that no other one can take the store for its own.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, Table, func, insert, select, update

from weightyard.errors import Conflict, Damaged, ForeignStore, InvalidName, UnknownFormat
from weightyard.names import Digest, ModelName, PackId, UploadId
from weightyard.records import RebuildReport, Version
from weightyard.registry import binding, commits, damage, migrate, schema, uploads
from weightyard.registry.binding import YardFile
from weightyard.registry.chores import small_files
from weightyard.registry.database import Database
from weightyard.registry.retell import Retold, RetoldModel, millis, retell
from weightyard.registry.rows import clock, insert_missing, record_event
from weightyard.registry.schema import Dedup, FileState, Settle, UploadState
from weightyard.storage import layout
from weightyard.storage.store import FileStat, Store
from weightyard.transfer.publish import read_manifest
from weightyard.transfer.reader import read_pack_index

NOT_KEPT = (
    "tokens",
    "quotas",
    "the audit log and events",
    "times of last use: every version counts as used now",
    "what the old registry had not yet written into the store",
)
"""What only the old database had."""

_NOBODY = ""
"""No project has this name."""

_FULL = (schema.models, schema.versions, schema.packs, schema.manifests, schema.tokens)


def rebuild(
    store: Store, database: Database, *, adopt: bool = False, who: str = ""
) -> RebuildReport:
    """Fill an empty database from a store, and make the store belong to it.

    The database gets the registry id that the store knows; with `adopt` it keeps its own, and the
    store changes over to that. Either way the store's former database is refused from now on.
    Raises Conflict if the database has anything in it, ForeignStore if there is no yard.
    """
    migrate.upgrade(database)
    yard = binding.read_yard_file(store)
    if yard is None:
        raise ForeignStore(f"{store.url} has no yard.json: there is nothing to rebuild from")

    def work(tx: Connection) -> RebuildReport:
        mine = _require_empty(tx, yard)
        owner = mine.registry_id if adopt else binding.read_owner(store, yard).registry_id
        report = _Rebuilding(tx, store, yard.dedup).run(owner, yard.yard_id)
        record_event(tx, who, "registry.rebuilt", yard.yard_id, {"adopted": adopt})
        binding.take_over(tx, store, upload, yard, owner)
        return report

    # Before the upload below is opened: that would write into a database that is not empty.
    database.read(lambda tx: _require_empty(tx, yard))
    with small_files(database, store, "rebuild") as upload:
        return database.write(work)


def _require_empty(tx: Connection, yard: YardFile) -> Row[Any]:
    """The registry's row. Raises Conflict, ForeignStore."""
    mine = tx.execute(select(schema.registry)).one()
    if mine.yard_id not in (None, yard.yard_id):
        raise ForeignStore(f"this database belongs to yard {mine.yard_id}, not {yard.yard_id}")
    for table in _FULL:
        if tx.scalar(select(func.count()).select_from(table)):
            raise Conflict(f"the database has {table.name} already: rebuild into an empty one")
    return mine


class _Rebuilding:
    """Fills one database, inside one transaction."""

    def __init__(self, tx: Connection, store: Store, dedup: Dedup) -> None:
        self._tx = tx
        self._store = store
        self._dedup = dedup
        self._at_ms = clock(tx)
        self._lost: list[str] = []
        self._damaged: list[str] = []
        self._manifests: dict[str, int] = {}

    def run(self, registry_id: str, yard_id: str) -> RebuildReport:
        packs = self._bring_back_packs()
        self._bring_back_manifests()
        self._bring_back_uploads()
        told = retell(self._store)
        for name, model in told.models.items():
            self._bring_back_model(name, model)
        self._name_parents(told)
        if self._dedup is Dedup.PROJECT:
            self._give_packs_to_projects()
        self._raise_replication()
        self._continue_journal(told)
        damage.mark_versions(self._tx)
        return RebuildReport(
            registry_id=registry_id,
            yard_id=yard_id,
            models=sum(not model.is_removed for model in told.models.values()),
            versions=sum(len(model.versions) for model in told.models.values()),
            packs=packs,
            blocks=self._tx.scalar(select(func.count()).select_from(schema.blocks)) or 0,
            alias_moves=sum(len(model.moves) for model in told.models.values()),
            damaged=tuple(self._damaged) + damage.damaged_versions(self._tx),
            lost=(*self._lost, *told.lost),
            not_kept=NOT_KEPT,
        )

    def _bring_back_packs(self) -> int:
        """A row for every pack that can be read, with what its footer says it holds."""
        found = 0
        for file in self._store.list(layout.PACKS):
            try:
                pack = PackId(file.path.text.rpartition("/")[2])
                if layout.pack(pack) != file.path:
                    raise InvalidName("not where a pack of this name lies")
                placements = read_pack_index(self._store, pack)
            except (Damaged, InvalidName, UnknownFormat) as why:
                self._lost.append(f"{file.path}: {why}")
                continue
            row = self._insert(schema.packs, **self._file(pack.hex, file))
            uploads.insert_placements(self._tx, row, placements)
            found += 1
        return found

    def _bring_back_manifests(self) -> None:
        for file in self._store.list(layout.MANIFESTS):
            try:
                digest = Digest(file.path.text.rpartition("/")[2])
                if layout.manifest(digest) != file.path:
                    raise InvalidName("not where a manifest of this name lies")
            except InvalidName as why:
                self._lost.append(f"{file.path}: {why}")
                continue
            row = self._insert(schema.manifests, **self._file(digest.hex, file))
            self._manifests[digest.hex] = row

    def _bring_back_uploads(self) -> None:
        """Give the old registry's staged files a row, so that gc removes them."""
        folders = {file.path.text.split("/")[1] for file in self._store.list(layout.STAGING)}
        for folder in sorted(folders):
            try:
                upload = UploadId(folder)
            except InvalidName as why:
                self._lost.append(f"{layout.STAGING}/{folder}: {why}")
                continue
            left = {
                "name": upload.hex,
                "project": "weightyard",
                "model": "rebuild",
                "author": "",
                "state": UploadState.EXPIRED,
                "created_ms": self._at_ms,
                "lease_ms": self._at_ms,
            }
            # There is a row already for a rebuild into this database that failed.
            insert_missing(self._tx, schema.uploads, [left])

    def _bring_back_model(self, name: ModelName, model: RetoldModel) -> None:
        row = self._insert(
            schema.models,
            project=name.project,
            name=name.name,
            kind=model.kind,
            created_ms=model.created_ms,
            created_by=model.created_by,
            last_number=model.last_number,
            retention=model.retention,
            generation=model.generation,
            removed_ms=self._at_ms if model.is_removed else None,
        )
        rows = {
            number: self._bring_back_version(row, version)
            for number, version in sorted(model.versions.items())
        }
        for move in model.moves:
            self._insert(
                schema.alias_moves,
                model_id=row,
                alias=move.alias,
                before=move.before,
                after=move.after,
                who=move.who,
                at_ms=move.at_ms,
                reason=move.reason,
            )
        for alias, number in model.aliases.items():
            if number in rows:
                there = {"model_id": row, "alias": alias, "version_id": rows[number]}
                self._tx.execute(insert(schema.aliases).values(there))
            else:
                self._lost.append(f"{name}@{alias}: it was on v{number}, which is gone")

    def _bring_back_version(self, model_row: int, version: Version) -> int:
        """Bring a version back; also one without a good manifest: another push makes it whole."""
        try:
            manifest = read_manifest(self._store, Digest(version.digest))
        except (Damaged, UnknownFormat) as why:
            self._lost.append(f"{layout.manifest(Digest(version.digest))}: {why}")
            self._damaged.append(version.ref)
            manifest = None
        row = self._insert(
            schema.versions,
            model_id=model_row,
            number=version.number,
            manifest_id=self._manifest_row(version.digest, is_damaged=manifest is None),
            author=version.author,
            message=version.message,
            metrics=version.metrics,
            tags=version.tags,
            metadata=version.metadata,
            structure=version.structure,
            files=version.files,
            tensors=version.tensors,
            logical_bytes=version.logical_bytes,
            replication=version.replication,
            policy=version.policy,
            step=version.step,
            created_ms=millis(version),
            used_ms=self._at_ms,
        )
        if manifest is not None:
            sizes = {block.id: block.raw_bytes for block in manifest.blocks}
            lists = commits.insert_lists(self._tx, manifest, uploads.block_rows(self._tx, sizes))
            edges = [{"version_id": row, "list_id": one} for one in lists]
            insert_missing(self._tx, schema.version_lists, edges)
        return row

    def _manifest_row(self, digest: str, *, is_damaged: bool) -> int:
        table = schema.manifests
        if digest not in self._manifests:
            self._manifests[digest] = self._insert(
                table, name=digest, state=FileState.DAMAGED, state_ms=self._at_ms, bytes=0
            )
        row = self._manifests[digest]
        if is_damaged:
            self._tx.execute(update(table).where(table.c.id == row).values(state=FileState.DAMAGED))
        return row

    def _name_parents(self, told: Retold) -> None:
        v, m = schema.versions, schema.models
        rows = {
            f"{project}/{name}@v{number}": row
            for row, number, project, name in self._tx.execute(
                select(v.c.id, v.c.number, m.c.project, m.c.name).join(m, m.c.id == v.c.model_id)
            )
        }
        for model in told.models.values():
            for version in model.versions.values():
                if version.parent is None:
                    continue
                if version.parent in rows:
                    self._tx.execute(
                        update(v)
                        .where(v.c.id == rows[version.ref])
                        .values(parent_id=rows[version.parent])
                    )
                else:
                    self._lost.append(f"{version.ref}: its parent {version.parent} is gone")

    def _give_packs_to_projects(self) -> None:
        """Give each pack to a project that has all of its blocks, and so learns nothing by it.

        If there is none, nobody can claim from the pack: what is in it is written anew.
        """
        p, lb, vl = schema.placements, schema.list_blocks, schema.version_lists
        v, m, packs = schema.versions, schema.models, schema.packs
        has = (
            select(m.c.project, p.c.pack_id, func.count(p.c.block_id.distinct()).label("blocks"))
            .join(v, v.c.model_id == m.c.id)
            .join(vl, vl.c.version_id == v.c.id)
            .join(lb, lb.c.list_id == vl.c.list_id)
            .join(p, p.c.block_id == lb.c.block_id)
            .group_by(m.c.project, p.c.pack_id)
            .subquery()
        )
        in_all = (
            select(p.c.pack_id, func.count(p.c.block_id.distinct()).label("blocks"))
            .group_by(p.c.pack_id)
            .subquery()
        )
        owner = (
            select(func.min(has.c.project))
            .join(in_all, in_all.c.pack_id == has.c.pack_id)
            .where(has.c.pack_id == packs.c.id, has.c.blocks == in_all.c.blocks)
            .scalar_subquery()
        )
        self._tx.execute(update(packs).values(project=func.coalesce(owner, _NOBODY)))

    def _raise_replication(self) -> None:
        """Note what versions ask of each file: most copies, newest policy. `settle` reviews it."""
        v, vl, lb, p = schema.versions, schema.version_lists, schema.list_blocks, schema.placements
        packs, manifests = schema.packs, schema.manifests
        most = select(func.max(v.c.replication)).where(v.c.manifest_id == manifests.c.id)
        self._tx.execute(update(manifests).values(replication=most.scalar_subquery()))
        using = (
            select(v.c.id)
            .join(vl, vl.c.version_id == v.c.id)
            .join(lb, lb.c.list_id == vl.c.list_id)
            .join(p, p.c.block_id == lb.c.block_id)
            .where(p.c.pack_id == packs.c.id)
        )
        copies = using.with_only_columns(func.max(v.c.replication), maintain_column_froms=True)
        # The newest version that asks for a policy decides, as it does when versions are published.
        policy = using.with_only_columns(v.c.policy, maintain_column_froms=True).where(
            v.c.policy.is_not(None)
        )
        newest = policy.order_by(v.c.created_ms.desc(), v.c.id.desc()).limit(1)
        asked = {"replication": copies.scalar_subquery(), "policy": newest.scalar_subquery()}
        self._tx.execute(update(packs).values(asked))
        for table in (packs, manifests):
            asks = update(table).where(table.c.replication.is_not(None))
            self._tx.execute(asks.values(settle=Settle.REVIEW))

    def _continue_journal(self, told: Retold) -> None:
        """Number the next entry after those in the store. `check` will look for all of these."""
        if not told.last_sequence:
            return
        entries = {told.last_sequence: self._at_ms, **told.entries}
        rows = [{"id": number, "at_ms": at_ms} for number, at_ms in sorted(entries.items())]
        insert_missing(self._tx, schema.journal, rows)

    def _file(self, name: str, file: FileStat) -> dict[str, Any]:
        return {
            "name": name,
            "state": FileState.LIVE,
            "state_ms": self._at_ms,
            "bytes": file.length,
        }

    def _insert(self, table: Table, **values: Any) -> int:
        return int(
            self._tx.execute(insert(table).values(values).returning(table.c.id)).scalar_one()
        )
