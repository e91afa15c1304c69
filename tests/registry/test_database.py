"""A database's errors mean to callers what they can do about them; its size means little."""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from collecting import gc, noise, states
from pushing import BERT, push, push_delta
from sqlalchemy import Connection, event, insert, make_url, select, text, update

from bench.filling import MODEL, Filled, fill
from weightyard.errors import BadSetting, Bug, NotAllowed, RegistryUnavailable, StoreFull
from weightyard.format.block import block_id
from weightyard.names import AliasName, BlockId, Ref
from weightyard.opening import open_yard
from weightyard.records import Publication
from weightyard.registry import database as databases
from weightyard.registry import migrate, schema
from weightyard.registry.database import Database, is_one_of
from weightyard.registry.registry import Registry
from weightyard.settings import Settings
from weightyard.storage.local import LocalStore

LIMIT_S = 60.0
QUOTA = insert(schema.quotas).values(project="team", versions=1)

WRONG = ("SELECT nothing FROM packs", "SELECT 1 FROM no_such_table", "SELEC 1")


@pytest.mark.parametrize("statement", WRONG)
def test_a_wrong_statement_is_a_bug_and_not_tried_again(database: Database, statement: str) -> None:
    tried: list[str] = []

    def work(tx: Connection) -> None:
        tried.append(statement)
        tx.execute(text(statement))

    with pytest.raises(Bug, match="database: "):
        database.read(work)
    with pytest.raises(Bug):
        database.write(work)
    assert len(tried) == 2


def test_a_ref_is_resolved_by_one_statement_and_no_transaction(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    pushed = push(registry, store, noise(1, 100), alias="prod")
    seen: list[str] = []
    event.listen(
        database.engine,
        "before_cursor_execute",
        lambda connection, cursor, statement, *rest: seen.append(statement.partition(" ")[0]),
    )
    for ref in ("team/bert", "team/bert@v1", "team/bert@prod"):
        seen.clear()
        assert registry.resolve(Ref.parse(ref)) == pushed
        assert seen == ["SELECT"]
    assert database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_a_broken_rule_of_the_schema_is_a_bug(database: Database) -> None:
    database.write(lambda tx: tx.execute(QUOTA))
    with pytest.raises(Bug):
        database.write(lambda tx: tx.execute(QUOTA))
    edge = insert(schema.version_lists).values(version_id=7, list_id=7)
    with pytest.raises(Bug):
        database.write(lambda tx: tx.execute(edge))


def test_work_that_met_another_writer_finds_what_that_one_left(
    postgres: Callable[[], str], opened: Callable[[str], Database]
) -> None:
    database = opened(postgres())
    looked, written = threading.Barrier(2, timeout=LIMIT_S), []

    def put(tx: Connection) -> str:
        if tx.scalar(select(schema.quotas.c.project)) is not None:
            return "found"
        if not looked.broken and len(written) < 2:
            written.append(1)
            looked.wait()  # both have seen nothing before either writes
        tx.execute(QUOTA)
        return "made"

    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(database.write(put))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    assert sorted(answers) == ["found", "made"]


def test_a_database_that_is_away_is_unavailable(
    tmp_path: Path, opened: Callable[[str], Database]
) -> None:
    nowhere = opened(f"sqlite:///{tmp_path}/no/such/folder/registry.db")
    with pytest.raises(RegistryUnavailable):
        nowhere.read(lambda tx: tx.scalar(select(1)))
    silent = opened("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(RegistryUnavailable):
        silent.write(lambda tx: tx.scalar(select(1)))


@pytest.mark.parametrize("mode", [0o444, 0o000])
def test_a_file_that_this_user_may_not_use_is_named_as_such(migrated: Path, mode: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        file = Path(shutil.copy(migrated, folder))
        file.chmod(mode)
        database = Database(f"sqlite:///{file}")
        if is_root := os.geteuid() == 0:
            os.seteuid(65534)  # to root nothing is forbidden
        try:
            with pytest.raises(NotAllowed, match=rf"{file}.*must be able to write"):
                database.write(lambda tx: tx.execute(QUOTA))
        finally:
            if is_root:
                os.seteuid(0)
        database.close()


def test_a_full_disk_is_said_to_be_full(
    migrated: Path, tmp_path: Path, opened: Callable[[str], Database]
) -> None:
    file = shutil.copy(migrated, tmp_path)
    database = opened(f"sqlite:///{file}")

    def fill_up(tx: Connection) -> None:
        tx.exec_driver_sql("PRAGMA max_page_count=1")  # it takes what is there already
        tx.execute(insert(schema.quotas).values(project="x" * 10**7))

    with pytest.raises(StoreFull, match=rf"{file}.*make room"):
        database.write(fill_up)


def test_a_disk_without_room_for_what_sqlite_puts_beside_a_file_is_said_to_be_full(
    migrated: Path, tmp_path: Path, opened: Callable[[str], Database]
) -> None:
    file = shutil.copy(migrated, tmp_path)
    database = opened(f"sqlite:///{file}")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))  # no file may become larger
    try:
        with pytest.raises(StoreFull, match=rf"{file}.*make room"):
            database.read(lambda tx: tx.scalar(select(schema.quotas.c.project)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("nonsense=1", '"nonsense"'),
        ("connect_timeout=abc", "connect_timeout"),
        ("sslmode=maybe", "sslmode"),
        ("port=xyz", "port"),
        ("plugin=xyz", "xyz"),
    ],
)
def test_a_wrong_option_of_the_url_is_named_and_its_password_is_not(
    opened: Callable[[str], Database], option: str, named: str
) -> None:
    with pytest.raises(BadSetting, match=f"the database's URL: .*{named}") as caught:
        opened(f"postgresql://alice:hunter2@127.0.0.1:1/yard?{option}").read(
            lambda tx: tx.scalar(select(1))
        )
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["sqlite:///yard.db?timeout=abc", "sqlite://host/yard.db"])
def test_a_url_that_sqlite_cannot_take_is_refused(url: str) -> None:
    with pytest.raises(BadSetting, match="the database's URL: "):
        Database(url)


