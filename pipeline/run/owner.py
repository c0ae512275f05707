"""Whose a run on Slurm is: the Unix user whose jobs do its tasks, and the cluster that has them.

squeue shows a user's own jobs, on the cluster that the machine belongs to, and scancel ends no others. So who
looks at a run as another user, or from another cluster, knows less of it, and must not act on it.
"""

import os
import pwd
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm.commands import SlurmError, SlurmMissing
from slurm.limits import read_cluster_name

_PATIENCE = 10.0
"""Seconds to wait for the name of the cluster that is asked from here."""


@dataclass(frozen=True)
class Owner:
    """A user on a cluster."""

    user: str
    """Name of the user."""
    uid: int
    cluster: str = ""
    """Name of the cluster (ClusterName); empty where it is not known."""

    def __str__(self) -> str:
        return f"{self.user} on cluster {self.cluster}" if self.cluster else self.user

    def is_on_another_cluster(self, other: "Owner") -> bool:
        """Whether both clusters are known, and differ."""
        return bool(self.cluster and other.cluster) and self.cluster != other.cluster


def owner_by_id(uid: int, cluster: str = "") -> Owner:
    """Return a user by number, who may have no name on this machine."""
    try:
        return Owner(pwd.getpwuid(uid).pw_name, uid, cluster)
    except KeyError:
        return Owner(f"user {uid}", uid, cluster)


def who_acts(cluster: str = "") -> Owner:
    """Return who types this command, or whose job it is, on the cluster that is asked from here. Where Slurm
    does not say which, the cluster is not known.

    Args:
        cluster: name of the cluster that every command of a run asks, from wherever; empty: this machine's.
    """
    return owner_by_id(os.getuid(), cluster or os.environ.get("SLURM_CLUSTER_NAME") or _cluster_here())


def _cluster_here() -> str:
    try:
        return read_cluster_name(_PATIENCE)
    except (SlurmError, SlurmMissing):
        return ""


def owner_of_job(environment: Mapping[str, str]) -> Owner | None:
    """Return whose job this process is part of, by Slurm's variables, as in a container the user may have
    another number; None: it is part of none."""
    uid = environment.get("SLURM_JOB_UID", "")
    if not uid.isdecimal():
        return None
    return Owner(environment.get("SLURM_JOB_USER", ""), int(uid), environment.get("SLURM_CLUSTER_NAME", ""))


def why_closed(path: Path) -> str | None:
    """Say which folder above a file this user may not enter, whose it is, and what that user can type; None
    where all of them are open."""
    above = (folder for folder in reversed(path.parents) if not os.access(folder, os.R_OK | os.X_OK))
    if (closed := next(above, None)) is None:
        return None
    owner, me = owner_by_id(closed.stat().st_uid).user, owner_by_id(os.getuid()).user
    return (
        f"{closed} is {owner}'s, and {me} may not read it; ask {owner} for that: "
        f"chmod g+rX {shlex.quote(str(closed))}, or o+rX where you are not in its group"
    )
