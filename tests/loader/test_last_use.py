"""Every way to read a version is a use of it: retention by last use goes by that."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from loader_world import BERT, yard_in
from sqlalchemy import event

from weightyard.errors import NotAllowed, StoreFull
from weightyard.yard import Yard


def _open(yard: Yard) -> None:
    with yard.safe_open(BERT) as opened:
        opened.get_tensor("w")


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3))


WAYS: dict[str, Callable[[Yard], object]] = {
    "load": lambda yard: yard.load(BERT),
    "load_into": lambda yard: yard.load_into(Module(), BERT),
    "stream": lambda yard: list(yard.stream(BERT)),
    "safe_open": _open,
    "snapshot": lambda yard: yard.snapshot(BERT),
}


@pytest.mark.parametrize("way", WAYS)
def test_that_a_version_is_used_is_noted_and_nothing_else_is_a_use(
    tmp_path: Path, way: str
) -> None:
    with yard_in(tmp_path) as yard:
        yard.push({"w": torch.ones(3)}, BERT)
        yard.push({"w": torch.zeros(3)}, BERT)
        assert [version.last_used for version in yard.versions(BERT)] == [None, None]
        WAYS[way](yard)
        newest, oldest = yard.versions(BERT)
        assert newest.last_used is not None
        assert oldest.last_used is None


def test_a_load_does_not_wait_long_for_who_writes_to_the_registry(tmp_path: Path) -> None:
    with yard_in(tmp_path) as yard:
        yard.push({"w": torch.ones(3)}, BERT)
        yard.settle()
        database = next(tmp_path.rglob("registry.db"))
        other = sqlite3.connect(database, timeout=30, isolation_level=None)
        with closing(other):
            other.execute("BEGIN IMMEDIATE")
            began = time.monotonic()
            assert torch.equal(yard.load(BERT)["w"], torch.ones(3))
            assert time.monotonic() - began < 20, "the database would wait for 30 s"
            other.execute("ROLLBACK")
        yard.load(BERT)
        assert yard.resolve(BERT).last_used is not None


def test_a_registry_that_can_only_be_read_is_enough_for_a_load(tmp_path: Path) -> None:
    with yard_in(tmp_path) as yard:
        yard.push({"w": torch.ones(3)}, BERT)
        yard.settle()
        event.listen(
            yard.registry.database.engine,
            "checkout",
            lambda connection, *rest: connection.execute("PRAGMA query_only=ON"),
        )
        with pytest.raises(NotAllowed, match="readonly"):
            yard.set_alias(BERT, "prod", 1)
        for way in WAYS.values():
            way(yard)


def test_a_disk_that_is_full_is_no_reason_not_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*values: object, **named: object) -> None:
        raise StoreFull("database: database or disk is full")

    with yard_in(tmp_path) as yard:
        yard.push({"w": torch.ones(3)}, BERT)
        for name in ("mark_used", "take_lease"):
            monkeypatch.setattr(yard.catalogue, name, fail)
        for way in WAYS.values():
            way(yard)
