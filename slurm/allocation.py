"""The allocation that this process runs in: its nodes, and what of them it has."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurm.commands import SlurmError, run_command

_DETAIL = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=(\S*)")
_GPUS = re.compile(r"\bgpu(?::[^:(,]+)?:(\d+)")
_RETRIES = 3


@dataclass(frozen=True)
class NodeShare:
    """What an allocation has of a node."""

    name: str
    cpus: int
    memory: int
    """MiB; 0 where memory is not counted."""
    gpus: int


def allocation_id(environment: Mapping[str, str]) -> str | None:
    """Return the id of the allocation that a process runs in; None outside of one."""
    return environment.get("SLURM_JOB_ID") or None


def read_allocation(job: str) -> list[NodeShare]:
    """Ask Slurm what a job has, in the order of its nodes.

    Raises:
        SlurmError, SlurmTimeout, SlurmMissing: Slurm does not answer, does not know the job, or says nothing
            of its nodes.
    """
    command = ["scontrol", "-d", "-o", "show", "job", job]
    text = run_command(command, retries=_RETRIES)
    found = []
    for nodes, cpus, memory, gres in _DETAIL.findall(text):
        gpus = sum(map(int, _GPUS.findall(gres)))
        found += [NodeShare(name, num_ids(cpus), int(memory), gpus) for name in node_names(nodes)]
    if not found:
        raise SlurmError(command, 0, f"job {job} has no nodes; it does not run")
    return found


def node_names(expression: str) -> list[str]:
    """Return the names that an expression like ``gpu[0-3,7]`` stands for."""
    if "[" not in expression and "," not in expression:
        return [expression]
    return run_command(["scontrol", "show", "hostnames", expression], retries=_RETRIES).split()


def num_ids(expression: str) -> int:
    """Return how many numbers an expression like ``0-3,8`` stands for."""
    ends = [part.partition("-") for part in expression.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)
