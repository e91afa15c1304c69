"""Crashes pushes and gc on an HDFS store, all in one yard, and says what did not hold at the end.

A program: `python crash_on_hdfs.py CONFIG.json`, answers in JSON. HDFS clients have threads, so
every step is a process of its own, forked before anything is open.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash_world
from crash_points import Call, Calls, Point, state_changes
from crash_world import OPTIONS, noise
from ending import end_with_parent
from pushing import BERT, push, read_back

from weightyard.errors import YardError
from weightyard.names import ModelName, Ref
from weightyard.registry import binding, migrate
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.settings import Settings
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.retry import Retry, RetryingStore
from weightyard.storage.store import Store

TRASH = ModelName("team", "trash")
LIMIT_S = 900


class Yard:
    """The yard on HDFS, as one process has it open."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.database = Database(config["database"])
        self._hdfs = HdfsStore(config["store"], Settings(hadoop_conf_dir=Path(config["conf"])))
        self.store: Store = RetryingStore(self._hdfs)
        migrate.upgrade(self.database)
        binding.bind(self.database, self.store)
        self.registry = Registry(self.database, who="alice")

    def push(self, store: Store, seed: int, model: ModelName = BERT) -> str:
        contents = contents_of(seed)
        version = push(
            self.registry, store, *contents, model=model, options=OPTIONS, message=str(seed)
        )
        self.registry.flush_outbox(store)
        return version.ref

    def collect(self, store: Store) -> None:
        crash_world.do_gc(self.registry, store)

    def litter(self, seed: int) -> None:
        """Something for gc to do."""
        ref = self.push(self.store, seed, TRASH)
        self.registry.remove(Ref.parse(ref))

    def attempt(self, work: Callable[[Store], object], point: Point | None) -> list[Call]:
        """Do something that fails at a point, beneath what tries again: so HDFS loses answers."""
        calls = Calls(point)
        store = RetryingStore(calls.store(self._hdfs), Retry(deadline_s=120))
        with calls.database(self.database):
            work(store)
        return calls.seen


def contents_of(seed: int) -> list[bytes]:
    return [noise(3 * seed), noise(3 * seed + 1), noise(3 * seed + 2)]


def count(config: dict[str, Any]) -> dict[str, list[Call]]:
    """The calls of a clean push and a clean gc."""
    yard = Yard(config)
    yard.push(yard.store, 0)  # makes the model: that is done once
    pushing = yard.attempt(lambda store: yard.push(store, 1), None)
    for seed in (2, 3):  # the first gc has more to do than those to come
        yard.litter(seed)
        collecting = yard.attempt(yard.collect, None)
    return {"push": pushing, "gc": collecting}


def lose_answers(config: dict[str, Any], calls: dict[str, list[Call]]) -> list[str]:
    """Lose the answer of every call on the store once. None of it may even be noticed."""
    yard = Yard(config)
    problems = []
    lost = [(one, call) for one, seen in calls.items() for call in seen if call[0] == "store"]
    for seed, (operation, call) in enumerate(lost, 100):
        point = Point(operation, *call, "after")
        if operation == "gc":
            yard.litter(seed)
        work = (
            yard.collect if operation == "gc" else lambda store, seed=seed: yard.push(store, seed)
        )
        try:
            yard.attempt(work, point)
        except YardError as why:
            problems.append(f"{point}: {why!r}")
    return problems


def be_killed(config: dict[str, Any], point: Point, seed: int) -> list[str]:
    yard = Yard(config)
    if point.operation == "gc":  # how many calls it has depends on what others left
        yard.litter(seed)
        yard.attempt(yard.collect, point)
        return []
    yard.attempt(lambda store: yard.push(store, seed), point)
    return [f"{point}: was not reached"]


def verify(config: dict[str, Any]) -> list[str]:
    """Everything visible is whole; nothing is left over."""
    yard = Yard(config)
    while yard.registry.flush_outbox(yard.store):
        pass
    crash_world.age(yard.database)
    crash_world.collect(yard.registry, yard.store)
    problems = [
        f"check: {finding}"
        for finding in yard.registry.check(yard.store, read_data=True).findings
        if finding.code != "under-replicated"
    ]
    versions = yard.registry.versions(BERT)
    for version in versions:
        if read_back(yard.registry, yard.store, version) != contents_of(int(version.message)):
            problems.append(f"{version.ref} has other bytes than were pushed")
    if sorted(version.number for version in versions) != list(range(1, len(versions) + 1)):
        problems.append("numbers are missing")
    return [*problems, *crash_world.find_orphans(yard.database, yard.store)]


def apart(work: Callable[[], Any]) -> Any:
    """What a process of its own returns; None if it was killed."""
    from_child, to_parent = os.pipe()
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        signal.alarm(LIMIT_S)
        try:
            said = json.dumps(work())
        except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
            said = json.dumps([traceback.format_exc()])
        os.write(to_parent, said.encode())
        os._exit(0)
    os.close(to_parent)
    with os.fdopen(from_child) as answer:
        said = answer.read()
    _, status = os.waitpid(pid, 0)
    if status not in (0, signal.SIGKILL):
        return [f"ended with status {status}"]
    return json.loads(said) if said else None


def main() -> None:
    end_with_parent()
    config = json.loads(Path(sys.argv[1]).read_text())
    calls: dict[str, list[Call]] = apart(lambda: count(config))
    problems: list[str] = apart(lambda: lose_answers(config, calls)) or []
    kills = [
        Point(operation, *call, "kill")
        for operation, seen in calls.items()
        for call in state_changes([(kind, index, name) for kind, index, name in seen])
    ]
    first, shares = config["share"]
    kills = kills[first::shares]
    for seed, point in enumerate(kills, 1000):
        problems += apart(lambda point=point, seed=seed: be_killed(config, point, seed)) or []
    problems += apart(lambda: verify(config)) or []
    print(json.dumps({"kills": len(kills), "problems": problems}))


if __name__ == "__main__":
    main()
