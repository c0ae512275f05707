"""A real Slurm on one machine, for development and tests: several nodes, partitions and pretended GPUs."""

from slurm.devcluster.cluster import Cluster, ClusterStatus, DaemonStatus, attach, start
from slurm.devcluster.errors import DevclusterError, PackagesMissing
from slurm.devcluster.layout import Layout, Node, Partition

__all__ = [
    "Cluster",
    "ClusterStatus",
    "DaemonStatus",
    "DevclusterError",
    "Layout",
    "Node",
    "PackagesMissing",
    "Partition",
    "attach",
    "start",
]
