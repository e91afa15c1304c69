"""Follower: brings the versions an alias moves to into host memory, while the old one serves."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING

from weightyard import jitter
from weightyard.closing import Closing
from weightyard.errors import (
    BadSetting,
    Bug,
    Cancelled,
    Damaged,
    NoSuchThing,
    Refused,
    Retryable,
    StoreUnavailable,
    Unsupported,
    YardError,
)
from weightyard.format.manifest import FileEntry, Manifest, TensorEntry
from weightyard.loader.asked import Asked
from weightyard.loader.changes import Content, Holds, content_of, plan_changes
from weightyard.loader.leases import Holding
from weightyard.loader.origin import chosen
from weightyard.loader.plan import TensorPlan
from weightyard.loader.report import OnLoadEvent
from weightyard.loader.resident import Resident
from weightyard.loader.staging import WORKING_BYTES, Stage, Staged, StagedTensor, prepare
from weightyard.logs import Log
from weightyard.names import Ref
from weightyard.records import Version
from weightyard.settings import Settings
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import Deadline
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import Catalogue
from weightyard.transfer.memory import SpareMemory
from weightyard.transfer.reader import ReadReport, ReadsBlocks
from weightyard.transfer.watching import Sighting

if TYPE_CHECKING:
    import torch

_log = Log(__name__)

MAX_POLL_S = 3600.0

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
_CLOSING_S = 30.0


@dataclass(frozen=True, slots=True)
class Planned:
    """A version as it would be brought."""

    manifest: Manifest
    entries: Sequence[TensorEntry]
    """Those asked for."""
    plans: tuple[TensorPlan, ...]
    contents: dict[str, Content]
    """What every tensor holds then, by name."""


@dataclass(frozen=True, slots=True)
class Following:
    """What is followed, where it comes from, and how."""

    ref: Ref
    catalogue: Catalogue
    store: Callable[[], Store]
    """Raises StoreUnavailable or Unsupported where bytes come only through the service."""
    reader: Callable[[Version, Manifest, Deadline], ReadsBlocks]
    """Makes what reads a version's blocks, whichever way they come."""
    manifest: Callable[[Version], Manifest]
    file: Callable[[Version, Manifest, FileEntry], bytes]
    """A small file of a version."""
    asked: Asked
    max_host_bytes: int | None
    poll_s: float
    on_event: OnLoadEvent | None = None
    """Is told of what happens to reads."""
    settings: Settings | None = None
    spare: SpareMemory = field(default_factory=lambda: SpareMemory(WORKING_BYTES))
    """Memory to read with, kept from one version to the next."""

    def __post_init__(self) -> None:
        if not (isinstance(self.poll_s, Real) and 0 < self.poll_s <= MAX_POLL_S):
            raise BadSetting(f"poll_s={self.poll_s!r}: over 0 and at most {MAX_POLL_S:.0f} seconds")
        if not isinstance(self.max_host_bytes, int | None):
            raise BadSetting(f"max_host_bytes={self.max_host_bytes!r}: a whole number of bytes")

    def planned(self, version: Version, resident: Resident, now: Holds) -> Planned:
        """What a version is made of, fitted to what is served. Raises DoesNotFit."""
        manifest = self.manifest(version)
        entries = chosen(manifest, self.asked, lambda file: self.file(version, manifest, file))
        plans = resident.plan(entries, self.asked, now)
        contents = {
            name: content
            for plan in plans
            for content in (content_of(plan, manifest.blocks),)
            for name in plan.names
        }
        return Planned(manifest, entries, plans, contents)

    def stage(self, version: Version, manifest: Manifest, cancel: Cancel) -> Stage:
        """How a version is brought: straight from the store where that can be reached."""
        source: Store | ReadsBlocks
        try:
            source = self.store()
        except (StoreUnavailable, Unsupported):
            source = self.reader(version, manifest, Deadline.after(None, cancel))
        return Stage(
            source,
            self.catalogue,
            self.max_host_bytes,
            self.asked.verify,
            self.on_event,
            self.settings,
            self.spare,
        )


