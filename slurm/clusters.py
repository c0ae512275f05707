"""The cluster that Slurm's commands are for, at sites where one machine reaches several (``--clusters``)."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar

_named: ContextVar[str] = ContextVar("cluster", default="")
_PROGRAMS = frozenset({"sbatch", "squeue", "scancel", "scontrol", "sacct", "sinfo"})
"""Programs that take the option. sacctmgr asks the database of all clusters."""
_HEADING = re.compile(r"\A\s*CLUSTER: \S+\n")


@contextlib.contextmanager
def on_cluster(name: str) -> Iterator[None]:
    """Have the commands of a block ask a cluster by its name; empty: the one of this machine."""
    token = _named.set(name)
    try:
        yield
    finally:
        _named.reset(token)


def addressed(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return a command for the cluster that is named (:func:`on_cluster`).

    A job of that cluster does without the name: its machine asks that cluster anyway, and a name is looked up
    in accounting, which may be away.
    """
    name, (program, *rest) = _named.get(), arguments
    if not name or program not in _PROGRAMS or environ.get("SLURM_CLUSTER_NAME") == name:
        return list(arguments)
    return [program, f"--clusters={name}", *rest]


def without_heading(output: str) -> str:
    """Return what a command printed without the line that names its cluster, which some versions print even
    where no header is wanted."""
    return _HEADING.sub("", output, count=1)
