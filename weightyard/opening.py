"""Opening a yard: finds out which one is meant, by argument and settings, and connects to it."""

from __future__ import annotations

import getpass
import hashlib
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from weightyard.away import AwayCatalogue, Opened
from weightyard.errors import (
    BadSetting,
    DeadlineExceeded,
    RegistryUnavailable,
    Retryable,
    StoreUnavailable,
)
from weightyard.format.block import MAX_BLOCK_BYTES
from weightyard.loader.offline import OfflineCatalogue, OfflineStore
from weightyard.loader.remembered import Remembered
from weightyard.logs import Log
from weightyard.settings import Settings
from weightyard.storage.opening import folder_at, folder_of, open_store
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import Catalogue
from weightyard.transfer.source import translated
from weightyard.via import ViaStore, chosen_via
from weightyard.yard import Yard, needs_database

if TYPE_CHECKING:
    from weightyard.registry.database import Database

_log = Log(__name__)

_REGISTRY_FILE = "registry.db"


def open_yard(
    url: str | Path | None = None, *, token: str | None = None, settings: Settings | None = None
) -> Yard:
    """Open a yard by its service's `http(s)://…`, or by its store: `hdfs://…` or a folder.

    Without a URL: WEIGHTYARD_URL; else WEIGHTYARD_STORE with WEIGHTYARD_DB; else a folder below
    WEIGHTYARD_HOME. A store without a database of its own gets an SQLite file: in the folder, or
    for HDFS below WEIGHTYARD_HOME, which makes it a yard of this one host.
    Raises BadSetting, Refused, Retryable if it does not answer.
    """
    if not isinstance(url, str | os.PathLike | None):
        raise BadSetting(f"a yard is opened by its URL or folder, not by a {type(url).__name__}")
    settings = settings or Settings()
    chosen = chosen_url(None if url is None else str(url), settings)
    name = known_name(chosen, settings)
    remembered = Remembered(settings.cache, name)
    if settings.offline:
        return _without_store(OfflineCatalogue(remembered), settings, name)
    try:
        opened = _open(chosen, token, settings)
    except Retryable as why:
        if settings.on_unavailable != "cached":
            raise
        _log.warning("yard.unavailable", yard=name, reason=why)
        away = AwayCatalogue(name, remembered, why, lambda: _open(chosen, token, settings))
        return _without_store(away, settings, name)
    return Yard(
        opened.via,
        opened.catalogue,
        block_bytes=opened.block_bytes,
        settings=settings,
        name=name,
    )


def known_name(chosen: str | None, settings: Settings) -> str:
    """The name under which this node remembers a yard."""
    folder = chosen or settings.home / "store"
    return str(folder) if "://" in str(folder) else str(folder_at(str(folder)))


def store_url(url: str | None, settings: Settings) -> str | None:
    """The store of the yard that would be opened; None: the default. For those who run a yard.

    Raises BadSetting if that is a service: only the service has the store and database.
    """
    chosen = chosen_url(url, settings)
    if is_service(chosen):
        raise needs_database(str(chosen))
    return chosen


def chosen_url(url: str | None, settings: Settings) -> str | None:
    """The argument, else WEIGHTYARD_URL, else WEIGHTYARD_STORE; None: the default folder.

    Raises BadSetting for an empty argument: most likely a script's variable was not set, and what
    was meant for one yard would be done to the default one.
    """
    if url is not None and not url.strip():
        raise BadSetting("the yard's URL or folder is empty; for the default yard leave it out")
    if url is None and settings.url is not None and settings.store is not None:
        raise BadSetting("WEIGHTYARD_URL and WEIGHTYARD_STORE are both set: unset one of them")
    return url or settings.url or settings.store


def current_user() -> str:
    """The user's name, for history and audit, where there is no token."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id may have no name
        return f"uid {os.getuid()}"


def is_service(url: str | None) -> bool:
    """Whether this is the URL of a service, not of a store."""
    return url is not None and url.lower().startswith(("http://", "https://"))


def _open(chosen: str | None, token: str | None, settings: Settings) -> Opened:
    """Connect to what was chosen. Raises Retryable if it does not answer."""
    if is_service(chosen):
        secret = settings.token.get_secret_value() if settings.token is not None else None
        return _open_service(str(chosen), token or secret, settings)
    if settings.via == "service":
        raise BadSetting("WEIGHTYARD_VIA=service needs a service: set WEIGHTYARD_URL")
    return _open_database(open_store(chosen, settings), settings)


def _open_service(url: str, token: str | None, settings: Settings) -> Opened:
    from weightyard.client.catalogue import HttpCatalogue

    with ExitStack() as opened:
        catalogue = HttpCatalogue(url, token, deadline_s=settings.deadline_s)
        opened.callback(catalogue.close)
        try:
            about = catalogue.about()
        except (RegistryUnavailable, DeadlineExceeded) as why:
            raise RegistryUnavailable(f"{url} does not answer: {why}") from why
        via = chosen_via(catalogue, about, settings)
        opened.pop_all()
    return Opened(via, catalogue, about.block_bytes)


def _without_store(catalogue: OfflineCatalogue, settings: Settings, name: str) -> Yard:
    """A yard that has only what is on this node; it connects to nothing."""
    return Yard(
        cast("Store", OfflineStore(name)),
        cast("Catalogue", catalogue),
        block_bytes=MAX_BLOCK_BYTES,  # nothing is pushed
        settings=settings,
        name=name,
    )


def _open_database(store: Store, settings: Settings) -> Opened:
    from weightyard.registry import binding, migrate
    from weightyard.registry.registry import Registry

    with ExitStack() as opened:
        opened.enter_context(store)
        database = open_database_of_yard(store, settings)
        opened.callback(database.close)
        if database.is_sqlite:
            migrate.upgrade(database)
        registry = Registry(database, store=store, who=current_user())
        try:
            bound = binding.bind(database, store)
        except StoreUnavailable as why:
            raise StoreUnavailable(f"{store.url} does not answer: {why}") from why
        opened.pop_all()
    return Opened(ViaStore(store, registry, settings), registry, bound.block_bytes)


def open_database_of_yard(store: Store, settings: Settings) -> Database:
    """The database of a yard that exists, or that may be made here without `weightyard init`.

    Raises BadSetting for a folder of other files, before a database is made in it.
    """
    from weightyard.registry import binding

    if settings.db is None and folder_of(store) is not None:
        binding.require_vacant(store, _REGISTRY_FILE)
    return open_database(store, settings)


def open_database(store: Store, settings: Settings) -> Database:
    """The database of a store's registry, whatever its schema. Makes a new one's folder."""
    from weightyard.registry.database import Database

    database = Database(database_url(store, settings))
    if settings.db is None:
        folder = Path(str(database.url.database)).parent
        with translated(folder):
            folder.mkdir(parents=True, exist_ok=True)
    return database


def database_url(store: Store, settings: Settings) -> str:
    """Where a store's registry is: WEIGHTYARD_DB, or an SQLite file of its own."""
    if settings.db is not None:
        return settings.db
    folder = folder_of(store)
    if folder is None:
        key = hashlib.blake2s(store.url.encode(), digest_size=8).hexdigest()
        folder = settings.home / "registries" / key
    return f"sqlite:///{folder / _REGISTRY_FILE}"