def test_a_user_without_rights_is_a_matter_of_setting_up(
    postgres: Callable[[], str], opened: Callable[[str], Database]
) -> None:
    database = opened(postgres())

    def work(tx: Connection) -> None:
        tx.execute(text("CREATE ROLE weightyard_stranger"))
        tx.execute(text("SET LOCAL ROLE weightyard_stranger"))
        tx.execute(QUOTA)

    with pytest.raises(BadSetting, match="permission denied"):
        database.write(work)


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_cannot_keep_every_text_is_refused_saying_how_to_make_one(
    postgres: Callable[[], str], opened: Callable[[str], Database], encoding: str
) -> None:
    server, name = make_url(postgres()), f"yard_{encoding.lower()}_{secrets.token_hex(4)}"
    with psycopg.connect(server.render_as_string(False), autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'"
        )
    database = opened(server.set(database=name).render_as_string(False))
    for _ in range(2):
        with pytest.raises(BadSetting, match=rf"{encoding}.*template0 ENCODING 'UTF8'"):
            migrate.upgrade(database)


@pytest.mark.parametrize("is_analyzed", [True, False])
def test_in_a_registry_of_many_times_the_size_sqlite_has_to_look_at_no_more(
    tmp_path: Path, opened: Callable[[str], Database], is_analyzed: bool
) -> None:
    small, large = (
        steps_at(opened(f"sqlite:///{tmp_path}/{versions}.db"), versions, is_analyzed)
        for versions in (5, 200)
    )
    assert all(large[what] <= 1.5 * small[what] for what in small), (small, large)


def steps_at(database: Database, versions: int, is_analyzed: bool) -> dict[str, int]:
    """How many steps SQLite takes for what is asked all day."""
    migrate.upgrade(database)
    fill(database, Filled(versions))
    condemn = update(schema.packs).where(schema.packs.c.id == 2).values(state="condemned")
    database.write(lambda tx: tx.execute(condemn))
    if is_analyzed:  # by its operator
        database.write(lambda tx: tx.execute(text("ANALYZE")))
    database.close()  # what was analyzed is known to those who open it after that
    ticks: list[None] = []
    event.listen(
        database.engine,
        "connect",
        lambda connection, record: connection.set_progress_handler(lambda: ticks.append(None), 10),
    )
    registry = Registry(database, who="alice")
    upload = registry.open_upload(MODEL, Publication())
    b = schema.blocks
    first = select(b.c.hash).order_by(b.c.id).limit(1000)  # some of them in the condemned pack
    hashes = database.read(lambda tx: tx.scalars(first).all())
    blocks = [BlockId.of(raw) for raw in hashes]

    def steps(work: Callable[[], object]) -> int:
        ticks.clear()
        work()
        return len(ticks)

    return {
        "the newest": steps(lambda: registry.resolve(Ref(MODEL, None))),
        "a number": steps(lambda: registry.resolve(Ref(MODEL, 2))),
        "an alias": steps(lambda: registry.resolve(Ref(MODEL, AliasName("prod")))),
        "a claim of one": steps(lambda: upload.claim(blocks[:1])),
        "a claim of many": steps(lambda: upload.claim(blocks)),
    }


