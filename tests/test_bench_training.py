"""The numbers about checkpoints: what was missed is said, and all of it is on the page."""

from __future__ import annotations

from typing import Any

import pytest

from bench import asked, report, training
from bench.counting import Counted
from bench.samples import Kind, Measured, Results, Row, Sample, Table, Timed
from bench.training import OURS, STOCK, group_of

MACHINE = Measured("2026-11-16", {"cores": "2", "CPU": "a processor"})
GB = 1_000_000_000


def row(who: str, what: str, ranks: int, seconds: float, **told: int) -> Row:
    kind = Kind.OURS if who == OURS else Kind.PEER
    sample = Sample(seconds, seconds, seconds / 10, 300 << 20, **told)
    return Row(kind, who, what, GB, (sample,), group=group_of(what, ranks))


ROWS = (
    row(OURS, "save", 2, 1.0, stored_bytes=GB * 4 // 5),
    row(STOCK, "save", 2, 2.0, stored_bytes=GB),
    row(OURS, "load", 4, 1.0, read_bytes=GB * 4 // 5),
    row(STOCK, "load", 4, 2.0),
)

CONTENT: dict[str, Any] = {
    "what HDFS counted": [{"ranks": 2, "who": OURS, "NameNode calls, save": 20}],
    "read by other ranks": [
        {"ranks": "4 → 3", "who": OURS, "sent / needed": 1.01},
        {"ranks": "4 → 3", "who": STOCK, "sent / needed": 1.43},
        {"ranks": "4 → 8", "who": OURS, "sent / needed": 1.2},
    ],
    "a step that saves": [
        {"way": STOCK, "stall of a step ms": 40.0, "stall / step": 0.4, "lost": 0.2},
        {"way": OURS, "stall of a step ms": 10.0, "stall / step": 0.1, "lost": 0.08},
    ],
    "bytes of checkpoints": [{"training": "frozen trunk", "one after it / state": 0.02}],
}


def test_saving_and_loading_are_held_against_torchs_own_on_as_many_ranks() -> None:
    save, load = asked.claims("checkpoints", ROWS)
    assert save == (
        "**2.00×** torch's own: save, 2 ranks; 0.80 of the bytes stored; asked: 1.5× or more"
    )
    assert load == "**2.00×** torch's own: load, 4 ranks; asked: 3× or more – **missed**"


def test_what_is_read_and_lost_is_held_against_its_bound_and_torchs_is_not_asked() -> None:
    three, eight, lost, stall = training.claims(CONTENT)
    assert three.startswith("**1.01** stored bytes read for each that was needed, 4 → 3")
    assert "missed" not in three
    assert eight.endswith("asked: 1.05 or less – **missed**")
    assert lost.startswith("**0.08** of the time lost")
    assert lost.endswith("**missed**")
    assert stall.startswith("**0.25** of the stall by `dcp.async_save`")
    assert stall.endswith("**10%** of a step")


def test_what_a_save_costs_is_told_by_the_steps_around_it() -> None:
    """The machine gets slower meanwhile, which is not the save's doing."""
    steps = [1.0] * 30 + [2.0] * 30
    steps[9] += 0.5  # the step that begins the first save, and the one after it
    steps[10] += 0.5
    steps[39] += 4.0
    ran = {
        "way": OURS,
        "steps_s": steps,
        "stalls_s": {"10": 0.2, "40": 0.4},
        "state_bytes": 1 << 20,
    }
    assert training.lost_by_save(steps, [10, 40]) == pytest.approx([0.1, 0.2])
    row = training.stall_row(ran)
    assert (row["saves"], row["lost"]) == (2, pytest.approx(0.15))
    assert row["lost, from to"] == "0.10 to 0.20"
    assert row["stall of a step ms"] == pytest.approx(300)


def test_the_page_has_checkpoints_and_training() -> None:
    content = {"asked": training.claims(CONTENT), **CONTENT}
    page = report.render(
        Results(checkpoints=Timed(MACHINE, ROWS), training=Table(MACHINE, content))
    )
    assert "| stock | save | 500 |" in page
    assert "| 4 → 8 | weightyard | 1.200 |" in page
    assert "| frozen trunk | 0.020 |" in page


def test_of_what_hdfs_counted_only_the_difference_is_told() -> None:
    before = Counted({"create": 3, "getFileInfo": 5}, 100)
    after = Counted({"create": 4, "getFileInfo": 5, "by HTTP": 2}, 250)
    assert after.since(before) == Counted({"create": 1, "by HTTP": 2}, 150)


@pytest.mark.parametrize("length", [1 << 20, 1 << 24, 1 << 30])
def test_a_dense_state_is_about_as_large_as_asked_and_cut_evenly_for_all_ranks(length: int) -> None:
    from bench.trained import dense_bytes, dense_shape

    _, rows = dense_shape(length)
    assert all(rows % ranks == 0 for ranks in (2, 3, 4, 8))
    assert dense_bytes(length) <= max(1.05 * length, 1 << 20)
