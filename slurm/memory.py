"""The memory that a job gets which asks for none."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Per(StrEnum):
    """Settings of a cluster or a partition that give jobs memory by default."""

    NODE = "DefMemPerNode"
    CPU = "DefMemPerCPU"
    GPU = "DefMemPerGPU"


Defaults = Mapping[str, int]
"""MiB by setting (:class:`Per`), of those that are set: by Slurm's rules one of them at most."""


@dataclass(frozen=True)
class ClusterMemory:
    """A cluster's default memory."""

    defaults: Defaults
    """Defaults of partitions that have none of their own."""
    is_counted: bool
    """Whether Slurm shares a node's memory among jobs at all."""


def parse_defaults(settings: Mapping[str, str]) -> dict[str, int]:
    """Return the defaults among settings as ``scontrol show config`` and ``show partition`` print them."""
    jobs = dict(word.partition("=")[::2] for word in settings.get("JobDefaults", "").split(","))
    given = {name: value for name in Per if (value := jobs.get(name) or settings.get(name, ""))}
    return {name: int(value) for name, value in given.items() if value.isdecimal() and int(value)}


def parse_cluster_memory(settings: Mapping[str, str]) -> ClusterMemory:
    """Parse the settings of ``scontrol show config``."""
    parameters = settings.get("SelectTypeParameters", "").upper()
    return ClusterMemory(parse_defaults(settings), "MEMORY" in parameters)


def given_memory(defaults: Defaults, cpus: int, gpus: int) -> tuple[int | None, str]:
    """Return the MiB that a job gets on a node which asks for none, and how that comes about.

    Args:
        defaults: the partition's own, or else the cluster's.
        cpus: CPUs of the job on the node.
        gpus: GPUs of the job on the node.

    Returns:
        None for the memory where it is all that the node has.
    """
    for name, count in ((Per.GPU, gpus), (Per.CPU, cpus), (Per.NODE, 1)):
        if name in defaults and count:
            times = "" if name is Per.NODE else f" x {count}"
            return defaults[name] * count, f"{name}={defaults[name]}{times}"
    return None, f"no {Per.CPU}, no {Per.NODE}"