def test_many_values_are_looked_up_in_an_index_not_by_reading_the_table(
    postgres: Callable[[], str], opened: Callable[[str], Database]
) -> None:
    database, blocks = opened(postgres()), schema.blocks
    fill = text(
        "INSERT INTO blocks (hash, raw_bytes) "
        "SELECT sha256(n::text::bytea), 1 FROM generate_series(1, 60000) n"
    )
    database.write(lambda tx: tx.execute(fill))
    database.write(lambda tx: tx.execute(text("ANALYZE blocks")))
    many = [secrets.token_bytes(32) for _ in range(5000)]

    def plan(tx: Connection) -> str:
        # As if the table were many times as large: jumping about in it is dear.
        tx.execute(text("SET LOCAL random_page_cost = 20"))
        looked_up = select(blocks.c.id).where(is_one_of(tx, blocks.c.hash, many))
        said = looked_up.compile(tx, compile_kwargs={"render_postcompile": True})
        return "\n".join(
            tx.exec_driver_sql(f"EXPLAIN {said}", dict(said.params)).scalars()  # type: ignore[arg-type]
        )

    found = database.read(plan)
    assert "uq_blocks_hash" in found
    assert "Seq Scan" not in found


def test_an_embedded_yard_keeps_a_write_ahead_log(tmp_path: Path) -> None:
    with open_yard(settings=Settings(home=tmp_path, cache=tmp_path / "cache")) as yard:
        (file,) = tmp_path.rglob("registry.db")
        with closing(sqlite3.connect(file)) as others:
            assert others.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert yard.models() == []


def test_a_claim_of_a_delta_revives_its_base_too(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    base = noise(1)
    delta = bytes(100) + base[100:]
    push(registry, store, base)
    push_delta(registry, store, delta, base)
    for number in (2, 1):
        registry.remove(Ref.parse(f"{BERT}@v{number}"))
    gc(registry, store, grace_s=3600)
    assert states(database) == ["condemned", "condemned"]
    claimed = registry.open_upload(BERT, Publication()).claim([block_id(delta)])
    assert states(database) == ["live", "live"]
    assert claimed[block_id(delta)][0].encoding.base == block_id(base)


@pytest.fixture
def opened() -> Iterator[Callable[[str], Database]]:
    """Opens databases, and closes them after the test."""
    databases: list[Database] = []

    def open_database(url: str) -> Database:
        databases.append(Database(url))
        return databases[-1]

    yield open_database
    for database in databases:
        database.close()


def test_a_server_that_accepts_and_says_nothing_is_given_up(
    opened: Callable[[str], Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(databases._DEADLINES, "connect_timeout", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        database = opened(f"postgresql://alice@127.0.0.1:{silent.getsockname()[1]}/yard")
        began = time.monotonic()
        with pytest.raises(RegistryUnavailable):
            database.read(lambda tx: tx.execute(text("SELECT 1")))
    assert time.monotonic() - began < LIMIT_S


def _waits(database: Database) -> str:
    return database.read(lambda tx: str(tx.scalar(text("SHOW lock_timeout"))))


def test_what_the_url_says_of_deadlines_counts(
    postgres: Callable[[], str], opened: Callable[[str], Database]
) -> None:
    url = make_url(postgres())
    said = {"connect_timeout": "7", "options": "-c lock_timeout=5s"}
    database = opened(url.update_query_dict(said).render_as_string(False))
    assert _waits(database) == "5s"
    with database.engine.connect() as connection:
        raw: Any = connection.connection.dbapi_connection
        assert raw.info.get_parameters()["connect_timeout"] == "7"
        assert raw.info.get_parameters()["keepalives_idle"] == "30"
    assert _waits(opened(url.render_as_string(False))) == "1min"


def test_work_that_waited_too_long_for_another_is_run_again(
    postgres: Callable[[], str],
    opened: Callable[[str], Database],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(databases, "_LOCK_TIMEOUT", "50ms")
    database = opened(postgres())
    locked, let_go, tries = threading.Event(), threading.Event(), []

    def hold(tx: Connection) -> None:
        tx.execute(select(schema.registry).with_for_update())
        locked.set()
        assert let_go.wait(LIMIT_S)

    def want(tx: Connection) -> int:
        tries.append(1)
        if len(tries) > 1:  # the first waited for as long as it may
            let_go.set()
            holder.join(LIMIT_S)
        return len(tx.execute(select(schema.registry).with_for_update()).all())

    holder = threading.Thread(target=database.write, args=(hold,))
    holder.start()
    assert locked.wait(LIMIT_S)
    assert database.write(want) == 1
    assert len(tries) == 2
    assert not holder.is_alive()
