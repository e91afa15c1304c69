"""Settings from the environment, read once into a frozen object. Nothing else reads them there.

The variables by which torchrun tells its ranks who they are, the trainer reads itself.
"""

from __future__ import annotations

import ipaddress
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from weightyard.errors import BadSetting

PREFIX = "WEIGHTYARD_"

TOLD = frozenset(PREFIX + name for name in ("REF", "VERSION", "DIGEST", "PATH"))
"""Variables that `weightyard follow` sets for the command it runs. They are no settings."""

_LOCATION = re.compile(r"(/[!-.0-~]+)+")

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,3})?)\s*([KMGTP]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of `200G`, `1.5TiB` or `1000000`; K is 1024. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:40]!r} is no amount of bytes: write 200G, 1.5T or 1000000")
    return int(float(found[1]) * 1024 ** " KMGTP".index(found[2].upper() or " "))


class Settings(BaseSettings):
    """What the environment says, read once. Arguments of a call override it."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,  # `WEIGHTYARD_URL= command` unsets it for the command
        frozen=True,
        extra="ignore",
        populate_by_name=True,
    )

    store: str | None = None
    """Where packs live: a folder, `file://…` or `hdfs://…`. None: `home`/store."""

    db: str | None = None
    """The registry's database: `sqlite:///…` or `postgresql://…`. None: an SQLite file."""

    url: str | None = None
    """A service: `http(s)://…`. It knows store and database: those are not set beside it."""

    token: SecretStr | None = None
    """The token that this client shows to the service."""

    via: Literal["auto", "store", "service"] = "auto"
    """Which way bytes go where there is a service: straight to the store, or through it. `auto`
    tries the store."""

    home: Path = Field(default_factory=lambda: Path.home() / ".weightyard")
    """The embedded default's folder."""

    cache: Path = Field(default_factory=lambda: Path.home() / ".cache" / "weightyard")
    """What can be fetched again: snapshots, Hadoop jars for the test cluster."""

    cache_max: int | None = Field(default=None, ge=0)
    """How much disk snapshots may take: bytes, or `200G`. None: half of what would be free."""

    cache_loads: bool | Literal["first"] = True
    """Whether a load of a whole version from a store on another host leaves a snapshot of it. True:
    afterwards, if that costs little. `first`: always, before the tensors, which are mapped from
    it."""

    offline: bool = False
    """Use only what is on this node: connect to no service, no database and no store."""

    on_unavailable: Literal["fail", "cached"] = "fail"
    """When the yard does not answer: fail, or use what this node last knew and has."""

    webhdfs: Annotated[tuple[str, ...], NoDecode] = ()
    """`http(s)://host:port` of the NameNodes, comma separated, if the Hadoop files do not say."""

    hdfs_user: str | None = Field(
        default=None, validation_alias=AliasChoices("WEIGHTYARD_HDFS_USER", "HADOOP_USER_NAME")
    )
    """The user's name on a cluster without Kerberos. None: the user of this process."""

    hadoop_conf_dir: Path | None = Field(
        default=None, validation_alias=AliasChoices("WEIGHTYARD_HADOOP_CONF_DIR", "HADOOP_CONF_DIR")
    )
    """The folder of core-site.xml and hdfs-site.xml."""

    hadoop_home: Path | None = Field(default=None, validation_alias="HADOOP_HOME")
    """Used for its etc/hadoop where hadoop_conf_dir is not set, and to find libhdfs."""

    location: str | None = Field(default=None, max_length=512)
    """Where this host is in HDFS's topology, such as `/rack-b`: replicas near it are read first.
    None: found out, where a DataNode runs on this host."""

    libhdfs_dir: Path | None = Field(default=None, validation_alias="ARROW_LIBHDFS_DIR")
    """The folder of libhdfs.so, if it is not in hadoop_home; pyarrow looks there too."""

    java_home: Path | None = Field(default=None, validation_alias="JAVA_HOME")
    """A Java for the test cluster's daemons, if the one on the path will not do."""

    deadline_s: float = Field(default=30.0, gt=0, le=3600)
    """How long a call on the store may take, and for how long it is repeated if it fails."""

    max_rate: int | None = Field(default=None, ge=1)
    """How much this process moves to and from the store a second: bytes, or `200M`. None: all that
    the network gives."""

    poll_s: float = Field(default=5.0, gt=0, le=3600)
    """How many seconds a follower waits between looks where no service tells it of changes."""

    proxy_header: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]{1,64}$")
    """The header in which a proxy that signs users on tells the service the user's name."""

    proxy_addresses: Annotated[tuple[str, ...], NoDecode] = ()
    """The proxies from which that header is believed: addresses or networks, comma separated."""

    proxy_role: Literal["read", "write", "admin"] | None = None
    """What users of the proxy may do that have no token of their name. None: nothing."""

    spool: Path | None = None
    """Where the service keeps files on their way into the store. None: below `cache`."""

    spool_bytes: int = Field(default=64 << 30, ge=1)
    """How much of it the service may use; no file sent through it is longer."""

    tell_locations: bool = True
    """Whether the service tells readers where packs lie, with the block tokens to read them. Such a
    token opens a whole pack, in which other projects may have blocks too."""

    test_hdfs: str | None = None
    """A running HDFS for the tests, instead of a mini cluster: `hdfs://…`."""

    @field_validator("cache_max", "max_rate", mode="before")
    @classmethod
    def _parse_size(cls, value: Any) -> Any:
        return parse_size(value) if isinstance(value, str) else value

    @field_validator(
        "home", "cache", "spool", "hadoop_conf_dir", "hadoop_home", "libhdfs_dir", "java_home"
    )
    @classmethod
    def _is_a_path(cls, value: Path | None) -> Path | None:
        try:
            return value and value.expanduser()
        except RuntimeError:  # `~name`, and there is no such user
            raise ValueError(f"this host knows no home for {str(value)[:80]!a}") from None

    @field_validator("location")
    @classmethod
    def _is_in_a_topology(cls, value: str | None) -> str | None:
        if value is not None and not _LOCATION.fullmatch(value):
            raise ValueError(f"{value[:40]!a} is no place in HDFS's topology, such as /rack-b")
        return value

    @field_validator("webhdfs", "proxy_addresses", mode="before")
    @classmethod
    def _split_commas(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(one for part in value.split(",") if (one := part.strip()))

    @field_validator("webhdfs")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            parts = urlsplit(url)
            _ = parts.port  # raises ValueError for a wrong one
            is_odd = not url.isprintable() or any(sign in url for sign in " ?#;")
            if parts.scheme not in ("http", "https") or not parts.hostname or is_odd:
                raise ValueError(f"{url[:80]!a} is not http(s)://HOST:PORT")
        return value

    @field_validator("proxy_addresses")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ipaddress.ip_network(network, strict=False)
        return value

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as why:
            first = why.errors()[0]
            said = first["msg"].removeprefix("Value error, ")
            raise BadSetting(f"{_variable(str(first['loc'][0]))}: {said}") from None


def _variable(name: str) -> str:
    """The variable of a field; `name` may also be a field's alias, which is one already."""
    return f"{PREFIX}{name.upper()}" if name in Settings.model_fields else name


def variables() -> set[str]:
    """The names of all variables that are read."""
    found: set[str] = set()
    for name, field in Settings.model_fields.items():
        match field.validation_alias:
            case AliasChoices(choices=names):
                found.update(str(one) for one in names)
            case str(other):
                found.add(other)
            case _:
                found.add(_variable(name))
    return found


def unknown_variables() -> dict[str, str | None]:
    """Variables that look like settings and are none, each with the one that may be meant."""
    known = variables() | TOLD
    odd = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    return {name: next(iter(get_close_matches(name, known, 1)), None) for name in odd}
