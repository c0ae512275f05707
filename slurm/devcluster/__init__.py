"""A real Slurm on one machine, for development and tests: several nodes, partitions and pretended GPUs."""

from slurm.devcluster.cluster import ClusterStatus, DaemonStatus, PracticeCluster, attach, start
from slurm.devcluster.errors import DevclusterError, PackagesMissing
from slurm.devcluster.layout import Layout, PracticeNode, PracticePartition

__all__ = [
    "ClusterStatus",
    "DaemonStatus",
    "DevclusterError",
    "Layout",
    "PackagesMissing",
    "PracticeCluster",
    "PracticeNode",
    "PracticePartition",
    "attach",
    "start",
]
