"""Crashes an operation at one call after the other, and says what did not hold afterwards.

A program: `python crash_points.py CONFIG.json`, answers in JSON. It warms up once, counts the calls
of a clean run, and then forks for each point, so that no interpreter has to start anew. Nothing is
open when it forks: every process opens the store and the database itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import secrets
import shutil
import signal
import sqlite3
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import crash_world
import psycopg
from blake3 import blake3
from crash_world import OPERATIONS, Outcome
from ending import end_with_parent
from waiting import eventually

from weightyard.errors import YardError
from weightyard.records import GcReport
from weightyard.registry import migrate, schema
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Store
from weightyard.testing.faults import Fault, FaultyStore

LIMIT_S = 120
MODES = ("before", "after", "kill")
_LOOKS = ("stat", "list", "locate", "read")
WRITES = ("INSERT", "UPDATE", "DELETE")


Call: TypeAlias = tuple[str, int, str]
"""`store` or `sql`, the number among those, and what is called."""


@dataclass(frozen=True, slots=True)
class Point:
    """A call of an operation, and what happens there."""

    operation: str
    kind: str
    """`store` or `sql`."""
    index: int
    """Among the calls of its kind."""
    call: str
    mode: str
    """`before`, `after`, `kill`; or `pause`, to let gc run."""
    gc: Call | None = None
    """With `pause`: the call at which gc is killed; None: it comes to its end."""
    expired: bool = False
    """With `pause`: the writer is away so long that its lease ends."""


class Calls:
    """Counts the calls on store and database, and lets one of them fail."""

    def __init__(self, point: Point | None = None, pause: Callable[[], None] | None = None) -> None:
        self.seen: list[Call] = []
        self.is_reached = False
        self._point = point
        self._pause = pause
        self._counts = {"store": 0, "sql": 0}
        self._lock = threading.Lock()  # files of the outbox are staged side by side

    def store(self, store: Store) -> Store:
        faults = {}
        if self._point is not None and self._point.kind == "store":
            mode = {"before": Fault.BEFORE, "after": Fault.AFTER}.get(self._point.mode)
            faults = {self._point.index: mode} if mode is not None else {}
        return FaultyStore(store, faults, on_call=lambda index, name: self._note("store", name))

    @contextmanager
    def database(self, database: Database) -> Iterator[Database]:
        """Counts what the dialect is told to do; a transaction's begin and commit, too."""
        dialect: Any = database.engine.dialect
        error = sqlite3.OperationalError if database.is_sqlite else psycopg.OperationalError
        names = ["do_execute", "do_executemany", "do_commit"]
        if not database.is_sqlite:  # SQLite's is a statement
            names.append("do_begin")
        for name in names:
            setattr(dialect, name, self._counted(name, getattr(dialect, name), error))
        try:
            yield database
        finally:
            for name in names:
                delattr(dialect, name)

    def _counted(
        self, name: str, call: Callable[..., None], error: type[Exception]
    ) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            what = " ".join(str(arguments[1]).split()[:3]) if "exec" in name else name[3:].upper()
            mode = self._note("sql", what)
            if mode == "before":
                raise error(f"injected before {what}")
            call(*arguments, **options)
            if mode == "after":
                raise error(f"injected after {what}")

        return run

    def _note(self, kind: str, name: str) -> str | None:
        """What is to happen at this call."""
        with self._lock:
            index = self._counts[kind]
            self._counts[kind] += 1
            self.seen.append((kind, index, name))
        point = self._point
        if point is None or (point.kind, point.index) != (kind, index):
            return None
        self.is_reached = True
        if point.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if point.mode == "pause" and self._pause is not None:
            self._pause()
        return point.mode


