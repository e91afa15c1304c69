"""The HDFS the tests run on: one mini cluster for all of them, or the one you name.

WEIGHTYARD_TEST_HDFS=hdfs://… (with HADOOP_CONF_DIR, or WEIGHTYARD_WEBHDFS for its HTTP address)
runs them on a cluster that is up already. Tests that kill daemons or touch their disks are then
skipped.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

import pytest

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
def token_cluster() -> Iterator[MiniCluster]:
    """An HDFS whose DataNodes ask for block tokens. One DataNode."""
    with _own_cluster(racks=("a",), block_tokens=True) as started:
        yield started


@pytest.fixture(scope="session")
def ha_cluster() -> Iterator[MiniCluster]:
    """An HDFS with two NameNodes. One DataNode."""
    with _own_cluster(racks=("a",), ha=True) as started:
        yield started


def _own_cluster(**options: Any) -> MiniCluster:
    if Settings().test_hdfs:
        pytest.skip("needs a mini cluster of its own; WEIGHTYARD_TEST_HDFS names a running HDFS")
    return MiniCluster(**options)
