"""What Hadoop's daemons and clients are told. Pure: a plan in, properties out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from xml.etree import ElementTree

from weightyard.errors import BadSetting

NAMESERVICE = "weightyard"
"""What an HA pair is called: its URL is hdfs://weightyard."""

DEFAULT_RACKS = ("a", "a", "b")
MAX_DATANODES = 16

LOOPBACK = ("127.0.0.1", *(f"127.0.0.{11 + n}" for n in range(MAX_DATANODES)))
"""Where the daemons of a cluster on this machine listen: the first is for all but DataNodes."""

LOG4J = """\
log4j.rootLogger=INFO,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
"""

GROUPS = "alice=team;bob=team;dr.who="
"""Two users who share a group and are not known to the machine, for tests of permissions."""

Properties = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _RpcDaemonPlan:
    """A daemon that is asked by RPC, and where it listens."""

    name: str
    host: str
    rpc_port: int
    http_port: int

    @property
    def address(self) -> str:
        """`host:port` of its RPC."""
        return f"{self.host}:{self.rpc_port}"

    @property
    def http(self) -> str:
        return f"{self.host}:{self.http_port}"


class NameNodePlan(_RpcDaemonPlan):
    """A NameNode: where it listens."""

    __slots__ = ()
    main_class = "org.apache.hadoop.hdfs.server.namenode.NameNode"


class JournalNodePlan(_RpcDaemonPlan):
    """The JournalNode an HA pair shares its edits through."""

    __slots__ = ()
    main_class = "org.apache.hadoop.hdfs.qjournal.server.JournalNode"


@dataclass(frozen=True, slots=True)
class DataNodePlan:
    """A DataNode: where it listens, and its rack."""

    name: str
    host: str
    rack: str
    transfer_port: int
    ipc_port: int
    http_port: int

    main_class = "org.apache.hadoop.hdfs.server.datanode.DataNode"

    @property
    def address(self) -> str:
        """`host:port` blocks are read from; the name of this DataNode in locations."""
        return f"{self.host}:{self.transfer_port}"

    @property
    def http(self) -> str:
        return f"{self.host}:{self.http_port}"