class World:
    """Where one job runs: a folder with a store and, with SQLite, the database."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.work = Path(config["work"])
        self.server: str | None = config.get("server")
        # Without a name of its own, PostgreSQL's client takes it from the environment, and SQLite
        # looks into the current folder: one engine, warm before forking, serves every job.
        self.database = Database(self.server or "sqlite:///file:registry.db?uri=true")
        self.base = self.work / "base"
        self._yards = count()

    def begin(self, jobs: int) -> None:
        """Make the yard that every job starts from."""
        self.base.mkdir(parents=True)
        (self.work / "known").mkdir()
        os.chdir(self.base)
        os.environ["PGDATABASE"] = "crash_base"
        if self.server is not None:
            self._execute("postgres", "CREATE DATABASE crash_base")
        migrate.upgrade(self.database)
        self.registry = Registry(self.database, store=LocalStore(Path("store")), who="alice")
        crash_world.begin(self.database, LocalStore(Path("store")))
        self.database.close()
        if self.server is not None:
            self._execute("crash_base", _remember_all())
            self._wait_until_closed("crash_base")
            for job in range(jobs):
                self._execute("postgres", f"CREATE DATABASE crash_{job} TEMPLATE crash_base")

    def enter(self, job: int) -> Store:
        """A fresh copy of that yard, which this process is in from now on."""
        folder = self.work / f"job-{job}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.base, folder)
        if self.server is not None:
            # A collector that was killed has its lock until the server has noticed.
            self._wait_until_closed(f"crash_{job}")
            self._execute(f"crash_{job}", _recall_all())
        return self.return_to(job)

    def return_to(self, job: int) -> Store:
        """The yard of a job as it was left."""
        os.chdir(self.work / f"job-{job}")
        os.environ["PGDATABASE"] = f"crash_{job}"
        store = LocalStore(Path("store"))
        # Names of packs come again at every point, and readers remember where a store's packs lie.
        store.url += f"?{next(self._yards)}"
        return store

    def answer(self, job: int) -> Path:
        return self.work / f"answer-{job}"

    def is_new(self, state: str) -> bool:
        """Whether no worker has judged this state yet."""
        try:
            (self.work / "known" / blake3(state.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def fingerprint(self, job: int) -> str:
        """All that is in a job's yard, but for the times."""
        self.return_to(job)
        seen = blake3()
        for file in sorted(path for path in Path("store").rglob("*") if path.is_file()):
            seen.update(f"{file} {file.stat().st_size}\n".encode())
            if file.parts[1] in ("packs", "manifests", "staging"):
                seen.update(file.read_bytes())
        if self.server is not None:
            with psycopg.connect(self.server, dbname=f"crash_{job}") as connection:
                for query in _without_times():
                    seen.update(repr(connection.execute(query).fetchall()).encode())
            return seen.hexdigest()
        database = sqlite3.connect("registry.db")
        for query in _without_times():
            seen.update(repr(database.execute(query).fetchall()).encode())
        database.close()
        return seen.hexdigest()

    def end(self, jobs: int) -> None:
        self.database.close()
        if self.server is not None:
            for name in ("crash_base", *(f"crash_{job}" for job in range(jobs))):
                self._execute("postgres", f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def _wait_until_closed(self, name: str) -> None:
        """The server ends a session some time after its client has gone."""
        sessions = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = %s AND backend_type = 'client backend'"
        )
        with psycopg.connect(self.server or "", dbname="postgres", autocommit=True) as connection:
            eventually(lambda: connection.execute(sessions, [name]).fetchone() == (0,))

    def _execute(self, name: str, statements: str) -> None:
        with psycopg.connect(self.server or "", dbname=name, autocommit=True) as connection:
            connection.execute(statements)


def _without_times() -> list[str]:
    return [
        "SELECT {} FROM {} ORDER BY 1, 2".format(", ".join(f'"{c.name}"' for c in columns), table)
        for table in schema.metadata.sorted_tables
        if len(columns := [c for c in table.c if not c.name.endswith(("_ms", "content"))]) > 1
    ]


def _remember_all() -> str:
    tables = schema.metadata.sorted_tables
    copies = [f"CREATE TABLE base.{t.name} AS TABLE public.{t.name}" for t in tables]
    return ";".join(["CREATE SCHEMA base", *copies])


