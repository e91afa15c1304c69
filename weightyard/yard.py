"""Yard: a store and its one registry, and what people do with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from weightyard.away import AwayCatalogue, Opened
from weightyard.catalogued import Catalogued
from weightyard.closing import Closed, Closing
from weightyard.errors import BadSetting, NotOnNode, Refused, Retryable
from weightyard.format.manifest import FileEntry, Manifest
from weightyard.loader.asked import Asked
from weightyard.loader.building import (
    Supply,
    plan_snapshot,
    take_snapshot,
    write_state,
)
from weightyard.loader.byproducts import Byproducts
from weightyard.loader.interface import Loads, OnUnavailable
from weightyard.loader.offline import OfflineCatalogue, recalled
from weightyard.loader.remembered import Remembered
from weightyard.loader.snapshot import STATE_FILE, Snapshot
from weightyard.loader.snapshots import Snapshots
from weightyard.loader.uses import Uses
from weightyard.logs import Log
from weightyard.names import AliasName, Digest, ModelName, Ref
from weightyard.records import (
    Cost,
    Diff,
    Pushed,
    PushPlan,
    RememberedVersion,
    Version,
)
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.storage.local import require_no_file, require_path
from weightyard.storage.opening import folder_of
from weightyard.storage.store import Store
from weightyard.transfer.appearing import appearing
from weightyard.transfer.catalogue import Catalogue
from weightyard.transfer.diff import diff_manifests, doubtful_pairs, equal_pairs
from weightyard.transfer.gather import EVERYTHING, Choice, Gathered, Patterns, gather_files
from weightyard.transfer.options import require_function
from weightyard.transfer.plan import wanted_of
from weightyard.transfer.preview import preview
from weightyard.transfer.publish import checked_publication
from weightyard.transfer.settling import Settling
from weightyard.transfer.source import FileSource, translated
from weightyard.transfer.writer import require_delta
from weightyard.via import Incoming, Outgoing, Progress, Via, ViaStore

if TYPE_CHECKING:
    import torch

    from weightyard.loader.follower import Follower
    from weightyard.registry.registry import Registry

_log = Log(__name__)

_RESOLVING = 0.5
"""For which part of its time a load waits to resolve a ref, if this node remembers it as well."""


def needs_database(service: str) -> BadSetting:
    """The error for work that needs a yard's store and database, where there is a service."""
    return BadSetting(
        f"{service} is a service; this needs the yard's store and database: --yard STORE, or "
        "WEIGHTYARD_STORE and WEIGHTYARD_DB instead of WEIGHTYARD_URL"
    )


