"""Nodes of some partitions: what each has, and whether it takes jobs."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from slurm.commands import run_command
from slurm.limits import parse_gres, takes_jobs

_FORMAT = "%N|%P|%c|%m|%G|%T|%C"
_PATIENCE = 10.0


@dataclass(frozen=True)
class Node:
    """Node of a cluster, empty of jobs."""

    name: str
    partitions: frozenset[str]
    """Partitions that it belongs to; the default one also by an empty name."""
    cpus: int
    gpus: int
    memory: int
    """Memory in MiB."""


@dataclass(frozen=True)
class Nodes:
    """Nodes that take jobs."""

    nodes: tuple[Node, ...]
    allocated: int = 0
    """CPUs of theirs that jobs hold, whosesoever."""
    away: tuple[Node, ...] = ()
    """Other nodes: down, drained or kept back."""


def read_nodes(partitions: Collection[str], timeout: float = _PATIENCE) -> Nodes:
    """Read the nodes of some partitions, by one call of sinfo.

    Args:
        partitions: names; an empty one stands for the default partition.

    Raises:
        SlurmError, SlurmMissing: sinfo does not answer.
    """
    which = "--all" if "" in partitions or not partitions else f"--partition={','.join(sorted(partitions))}"
    return parse_nodes(run_command(["sinfo", which, "-N", "-h", "-o", _FORMAT], timeout=timeout))


def parse_nodes(shown: str) -> Nodes:
    """Parse the output of ``sinfo -N -h -o '%N|%P|%c|%m|%G|%T|%C'``: a line for each node and partition."""
    taking, away = dict[str, Node](), dict[str, Node]()
    allocated: dict[str, int] = {}
    for line in shown.splitlines():
        name, partition, cpus, memory, gres, state, by_use = line.split("|")
        found = taking if takes_jobs(state) else away
        before = found[name].partitions if name in found else frozenset()
        is_default = partition.endswith("*")  # sinfo's mark
        names = before | {partition.removesuffix("*"), *[""] * is_default}
        gpus = parse_gres(gres).get("gpu", 0)
        found[name] = Node(name, names, int(cpus.rstrip("+")), gpus, int(memory.rstrip("+")))
        if found is taking:
            allocated[name] = int(by_use.partition("/")[0])  # allocated/idle/other/total
    return Nodes(tuple(taking.values()), sum(allocated.values()), tuple(away.values()))


_GROUP = re.compile(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)")


def node_names(expression: str) -> tuple[str, ...]:
    """Return the names in Slurm's notation of nodes, like ``gpu[01-03,7],login``. Several brackets in one
    name are not understood: what comes out is no node's name."""
    found: list[str] = []
    for before, numbers, after in _GROUP.findall(expression):
        found += [f"{before}{number}{after}" for number in _numbers(numbers)] if numbers else [before]
    return tuple(found)


def _numbers(text: str) -> Iterable[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        if last:
            yield from (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
        else:
            yield first
