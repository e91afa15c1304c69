"""Which cluster a URL means, and how to reach it: Hadoop's own configuration files, read once."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from xml.etree import ElementTree

from weightyard.errors import BadSetting
from weightyard.settings import Settings
from weightyard.storage.store import StorePath

_FILES = ("core-site.xml", "hdfs-site.xml")
_MAX_FILE_BYTES = 16 * 1024 * 1024
_MAX_INCLUDED_DEPTH = 8
_MAX_EXPANSIONS = 20  # Hadoop's own limit
_MAX_VALUE_CHARS = 1024 * 1024
_INCLUDE = "{http://www.w3.org/2001/XInclude}include"
_FALLBACK = "{http://www.w3.org/2001/XInclude}fallback"
_BETWEEN = re.compile(r"[,\n]")
_VARIABLE = re.compile(r"\$\{([^${}\s]+)\}")
_RPC_PORT, _HTTP_PORT, _HTTPS_PORT = 8020, 9870, 9871
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+@~-]{0,254}", re.ASCII)
_AUTHORITY = re.compile(r"[A-Za-z0-9._-]+(?::[0-9]{1,5})?|\[[0-9A-Fa-f:]+\](?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class Configuration:
    """The properties of core-site.xml and hdfs-site.xml; empty without such files."""

    values: Mapping[str, str]

    @classmethod
    def load(cls, settings: Settings) -> Configuration:
        """Read the folder the settings name. Raises BadSetting for a file that is not XML."""
        folder = folder_of_files(settings)
        values: dict[str, str] = {}
        for name in _FILES if folder is not None else ():
            file = Path(folder or "", name)
            if (tree := _tree(file)) is not None:
                _collect(tree, file, values)
        return cls({name: _expanded(name, values) for name in values})

    def get(self, key: str) -> str | None:
        return self.values.get(key, "").strip() or None

    def names(self, key: str) -> list[str]:
        """A list as Hadoop reads it: divided by commas or line ends, with spaces around allowed."""
        return [name for part in _BETWEEN.split(self.get(key) or "") if (name := part.strip())]

    def is_on(self, key: str) -> bool:
        return (self.get(key) or "").lower() == "true"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster and a folder in it: all that a client needs to know before it connects."""

    authority: str
    """A nameservice, or a NameNode's `host:port`."""
    root: str
    """The store's folder: absolute, without a slash at its end."""
    webhdfs: tuple[str, ...]
    """`http(s)://host:port` of the NameNodes."""
    namenodes: tuple[str, ...]
    """`host:port` of the NameNodes' RPC."""
    user: str
    """Who to be where there is no Kerberos."""
    is_kerberos: bool
    uses_datanode_hostname: bool
    is_transfer_protected: bool
    """DataNodes want SASL or encryption before they send a byte."""
    domain_socket: str | None
    """The UNIX socket on which this host's DataNodes hand out the files of replicas; None: they are
    not asked."""
    properties: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, url: str, settings: Settings) -> Cluster:
        """What a URL means: `hdfs://…`, `hdfs:///…` on the default cluster, or `viewfs://…`.

        Raises BadSetting.
        """
        configuration = Configuration.load(settings)
        authority, root = _resolve(url, configuration)
        authentication = configuration.get("hadoop.security.authentication") or "simple"
        return cls(
            authority=authority,
            root=root,
            webhdfs=settings.webhdfs or _namenode_urls(authority, configuration),
            namenodes=tuple(
                _with_port(address) for _, address in _namenodes(authority, configuration)
            ),
            user=settings.hdfs_user or _own_name(),
            # Hadoop's SecurityUtil takes it in any case.
            is_kerberos=authentication.lower() == "kerberos",
            uses_datanode_hostname=configuration.is_on("dfs.client.use.datanode.hostname"),
            is_transfer_protected=configuration.is_on("dfs.encrypt.data.transfer")
            or configuration.get("dfs.data.transfer.protection") is not None,
            domain_socket=configuration.get("dfs.domain.socket.path")
            if configuration.is_on("dfs.client.read.shortcircuit")
            else None,
            properties=_for_hdfs_native(authority, configuration),
        )

    @property
    def url(self) -> str:
        """For clients that know nameservices; without the folder."""
        return f"hdfs://{self.authority}"

    def at(self, path: StorePath) -> str:
        """A store path as HDFS knows it."""
        return f"{self.root}/{path.text}"


