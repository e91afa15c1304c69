"""The condition of a cluster as a client finds it: for `weightyard doctor`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from weightyard.errors import FileMissing, Unsupported
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Cluster, folder_of_files
from weightyard.storage.hdfs.namenode import NameNode
from weightyard.storage.hdfs.native import Namespace
from weightyard.storage.hdfs.tickets import Ticket


@dataclass(frozen=True, slots=True)
class FolderCondition:
    """Who owns a folder, its mode, and whether it is encrypted."""

    owner: str
    group: str
    mode: int
    is_encrypted: bool
    """It lies in an encryption zone."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What the configuration says, before any server is asked."""

    authority: str
    root: str
    webhdfs: tuple[str, ...]
    user: str
    is_kerberos: bool
    is_transfer_protected: bool
    folder: Path | None
    """Where the configuration files should be; None: nothing says so."""
    has_configuration: bool
    default: str | None
    """The cluster that the files are about, `fs.defaultFS`."""


class Condition:
    """Looks at a store's cluster and folder, one question at a time. Changes nothing."""

    def __init__(self, url: str, settings: Settings) -> None:
        self._cluster = Cluster.of(url, settings)
        self._folder = folder_of_files(settings)
        self._limit_s = settings.deadline_s

    @property
    def settings(self) -> ClusterSettings:
        cluster = self._cluster
        return ClusterSettings(
            authority=cluster.authority,
            root=cluster.root or "/",
            webhdfs=cluster.webhdfs,
            user=cluster.user,
            is_kerberos=cluster.is_kerberos,
            is_transfer_protected=cluster.is_transfer_protected,
            folder=self._folder,
            has_configuration=bool(cluster.properties),
            default=cluster.properties.get("fs.defaultFS"),
        )

    def ticket(self) -> Ticket:
        """The Kerberos ticket of whoever runs this. Raises NotAllowed, Retryable, BadSetting."""
        return Ticket.own(self._limit_s)

    def is_there(self) -> bool:
        """Whether the store's folder exists, asked by RPC. Raises Retryable, NotAllowed."""
        with closing(Namespace(self._cluster, limit_s=self._limit_s)) as namespace:
            try:
                return namespace.status(self._cluster.root or "/").isdir
            except FileMissing:
                return False

    def packs(self) -> FolderCondition:
        """The folder of the packs, asked by RPC and WebHDFS. Raises FileMissing."""
        path = self._cluster.at(layout.PACKS)
        with closing(Namespace(self._cluster, limit_s=self._limit_s)) as namespace:
            status = namespace.status(path)
        with closing(NameNode(self._cluster)) as namenode:
            is_encrypted = namenode.is_encrypted(layout.PACKS, Deadline.after(self._limit_s))
        return FolderCondition(status.owner, status.group, status.permission & 0o777, is_encrypted)

    def is_transfer_protected(self) -> bool:
        """Whether the configuration or the NameNode, asked by WebHDFS, wants transfers protected.

        Only the configuration tells of SASL without encryption (`dfs.data.transfer.protection`).
        """
        if self._cluster.is_transfer_protected:
            return True
        with closing(NameNode(self._cluster)) as namenode:
            try:
                return namenode.is_transfer_encrypted(Deadline.after(self._limit_s))
            except Unsupported:  # a gateway, or Hadoop before 3.1
                return False

    def clock_s(self) -> float:
        """The NameNode's clock, to a second, asked by WebHDFS."""
        with closing(NameNode(self._cluster)) as namenode:
            return namenode.clock_s(Deadline.after(self._limit_s))
