"""gc whose calls on the store fail is finished by the next one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from collecting import begin, gc, noise, pass_time, require_no_orphan
from pushing import push, read_back

from weightyard.errors import StoreUnavailable
from weightyard.names import PackId, Ref
from weightyard.records import Version
from weightyard.registry import binding, migrate
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.testing.faults import Fault, FaultyStore


def removed_and_abandoned(registry: Registry, store: LocalStore, database: Database) -> Version:
    """A yard with work of every kind for gc; returns the version that must survive."""
    push(registry, store, noise(1), noise(2), noise(3))
    kept = push(registry, store, noise(1), alias="prod")
    push(registry, store, noise(4))
    for number in (1, 3):
        registry.remove(Ref.parse(f"team/bert@v{number}"))
    upload = begin(registry, store, noise(5))
    pack = PackId.new()
    upload.begin_pack(pack)
    with store.stage(layout.staging(upload.id, pack.hex)) as stage:
        stage.write(b"late")
        store.publish(stage.close(), layout.pack(pack))
    store.stage(layout.staging(upload.id, "left")).close()
    pass_time(database, 3600)
    return kept


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the database and the store of such a yard."""
    folder = tmp_path_factory.mktemp("prepared")
    database = Database(f"sqlite:///{folder}/registry.db")
    migrate.upgrade(database)
    store = LocalStore(folder / "store")
    binding.bind(database, store)
    removed_and_abandoned(Registry(database), store, database)
    database.close()
    return folder


def test_gc_that_fails_at_some_call_is_finished_by_the_next(prepared: Path, tmp_path: Path) -> None:
    for index in range(2, _calls(prepared, tmp_path), 5):
        _fail_gc_at(prepared, tmp_path, index, Fault.AFTER if index % 2 else Fault.BEFORE)


@pytest.mark.long
@pytest.mark.parametrize("fault", list(Fault))
def test_gc_that_fails_at_any_call_is_finished_by_the_next(
    prepared: Path, tmp_path: Path, fault: Fault
) -> None:
    for index in range(_calls(prepared, tmp_path)):
        _fail_gc_at(prepared, tmp_path, index, fault)


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("call", [17, 40])
def test_gc_that_fails_on_postgresql_is_finished_by_the_next(
    postgres: Callable[[], str], tmp_path: Path, fault: Fault, call: int
) -> None:
    database = Database(postgres())
    store = LocalStore(tmp_path / "store")
    binding.bind(database, store)
    removed_and_abandoned(Registry(database), store, database)
    _fail_and_go_on(database, store, call, fault)
    database.close()


def _calls(prepared: Path, folder: Path) -> int:
    """How many calls a run makes that does not fail."""
    yard = folder / "clean"
    shutil.copytree(prepared, yard)
    database = Database(f"sqlite:///{yard}/registry.db")
    store = FaultyStore(LocalStore(yard / "store"))
    gc(Registry(database), store)
    database.close()
    assert len(store.calls) > 40
    assert {"publish", "locate", "read", "delete", "list"} <= set(store.calls)
    return len(store.calls)


def _fail_gc_at(prepared: Path, folder: Path, index: int, fault: Fault) -> None:
    yard = folder / str(index)
    shutil.copytree(prepared, yard)
    database = Database(f"sqlite:///{yard}/registry.db")
    _fail_and_go_on(database, LocalStore(yard / "store"), index, fault)
    database.close()
    shutil.rmtree(yard)


def _fail_and_go_on(database: Database, store: LocalStore, index: int, fault: Fault) -> None:
    """Whatever the failed call was, afterwards all is as it should be."""
    registry = Registry(database)
    kept = registry.resolve(Ref.parse("team/bert@prod"))
    with suppress(StoreUnavailable):
        gc(registry, FaultyStore(store, {index: fault}))
    assert read_back(registry, store, kept) == [noise(1)]
    pass_time(database, 3600)
    gc(registry, store)
    assert read_back(registry, store, kept) == [noise(1)]
    require_no_orphan(database, store)