class Follower(Closing):
    """What `yard.follow` gives. A context manager.

    Two threads work behind it: one watches what the ref means, the other brings what changed. A
    version is `ready` when all of it is in host memory and checked; `apply` then only copies. One
    that fails leaves the old one serving, and `failure` says why. When the ref moves on, what was
    ready or on its way is dropped: `ready` never names a version the ref has left.
    """

    def __init__(
        self, following: Following, resident: Resident, applied: Version | None = None
    ) -> None:
        """`applied`: what `resident` holds now. Raises as `Following.planned`."""
        self._following = following
        self._resident = resident
        self._state = threading.Condition()
        self._stop = Cancel()
        self._version = applied
        self._is_torn = False
        """Some tensors hold another version than the rest."""
        self._wanted: Version | None = None
        self._bringing = Cancel()
        self._staged: Staged | None = None
        self._not_seen: YardError | None = None
        self._not_brought: YardError | None = None
        self._ended: YardError | None = None
        self._attempts = 0
        self._retry_at = 0.0
        self._is_taking = False
        self._holds: dict[str, Content | None] = {}
        if applied is not None:
            self._holds |= following.planned(applied, resident, {}).contents
        sightings = following.catalogue.watch(
            following.ref, poll_s=following.poll_s, stop=self._stop
        )
        self._threads = [
            threading.Thread(target=work, args=args, name=f"weightyard-{name}", daemon=True)
            for name, work, args in (
                ("watch", self._watch, (sightings,)),
                ("follow", self._work, ()),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def version(self) -> Version | None:
        """What is applied; None: nothing yet."""
        with self._state:
            return self._version

    @property
    def failure(self) -> YardError | None:
        """Why the newest version could not be had; None: nothing is wrong."""
        with self._state:
            return self._ended or self._not_seen or self._not_brought

    @property
    def report(self) -> ReadReport | None:
        """What it took to bring the version that is ready."""
        with self._state:
            return None if self._staged is None else self._staged.report

    def ready(self) -> Version | None:
        """A version that is whole in host memory and checked, and not applied yet."""
        with self._state:
            return None if self._staged is None else self._staged.version

    def wait(self, timeout_s: float) -> Version | None:
        """Wait until a version is ready; None if time runs out or the follower is closed first."""
        with self._state:
            self._state.wait_for(
                lambda: self._staged is not None or self._stop.is_cancelled, timeout_s
            )
            return None if self._staged is None else self._staged.version

    def apply(
        self, module: torch.nn.Module | Mapping[str, torch.Tensor] | None = None
    ) -> Version | None:
        """Put the version that is ready, if any, into what is served. Returns what is applied then.

        Call it between two forward passes. It copies memory and does nothing else: no I/O can make
        it fail. `module`: what is served, if `follow` was not told; from then on it is followed.
        It is compared with the version here, before any of it changes. Raises DoesNotFit, and
        Refused if it is not what is followed.
        """
        target = self._target(module)
        with self._state:
            staged = self._applicable()
            if staged is not None:
                left = self._left_of(staged)
                self._adopt(target, staged, left)
                for one in left:
                    self._begin(one)
                    one.put(target)
                    self._end(one)
                self._done(staged)
            return self._version

    def _target(self, module: torch.nn.Module | Mapping[str, torch.Tensor] | None) -> Resident:
        if self._resident.has_tensors:
            if module is not None and not self._resident.is_of(module):
                raise Refused("follow() was given another module than apply()")
            return self._resident
        if module is None:
            raise Refused("neither follow() nor apply() was given a module: use changed()")
        return Resident(module)

    def _adopt(self, target: Resident, staged: Staged, left: Sequence[StagedTensor]) -> None:
        """From now on versions are brought for `target`; `staged` may be from before.

        Raises DoesNotFit.
        """
        plans = [one.change.plan for one in left]
        chosen = target.require(staged.entries, self._following.asked, plans)
        self._resident = target
        # The version may have only one of the names that the module ties.
        for name, slot in chosen.items():
            self._holds |= dict.fromkeys(slot.names, self._holds.get(name))

    def changed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that differ in the version that is ready, for servers that load on their own.

        They are on the host and the caller's to keep. When the last was taken the version counts as
        applied. If the caller stops before, all that it may not have taken come again next time.
        """
        with self._state:
            staged = self._applicable()
            if staged is None:
                return
            self._is_taking = True
            left = self._left_of(staged)
        try:
            for one in left:
                with self._state:
                    tensor = one.whole(self._resident)
                    self._begin(one)
                for name in one.names:
                    yield name, tensor
                del tensor  # from here on only the caller has it
                with self._state:
                    self._end(one)
            with self._state:
                self._done(staged)
        finally:
            with self._state:
                self._is_taking = False
                # If not all was taken, the caller may have changed some of it: bring it anew.
                self._drop(staged)

    def close(self) -> None:
        """Stop following. What is applied stays."""
        with self._state:
            self._stop.cancel()
            self._bringing.cancel()
            self._staged = None
            self._state.notify_all()
        ends_at = time.monotonic() + _CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))

    def _applicable(self) -> Staged | None:
        """What is ready, if it fits what tensors hold now; else it is dropped and brought anew."""
        if self._staged is not None and not self._staged.fits(self._holds):
            self._staged = None
            self._state.notify_all()
        return self._staged

    def _left_of(self, staged: Staged) -> list[StagedTensor]:
        now = self._holds
        return [
            one
            for one in staged.tensors
            if any(now.get(name) != one.change.content for name in one.names)
        ]

    def _begin(self, one: StagedTensor) -> None:
        """A tensor is being written: if that breaks off, what it holds is not known."""
        self._is_torn = True
        self._holds |= dict.fromkeys(self._resident.tied(one.names))

    def _end(self, one: StagedTensor) -> None:
        self._holds |= dict.fromkeys(self._resident.tied(one.names), one.change.content)

    def _done(self, staged: Staged) -> None:
        self._version = staged.version
        self._is_torn = False
        if not self._resident.has_tensors:
            # Forget other tensors, of a version that was taken only in part.
            self._holds = {name: self._holds[name] for name in staged.contents}
        self._drop(staged)
        _log.info("follow.applied", ref=self._following.ref, version=staged.version.ref)

    def _drop(self, staged: Staged) -> None:
        if self._staged is staged:
            self._staged = None
        self._state.notify_all()

    def _watch(self, sightings: Iterator[Sighting]) -> None:
        """In a thread of its own: see what the ref means."""
        try:
            for seen in sightings:
                with self._state:
                    self._see(seen)
        except Cancelled:
            return
        except Exception as why:  # noqa: BLE001  nobody else would learn of it
            with self._state:
                self._see(Bug(f"watching {self._following.ref} ended: {why!r}"))

    def _see(self, seen: Sighting) -> None:
        ref = self._following.ref
        if isinstance(seen, YardError):
            if self._not_seen is None or self._not_seen.code != seen.code:
                _log.warning("follow.not_seen", ref=ref, reason=seen)
            self._not_seen = seen
            if isinstance(seen, NoSuchThing) and self._wanted is not None:
                self._want(None)
        else:
            if self._not_seen is not None:
                _log.info("follow.seen_again", ref=ref, version=seen.ref)
            self._not_seen = None
            if self._wanted is None or self._wanted.ref != seen.ref:
                self._want(seen)

    def _want(self, version: Version | None) -> None:
        """From now on bring this version and no other."""
        self._wanted = version
        self._staged = None
        self._not_brought = None
        self._attempts, self._retry_at = 0, 0.0
        self._bringing.cancel()
        self._state.notify_all()

    def _work(self) -> None:
        """In a thread of its own: bring what is wanted, and hold leases on what is in use."""
        holding = Holding(self._following.catalogue)
        try:
            try:
                if self._version is not None:  # else there is something to bring now
                    with suppress(MemoryError):
                        prepare(self._following.spare, self._following.max_host_bytes)
                while (todo := self._next(holding.refs)) is not None:
                    wanted, refs = todo
                    holding.hold(refs)
                    if wanted is not None:
                        self._bring(wanted)
            finally:
                self._following.spare.take_all()
                holding.hold(())
        except Exception as why:  # noqa: BLE001  nobody else would learn of it
            ended = Bug(f"bringing what {self._following.ref} means ended: {why!r}")
            _log.warning("follow.ended", ref=self._following.ref, reason=ended)
            with self._state:
                self._ended = ended

    def _next(self, held: frozenset[str]) -> tuple[Version | None, list[str]] | None:
        """Wait for something to do: a version to bring, other leases to hold; None: the end."""
        with self._state:
            while not self._stop.is_cancelled:
                wanted = self._outstanding()
                staged = None if self._staged is None else self._staged.version
                using = (wanted, self._version, staged)
                refs = [version.ref for version in using if version is not None]
                left_s = self._retry_at - time.monotonic()
                if wanted is not None and left_s <= 0:
                    self._bringing = Cancel()
                    return wanted, refs
                if held != frozenset(refs):
                    return None, refs
                self._state.wait(None if wanted is None else left_s)
            return None

    def _outstanding(self) -> Version | None:
        """The version to bring, now or later; None: there is none, or it cannot be had."""
        if self._wanted is None or self._staged is not None or math.isinf(self._retry_at):
            return None
        if self._is_taking:  # what to bring depends on how far that gets
            return None
        is_there = self._version is not None and self._version.ref == self._wanted.ref
        return None if is_there and not self._is_torn else self._wanted

    def _bring(self, wanted: Version) -> None:
        with self._state:
            cancel = self._bringing
            now = dict(self._holds)
            before = now if self._version is not None else {}  # else a part of a version
        following, resident = self._following, self._resident
        began = time.monotonic()
        try:
            planned = following.planned(wanted, resident, before)
            plans, blocks = planned.plans, planned.manifest.blocks
            changes = plan_changes(plans, planned.contents, now, resident.patched(plans))
            stage = following.stage(wanted, planned.manifest, cancel)
            tensors, report = stage.bring(wanted, changes, blocks, resident, now, cancel)
        except Cancelled:
            return
        except YardError as why:
            # What is damaged may be healed; what is refused stays so until the ref moves.
            self._fail(wanted, why, may_pass=isinstance(why, Retryable | Damaged))
        except Exception as why:  # noqa: BLE001  the old version goes on serving
            # Such as MemoryError: a host may be short of something for a moment.
            self._fail(wanted, Bug(f"bringing {wanted.ref}: {why!r}"), may_pass=True)
        else:
            staged = Staged(wanted, planned.contents, tensors, planned.entries, report)
            with self._state:
                is_wanted = self._wanted is wanted and not self._stop.is_cancelled
                if is_wanted and staged.fits(self._holds):
                    self._staged = staged
                    self._not_brought = None
                    self._attempts = 0
                    self._state.notify_all()
            _log.info(
                "follow.ready",
                ref=following.ref,
                version=wanted.ref,
                tensors=len(tensors),
                raw_bytes=report.raw_bytes,
                stored_bytes=report.stored_bytes,
                seconds=round(time.monotonic() - began, 3),
            )

    def _fail(self, wanted: Version, why: YardError, *, may_pass: bool) -> None:
        with self._state:
            if self._wanted is not wanted or self._stop.is_cancelled:
                return
            self._not_brought = why
            self._attempts += 1
            pause_s = min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2 ** min(self._attempts - 1, 10))
            self._retry_at = time.monotonic() + jitter.about(pause_s) if may_pass else math.inf
        _log.warning(
            "follow.failed",
            ref=self._following.ref,
            version=wanted.ref,
            reason=why,
            again_in_s=round(pause_s, 1) if may_pass else "never",
        )
