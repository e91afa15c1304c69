"""A yard under random use, held against a dict that says what must be there."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from collecting import DAY_S, KIB, gc, noise, pass_time, require_no_orphan
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)
from pushing import push, read_back, write

from weightyard.errors import NoSuchThing, Protected, StoreUnavailable, UploadExpired
from weightyard.format.block import block_id
from weightyard.format.pack import Placement
from weightyard.names import AliasName, BlockId, ModelName, Ref
from weightyard.records import Publication, ReadLease, Retention, Version
from weightyard.registry import binding, migrate
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry, RegistryUpload
from weightyard.storage.local import LocalStore
from weightyard.testing.faults import Fault, FaultyStore
from weightyard.transfer.plan import Wanted
from weightyard.transfer.publish import publish
from weightyard.transfer.reader import Reader

MODELS = [ModelName("team", "one"), ModelName("team", "two")]
GRACE_S = 7 * DAY_S

contents = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple)
models = st.sampled_from(MODELS)
crashes = st.none() | st.tuples(st.integers(0, 60), st.sampled_from(Fault))


@dataclass
class Known:
    """What a version must give back, and what holds it."""

    version: Version
    seeds: tuple[int, ...]
    parent: str | None = None
    is_removed: bool = False
    held_until: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Remembered:
    """A reader that asked where a block lies, and did so then."""

    seed: int
    at: float
    found: Mapping[BlockId, Sequence[Placement]]

    def placements(
        self, blocks: Sequence[BlockId], *, within_s: float = math.inf
    ) -> Mapping[BlockId, Sequence[Placement]]:
        return self.found


class Yard(RuleBasedStateMachine):
    """What each rule may do is what a user may do; `now` is the time that has passed."""

    new_url: Callable[[Path], str]

    uploads = Bundle("uploads")
    leases = Bundle("leases")
    readers = Bundle("readers")

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weightyard-states-"))
        self.database = Database(type(self).new_url(self.folder))
        self.store = LocalStore(self.folder / "store")
        binding.bind(self.database, self.store)
        self.registry = Registry(self.database)
        self.known: dict[str, Known] = {}
        self.aliases: dict[tuple[ModelName, str], str] = {}
        self.rules: dict[ModelName, int] = {}
        self.now = 0.0
        self.no_grace_at = -1.0

    @rule(model=models, seeds=contents, alias=st.none() | st.sampled_from(["prod", "test"]))
    def push(self, model: ModelName, seeds: tuple[int, ...], alias: str | None) -> None:
        version = push(self.registry, self.store, *map(noise, seeds), model=model, alias=alias)
        self.known[version.ref] = Known(version, seeds)
        if alias is not None:
            self.aliases[model, alias] = version.ref

    @rule(data=st.data(), seeds=contents)
    def push_child(self, data: st.DataObject, seeds: tuple[int, ...]) -> None:
        if parent := self._choose(data):
            version = push(
                self.registry, self.store, *map(noise, seeds), model=MODELS[0], parent=parent
            )
            self.known[version.ref] = Known(version, seeds, parent)

    @rule(target=uploads, model=models, seed=st.integers(0, 6))
    def begin(self, model: ModelName, seed: int) -> tuple[RegistryUpload, Any, int, float]:
        upload = self.registry.open_upload(model, Publication())
        return upload, write(upload, self.store, noise(seed)), seed, self.now

    @rule(begun=consumes(uploads))
    def finish(self, begun: tuple[RegistryUpload, Any, int, float]) -> None:
        upload, manifest, seed, at = begun
        try:
            version = publish(self.store, upload, manifest, Publication(), upload.id.hex)
        except UploadExpired:
            assert self.now > at, "its lease had not ended"
        else:
            assert self.now == at
            self.known[version.ref] = Known(version, (seed,))

    @rule(data=st.data(), alias=st.sampled_from(["prod", "test"]))
    def move_alias(self, data: st.DataObject, alias: str) -> None:
        if ref := self._choose(data):
            version = self.known[ref].version
            model = ModelName.parse(version.model)
            self.registry.move_alias(model, AliasName(alias), version.number)
            self.aliases[model, alias] = ref

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if ref := self._choose(data):
            is_protected = ref in self.aliases.values() or self._has_child(ref)
            try:
                self.registry.remove(Ref.parse(ref))
            except Protected:
                assert is_protected
            else:
                assert not is_protected
                self.known[ref].is_removed = True

    @rule(model=models, keep_last=st.integers(1, 3))
    def set_retention(self, model: ModelName, keep_last: int) -> None:
        self.registry.create_model(model)
        self.registry.set_retention(model, Retention(keep_last=keep_last))
        self.rules[model] = keep_last

    @rule(target=leases, data=st.data())
    def lease(self, data: st.DataObject) -> Any:
        if ref := self._choose(data):
            self.known[ref].held_until.append(self.now + 1.5 * DAY_S)
            return self.registry.take_lease(Ref.parse(ref), "test", 1.5 * DAY_S)
        return multiple()

    @rule(lease=consumes(leases))
    def release(self, lease: ReadLease) -> None:
        self.registry.release_lease(lease.id)
        self.known[lease.ref].held_until.clear()  # of several leases, too: rather too few held

    @rule(target=readers, data=st.data())
    def remember(self, data: st.DataObject) -> Any:
        if ref := self._choose(data):
            seed = self.known[ref].seeds[0]
            found = self.registry.placements([block_id(noise(seed))])
            return Remembered(seed, self.now, found)
        return multiple()

    @rule(reader=readers)
    def read_from_memory(self, reader: Remembered) -> None:
        if reader.at > self.no_grace_at and self.now - reader.at < GRACE_S:
            into = bytearray(66 * KIB)
            wanted = Wanted(block_id(noise(reader.seed)), 0, memoryview(into))
            Reader(self.store, reader, threads=1).read([wanted])
            assert bytes(into) == noise(reader.seed)

    @rule(hours=st.sampled_from([1, 24, 80, 200]))
    def wait(self, hours: int) -> None:
        pass_time(self.database, hours * 3600)
        self.now += hours * 3600

    @rule(no_grace=st.booleans(), crash=crashes)
    def collect(self, no_grace: bool, crash: tuple[int, Fault] | None) -> None:
        faults = {} if crash is None else dict([crash])
        grace_s = 0 if no_grace else GRACE_S
        if no_grace:
            self.no_grace_at = self.now
        try:
            gc(self.registry, FaultyStore(self.store, faults), grace_s=grace_s)
        except StoreUnavailable:
            assert crash is not None
        self._follow_retention()
        self.reload_all()

    @rule()
    def reload_all(self) -> None:
        for ref, known in self.known.items():
            if not known.is_removed:
                assert self.registry.resolve(Ref.parse(ref)).digest == known.version.digest
            if not known.is_removed or any(until > self.now for until in known.held_until):
                assert read_back(self.registry, self.store, known.version) == [
                    *map(noise, known.seeds)
                ]

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        self.wait(hours=30 * 24)
        for _ in range(2):
            gc(self.registry, self.store)
        self._follow_retention()
        self.reload_all()
        require_no_orphan(self.database, self.store)
        assert self.registry.check(self.store, read_data=True).is_clean
        self.database.close()
        shutil.rmtree(self.folder)

    def _choose(self, data: st.DataObject) -> str | None:
        refs = sorted(ref for ref, known in self.known.items() if not known.is_removed)
        return data.draw(st.sampled_from(refs)) if refs else None

    def _has_child(self, ref: str) -> bool:
        return any(k.parent == ref and not k.is_removed for k in self.known.values())

    def _follow_retention(self) -> None:
        """What rules took away must have been theirs to take."""
        gone = []
        for ref, known in self.known.items():
            if not known.is_removed:
                try:
                    self.registry.resolve(Ref.parse(ref))
                except NoSuchThing:
                    gone.append(ref)
        for ref in gone:
            model = ModelName.parse(self.known[ref].version.model)
            newer = [
                other
                for other, known in self.known.items()
                if known.version.model == str(model)
                and known.version.number > self.known[ref].version.number
                and not known.is_removed
            ]
            assert len(newer) >= self.rules[model]
            assert ref not in self.aliases.values()
            assert not any(until > self.now for until in self.known[ref].held_until)
        for ref in gone:
            self.known[ref].is_removed = True
        assert not any(self._has_child(ref) for ref in gone)


def run(new_url: Callable[[Path], str], examples: int, steps: int) -> None:
    machine = type("YardUnderTest", (Yard,), {"new_url": staticmethod(new_url)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def sqlite(tmp_path: Path) -> Callable[[Path], str]:
    template = tmp_path / "template.db"
    database = Database(f"sqlite:///{template}")
    migrate.upgrade(database)
    database.close()

    def new_url(folder: Path) -> str:
        shutil.copy(template, folder / "registry.db")
        return f"sqlite:///{folder}/registry.db"

    return new_url


@pytest.fixture
def postgresql(postgres: Callable[[], str]) -> Callable[[Path], str]:
    return lambda folder: postgres()


def test_a_yard_keeps_its_promises_whatever_its_users_do(
    sqlite: Callable[[Path], str],
) -> None:
    run(sqlite, examples=12, steps=25)


def test_a_yard_on_postgresql_keeps_its_promises(postgresql: Callable[[Path], str]) -> None:
    run(postgresql, examples=4, steps=25)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", ["sqlite", "postgresql"])
def test_a_yard_keeps_its_promises_for_long(where: str, request: pytest.FixtureRequest) -> None:
    run(request.getfixturevalue(where), examples=150, steps=50)
