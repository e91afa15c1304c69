"""Checkpoints of a training: saved and loaded, by us and by torch's own writer and reader.

Theirs are torch's FsspecWriter and FsspecReader on `hdfs://`, through hdfs-native.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from bench import peers
from bench.samples import Kind, Row, Sample
from bench.site import ChildFailed, Site
from bench.verdicts import at_least, at_most

FOLDER = "/bench/training"
RANKS = (2, 4)
SAVED_BY, READ_BY = 4, (4, 3, 8)
OURS, STOCK = "weightyard", "stock"
BOTH = (OURS, STOCK)
SAVE_TIMES, LOAD_TIMES, AMPLIFICATION, LOST = 1.5, 3.0, 1.05, 0.05

_MIB = 2**20
_TIMEOUT_S = 900


def group_of(what: str, ranks: int) -> str:
    return f"{what}, {ranks} ranks"


def run_checkpoints(
    site: Site, length: int, repeat: int, done: Callable[[Row], object]
) -> tuple[Row, ...]:
    """The same dense fp32 state on 2 and 4 ranks: the first checkpoint of a run, and reading it."""
    from bench.trained import dense_bytes

    moved = dense_bytes(length)
    rows = {
        (what, ranks, who): Row(kind, who, what, moved, group=group_of(what, ranks))
        for ranks in RANKS
        for what in ("save", "load")
        for kind, who in ((Kind.OURS, OURS), (Kind.PEER, STOCK))
    }
    for turn in range(repeat):
        for ranks in RANKS:
            with _Place(site) as place:
                for what in ("save", "load"):
                    ways = (OURS, STOCK)[:: -1 if turn % 2 else 1]
                    asked = {"length": length, "ways": ways, "is_counted": False}
                    try:
                        took = place.ran(ranks, what, **asked)
                    except ChildFailed as why:
                        for who in ways:
                            failed = rows[what, ranks, who]
                            rows[what, ranks, who] = msgspec.structs.replace(
                                failed, failed=str(why)
                            )
                        break
                    for one in took:
                        key = (what, ranks, one["who"])
                        rows[key] = rows[key].with_sample(_sample(one))
                        done(rows[key])
    return tuple(rows.values())


def _sample(took: Mapping[str, Any]) -> Sample:
    names = ("seconds", "client_cpu_s", "server_cpu_s", "other_cpu_s", "peak_rss_bytes")
    told = ("stored_bytes", "read_bytes")
    return Sample(**{name: took[name] for name in (*names, *told)})


def run_training(
    site: Site, length: int, done: Callable[[Mapping[str, Any]], object]
) -> dict[str, Any]:
    """Everything that is no rate."""
    content: dict[str, Any] = {
        "what HDFS counted": _counted(site, length, done),
        "read by other ranks": _read_by_others(site, length, done),
        "a step that saves": _stalls(site, length, done),
        "bytes of checkpoints": _kinds(site, length, done),
    }
    return {"asked": claims(content), **content}


def _counted(
    site: Site, length: int, done: Callable[[Mapping[str, Any]], object]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        with _Place(site) as place:
            asked = {"length": length, "ways": BOTH, "is_counted": True}
            saved = {one["who"]: one for one in place.ran(ranks, "save", **asked)}
            loaded = {one["who"]: one for one in place.ran(ranks, "load", **asked)}
        for who in BOTH:
            row = {
                "ranks": ranks,
                "who": who,
                "stored MiB": saved[who]["stored_bytes"] / _MIB,
                "NameNode calls, save": _calls(saved[who]),
                "NameNode calls, load": _calls(loaded[who]),
                "most of them, save": _most(saved[who]),
                "most of them, load": _most(loaded[who]),
            }
            done(row)
            rows.append(row)
    return rows


def _read_by_others(
    site: Site, length: int, done: Callable[[Mapping[str, Any]], object]
) -> list[dict[str, Any]]:
    """The second checkpoint of a run, a delta: its bases are among what is needed."""
    rows: list[dict[str, Any]] = []
    with _Place(site) as place:
        asked = {"length": length, "ways": BOTH}
        place.ran(SAVED_BY, "save", **asked, is_counted=False, is_delta=True)
        for ranks in READ_BY:
            for one in place.ran(ranks, "load", **asked, is_counted=True):
                row = {
                    "ranks": f"{SAVED_BY} → {ranks}",
                    "who": one["who"],
                    "needed MiB": one["needed_bytes"] / _MIB,
                    "sent by DataNodes MiB": one["counted"]["sent_bytes"] / _MIB,
                    "sent / needed": one["counted"]["sent_bytes"] / one["needed_bytes"],
                    "said to be read / needed": (
                        one["read_bytes"] / one["needed_bytes"] if one["read_bytes"] else None
                    ),
                    "NameNode calls": _calls(one),
                }
                done(row)
                rows.append(row)
    return rows


def _stalls(
    site: Site, length: int, done: Callable[[Mapping[str, Any]], object]
) -> list[dict[str, Any]]:
    is_large = length >= 1 << 28
    width, layers = (512, 6) if is_large else (64, 2)
    with _Place(site) as place:
        # The last save has half an interval left to end beside the training, as those before it.
        asked = {"width": width, "layers": layers, "steps": 90 if is_large else 25}
        ran = place.ran(2, "stall", **asked, interval=20 if is_large else 10)
    rows = [stall_row(one) for one in ran]
    for row in rows:
        done(row)
    return rows


def stall_row(ran: Mapping[str, Any]) -> dict[str, Any]:
    """What a way to save cost the training beside it. Pure."""
    steps, stalls = ran["steps_s"], {int(at): stall for at, stall in ran["stalls_s"].items()}
    lost = lost_by_save(steps, list(stalls))
    step_s = median(steps)
    return {
        "way": ran["way"],
        "state MiB": ran["state_bytes"] / _MIB,
        "steps": len(steps),
        "saves": len(lost),
        "median step ms": 1000 * step_s,
        "stall of a step ms": 1000 * mean(stalls.values()),
        "stall / step": mean(stalls.values()) / step_s,
        "lost": mean(lost),
        "lost, from to": f"{min(lost):.2f} to {max(lost):.2f}",
    }


def lost_by_save(steps_s: Sequence[float], saved_at: Sequence[int]) -> list[float]:
    """What the steps beside each save took longer than those around them, of an interval's time.

    Steps are counted from 1. Only those right around a save say what it cost: the machine is now
    quicker and now slower, and two runs that are alike differ by more than what is asked about.
    """
    every = saved_at[0]
    beside = every // 3
    lost = []
    for at in saved_at:
        before = steps_s[at - 1 - beside : at - 1]
        after = steps_s[at - 1 + beside : at - 1 + 2 * beside]
        usual_s = median((*before, *after))
        longer_s = sum(steps_s[at - 1 : at - 1 + beside]) - beside * usual_s
        lost.append(longer_s / (every * usual_s))
    return lost


def _kinds(
    site: Site, length: int, done: Callable[[Mapping[str, Any]], object]
) -> list[dict[str, Any]]:
    from bench.trained import KINDS

    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        with _Place(site) as place:
            asked = {"kind": kind, "length": length // 8, "saves": 4, "steps": 10}
            first, *others, read = place.ran(1, "kind", **asked)
        after = mean(one["stored_bytes"] for one in others)
        row = {
            "training": kind,
            "state MiB": read["state_bytes"] / _MIB,
            "first checkpoint MiB": first["stored_bytes"] / _MIB,
            "one after it MiB": after / _MIB,
            "one after it / state": after / read["state_bytes"],
            "a resume reads MiB": read["read_bytes"] / _MIB,
        }
        done(row)
        rows.append(row)
    return rows


def claims(content: Mapping[str, Any]) -> list[str]:
    """What was asked of the numbers that are no rates. Pure."""
    lines = []
    for row in content["read by other ranks"]:
        if row["who"] == OURS:
            what = f"stored bytes read for each that was needed, {row['ranks']}"
            lines.append(at_most(row["sent / needed"], AMPLIFICATION, what))
    by_way = {row["way"]: row for row in content["a step that saves"]}
    if ours := by_way.get(OURS):
        what = "of the time lost with a checkpoint every 20 steps"
        lines.append(at_most(ours["lost"], LOST, what))
        if stock := by_way.get(STOCK):
            share = ours["stall of a step ms"] / stock["stall of a step ms"]
            lines.append(
                f"**{share:.2f}** of the stall by `dcp.async_save` with torch's own writer, and "
                f"**{ours['stall / step']:.0%}** of a step"
            )
    return lines


def checkpoint_claims(rows: Sequence[Row]) -> list[str]:
    """What was asked of saving and loading. Pure."""
    lines = []
    for what, asked in (("save", SAVE_TIMES), ("load", LOAD_TIMES)):
        for ranks in RANKS:
            pair = {row.who: row for row in rows if row.group == group_of(what, ranks)}
            if OURS in pair and STOCK in pair:
                times = pair[OURS].best_rate / pair[STOCK].best_rate
                left = pair[OURS].best.stored_bytes / pair[OURS].moved_bytes
                stored = f"; {left:.2f} of the bytes stored" if what == "save" else ""
                lines.append(
                    at_least(times, asked, f"torch's own: {group_of(what, ranks)}{stored}")
                )
    return lines


def _calls(took: Mapping[str, Any]) -> int:
    return sum(took["counted"]["calls"].values())


def _most(took: Mapping[str, Any]) -> str:
    """The methods called most."""
    calls = sorted(took["counted"]["calls"].items(), key=lambda pair: -pair[1])
    return ", ".join(f"{method} {count}" for method, count in calls[:5])


class _Place:
    """Folders in HDFS and on this machine for one thing measured; all of it is removed after."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._url = f"{site.url}{FOLDER}"

    def __enter__(self) -> _Place:
        peers.native_client(self._site).delete(FOLDER, recursive=True)  # of a run cut short
        self._folder = tempfile.TemporaryDirectory(prefix="training-", dir=self._site.scratch)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()
        peers.native_client(self._site).delete(FOLDER, recursive=True)

    def ran(self, ranks: int, task: str, **options: Any) -> list[dict[str, Any]]:
        """What a job of so many ranks answered. Raises ChildFailed."""
        asked, answer = Path(self._folder.name, "asked"), Path(self._folder.name, "answer")
        registry = str(Path(self._folder.name, "registry"))
        place = {"url": self._url, "folder": registry}
        request = {"site": self._site, "task": task, "options": {**place, **options}}
        asked.write_bytes(msgspec.json.encode(request))
        answer.unlink(missing_ok=True)
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        job = ["-m", "bench.training_job", str(asked), str(answer)]
        try:
            done = subprocess.run(
                [sys.executable, "-m", *launcher, *job],
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, **self._site.environment, "GLOO_SOCKET_IFNAME": "lo"},
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{task} on {ranks} ranks: not done after {_TIMEOUT_S} s") from None
        if done.returncode:
            raise ChildFailed(f"{task} on {ranks} ranks: {_reason(done.stderr)}")
        found: list[dict[str, Any]] = msgspec.json.decode(answer.read_bytes())
        return found


def _reason(said: str) -> str:
    """The last line of a rank; after it torchrun sums up."""
    lines = [line for line in said.splitlines() if line.startswith("[rank")]
    return (lines or said.strip().splitlines() or ["no message"])[-1][:300]
