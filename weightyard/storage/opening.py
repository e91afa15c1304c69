"""Opening a store by what a user types."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from weightyard.errors import BadSetting
from weightyard.settings import Settings
from weightyard.storage.limit import LimitedStore, Rate
from weightyard.storage.local import LocalStore
from weightyard.storage.retry import Retry, RetryingStore
from weightyard.storage.store import Store

if TYPE_CHECKING:
    from weightyard.storage.hdfs.namenode import Locator

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE | re.ASCII)
_ONE_SLASH = re.compile(r"(file|hdfs|viewfs|https?):/(?!/)", re.IGNORECASE)


def open_store(
    url: str | None = None,
    settings: Settings | None = None,
    *,
    patient: bool = True,
    locator: Locator | None = None,
) -> Store:
    """The store at a folder's path, `file://…`, `hdfs://…` or `viewfs://…`.

    Without a URL: what WEIGHTYARD_STORE says, else the folder `store` below WEIGHTYARD_HOME.
    A store that is not `patient` tries nothing twice. All keep to WEIGHTYARD_MAX_RATE. `locator`:
    whom to ask where files of an HDFS lie, instead of its NameNode.
    Raises BadSetting for a URL it cannot make sense of.
    """
    settings = settings or Settings()
    store = _opened(url or settings.store or str(settings.home / "store"), settings, locator)
    if patient and folder_of(store) is None:
        store = RetryingStore(store, Retry(settings.deadline_s))
    if settings.max_rate is not None:
        store = LimitedStore(store, rate=_rate_of(settings.max_rate))
    return store


def folder_of(store: Store) -> Path | None:
    """The folder of this machine that a store is; None: it is elsewhere."""
    if isinstance(store, LimitedStore):
        return folder_of(store.store)
    return store.folder if isinstance(store, LocalStore) else None


def folder_at(path: str) -> Path:
    """The folder of this machine that a user names, whether or not it is there.

    Raises BadSetting for what cannot be one, and for a URL with one slash, such as `hdfs:/folder`:
    Hadoop reads that as `hdfs:///folder`, and bytes would stay on this host.
    """
    if scheme := _ONE_SLASH.match(path):
        raise BadSetting(f"{path}: a URL has two slashes, {scheme[1]}://…; a folder is ./{path}")
    if "://" in path:
        raise BadSetting(f"{path!a} is neither a folder nor a URL: are there signs before it?")
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("it has a NUL")
        return Path(path).expanduser().absolute()
    except (ValueError, RuntimeError) as why:  # `~name` of nobody
        raise BadSetting(f"{path!a} cannot be a folder: {why}") from None


@functools.cache
def _rate_of(bytes_per_s: int) -> Rate:
    """All stores of this process share what it may use."""
    return Rate(bytes_per_s)


def _opened(url: str, settings: Settings, locator: Locator | None) -> Store:
    scheme = _SCHEME.match(url)
    match scheme and scheme[1].lower():
        case None:
            return LocalStore(folder_at(url))
        case "file":
            return LocalStore(_folder_of_url(url))
        case "hdfs" | "viewfs":
            from weightyard.storage.hdfs.store import HdfsStore  # its clients are slow to import

            return HdfsStore(url, settings, locator=locator)
        case other:
            raise BadSetting(f"{url}: {other}:// is not a store; use a folder, file:// or hdfs://")


def _folder_of_url(url: str) -> Path:
    """What `file://…` means, to the byte: names of files need be neither ASCII nor UTF-8."""
    host, slash, rest = url.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise BadSetting(f"{url}: a file:// URL has three slashes, file:///folder")
    if "?" in rest or "#" in rest:
        raise BadSetting(f"{url}: in a URL write %3F for ? and %23 for #, or give the path alone")
    return folder_at(os.fsdecode(unquote_to_bytes(f"/{rest}")))