def _recall_all() -> str:
    tables = schema.metadata.sorted_tables
    serial = [t.name for t in tables if "id" in t.c and t.name != "registry"]
    return ";".join(
        [
            "SET session_replication_role = replica",
            *(f"DELETE FROM public.{t.name}" for t in tables),
            *(f"INSERT INTO public.{t.name} SELECT * FROM base.{t.name}" for t in tables),
            *(
                f"SELECT setval(pg_get_serial_sequence('{name}', 'id'), "
                f"(SELECT coalesce(max(id), 0) + 1 FROM public.{name}), false)"
                for name in serial
            ),
        ]
    )


def count_calls(world: World, operation: str) -> list[Call]:
    """The calls of a clean run, which also warms this process up."""
    store = world.enter(0)
    calls = Calls()
    with calls.database(world.database):
        done = OPERATIONS[operation](world.registry, calls.store(store))
    problems = list(crash_world.verify(world.registry, store, operation, Outcome(is_done=True)))
    if isinstance(done, GcReport) and not done.packs_rewritten:
        problems.append("no pack was merged")
    world.database.close()
    if problems:
        raise SystemExit(f"a clean {operation} fails: {problems}")
    return calls.seen


def attempt(world: World, store: Store, point: Point, pause: Callable[[], None] | None) -> Outcome:
    """Do the operation with its fault."""
    _make_ids_repeatable(point.operation)
    calls = Calls(point, pause)
    try:
        with calls.database(world.database):
            OPERATIONS[point.operation](world.registry, calls.store(store))
    except YardError as why:
        outcome = Outcome(is_done=False, error=type(why).__name__)
    except Exception:  # noqa: BLE001 - told to whoever judges
        outcome = Outcome(is_done=False, error=traceback.format_exc(), is_expected=False)
    else:
        outcome = Outcome(is_done=True)
    return dataclasses.replace(outcome, is_reached=calls.is_reached)


def _make_ids_repeatable(who: str) -> None:
    """The same names for packs and uploads at every point: equal states are judged once."""
    repeatable = random.Random(who)
    secrets.token_bytes = repeatable.randbytes  # type: ignore[assignment]


def _beside_gc(world: World, store: Store, point: Point) -> Outcome:
    """A push that stops at its point; gc runs, perhaps until it is killed; the push goes on."""
    pushing = _Beside(world, store, point)
    if pushing.is_paused:
        if point.expired:
            crash_world.age(world.database)
            world.database.close()
        end = ("none", 0, "") if point.gc is None else point.gc
        _Beside(world, store, Point("gc", *end, "kill")).outcome()
    return pushing.outcome()


class _Beside:
    """An operation in a process of its own, begun, and perhaps waiting at its point."""

    def __init__(self, world: World, store: Store, point: Point) -> None:
        from_child, to_parent = os.pipe()
        from_parent, self._to_child = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._to_child)
            signal.alarm(LIMIT_S)

            def pause() -> None:
                os.write(to_parent, b"paused\n")
                os.read(from_parent, 1)

            outcome = attempt(world, store, point, pause)
            os.write(to_parent, json.dumps(dataclasses.asdict(outcome)).encode())
            os._exit(0)
        os.close(to_parent)
        os.close(from_parent)
        self._said = os.fdopen(from_child)
        self._first = self._said.readline()
        self.is_paused = self._first == "paused\n"

    def outcome(self) -> Outcome:
        """Let it go on, and wait for its end."""
        os.close(self._to_child)
        rest = self._said.read() if self.is_paused else self._first
        self._said.close()
        os.waitpid(self._pid, 0)
        return Outcome(**json.loads(rest)) if rest else Outcome(is_done=False)


