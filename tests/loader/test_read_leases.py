"""Read leases: while one is at a version its bytes are kept, whatever happens in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_world import BERT, leases, left_threads, our_threads, yard_in
from sqlalchemy import delete
from waiting import SOON_S, eventually

from weightyard.errors import RegistryUnavailable
from weightyard.loader import leases as read_leases
from weightyard.loader.leases import Holding, held
from weightyard.registry import schema
from weightyard.yard import Yard

V1 = f"{BERT}@v1"


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    monkeypatch.setattr(read_leases, "_RENEW_S", 0.02)
    with yard_in(tmp_path) as opened:
        opened.push({"w": torch.zeros(3)}, BERT)
        yield opened
    assert left_threads() == []


def lose_all(yard: Yard) -> None:
    """As gc does with leases that nobody renewed for long enough."""
    yard.registry.database.write(lambda tx: tx.execute(delete(schema.read_leases)))


def is_held(yard: Yard) -> bool:
    return leases(yard.registry.database) == 1


def test_a_lease_that_was_lost_is_taken_again(yard: Yard) -> None:
    with held(yard.catalogue, V1):
        assert is_held(yard)
        lose_all(yard)
        eventually(lambda: is_held(yard))
    assert not is_held(yard), "the one that is held now is released"


@pytest.fixture
def refused_once(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The registry does not answer the first who asks for a lease."""
    asked: list[Any] = []
    take = yard.catalogue.take_lease

    def taken(*words: Any, **more: Any) -> Any:
        asked.append(words)
        if len(asked) == 1:
            raise RegistryUnavailable("injected")
        return take(*words, **more)

    monkeypatch.setattr(yard.catalogue, "take_lease", taken)
    yield
    assert len(asked) > 1


@pytest.mark.usefixtures("refused_once")
def test_a_lease_that_could_not_be_had_at_first_is_had_later(yard: Yard) -> None:
    with held(yard.catalogue, V1):
        eventually(lambda: is_held(yard))
    assert not is_held(yard)


@pytest.mark.usefixtures("refused_once")
def test_one_of_several_that_could_not_be_had_at_first_is_had_later(yard: Yard) -> None:
    holding = Holding(yard.catalogue)
    holding.hold([V1])
    eventually(lambda: is_held(yard))
    holding.hold(())
    assert not is_held(yard)


def test_a_version_that_is_gone_with_its_lease_is_not_asked_for_again(yard: Yard) -> None:
    with held(yard.catalogue, V1):
        yard.delete(V1)
        lose_all(yard)
        eventually(lambda: "weightyard-lease" not in our_threads())
        assert not is_held(yard)


def test_a_lease_that_is_released_while_it_is_taken_again_ends_without_a_word(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_at_it, may_end = threading.Event(), threading.Event()
    failed: list[Any] = []

    def closed(*words: Any, **more: Any) -> Any:
        is_at_it.set()
        assert may_end.wait(SOON_S)
        raise RuntimeError("the client has been closed")

    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(read_leases, "_ENDING_S", 0.01)
    with held(yard.catalogue, V1):
        monkeypatch.setattr(yard.catalogue, "take_lease", closed)
        lose_all(yard)
        assert is_at_it.wait(SOON_S)
    may_end.set()
    eventually(lambda: "weightyard-lease" not in our_threads())
    assert failed == []
