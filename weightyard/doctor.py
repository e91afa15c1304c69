"""Doctor: what works here, what does not, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sqlalchemy import select

from weightyard.codec import compiled
from weightyard.errors import (
    FileMissing,
    NotAllowed,
    Retryable,
    SchemaUnknown,
    StoreFull,
    YardError,
)
from weightyard.opening import chosen_url, database_url, is_service
from weightyard.records import Record
from weightyard.registry import binding, freshness, migrate, outbox, schema
from weightyard.registry.database import Database, now_ms
from weightyard.registry.schema import Dedup
from weightyard.settings import Settings, unknown_variables
from weightyard.storage.hdfs.remote import InSafeMode
from weightyard.storage.opening import folder_of, open_store
from weightyard.storage.store import ReadPath, Store

if TYPE_CHECKING:
    from weightyard.storage.hdfs.condition import ClusterSettings, Condition

_LIBRARIES = (
    "weightyard", "hdfs-native", "hdfs", "zstandard", "blake3", "xxhash", "numpy", "safetensors",
    "sqlalchemy", "alembic", "psycopg", "fastapi", "torch", "pyarrow",
)  # fmt: skip
_SKEW_WARN_S, _SKEW_FAIL_S = 5.0, 240.0
"""How far clocks may differ. At five minutes Kerberos refuses."""
_LIMIT_S = 10.0
_LITTLE_ROOM_BYTES = 1 << 30
_MANY_ENTRIES = 500_000
"""The journal is one folder that only grows; by default a folder of HDFS holds 1,048,576 files."""


_DEDUP = {
    Dedup.YARD: "equal content is stored once, whatever its projects",
    Dedup.PROJECT: "equal content is stored once in each project, and none learns of another's",
}


class Finding(Record):
    """One thing that was looked at."""

    check: str
    state: Literal["ok", "warn", "fail"]
    message: str
    advice: str = ""


def examine(
    url: str | None = None, *, token: str | None = None, settings: Settings | None = None
) -> Iterator[Finding]:
    """Look at everything a yard needs. What fails is a finding, too; nothing raises."""
    settings = settings or Settings()
    settings = settings.model_copy(update={"deadline_s": min(settings.deadline_s, _LIMIT_S)})
    yield _ok("versions", _versions())
    yield _codec()
    try:
        chosen = chosen_url(url, settings)
    except YardError as why:
        yield _fail("settings", why)
        return
    yield _ok("settings", _source(url, settings, chosen))
    for name, near in unknown_variables().items():
        meant = f"did you mean {near}?" if near else "docs/cli.md lists all settings"
        yield _warn("settings", f"{name} is set, but there is no such setting", meant)
    if is_service(chosen):
        yield from _guarded("service", lambda: _service(str(chosen), token, settings))
        return
    try:
        store = open_store(chosen, settings)
    except YardError as why:
        yield _fail("store", why)
        return
    with store:
        silent = False
        database = _guarded("database", lambda: _database(store, settings))
        for finding in chain(_store(store, settings), database):
            silent |= finding.state == "fail" and finding.check in ("kerberos", "hdfs", "database")
            yield finding
        if not silent:
            yield from _guarded("binding", lambda: _binding(store, settings))


def _service(url: str, token: str | None, settings: Settings) -> Iterator[Finding]:
    from weightyard.opening import open_yard

    with open_yard(url, token=token, settings=settings) as yard:
        yard.catalogue.models(limit=1)
        yield _ok("service", f"{url} answers, and knows who is asking")
        yield _ok(
            "isolation",
            "what you may see through the service is decided by your token; whoever can read its "
            "store reads every project",
        )
        try:
            store = yard.store
        except YardError as why:
            yield _warn("store", str(why), "all goes through the service, slower")
            return
        if yard.reads_by_locations:
            yield _ok(
                "locations",
                "bytes come straight from DataNodes, where the service says: reading needs no "
                "NameNode and no Kerberos; what follows is for pushing straight to the store",
            )
        for finding in _store(store, settings):
            is_spared = yard.reads_by_locations and finding.state == "fail"
            yield finding.model_copy(update={"state": "warn"}) if is_spared else finding


def _store(store: Store, settings: Settings) -> Iterator[Finding]:
    folder = folder_of(store)
    if folder is not None:
        yield from _guarded("store", lambda: _folder(folder))
    else:
        yield from _hdfs(store.url, settings)


def _folder(folder: Path) -> Iterator[Finding]:
    if not folder.exists():
        yield _warn("store", f"{folder} is not there yet", "the first push makes it")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield _warn("store", f"{folder} can be read, not written", "fine for pull and load only")
    else:
        yield _ok("store", f"{folder} can be read and written")
    free = shutil.disk_usage(folder).free
    said = f"{free / 2**30:.1f} GiB are free in {folder}"
    if free < _LITTLE_ROOM_BYTES:
        yield _warn("room", said, "make room: `weightyard gc` frees what no version needs")
    else:
        yield _ok("room", said)
    readers = _readers(folder.stat().st_mode & 0o777, "its group") or "only its owner"
    yield _ok("isolation", f"{readers} can read {folder}, and with it every project")


def _hdfs(url: str, settings: Settings) -> Iterator[Finding]:
    from weightyard.storage.hdfs.condition import Condition

    try:
        condition = Condition(url, settings)
    except YardError as why:
        yield _fail("hadoop configuration", why)
        return
    known = condition.settings
    yield _configuration(known)
    user = known.user
    if known.is_kerberos:
        try:
            ticket = condition.ticket()
        except YardError as why:
            yield _fail("kerberos", why)
            return
        user = ticket.principal
        yield _ok("kerberos", f"you are {user}, by a ticket for {ticket.left_s / 3600:.1f} hours")
    try:
        is_there = condition.is_there()
    except YardError as why:
        yield _fail("hdfs", why)
        return
    yield _ok("hdfs", f"{known.authority} answers by RPC")
    if not known.is_kerberos:
        yield _warn(
            "kerberos",
            f"the cluster takes your word for being {user}",
            "on a shared cluster, switch Kerberos on: permissions mean little without it",
        )
    yield from _guarded("webhdfs", lambda: _webhdfs(condition))
    if not is_there:
        yield _warn("store", f"{known.root} is not there yet", "make it: `weightyard init`")
        return
    yield from _guarded("permissions", lambda: _packs(condition, user))
    yield from _guarded("read path", lambda: _read_paths(url, settings))


def _configuration(known: ClusterSettings) -> Finding:
    if known.has_configuration:
        about = f", which are about {known.default}" if known.default else ""
        return _ok("hadoop configuration", f"read from the files in {known.folder}{about}")
    where = f" in {known.folder}" if known.folder else ""
    return _warn(
        "hadoop configuration",
        f"no core-site.xml or hdfs-site.xml was found{where}",
        "have HADOOP_CONF_DIR name the folder that has them, for high availability, Kerberos and "
        "the cluster's own ports",
    )


def _webhdfs(condition: Condition) -> Iterator[Finding]:
    skew_s = time.time() - condition.clock_s()
    yield _ok("webhdfs", f"{', '.join(condition.settings.webhdfs)} answers")
    yield _skew("NameNode", skew_s, resolution_s=1.0)


def _packs(condition: Condition, user: str) -> Iterator[Finding]:
    try:
        packs = condition.packs()
    except FileMissing:
        yield _warn("permissions", "there is no packs/ folder yet", "make it: `weightyard init`")
        return
    yield _ok(
        "permissions",
        f"packs/ belongs to {packs.owner}:{packs.group} with mode {packs.mode:04o}; you are {user}",
    )
    if packs.is_encrypted:
        yield _warn(
            "encryption",
            "packs/ is in an encryption zone: DataNodes hold ciphertext, so reads are not direct",
            "for direct reads keep the yard outside a zone",
        )
    elif condition.is_transfer_protected():
        yield _warn(
            "encryption",
            "the cluster protects transfers with SASL or encryption, so reads are not direct",
            "nothing to do; reads go through hdfs-native, slower",
        )
    else:
        yield _ok("encryption", "neither a zone nor protected transfers stand in the way")
    yield _isolation("packs/", readable_by=_readers(packs.mode, f"the group {packs.group}"))


def _read_paths(url: str, settings: Settings) -> Iterator[Finding]:
    from weightyard.storage.hdfs.store import HdfsStore

    with HdfsStore(url, settings) as store:
        found = store.probe()
        why_not_written = store.why_not_written_directly()
    if found.ways:
        yield _read_path(found.ways)
    if isinstance(found.not_written, NotAllowed):
        yield _warn(
            "write path",
            f"you may not write: {found.not_written}",
            "fine for pull and load only; for more, ask for access",
        )
    elif found.not_written is not None:
        yield _fail("write path", found.not_written)
    elif why_not_written is None:
        yield _ok("write path", "new files are sent straight to DataNodes")
    else:
        yield _warn(
            "write path",
            f"new files go by hdfs-native, which takes twice the CPU: {why_not_written}",
            "nothing to do; direct writes need plain transfers and no Kerberos",
        )


def _read_path(ways: Mapping[ReadPath, str | None]) -> Finding:
    working = [way for way, why_not in ways.items() if why_not is None]
    said = "; ".join(f"{way}: {why_not or 'works'}" for way, why_not in ways.items())
    if not working:
        return Finding(check="read path", state="fail", message=said, advice="see each reason")
    if working[0] == ReadPath.SHORT_CIRCUIT:
        return _ok("read path", f"replicas of this host are read from their files. {said}")
    if working[0] == ReadPath.DIRECT:
        return _ok("read path", f"reads are direct. {said}")
    return _warn(
        "read path",
        f"reads go by {working[0]}, not directly. {said}",
        "direct reads need the DataNodes' transfer port and no SASL or encryption zone",
    )


def _database(store: Store, settings: Settings) -> Iterator[Finding]:
    with _opened(store, settings) as database:
        if database is None:
            yield _warn("database", "there is none yet", "the first push makes it")
            return
        shown = database.shown
        began = time.time()
        there_ms = database.read(lambda tx: tx.scalar(select(now_ms())))
        took_s = time.time() - began
        yield _ok("database", f"{shown} answers in {took_s * 1000:.0f} ms")
        if database.is_sqlite and store.replicates:
            yield _warn(
                "database",
                "an SQLite file of this host holds the catalogue of a shared store",
                "for several hosts, set WEIGHTYARD_DB=postgresql://… or use a service",
            )
        yield _skew("database", began + took_s / 2 - (there_ms or 0) / 1000, resolution_s=0.1)
        yield _schema(database)


def _schema(database: Database) -> Finding:
    migrate.require_known(database)
    found, newest = migrate.current(database), migrate.newest()
    if found == newest:
        return _ok("schema", f"{newest}, as this weightyard needs it")
    said = f"{found or 'none'}; this weightyard needs {newest}"
    if database.is_sqlite:
        return _warn("schema", said, "the next command that opens the yard upgrades it")
    return Finding(check="schema", state="fail", message=said, advice="`weightyard db upgrade`")


def _binding(store: Store, settings: Settings) -> Iterator[Finding]:
    with _opened(store, settings) as database:
        if database is None:
            binding.require_vacant(store, None)
            return
        if migrate.current(database) != migrate.newest():
            return
        mine = database.read(lambda tx: tx.execute(select(schema.registry)).one())
        if binding.read_yard_file(store) is None and mine.yard_id is None:
            binding.require_vacant(store, database.files_in(folder_of(store)))
            yield _warn("binding", "store and database are both new", "the first push binds them")
            return
        bound = binding.bind(database, store)
        said = f"registry {bound.registry_id} and yard {bound.yard_id} belong together"
        yield _ok("binding", said)
        yield _ok("dedup", _DEDUP[bound.dedup])
        freshness.require_newest(database, store)
        yield _ok("freshness", "the database knows of all that is in the store's journal")
        entries = database.read(outbox.last_sequence)
        if store.replicates and entries > _MANY_ENTRIES:
            yield _warn(
                "journal",
                f"journal/ has {entries:,} entries; a folder that HDFS takes for full would stop "
                "records from being written, and gc",
                "raise dfs.namenode.fs-limits.max-directory-items (1,048,576 unless it is set) in "
                "the NameNode's hdfs-site.xml",
            )
        if (late := database.read(outbox.late)) is not None:
            yield _warn("records", str(late), "`weightyard check --heal` writes them")
        for path, obstacle in outbox.set_aside(database, store):
            said = f"{path} could not be written: the file of that name {obstacle.value}"
            yield _warn("records", said, "`weightyard check` says what to do")


@contextmanager
def _opened(store: Store, settings: Settings) -> Iterator[Database | None]:
    """The database, unless it is an SQLite file that is not there: looking must not make it."""
    database = Database(database_url(store, settings))
    try:
        yield database if database.is_there else None
    finally:
        database.close()


def _guarded(check: str, looks: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Findings of one kind. An error ends them, and is a finding itself."""
    try:
        yield from looks()
    except YardError as why:
        yield _fail(check, why)