def folder_of_files(settings: Settings) -> Path | None:
    """Where Hadoop's configuration files should be; None: nothing says so."""
    if settings.hadoop_conf_dir is None and settings.hadoop_home is not None:
        return settings.hadoop_home / "etc" / "hadoop"
    return settings.hadoop_conf_dir


def _for_hdfs_native(authority: str, configuration: Configuration) -> Mapping[str, str]:
    """The properties, with the list of NameNodes as it reads lists: without any spaces."""
    key = f"dfs.ha.namenodes.{authority}"
    namenodes = ",".join(configuration.names(key))
    return {**configuration.values, key: namenodes} if namenodes else configuration.values


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise BadSetting("this process's user has no name: set WEIGHTYARD_HDFS_USER") from None


def _tree(file: Path) -> ElementTree.Element | None:
    """A configuration file; None if there is none."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as why:
        raise BadSetting(f"{file}: {why.strerror}") from why
    if len(raw) > _MAX_FILE_BYTES:
        raise BadSetting(f"{file} is over {_MAX_FILE_BYTES} bytes: not a Hadoop configuration")
    try:
        return ElementTree.fromstring(raw)
    except ElementTree.ParseError as why:
        raise BadSetting(f"{file} is not a Hadoop configuration: {why}") from None


def _collect(
    tree: ElementTree.Element, file: Path, values: dict[str, str], above: tuple[Path, ...] = ()
) -> None:
    """Collect the properties of a file and of those it includes; later ones replace earlier."""
    for element in tree:
        if element.tag == "property":
            if name := element.findtext("name"):
                values[name.strip()] = element.findtext("value", "").strip()
        elif element.tag == _INCLUDE:
            _include(element, file, values, (*above, file))
        else:
            _collect(element, file, values, above)


def _include(
    element: ElementTree.Element, file: Path, values: dict[str, str], above: tuple[Path, ...]
) -> None:
    href = element.get("href", "")
    if not href or urlsplit(href).scheme not in ("", "file"):
        raise BadSetting(f"{file}: only files can be included, by a href; not {href[:200]!a}")
    included = file.parent / urlsplit(href).path
    if included in above or len(above) > _MAX_INCLUDED_DEPTH:
        raise BadSetting(f"{file}: {included} is included by itself or too deep")
    if (tree := _tree(included)) is not None:
        _collect(tree, included, values, above)
    elif (fallback := element.find(_FALLBACK)) is not None:
        _collect(fallback, file, values, above)
    else:
        raise BadSetting(f"{file} includes {included}, which is not there")


def _expanded(name: str, values: Mapping[str, str]) -> str:
    """A property with `${other}` replaced as Hadoop does; what nobody defines stays as it is."""
    text = values[name]
    for _ in range(_MAX_EXPANSIONS):
        expanded = _VARIABLE.sub(lambda found: values.get(found[1], found[0]).strip(), text)
        if len(expanded) > _MAX_VALUE_CHARS:
            break
        if expanded == text and not any(one in values for one in _VARIABLE.findall(text)):
            return text
        text = expanded
    raise BadSetting(f"Hadoop's configuration: {name} takes from itself, or from too many others")


def _resolve(url: str, configuration: Configuration) -> tuple[str, str]:
    """The nameservice or NameNode, and the path there, with mount tables looked up."""
    scheme, authority, root = _split(url)
    default = configuration.get("fs.defaultFS")
    if not authority and default is not None:
        default_scheme, authority, _ = _split(default)
        if default_scheme != scheme:
            raise BadSetting(f"{url}: fs.defaultFS is {default}; name the cluster in the URL")
    if not authority:
        raise BadSetting(f"{url} names no cluster, and no fs.defaultFS is configured")
    if scheme == "hdfs":
        return authority, root
    return _mounted(url, authority, root, configuration)


def _mounted(url: str, table: str, root: str, configuration: Configuration) -> tuple[str, str]:
    """Where a viewfs path really is. A store lies in one mount, so this is asked once."""
    prefix = f"fs.viewfs.mounttable.{table}."
    mounts = {
        key.removeprefix(f"{prefix}link.").rstrip("/"): value.strip()
        for key, value in configuration.values.items()
        if key.startswith(f"{prefix}link.")
    }
    if fallback := configuration.get(f"{prefix}linkFallback"):
        mounts.setdefault("", fallback)
    if any(mount.startswith(f"{root}/") for mount in mounts):
        raise BadSetting(f"{url}: another file system is mounted inside it; choose a folder below")
    holding = [mount for mount in mounts if root == mount or root.startswith(f"{mount}/")]
    if not holding:
        raise BadSetting(f"{url}: no mount of {prefix}link.… in the configuration holds it")
    mount = max(holding, key=len)
    scheme, authority, target = _split(mounts[mount])
    if scheme != "hdfs" or not authority:
        raise BadSetting(f"{url} is mounted from {mounts[mount]}, which is no hdfs:// cluster")
    return authority, target + root.removeprefix(mount)


def _split(url: str) -> tuple[str, str, str]:
    parts = _parts(url)
    if parts.scheme not in ("hdfs", "viewfs") or parts.query or parts.fragment:
        raise BadSetting(f"{url[:200]!a} is not an hdfs://CLUSTER/FOLDER URL")
    if parts.netloc and not _AUTHORITY.fullmatch(parts.netloc):
        raise BadSetting(f"{url[:200]!a}: {parts.netloc!a} is no host, host:port or nameservice")
    names = [name for name in parts.path.split("/") if name]
    if not all(_FOLDER_NAME.fullmatch(name) for name in names):
        raise BadSetting(
            f"{url[:200]!a}: folder names are ASCII letters, digits and ._=+@~-, not beginning "
            "with a sign"
        )
    return parts.scheme, parts.netloc, "".join(f"/{name}" for name in names)


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # looked at only now
    except ValueError as why:
        raise BadSetting(f"{url[:200]!a} is no URL: {why}") from None
    return parts


def _namenode_urls(authority: str, configuration: Configuration) -> tuple[str, ...]:
    """Where the NameNodes of a nameservice, or the one NameNode, speak HTTP."""
    is_https = configuration.get("dfs.http.policy") == "HTTPS_ONLY"
    scheme, port = ("https", _HTTPS_PORT) if is_https else ("http", _HTTP_PORT)
    key = f"dfs.namenode.{scheme}-address"

    def address(suffix: str | None, rpc: str) -> str:
        configured = None if suffix is None else configuration.get(key + suffix)
        host = _host(rpc)
        if configured is None:
            return f"{scheme}://{host}:{port}"
        wildcard = _host(configured) in ("0.0.0.0", "[::]")
        return (
            f"{scheme}://{host}:{configured.rpartition(':')[2]}"
            if wildcard
            else (f"{scheme}://{configured}")
        )

    return tuple(address(*each) for each in _namenodes(authority, configuration))


def _namenodes(authority: str, configuration: Configuration) -> list[tuple[str | None, str]]:
    """The NameNodes of a nameservice, or the one NameNode: RPC addresses, and how keys end.

    None: use no key, since the files may be about another cluster than the URL names.
    """
    if namenodes := configuration.names(f"dfs.ha.namenodes.{authority}"):
        suffixes = [f".{authority}.{name}" for name in namenodes]
    elif configuration.get(f"dfs.namenode.rpc-address.{authority}"):
        suffixes = [f".{authority}"]
    else:
        default = _parts(configuration.get("fs.defaultFS") or "").netloc
        is_known = authority in (default, configuration.get("dfs.namenode.rpc-address"))
        return [("" if is_known else None, authority)]
    keys = [f"dfs.namenode.rpc-address{suffix}" for suffix in suffixes]
    found = [configuration.get(key) for key in keys]
    if None in found:
        raise BadSetting(f"Hadoop's configuration does not say {keys[found.index(None)]}")
    return [*zip(suffixes, map(str, found), strict=True)]


def _host(address: str) -> str:
    head, colon, port = address.rpartition(":")
    return head if colon and port.isdecimal() else address


def _with_port(address: str) -> str:
    return address if _host(address) != address else f"{address}:{_RPC_PORT}"