class Worker:
    """Lets one point after the other happen in its yard, and judges what each leaves."""

    def __init__(self, world: World, job: int) -> None:
        self._world = world
        self._job = job
        self.problems: list[str] = []
        self.judged = 0

    def run(self, points: Iterable[Point]) -> None:
        for point in points:
            signal.alarm(LIMIT_S)
            outcome = self._happen(point)
            self._world.database.close()
            state = self._world.fingerprint(self._job)
            if self._world.is_new(f"{state} {point.operation} {_told(point, outcome)}"):
                self.judged += 1
                self.problems += [f"{point}: {one}" for one in self._judge(point, outcome)]
                self._world.database.close()

    def _happen(self, point: Point) -> Outcome:
        """In a fresh yard; what the doer was told, if it lived."""
        store = self._world.enter(self._job)
        match point.mode:
            case "kill":
                outcome = _Beside(self._world, store, point).outcome()
                is_reached = not outcome.is_done and not outcome.error
            case "pause":
                outcome = _beside_gc(self._world, store, point)
                is_reached = outcome.is_reached
            case _:
                outcome = attempt(self._world, store, point, None)
                is_reached = outcome.is_reached
        if not is_reached:
            self.problems.append(f"{point}: was not reached")
        return outcome

    def _judge(self, point: Point, outcome: Outcome) -> Iterator[str]:
        """What does not hold after a restart."""
        _make_ids_repeatable("judge")
        store = self._world.return_to(self._job)
        yield from crash_world.verify(self._world.registry, store, point.operation, outcome)
        if point.mode == "pause" and not point.expired and not outcome.is_done:
            yield f"gc made a push fail: {outcome.error}"


def _told(point: Point, outcome: Outcome) -> str:
    """What is judged besides the state. Dying says as little as any error one may expect."""
    is_blamed = point.mode == "pause" and not point.expired
    error = outcome.error if is_blamed or not outcome.is_expected else ""
    return f"{outcome.is_done} {error}"


def run_all(world: World, points: Sequence[Point], jobs: int) -> dict[str, Any]:
    """All points, by so many workers. What they found."""
    workers = {}
    for job in range(jobs):
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            worker = Worker(world, job)
            try:
                worker.run(points[job::jobs])
            except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
                worker.problems.append(traceback.format_exc())
            found = {"judged": worker.judged, "problems": worker.problems}
            world.answer(job).write_text(json.dumps(found))
            os._exit(0)
        workers[pid] = job
    judged, problems = 0, []
    while workers:
        pid, status = os.wait()
        job = workers.pop(pid)
        if status:
            problems.append(f"worker {job} ended with status {status}")
        else:
            found = json.loads(world.answer(job).read_text())
            judged += found["judged"]
            problems += found["problems"]
    return {"points": len(points), "judged": judged, "problems": problems}


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


def plan_pairs(calls: Mapping[str, Sequence[Call]]) -> list[Point]:
    """Every call of push outside a transaction × every change gc makes, and gc left to end.

    A collector killed inside a transaction leaves what one leaves that is killed at its commit,
    which the sweep of single calls shows.
    """
    outside = [call for call in calls["push"] if call[0] == "store" or call[2].startswith("BEGIN")]
    return [
        Point("push", *call, "pause", gc=gc, expired=expired)
        for call in outside
        for gc in (*state_changes(calls["gc"]), None)
        for expired in (False, True)
    ]


def state_changes(calls: Sequence[Call]) -> Iterator[Call]:
    """Where files are made, get or lose their names, and transactions that write are committed."""
    for group in transactions(calls):
        if group[0][2] in ("stage", "close", "publish", "delete", "adjust") or is_writing(group):
            yield group[-1]


def main() -> None:
    end_with_parent()
    config = json.loads(Path(sys.argv[1]).read_text())
    jobs = config.get("jobs", 2)
    world = World(config)
    world.begin(jobs)
    calls = {operation: count_calls(world, operation) for operation in OPERATIONS}
    wanted = {name: calls[name] for name in config.get("operations", OPERATIONS)}
    first, shares = config.get("share", (0, 1))
    points = plan_points(wanted, config.get("extent", "usual"))[first::shares]
    if "pairs" in config:
        pairs = plan_pairs(calls)
        chosen = random.Random(config.get("seed", 0))
        points += chosen.sample(pairs, min(config["pairs"], len(pairs)))[first::shares]
    found = run_all(world, points, jobs)
    world.end(jobs)
    counts = {operation: len(seen) for operation, seen in calls.items()}
    print(json.dumps({**found, "calls": counts}))


if __name__ == "__main__":
    main()