def _versions() -> str:
    found = [f"Python {platform.python_version()} on {sys.platform}"]
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _codec() -> Finding:
    if compiled.is_there():
        return _ok("codec", "compiled code splits, codes, decodes and merges planes")
    return _warn(
        "codec",
        "there is no compiled code: blocks take longer to encode and to decode",
        "install a C compiler, then weightyard anew: its wheel is built with compiled code then",
    )


def _source(url: str | None, settings: Settings, chosen: str | None) -> str:
    if url is not None:
        return f"{chosen}, as the command line says"
    if settings.url is not None:
        return f"{chosen}, by WEIGHTYARD_URL"
    if settings.store is not None:
        return f"{chosen}, by WEIGHTYARD_STORE"
    return f"the embedded default in {settings.home}"


def _skew(what: str, skew_s: float, *, resolution_s: float) -> Finding:
    off_s = max(0.0, abs(skew_s) - resolution_s)
    if off_s < _SKEW_WARN_S:
        return _ok(
            "clock", f"this host and the {what} agree to {max(abs(skew_s), resolution_s):.1f} s"
        )
    said = f"this host is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the {what}"
    advice = "synchronise the clocks (NTP): leases, tokens and Kerberos go by them"
    state: Literal["warn", "fail"] = "fail" if off_s > _SKEW_FAIL_S else "warn"
    return Finding(check="clock", state=state, message=said, advice=advice)


