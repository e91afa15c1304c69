"""Crashes pushes, removals and gc on an HDFS store, all in one yard; says what did not hold.

A program: `python crash_on_hdfs.py CONFIG.json`, answers in JSON. HDFS clients have threads, so
every step is a process of its own, forked before anything is open.

What an operation has to do may depend on what those before it left, so no call is planned: it is
done again and again, each time failing one call later, until it comes to its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import crash_world
from crash_calls import Calls, Point, StateChanges
from crash_world import OPTIONS, noise
from ending import end_with_parent
from pushing import BERT, push, read_back

from weightyard.errors import YardError
from weightyard.names import ModelName, Ref
from weightyard.records import GcReport
from weightyard.registry import binding, migrate
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.settings import Settings
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.retry import Retry, RetryingStore
from weightyard.storage.store import Store

OPERATIONS = ("push", "rm", "gc")
TRASH = ModelName("team", "trash")
LIMIT_S = 900

_EACH = 10_000
"""Seeds that each has for itself."""


class CountedChanges(StateChanges):
    """At the change with this number the process is killed."""

    def __init__(self, kill_at: int | None = None) -> None:
        super().__init__(self._count)
        self.changes = 0
        self._kill_at = kill_at

    def _count(self) -> None:
        if self.changes == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.changes += 1


class Yard:
    """The yard on HDFS, as one process has it open."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.database = Database(config["database"])
        self._hdfs = HdfsStore(config["store"], Settings(hadoop_conf_dir=Path(config["conf"])))
        self.store: Store = RetryingStore(self._hdfs)
        self._acknowledged = Path(config["acknowledged"])
        migrate.upgrade(self.database)
        binding.bind(self.database, self.store)
        self.registry = Registry(self.database, store=self.store, who="alice")

    def push(self, store: Store, seed: int) -> None:
        contents = contents_of(seed)
        version = push(self.registry, store, *contents, options=OPTIONS, message=str(seed))
        self._acknowledge("there", version.ref)
        self.registry.flush_outbox(store)

    def litter(self, seed: int) -> str:
        """A pack of which a push of the same seed needs the lesser half."""
        contents = [contents_of(seed)[0], noise(seed, 80_000)]
        version = push(self.registry, self.store, *contents, model=TRASH, options=OPTIONS)
        self._acknowledge("there", version.ref)
        self.registry.flush_outbox(self.store)
        return version.ref

    def remove(self, store: Store, ref: str) -> None:
        self.registry.remove(Ref.parse(ref))
        self._acknowledge("gone", ref)
        self.registry.flush_outbox(store)

    def collect(self, store: Store) -> GcReport:
        return crash_world.do_gc(self.registry, store)

    def prepare(self, operation: str, seed: int) -> Callable[[Store], object]:
        """What is there before an operation, and how it is done."""
        if operation == "push":
            return lambda store: self.push(store, seed)
        trash = self.litter(seed)
        if operation == "rm":
            return lambda store: self.remove(store, trash)
        self.push(self.store, seed)
        self.remove(self.store, trash)
        crash_world.age(self.database)  # gc looks for a day at what the one before it took away
        return self.collect

    def recover(self) -> None:
        """Do what is left of those that were killed, so that the next one has only its own."""
        while self.registry.flush_outbox(self.store):
            pass
        for _ in range(2):  # takes it away, and is done with it
            crash_world.age(self.database)
            crash_world.collect(self.registry, self.store)

    def attempt(self, work: Callable[[Store], object], calls: Calls) -> object:
        """Do something, failing beneath what tries again: so HDFS loses answers."""
        store = RetryingStore(calls.store(self._hdfs), Retry(deadline_s=120))
        usual = self.registry
        self.registry = Registry(self.database, store=store, who="alice")  # which asks it, too
        try:
            with calls.database(self.database):
                return work(store)
        finally:
            self.registry = usual

    def acknowledged(self) -> dict[str, str]:
        """What became of versions, as far as someone was told."""
        lines = self._acknowledged.read_text().splitlines()
        return dict(line.split()[::-1] for line in lines)  # type: ignore[misc]

    def _acknowledge(self, what: str, ref: str) -> None:
        with self._acknowledged.open("a") as file:
            file.write(f"{what} {ref}\n")


