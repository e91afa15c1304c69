"""A yard's one hook is told of reads and of loads that end; metrics are made of that."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from loader_world import BERT, noise, same, yard_in
from prometheus_client import CollectorRegistry, generate_latest
from torch import nn
from waiting import SOON_S

import weightyard
from weightyard.errors import DataNodeFailed, NoSuchThing, StoreUnavailable
from weightyard.loader.metrics import LoadMetrics
from weightyard.loader.report import LoadEvent, LoadFailed, LoadReport
from weightyard.transfer.report import ReadEvent, ReadEventKind
from weightyard.yard import Yard

STATE = {f"layers.{number}.weight": noise(256, 256, seed=number) for number in range(4)}
STATE_BYTES = 4 * 256 * 256 * 2


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_in(tmp_path) as opened:
        opened.push(STATE, BERT)
        yield opened


@pytest.fixture
def events(yard: Yard) -> list[LoadEvent]:
    told: list[LoadEvent] = []
    yard.on_event = told.append
    return told


def reports(events: list[LoadEvent]) -> list[LoadReport]:
    return [event for event in events if isinstance(event, LoadReport)]


def failing(
    monkeypatch: pytest.MonkeyPatch, yard: Yard, why: Exception, *, first: int | None = None
) -> None:
    """Reads of packs fail, the first ones or all."""
    read = type(yard.store).read
    calls = count()

    def fail(store: Any, location: Any, reads: Any, **options: Any) -> Any:
        if "packs/" in location.path.text and (first is None or next(calls) < first):
            raise why
        return read(store, location, list(reads), **options)

    monkeypatch.setattr(type(yard.store), "read", fail)


def test_the_hook_is_told_of_every_load_that_ends_whichever_way_it_was_asked_for(
    yard: Yard, events: list[LoadEvent]
) -> None:
    weights = yard.load(BERT)
    dict(yard.stream(BERT))
    module = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(256, 256, False) for _ in range(4))})
    report = yard.load_into(module, BERT)
    told = reports(events)
    assert len(told) == 3
    assert told[0] is weights.report
    assert told[2] is report
    assert {one.bytes for one in told} == {STATE_BYTES}


def test_a_stream_tells_apart_what_its_caller_took(yard: Yard, events: list[LoadEvent]) -> None:
    count = len(list(yard.stream(BERT)))
    for _ in yard.stream(BERT):
        time.sleep(0.02)
    quick, slow = reports(events)
    assert quick.stages["use"] < slow.stages["use"]
    assert count * 0.02 <= slow.stages["use"] <= slow.seconds
    assert "use" not in yard.load(BERT).report.stages


def test_the_hook_is_told_of_a_load_that_fails_and_why(
    yard: Yard, events: list[LoadEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoSuchThing):
        yard.load("team/other")
    failing(monkeypatch, yard, StoreUnavailable("injected"))
    with pytest.raises(StoreUnavailable):
        yard.load(BERT)
    with pytest.raises(StoreUnavailable):
        dict(yard.stream(BERT))
    told = [event for event in events if isinstance(event, LoadFailed)]
    assert [(event.ref, event.error) for event in told] == [
        ("team/other", NoSuchThing.code),
        (BERT, StoreUnavailable.code),
        (f"{BERT}@v1", StoreUnavailable.code),
    ]
    assert "injected" in told[1].reason
    assert reports(events) == []


def test_a_stream_that_is_left_early_has_not_failed(yard: Yard, events: list[LoadEvent]) -> None:
    stream = yard.stream(BERT)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not [event for event in events if not isinstance(event, ReadEvent)]


def test_the_hook_is_told_of_what_goes_wrong_on_the_way(
    yard: Yard, events: list[LoadEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, yard, DataNodeFailed("localhost", "injected"), first=1)
    weights = yard.load(BERT)
    assert same(weights, STATE)
    assert weights.report.failed_over == 1
    happened = [event for event in events if isinstance(event, ReadEvent)]
    assert ReadEventKind.REPLICA_FAILED in [event.kind for event in happened]
    assert events[-1] is weights.report


def test_the_hook_is_told_of_the_reads_of_a_follower(
    yard: Yard, events: list[LoadEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, yard, DataNodeFailed("localhost", "injected"), first=1)
    with yard.follow(BERT) as follower:
        assert follower.wait(SOON_S) is not None
    happened = [event.kind for event in events if isinstance(event, ReadEvent)]
    assert ReadEventKind.REPLICA_FAILED in happened


def test_a_hook_can_be_given_when_a_yard_is_opened(yard: Yard, tmp_path: Path) -> None:
    told: list[LoadEvent] = []
    with weightyard.open(str(tmp_path / "store"), on_event=told.append) as again:
        again.load(BERT, cache=False)
    assert len(reports(told)) == 1


def test_metrics_count_what_loads_did(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    yard.on_event = LoadMetrics(registry)
    report = yard.load(BERT).report
    yard.snapshot(BERT)
    yard.load(BERT)
    with pytest.raises(NoSuchThing):
        yard.load("team/other")
    failing(monkeypatch, yard, DataNodeFailed("localhost", "injected"), first=1)
    yard.load(BERT, cache=False)
    text = generate_latest(registry).decode()
    for line in (
        'weightyard_loads_total{device="cpu",source="store"} 2.0',
        'weightyard_loads_total{device="cpu",source="snapshot"} 1.0',
        f'weightyard_load_tensor_bytes_total{{source="snapshot"}} {STATE_BYTES:.1f}',
        f'weightyard_load_stored_bytes_total{{path="local"}} {2 * report.stored_bytes:.1f}',
        'weightyard_load_failures_total{error="no-such-thing"} 1.0',
        "weightyard_load_failed_over_total 1.0",
        'weightyard_read_events_total{kind="replica-failed"} 1.0',
        'weightyard_load_seconds_count{source="store"} 2.0',
    ):
        assert line in text.splitlines(), text
    assert 'weightyard_load_stage_seconds_total{stage="decode"}' in text


def test_the_metrics_can_be_imported_without_their_library_which_is_then_asked_for() -> None:
    script = """
import sys
sys.modules["prometheus_client"] = None
from weightyard.errors import Unsupported
from weightyard.loader.metrics import LoadMetrics
assert "torch" not in sys.modules
try:
    LoadMetrics()
except Unsupported as why:
    assert "prometheus_client" in str(why)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