def _readers(mode: int, group: str) -> str | None:
    if mode & 0o004:
        return "everyone"
    return group if mode & 0o040 else None


def _isolation(what: str, *, readable_by: str | None) -> Finding:
    if readable_by is None:
        return _ok("isolation", f"only the owner reads {what}; others go through the service")
    said = f"{readable_by} can read {what}, and with it the weights of every project"
    if readable_by == "everyone":
        return _warn(
            "isolation",
            said,
            "tokens isolate projects only for those who read through the service: "
            "`weightyard init --mode 0750 --group READERS`, or 0700",
        )
    return _ok("isolation", said)


def _ok(check: str, message: str) -> Finding:
    return Finding(check=check, state="ok", message=message)


def _warn(check: str, message: str, advice: str) -> Finding:
    return Finding(check=check, state="warn", message=message, advice=advice)


def _fail(check: str, why: YardError) -> Finding:
    return Finding(check=check, state="fail", message=str(why), advice=_advice(why))


def _advice(why: YardError) -> str:
    match why:
        case NotAllowed():
            return "ask for access, or log in (kinit, WEIGHTYARD_TOKEN)"
        case SchemaUnknown():
            return "`weightyard db upgrade`, or a newer weightyard"
        case StoreFull():
            return "make room (`weightyard gc`), or have the quota raised"
        case InSafeMode():
            return (
                "wait, or mend DataNodes: the NameNode leaves safe mode when enough of them have "
                "reported (`hdfs dfsadmin -safemode get`)"
            )
        case Retryable():
            return "is it running, is the address right, is a firewall in between?"
        case _:
            return "the message says what does not fit"