DaemonPlan = NameNodePlan | JournalNodePlan | DataNodePlan


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A whole cluster: which daemons, where, and how they are set."""

    namenodes: tuple[NameNodePlan, ...]
    datanodes: tuple[DataNodePlan, ...]
    journalnode: JournalNodePlan | None = None
    """Present exactly if there are two NameNodes."""
    client_racks: Properties = field(default_factory=dict)
    """Host → rack of machines that run no DataNode."""
    block_tokens: bool = False
    encrypt: bool = False
    """DataNodes encrypt what they send; by keys that only go with block tokens, so those too."""
    permissions: bool = True
    properties: Properties = field(default_factory=dict)
    """What the caller sets beyond; goes before everything here."""

    @classmethod
    def on_loopback(
        cls,
        ports: Iterable[int],
        *,
        racks: Sequence[str] = DEFAULT_RACKS,
        datanodes: int | None = None,
        ha: bool = False,
        block_tokens: bool = False,
        encrypt: bool = False,
        permissions: bool = True,
        properties: Properties | None = None,
    ) -> Self:
        """All daemons on this machine. More DataNodes than racks: the racks repeat."""
        count = len(racks) if datanodes is None else datanodes
        if not 1 <= count <= MAX_DATANODES:
            raise BadSetting(f"datanodes is {count}: 1 to {MAX_DATANODES}")
        if not racks or not all(rack.isalnum() and rack.isascii() for rack in racks):
            raise BadSetting(f"racks {','.join(racks)!r}: letters and digits, such as a,a,b")
        free = iter(ports)
        host, *datanode_hosts = LOOPBACK
        # The NameNode knows a DataNode by the address it connects from plus its transfer port,
        # and on loopback all connect from 127.0.0.1: each needs ports of its own. An address of
        # its own to listen on gives it a host name of its own, and with that a rack.
        return cls(
            namenodes=tuple(
                NameNodePlan(f"nn{n}", host, next(free), next(free))
                for n in range(1, 3 if ha else 2)
            ),
            journalnode=JournalNodePlan("jn1", host, next(free), next(free)) if ha else None,
            datanodes=tuple(
                DataNodePlan(
                    f"dn{n + 1}",
                    datanode_hosts[n],
                    f"/rack-{racks[n % len(racks)]}",
                    transfer_port=next(free),
                    ipc_port=next(free),
                    http_port=next(free),
                )
                for n in range(count)
            ),
            client_racks={host: f"/rack-{racks[-1]}"},
            block_tokens=block_tokens or encrypt,
            encrypt=encrypt,
            permissions=permissions,
            properties=dict(properties or {}),
        )

    @property
    def daemons(self) -> tuple[DaemonPlan, ...]:
        journal = (self.journalnode,) if self.journalnode else ()
        return (*journal, *self.namenodes, *self.datanodes)

    @property
    def is_ha(self) -> bool:
        return len(self.namenodes) > 1

    @property
    def url(self) -> str:
        return f"hdfs://{NAMESERVICE if self.is_ha else self.namenodes[0].address}"


def client_properties(plan: ClusterPlan) -> Properties:
    """What a client needs to find the cluster; the daemons are told the same."""
    common = {
        "fs.defaultFS": plan.url,
        "dfs.replication": str(min(3, len(plan.datanodes))),
        "dfs.client.use.datanode.hostname": "true",
        # A mini cluster may have no spare DataNode to put into a broken pipeline.
        "dfs.client.block.write.replace-datanode-on-failure.best-effort": "true",
    }
    if plan.encrypt:
        common["dfs.encrypt.data.transfer"] = "true"
    if not plan.is_ha:
        namenode = plan.namenodes[0]
        return common | {
            "dfs.namenode.rpc-address": namenode.address,
            "dfs.namenode.http-address": namenode.http,
        }
    proxies = "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
    return (
        common
        | {
            "dfs.nameservices": NAMESERVICE,
            f"dfs.ha.namenodes.{NAMESERVICE}": ",".join(one.name for one in plan.namenodes),
            f"dfs.client.failover.proxy.provider.{NAMESERVICE}": proxies,
        }
        | {
            f"dfs.namenode.rpc-address.{NAMESERVICE}.{one.name}": one.address
            for one in plan.namenodes
        }
        | {
            f"dfs.namenode.http-address.{NAMESERVICE}.{one.name}": one.http
            for one in plan.namenodes
        }
    )


def short_circuit_properties(folder: Path) -> Properties:
    """Have DataNodes hand out the files of replicas, each on a socket of its own below a folder."""
    return {
        "dfs.client.read.shortcircuit": "true",
        "dfs.domain.socket.path": f"{folder}/socket._PORT",
    }


def daemon_properties(plan: ClusterPlan, daemon: DaemonPlan, folder: Path) -> Properties:
    """Everything one daemon is told. `folder` is where it keeps its data."""
    racks = {one.host: one.rack for one in plan.datanodes} | dict(plan.client_racks)
    common = {
        "hadoop.tmp.dir": str(folder / "tmp"),
        "net.topology.node.switch.mapping.impl": "org.apache.hadoop.net.StaticMapping",
        "hadoop.configured.node.mapping": ",".join(f"{h}={rack}" for h, rack in racks.items()),
        "dfs.block.access.token.enable": str(plan.block_tokens).lower(),
        "dfs.permissions.enabled": str(plan.permissions).lower(),
        "hadoop.user.group.static.mapping.overrides": GROUPS,
        "dfs.storage.policy.enabled": "true",
        "dfs.heartbeat.interval": "1s",
        "ipc.client.connect.retry.interval": "200",
        "ipc.client.connect.max.retries": "100",
    }
    match daemon:
        case NameNodePlan():
            own = _namenode_properties(plan, daemon, folder)
        case JournalNodePlan():
            own = {
                "dfs.journalnode.edits.dir": str(folder / "edits"),
                "dfs.journalnode.rpc-address": daemon.address,
                "dfs.journalnode.http-address": daemon.http,
            }
        case DataNodePlan():
            own = {
                "dfs.datanode.data.dir": f"[DISK]file://{folder}/disk,[SSD]file://{folder}/ssd",
                "dfs.datanode.hostname": daemon.host,
                "dfs.datanode.address": daemon.address,
                "dfs.datanode.ipc.address": f"{daemon.host}:{daemon.ipc_port}",
                "dfs.datanode.http.address": daemon.http,
                "dfs.datanode.use.datanode.hostname": "true",
                "dfs.datanode.du.reserved": "0",
                # Whether damage is found must depend on the reader, not on when a scan runs.
                "dfs.block.scanner.volume.bytes.per.second": "0",
            }
    return {**client_properties(plan), **common, **own, **plan.properties}


def _namenode_properties(plan: ClusterPlan, daemon: NameNodePlan, folder: Path) -> Properties:
    own = {
        "dfs.namenode.name.dir": f"file://{folder}/name",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.namenode.fs-limits.min-block-size": "512",
        "dfs.namenode.safemode.extension": "0",
        "dfs.namenode.resource.du.reserved": "0",
        "dfs.namenode.redundancy.interval.seconds": "1s",
        "dfs.namenode.reconstruction.pending.timeout-sec": "5",
        # A DataNode is stale after 3 s and dead after 2 · 2 s + 10 heartbeats.
        "dfs.namenode.stale.datanode.interval": "3000",
        "dfs.namenode.heartbeat.recheck-interval": "2000",
        # A DataNode busier than twice the average gets no new replicas. Of three on one host that
        # leaves one out by chance, and a file with fewer replicas than it asked for.
        "dfs.namenode.redundancy.considerLoad": "false",
        # The page cache outlives a killed daemon; only a machine that loses power needs fsync.
        "dfs.namenode.edits.noeditlogchannelflush": "true",
    }
    if plan.journalnode:
        own |= {
            "dfs.ha.namenode.id": daemon.name,
            "dfs.namenode.shared.edits.dir": f"qjournal://{plan.journalnode.address}/{NAMESERVICE}",
            "dfs.ha.fencing.methods": "shell(/bin/true)",
            "dfs.ha.tail-edits.period": "1s",
            "dfs.ha.log-roll.period": "5s",
        }
    return own


def write_site_files(folder: Path, properties: Properties) -> None:
    """Make a configuration folder: core-site.xml, hdfs-site.xml."""
    folder.mkdir(parents=True, exist_ok=True)
    # Hadoop reads both files into one table; which property is in which is for people.
    core = {key: value for key, value in properties.items() if not key.startswith("dfs.")}
    hdfs = {key: value for key, value in properties.items() if key.startswith("dfs.")}
    for name, part in (("core-site.xml", core), ("hdfs-site.xml", hdfs)):
        root = ElementTree.Element("configuration")
        for key, value in sorted(part.items()):
            entry = ElementTree.SubElement(root, "property")
            ElementTree.SubElement(entry, "name").text = key
            ElementTree.SubElement(entry, "value").text = value
        ElementTree.indent(root)
        ElementTree.ElementTree(root).write(folder / name, encoding="utf-8", xml_declaration=True)


def write_daemon_configuration(folder: Path, properties: Properties) -> None:
    """A configuration folder for a daemon's class path: with logging, and what the jars lack."""
    write_site_files(folder, properties)
    (folder / "log4j.properties").write_text(LOG4J)
    # The daemons look for these on the class path and do not start without them.
    for application in ("hdfs", "datanode", "journal", "secondary"):
        (folder / "webapps" / application / "WEB-INF").mkdir(parents=True, exist_ok=True)