class Yard(Catalogued, Loads, Closing):
    """What `weightyard.open()` returns. Thread-safe; a context manager.

    Refs are `team/bert@prod`, `@v3`, `@<digest>`, `@latest` or nothing for the newest version.
    """

    def __init__(
        self,
        store: Store | Via,
        catalogue: Catalogue,
        *,
        block_bytes: int,
        settings: Settings | None = None,
        name: str = "",
    ) -> None:
        """`name`: the URL by which a user knows the yard; this node remembers things under it."""
        self._settings = settings or Settings()
        self._name = name
        self._via = store if isinstance(store, Via) else ViaStore(store, catalogue, self._settings)
        self.catalogue = catalogue
        self._block_bytes = block_bytes
        self.snapshots = Snapshots(self._settings.cache, self._settings.cache_max)
        self.byproducts = Byproducts(self.snapshots, catalogue, self._settings)
        self._remembered = Remembered(self._settings.cache, name)
        self._uses = Uses(catalogue, self._remembered)
        self._settling = Settling(lambda: catalogue.flush_outbox(self.store))
        self._in_use: dict[Path, Snapshot] = {}
        if isinstance(catalogue, AwayCatalogue):
            catalogue.on_back = self._come_back

    def _come_back(self, opened: Opened) -> None:
        """The yard was away when it was opened, and answers now."""
        self._via = opened.via
        self._block_bytes = opened.block_bytes
        self.catalogue = opened.catalogue

    @property
    def store(self) -> Store:
        """Where the packs are. Raises StoreUnavailable, Unsupported where bytes go elsewhere."""
        return self._via.store

    @property
    def block_bytes(self) -> int:
        """How long blocks are in this yard. Raises NotOnNode while the yard is away."""
        if isinstance(self.catalogue, AwayCatalogue):
            self.catalogue.require_back("block_bytes")
        return self._block_bytes

    @property
    def reads_by_locations(self) -> bool:
        """Whether the service says where packs lie, so that reading asks no NameNode."""
        return self._via.reads_by_locations

    @property
    def registry(self) -> Registry:
        """The registry behind this yard, after records of what was done here were written.

        Raises BadSetting if a service is in between; NotOnNode offline.
        """
        from weightyard.registry.registry import Registry

        self._settling.wait()
        if isinstance(self.catalogue, Closed):
            self.catalogue.refuse()
        if isinstance(self.catalogue, OfflineCatalogue):
            self.catalogue.require_asked()
            raise NotOnNode("the work is offline (WEIGHTYARD_OFFLINE); this needs the database")
        if not isinstance(self.catalogue, Registry):
            raise needs_database(self._name)
        return self.catalogue

    @property
    def is_embedded(self) -> bool:
        """Whether store and database are on this host alone: nobody reads from elsewhere."""
        return (
            not self.catalogue.is_service
            and folder_of(self.store) is not None
            and self.registry.database.is_sqlite
        )

    def push(
        self,
        source: str | Path | Mapping[str, Any] | Gathered,
        name: str,
        *,
        alias: str | None = None,
        parent: str | None = None,
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
        follow_links: bool = False,
        rehash: bool = False,
        replication: int | None = None,
        policy: str | None = None,
        codec: Literal["auto", "raw"] = "auto",
        delta: Literal["off", "also", "only"] = "off",
        expect_latest: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Pushed:
        """Publish a folder, a file or a state dict as the next version of a model.

            yard.push("./tuned", "team/bert", alias="prod", parent="team/bert@prod",
                      message="longer", metrics={"accuracy": 0.93}, tags={"data": "2026-11"})
            yard.push(module.state_dict(), "team/bert")

        A folder may lie in HDFS (`hdfs://…`): it is streamed. `include` and `exclude` are patterns
        of its paths; `follow_links` takes a link to a file for that file, as in the cache of the
        Hugging Face Hub, else links are refused. What the store has already is not sent again, so
        a push that was interrupted goes on where it stopped. Files that have not changed since they
        were pushed from this host are not even read; `rehash` reads them all the same. Nothing is
        visible before all of it is.

        `alias`: is put on the version as it is published. `parent`: the ref of the version it was
        made from. `message`, `metrics`, `tags`, `metadata` (JSON): what is said of it, and can be
        changed by `annotate`. `replication`, `policy`: how many copies HDFS keeps of its packs,
        and by which storage policy; None: as the yard does. `codec`: "raw" stores bytes as they
        are, to be read with the least CPU. `delta`: blocks that differ little from the parent's
        are stored whole ("off"), as what differs ("only"), or both ways ("also": for followers).
        `expect_latest`: only if this is the newest version's number now, 0 if there is none.
        `progress`: is told of raw bytes as they are done, from any thread.

        The result is the version, with what was new and what was stored of it. Raises Conflict,
        Refused, Retryable.
        """
        model = ModelName.parse(name)
        if codec not in ("auto", "raw"):
            raise BadSetting(f"codec={codec!r}: it is 'auto' or 'raw'")
        require_delta(delta)
        require_function("progress", progress)
        if delta != "off" and parent is None:
            raise BadSetting(f"delta={delta!r} needs a parent: the version to compare with")
        said: dict[str, Any] = {
            "message": message,
            # By its number from here on: an alias may move before the commit.
            "parent": self.resolve(parent).ref if parent is not None else None,
            "metrics": metrics or {},
            "tags": tags or {},
            "metadata": metadata or {},
            "alias": AliasName(alias).text if alias is not None else None,
            "expect_latest": expect_latest,
            "replication": replication,
            "policy": policy,
        }
        checked_publication(said)  # before the source is read, which may be large
        if isinstance(source, Gathered):
            return self._push(source, model, said, codec, delta, progress)
        with self.gather(
            source, include=include, exclude=exclude, follow_links=follow_links, rehash=rehash
        ) as gathered:
            return self._push(gathered, model, said, codec, delta, progress)

    def _push(
        self,
        gathered: Gathered,
        model: ModelName,
        said: Mapping[str, Any],
        codec: Literal["auto", "raw"],
        delta: Literal["off", "also", "only"],
        progress: Callable[[int], None] | None,
    ) -> Pushed:
        publication = checked_publication({**said, "config": gathered.config})
        pushed = self._via.push(Outgoing(gathered, model, publication, codec, delta), progress)
        self.settle()
        return pushed

    def gather(
        self,
        source: str | Path | Mapping[str, Any],
        *,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
        follow_links: bool = False,
        rehash: bool = False,
    ) -> Gathered:
        """What a push of this source would consist of; `push` also takes this as its source.

        For callers that want to know first how much it is. `include`, `exclude`, `follow_links`,
        `rehash`: as in `push`. A context manager. Raises NoSuchThing, NotAllowed, Refused.
        """
        if isinstance(source, Mapping):
            from weightyard.loader.state import state_content

            return Gathered([state_content(source, self.block_bytes)])
        if not isinstance(source, str | os.PathLike):
            raise Refused(
                f"a {type(source).__name__} cannot be pushed: give a folder, a file, or tensors by "
                "name such as module.state_dict()"
            )
        require_path(source)
        return gather_files(
            source,
            self.block_bytes,
            include,
            exclude,
            self._settings,
            follow_links=follow_links,
            rehash=rehash,
        )

    def preview(
        self, gathered: Gathered, name: str, progress: Callable[[int], None] | None = None
    ) -> PushPlan:
        """What a push of something gathered would send to a model. Sends nothing."""
        project = ModelName.parse(name).project
        require_function("progress", progress)
        said = progress or (lambda done_bytes: None)
        return preview(gathered.contents, self.catalogue, project, said)

    def pull(
        self,
        ref: str,
        dir: str | Path,
        *,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Path:
        """Put a version's files into a folder, bit for bit. Each appears when it is whole.

        The folder is made if need be, and returned. `include`, `exclude`: patterns of the version's
        paths. `progress`: is told of raw bytes as they are done, from any thread. A pushed state
        dict comes as `model.safetensors`. Files that are there with the same content stay, so a
        pull that was interrupted can be repeated. Raises NoSuchThing, Conflict (another file is
        there), Refused, Unsupported (a dtype such a file cannot have), Damaged, Retryable.
        """
        require_path(dir)
        require_function("progress", progress)
        choice = Choice(include, exclude)
        version = self._version_to_use(ref)
        manifest = self._manifest_of(version)
        target = Path(dir)
        require_no_file(target)
        plan = plan_snapshot(manifest, choice)
        with translated(target):
            target.mkdir(parents=True, exist_ok=True)
        self._via.pull(Incoming(version, manifest, plan.entries, target, NEVER), progress)
        if plan.state is not None:
            reader = self._via.reader(version, manifest, NEVER)
            with appearing(target / STATE_FILE) as partial, translated(target):
                write_state(reader, manifest, plan.state, partial, progress)
        return target

    def snapshot(
        self,
        ref: str,
        *,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
        progress: Callable[[int], None] | None = None,
        on_unavailable: OnUnavailable = None,
    ) -> Path:
        """A folder on this node with a version's real files, for any server; made if need be.

        A pushed state dict is there as `model.safetensors`. Do not write into it: other versions
        may share its files. It is not evicted while this yard is open. `include`, `exclude`:
        patterns of the version's paths. `progress`, `on_unavailable`: as in `load`.
        Raises NoSuchThing, NotOnNode, StoreFull, Damaged, Retryable.
        """
        choice = Choice(include, exclude)
        require_function("progress", progress)
        version = self._version_to_use(ref, on_unavailable)
        found = self.snapshots.find(Digest(version.digest)) if choice.is_all else None
        if found is None:
            found = self._take_snapshot(version, choice, progress)
        found.recheck()
        self._in_use[found.path] = found
        return found.path

    def _take_snapshot(
        self,
        version: Version,
        choice: Choice = EVERYTHING,
        progress: Progress | None = None,
        deadline: Deadline = NEVER,
        on_bytes: Progress = lambda done_bytes: None,
    ) -> Snapshot:
        manifest = self._manifest_of(version, deadline)

        def pull(files: Sequence[FileEntry], folder: Path, told: Progress) -> None:
            self._via.pull(Incoming(version, manifest, files, folder, deadline), told)

        return take_snapshot(
            self.snapshots,
            self.catalogue,
            version,
            manifest,
            Supply(pull, lambda: self._via.reader(version, manifest, deadline), on_bytes),
            choice,
            progress,
            deadline=deadline,
        )

    def follow(
        self,
        ref: str,
        module: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
        *,
        applied: Version | str | None = None,
        files: str | Sequence[str] | None = None,
        tensors: str | Sequence[str] | None = None,
        verify: Literal["fast", "full"] = "fast",
        max_host_bytes: int | None = None,
        poll_s: float | None = None,
    ) -> Follower:
        """Bring in the versions a ref moves to, while the old one serves (docs/following.md).

            with yard.follow("team/bert@prod", module) as follower:
                for request in requests:
                    follower.apply()  # nothing to do, almost always
                    …

        `module`: what is served, a module or tensors by name, which `apply` changes in place;
        None: the caller uses what `changed` returns. `applied`: the version that it holds now, or
        its ref, so that only what differs is read; not needed for what `load` returned. `files`,
        `tensors`, `verify`: as in `load`. A change that needs more than `max_host_bytes` of memory
        is refused. `poll_s`: seconds between looks where no service tells of moves; by default
        WEIGHTYARD_POLL_S. Raises NoSuchThing, DoesNotFit and Retryable for `applied`; `failure`
        tells of what fails later.
        """
        from weightyard.loader.follower import Follower, Following
        from weightyard.loader.load import Weights
        from weightyard.loader.resident import Resident

        if applied is None and isinstance(module, Weights):
            applied = module.version
        following = Following(
            Ref.parse(ref),
            self.catalogue,
            lambda: self.store,
            lambda version, manifest, deadline: self._via.reader(version, manifest, deadline),
            self._manifest_of,
            self._read_file,
            Asked(files, tensors, verify=verify),
            max_host_bytes,
            self._settings.poll_s if poll_s is None else poll_s,
            self.on_event,
            self._settings,
        )
        known = applied if isinstance(applied, Version | None) else self.resolve(applied)
        return Follower(following, Resident(module), known)

    def manifest(self, ref: str) -> Manifest:
        """What a version consists of: files, tensors and their blocks. Raises NoSuchThing."""
        return self._manifest_of(self.resolve(ref))

    def diff(self, a: str, b: str) -> Diff:
        """Tensors and files added, removed and changed from `a` to `b`, and the bytes both have.

        Small tensors share blocks: where such a block differs, they are read and compared. Offline
        they are not read, and all of them count as changed. Raises NoSuchThing, Damaged, Retryable.
        """
        old, new = self.resolve(a), self.resolve(b)
        was, now = self._manifest_of(old), self._manifest_of(new)
        if not (doubtful := doubtful_pairs(was, now)):
            return diff_manifests(was, now)
        try:
            readers = (self._via.reader(old, was, NEVER), self._via.reader(new, now, NEVER))
            equal = equal_pairs(doubtful, *readers)
        except NotOnNode as why:
            _log.warning("diff.by_blocks", before=old.ref, after=new.ref, reason=why)
            return diff_manifests(was, now)
        return diff_manifests(was, now, equal)

    def cost(self, ref: str) -> Cost:
        """What a version takes, shares with others, and would give back. Raises NoSuchThing."""
        if self.catalogue.is_service:
            return self.catalogue.cost(Ref.parse(ref))
        copies = self.store.stat(layout.YARD).replication  # written without asking for any number
        return self.catalogue.cost(Ref.parse(ref), copies=copies)

    def keep(
        self, ref: str, *, replication: int | None = None, policy: str | None = None
    ) -> Version:
        """Ask for copies or an HDFS storage policy for a version; what is None stays as it is.

            yard.keep("team/bert@v1", replication=2, policy="COLD")

        Raises NoSuchThing, Unsupported.
        """
        if self.catalogue.is_service:
            return self.catalogue.keep(Ref.parse(ref), copies=replication, policy=policy)
        kept = self.registry.keep_on(self.store, Ref.parse(ref), copies=replication, policy=policy)
        self.registry.settle_replication(self.store)
        self.settle()
        return kept

    def settle(self) -> None:
        """Have the records of what was just done written into the store.

        Only `close` waits for that: the database has all of it already, and what is to be written.
        """
        if not self.catalogue.is_service:  # a service does it by itself
            self._settling.soon()

    def close(self) -> None:
        """End work in the background, and give up connections, leases and snapshots.

        Waits until records of what was done are in the store, and for a snapshot that a load leaves
        if it is nearly made. Tensors that were loaded stay. From here on the yard refuses calls.
        """
        self._settling.close()
        self.byproducts.close()
        for snapshot in self._in_use.values():
            snapshot.close()
        self.catalogue.close()
        self._via.close()
        # Otherwise a late call would connect anew, and nobody would ever close that.
        closed = Closed(f"the yard {self._name}".rstrip())
        self.catalogue = cast("Catalogue", closed)
        self._via = cast("Via", closed)

    def _version_to_use(
        self, ref: str, on_unavailable: OnUnavailable = None, deadline: Deadline = NEVER
    ) -> Version:
        """A version. Its use is noted, for retention by last use, and on this node."""
        parsed = Ref.parse(ref)
        if on_unavailable not in (None, "fail", "cached"):
            raise BadSetting(f"on_unavailable={on_unavailable!r}: it is 'fail' or 'cached'")
        if isinstance(self.catalogue, AwayCatalogue):
            self.catalogue.itself()  # if the yard answers, its catalogue takes this one's place
        if on_unavailable == "fail" and isinstance(self.catalogue, OfflineCatalogue):
            self.catalogue.require_asked()
        may_recall = (on_unavailable or self._settings.on_unavailable) == "cached"
        try:
            # Only a part of the time, so that there is some left to load what this node last knew.
            resolving = deadline.part(_RESOLVING) if may_recall else deadline
            left_s = resolving.left(f"resolving {ref}")
            version = self.catalogue.resolve(parsed, within_s=left_s)
        except Retryable as why:
            if not may_recall:
                raise
            if (known := recalled(self._remembered, parsed, str(why))) is None:
                raise
            return known
        if isinstance(version, RememberedVersion):
            return version
        self._uses.note(parsed, version, deadline)
        return version

    def _manifest_of(self, version: Version, deadline: Deadline = NEVER) -> Manifest:
        """A version's manifest, from this node or else from the yard. Raises NotOnNode."""
        self._expect(version)
        digest = Digest(version.digest)
        if (known := self._remembered.manifest(digest)) is not None:
            return known
        manifest = self._via.manifest(version, deadline)
        self._remembered.keep(digest, manifest)
        return manifest

    def _read_file(self, version: Version, manifest: Manifest, file: FileEntry) -> bytes:
        """A small file of a version, from this node or else from the yard."""
        if (snapshot := self.snapshots.find(Digest(version.digest))) is not None:
            with snapshot:
                snapshot.require_sound(file.path)
                at = snapshot.path.joinpath(*file.name.parts)
                return FileSource(at).read_at(0, file.bytes)
        into = memoryview(bytearray(file.bytes))
        wanted = list(wanted_of(manifest, file.extents, into))
        self._via.reader(version, manifest, NEVER).read(wanted)
        return bytes(into)

    def _expect(self, version: Version) -> None:
        self._via.expect(version)
