"""A real HDFS on this machine: Hadoop's own daemons, from their published jars."""

from weightyard.testing.cluster.daemon import Daemon
from weightyard.testing.cluster.minicluster import MiniCluster
from weightyard.testing.cluster.replicas import ReplicaFile, damage

__all__ = ["Daemon", "MiniCluster", "ReplicaFile", "damage"]
