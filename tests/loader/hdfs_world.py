"""Yards on a real HDFS: straight, and with their registry behind a service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loader_world import yard_in
from service_world import served

from weightyard.names import TokenName
from weightyard.opening import open_yard
from weightyard.records import Role
from weightyard.registry import migrate
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.service.app import create_app
from weightyard.service.serving import open_service
from weightyard.settings import Settings
from weightyard.storage.opening import open_store
from weightyard.testing.cluster import MiniCluster
from weightyard.yard import Yard


@contextmanager
def straight(cluster: MiniCluster, folder: Path, **settings: object) -> Iterator[Yard]:
    """A yard whose database is this process's own. Its loads leave no snapshot by themselves."""
    settings = {"cache_loads": False, "hadoop_conf_dir": cluster.conf_dir, **settings}
    with yard_in(folder, cluster.fresh_dir(), **settings) as opened:
        yield opened


@contextmanager
def by_service(
    cluster: MiniCluster, folder: Path, *, cache_loads: bool = False
) -> Iterator[tuple[Yard, Database]]:
    """A yard behind a service, and the database that only the service knows."""
    settings = Settings(
        home=folder / "home",
        cache=folder / "cache",
        cache_loads=cache_loads,
        hadoop_conf_dir=cluster.conf_dir,
    )
    database = Database(f"sqlite:///{folder}/registry.db")
    migrate.upgrade(database)
    secret = Registry(database).create_token(TokenName("test"), Role.ADMIN, ["*"]).secret
    with open_store(cluster.fresh_dir(), settings) as store:
        service = open_service(store, database, settings, "127.0.0.1")
        with (
            served(create_app(service)) as address,
            open_yard(address, token=secret, settings=settings) as opened,
        ):
            yield opened, database
    database.close()