def contents_of(seed: int) -> list[bytes]:
    return [noise(3 * seed), noise(3 * seed + 1), noise(3 * seed + 2)]


def count_changes(config: dict[str, Any]) -> dict[str, int]:
    """How often operations that nothing happens to change the state."""
    yard = Yard(config)
    yard.push(yard.store, 1)
    yard.litter(2)  # makes the model, as the push before: that is done once
    changes = {}
    for seed, operation in enumerate(OPERATIONS, 3):
        yard.recover()
        calls = CountedChanges()
        yard.attempt(yard.prepare(operation, seed), calls)
        changes[operation] = calls.changes
    return changes


def lose_answers(config: dict[str, Any], operation: str, seed: int) -> dict[str, Any]:
    """Lose the answer of every call on the store once. None of it may even be noticed."""
    yard = Yard(config)
    problems = []
    for number in count():
        point = Point(operation, "store", number, "", "after")
        calls, done = Calls(point), None
        work = yard.prepare(operation, seed + number)
        try:
            done = yard.attempt(work, calls)
        except YardError as why:
            problems.append(f"{point}: {why!r}")
        if isinstance(done, GcReport) and not done.packs_rewritten:
            problems.append(f"{point}: no pack was rewritten")
        if not calls.is_reached:
            return {"lost": number, "problems": problems}
    raise AssertionError("unreachable")


def be_killed(config: dict[str, Any], operation: str, number: int, seed: int) -> dict[str, Any]:
    """Returns only if there are not so many changes."""
    yard = Yard(config)
    yard.recover()
    calls = CountedChanges(kill_at=number)
    yard.attempt(yard.prepare(operation, seed), calls)
    return {"problems": []}


def kill_all(config: dict[str, Any], operation: str, seed: int) -> dict[str, Any]:
    """Kill it at each of its share of changes. How often that happened."""
    first, shares = config["share"]
    for kills in count():
        number = first + kills * shares
        said = apart(partial(be_killed, config, operation, number, seed + number))
        if said is not None:
            return {"kills": kills, **said}
    raise AssertionError("unreachable")


def verify(config: dict[str, Any]) -> dict[str, Any]:
    """Everything visible is whole, all that was acknowledged is so, and nothing is left over."""
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
    seen = {version.ref for name in (BERT, TRASH) for version in yard.registry.versions(name)}
    for ref, state in yard.acknowledged().items():
        if (ref in seen) != (state == "there"):
            problems.append(f"{ref} was acknowledged to be {state}, and is not")
    return {"problems": [*problems, *crash_world.find_orphans(yard.database, yard.store)]}


def apart(work: Callable[[], Any]) -> Any:
    """What a process of its own returns; None if it was killed."""
    from_child, to_parent = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        end_with_parent(parent)
        signal.alarm(LIMIT_S)
        try:
            said = json.dumps(work())
        except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
            said = json.dumps({"problems": [traceback.format_exc()]})
        os.write(to_parent, said.encode())
        os._exit(0)
    os.close(to_parent)
    with os.fdopen(from_child) as answer:
        said = answer.read()
    _, status = os.waitpid(pid, 0)
    if status not in (0, signal.SIGKILL):
        return {"problems": [f"ended with status {status}"]}
    return json.loads(said) if said else None


def main() -> None:
    end_with_parent()
    config = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, Any] = {"changes": apart(lambda: count_changes(config))}
    problems: list[str] = []
    for operation, seed in zip(OPERATIONS, count(_EACH, 2 * _EACH), strict=False):
        lost = apart(partial(lose_answers, config, operation, seed))
        killed = kill_all(config, operation, seed + _EACH)
        found[operation] = {"lost": lost.get("lost"), "kills": killed["kills"]}
        problems += [*lost["problems"], *killed["problems"]]
    problems += apart(lambda: verify(config))["problems"]
    print(json.dumps({**found, "problems": problems}))


if __name__ == "__main__":
    main()
