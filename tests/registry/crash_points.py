"""Crashes an operation at one call after the other, and says what did not hold afterwards.

A program: `python crash_points.py CONFIG.json`, answers in JSON. It warms up once, counts the calls
of a clean run, and then forks, so that no interpreter has to start anew. Nothing is open when it
forks: every process opens the store and the database itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import crash_world
from crash_calls import WRITES, Call, Calls, Point, StateChanges
from crash_world import OPERATIONS, Outcome
from crash_yard import State, World
from ending import end_with_parent

from weightyard.errors import YardError
from weightyard.records import GcReport
from weightyard.registry import freshness
from weightyard.registry.registry import Registry
from weightyard.transfer import once

LIMIT_S = 120
MODES = ("before", "after", "kill")
_LOOKS = ("stat", "list", "locate", "read")

once._STAGED_AT_ONCE = 1  # one after the other, so that calls come in one order
# Nobody gives up a look at which an operation is stopped, to go on while the yard is put back.
freshness._LOOK_S = LIMIT_S


class Worker:
    """Lets one point after the other happen in its yard, and judges what each leaves."""

    def __init__(self, world: World, job: int) -> None:
        self._world = world
        self._yard = world.yard(job)
        self.points = 0
        self.judged = 0
        self.problems: list[str] = []

    def count_calls(self, operation: str) -> list[Call]:
        """The calls of a clean run, which also warms this process up."""
        self._yard.put(self._world.base)
        calls = Calls()
        done = self._do(operation, calls)
        if isinstance(done, GcReport) and not done.packs_rewritten:
            self.problems.append("no pack was merged")
        self._judge(Point(operation, "", 0, "", "clean"), Outcome(is_done=True))
        return calls.seen

    def crash(self, point: Point) -> None:
        """Fail an operation at a call, or kill it there."""
        self._yard.put(self._world.base)
        outcome = self._kill(point) if point.mode == "kill" else self._attempt(point)
        self._judge(point, outcome)

    def stop(self, point: Point, changes: int | None) -> None:
        """Stop a push at a call; gc runs to its end, or is killed at a change; the push goes on.

        At each change it makes, or at so many of them. gc runs only once: what it leaves when it is
        killed is what there was before that call, and its locks go with it.
        """
        left: list[State] = []
        reached: State | None = None

        def collect() -> None:
            nonlocal reached
            reached = self._yard.take()
            if point.expired:
                crash_world.age(self._world.gc_database)
            self._collect(point, StateChanges(lambda: left.append(self._yard.take())))

        def kill_at(change: int) -> None:
            if self._yard.put(left[change]) != reached:
                self._blame(point, "is reached in another way each time")

        self._yard.put(self._world.base)
        self._judge(point, self._attempt(point, collect))
        chosen: Sequence[int] = range(len(left))
        if changes is not None:
            chosen = random.Random(str(point)).sample(chosen, changes)
        for change in chosen:
            if change and left[change] == left[change - 1] and changes is None:
                self.points += 1  # nothing came of the call before: the same pair again
                continue
            self._yard.put(self._world.base)
            outcome = self._attempt(point, partial(kill_at, change))
            self._judge(dataclasses.replace(point, change=change), outcome)

    def close(self) -> None:
        signal.alarm(0)
        self._world.close()
        self._yard.close()

    def _do(self, operation: str, calls: Calls) -> object:
        store = calls.store(self._yard.store())
        # Of its own: what a registry itself asks of its store is counted, and fails, too.
        registry = Registry(self._world.database, store=store, who="alice")
        with calls.database(self._world.database), _repeatable_ids(operation):
            return OPERATIONS[operation](registry, store)

    def _attempt(self, point: Point, meanwhile: Callable[[], None] | None = None) -> Outcome:
        """Do the operation with its fault. What the doer was told."""
        signal.alarm(LIMIT_S)
        calls = Calls(point, meanwhile)
        try:
            self._do(point.operation, calls)
        except YardError as why:
            outcome = Outcome(is_done=False, error=type(why).__name__, said=str(why))
        except Exception:  # noqa: BLE001 - told to whoever judges
            outcome = Outcome(is_done=False, error=traceback.format_exc(), is_expected=False)
        else:
            outcome = Outcome(is_done=True)
        if not calls.is_reached:
            self._blame(point, "was not reached")
        if calls.went_on:
            self._blame(point, f"did not stand still: {calls.went_on[:5]}")
        return outcome

    def _kill(self, point: Point) -> Outcome:
        """Do the operation in a process that is killed."""
        self._world.close()
        worker, pid = os.getpid(), os.fork()
        if pid == 0:
            end_with_parent(worker)
            self._attempt(point)
            os._exit(0)
        if os.waitpid(pid, 0)[1] != signal.SIGKILL:
            self._blame(point, "was not reached")
        self._yard.wait_until_left()
        return Outcome(is_done=False)

    def _collect(self, point: Point, calls: Calls) -> None:
        """gc by another, while an operation stands still."""
        database, registry = self._world.gc_database, self._world.gc_registry
        try:
            with calls.database(database), _repeatable_ids("beside"):
                crash_world.do_gc(registry, calls.store(self._yard.store()))
        except Exception:  # noqa: BLE001 - told to whoever judges
            self._blame(point, f"gc failed beside it: {traceback.format_exc()}")

    def _judge(self, point: Point, outcome: Outcome) -> None:
        """What does not hold after a restart. Equal states are judged once."""
        signal.alarm(LIMIT_S)
        self.points += 1
        self._world.database.close()
        registry, store = self._world.registry, self._yard.store()
        told = f"{point.operation} {_told(point, outcome)}"
        if not self._world.is_new(f"{self._yard.take().fingerprint()} {told}"):
            return
        self.judged += 1
        if point.mode == "stop" and not point.expired and not outcome.is_done:
            self._blame(point, f"gc made a push fail: {outcome.error}: {outcome.said}")
        with _repeatable_ids("judge"):
            for problem in crash_world.verify(registry, store, point.operation, outcome):
                self._blame(point, problem)
            if self._world.is_new(f"{self._yard.take().fingerprint()} {told}, collected"):
                for problem in crash_world.verify_collected(
                    registry, store, point.operation, outcome
                ):
                    self._blame(point, problem)

    def _blame(self, point: Point, problem: str) -> None:
        self.problems.append(f"{point}: {problem}")


@contextmanager
def _repeatable_ids(who: str) -> Iterator[None]:
    """The same names for packs and uploads at every point: equal states are judged once."""
    before = secrets.token_bytes
    secrets.token_bytes = random.Random(who).randbytes  # type: ignore[assignment]
    try:
        yield
    finally:
        secrets.token_bytes = before


def _told(point: Point, outcome: Outcome) -> str:
    """What is judged besides the state. Dying says as little as any error one may expect."""
    is_blamed = point.mode == "stop" and not point.expired
    error = outcome.error if is_blamed or not outcome.is_expected else ""
    return f"{outcome.is_done} {error}"


def run_all(world: World, jobs: int, work: Callable[[Worker, int], None]) -> dict[str, Any]:
    """Let so many workers do their share of the work. What they found."""
    program = os.getpid()
    workers = {}
    for job in range(jobs):
        pid = os.fork()
        if pid == 0:
            end_with_parent(program)
            worker = Worker(world, job)
            try:
                work(worker, job)
            except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
                worker.problems.append(traceback.format_exc())
            found = {name: getattr(worker, name) for name in ("points", "judged", "problems")}
            world.answer(job).write_text(json.dumps(found))
            os._exit(0)
        workers[pid] = job
    sums: dict[str, Any] = {"points": 0, "judged": 0, "problems": []}
    while workers:
        pid, status = os.wait()
        job = workers.pop(pid)
        if status:
            sums["problems"].append(f"worker {job} ended with status {status}")
        else:
            found = json.loads(world.answer(job).read_text())
            sums = {name: sums[name] + found[name] for name in sums}
    return sums


def plan_points(calls: Mapping[str, Sequence[Call]], extent: str) -> list[Point]:
    """Where to fail: `full` is at every call in every mode; else where it can make a difference.

    What happens inside a transaction is gone when it fails, wherever that was. So `usual` fails
    each at its first, its last and some statement between, each in one mode, one that only reads
    at a single one; every commit and every call on the store in all modes (of a call that only
    looks, losing the answer is the same as failing). `short` is for a second database: what only
    reads is left out, and so are calls on the store that fail; those are not its business.
    """
    chosen: list[tuple[str, Call, str]] = []
    for operation, seen in calls.items():
        for number, group in enumerate(transactions(seen)):
            is_store = group[0][0] == "store"
            if extent == "full":
                chosen += [(operation, call, mode) for call in group for mode in MODES]
            elif is_store and extent == "short":
                chosen.append((operation, group[0], "kill"))
            elif is_store:
                modes = MODES[::2] if group[0][2] in _LOOKS else MODES
                chosen += [(operation, group[0], mode) for mode in modes]
            elif is_writing(group):
                *inside, commit = group
                chosen.append((operation, inside[0], "before"))
                chosen.append((operation, inside[number % len(inside)], "kill"))
                chosen.append((operation, inside[-1], "after"))
                chosen += [(operation, commit, mode) for mode in MODES]
            elif extent == "usual":
                chosen.append((operation, group[number % len(group)], MODES[number % 3]))
    return [Point(operation, *call, mode) for operation, call, mode in chosen]


def transactions(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """Calls on the store one by one, those on the database up to each commit."""
    group: list[Call] = []
    for call in calls:
        if call[0] == "store":
            yield [call]
            continue
        group.append(call)
        if call[2] == "COMMIT":
            yield group
            group = []
    if group:
        yield group


def is_writing(transaction: Sequence[Call]) -> bool:
    return any(call[2].startswith(WRITES) for call in transaction)


def plan_stops(calls: Sequence[Call]) -> list[Point]:
    """Every call of a push outside a transaction; and whether its lease ends there."""
    return [
        Point("push", *call, "stop", expired=expired)
        for call in calls
        if call[0] == "store" or call[2].startswith("BEGIN")
        for expired in (False, True)
    ]


def main() -> None:
    end_with_parent()
    config = json.loads(Path(sys.argv[1]).read_text())
    jobs = config.get("jobs", 2)
    world = World(Path(config["work"]), config.get("server"))
    world.begin(jobs)
    first = Worker(world, 0)
    calls = {operation: first.count_calls(operation) for operation in OPERATIONS}
    if first.problems:
        raise SystemExit(f"without a crash: {first.problems}")
    first.close()

    share, shares = config.get("share", (0, 1))
    wanted = {name: calls[name] for name in config.get("operations", OPERATIONS)}
    points = plan_points(wanted, config.get("extent", "usual"))[share::shares]
    stops = plan_stops(calls["push"])[: None if "stops" in config else 0]
    if config.get("stops") is not None:
        stops = random.Random(config["seed"]).sample(stops, config["stops"])

    def work(worker: Worker, job: int) -> None:
        for point in points[job::jobs]:
            worker.crash(point)
        for point in stops[job::jobs]:
            worker.stop(point, config.get("changes"))

    found = run_all(world, jobs, work)
    world.end(jobs)
    counts = {operation: len(seen) for operation, seen in calls.items()}
    looks = {name: sum(call[2] in _LOOKS for call in seen) for name, seen in calls.items()}
    print(json.dumps({**found, "calls": counts, "looks": looks}))


if __name__ == "__main__":
    main()
