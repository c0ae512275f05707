"""A job that goes back into the queue for another node: its own may be what is wrong."""

import contextlib
import signal

from slurm.commands import SlurmError, SlurmMissing, run_command
from slurm.nodes import read_nodes
from slurm.submission import requeue

_NONE = "(null)"
_CHOICES = ("ExcNodeList", "ReqNodeList", "Features", "Reservation")
"""Fields by which a job is kept from some nodes."""


def requeue_elsewhere(job: str, node: str) -> None:
    """Requeue the job that this process runs in, and exclude its node, which Slurm would give it again.

    Only where another node of its partitions takes jobs, and the job is not kept from any yet: so at most one
    node is ever excluded, and a fault of all nodes keeps no job from starting. From then on SIGTERM, which
    Slurm sends to what it requeues, does not end this process: the exclusion comes after it.

    Args:
        job: id of a job, not of an array that has several.
        node: name of this node, as Slurm calls it; empty if unknown.

    Raises:
        SlurmError, SlurmMissing: it was not requeued.
    """
    has_another = bool(node) and _may_have_another(job, node)
    if has_another:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    requeue(job)
    if has_another:
        with contextlib.suppress(SlurmError):  # then it may come back here
            run_command(["scontrol", "update", f"jobid={job}", f"excnodelist={node}"])


def _may_have_another(job: str, node: str) -> bool:
    try:
        shown = run_command(["scontrol", "-o", "show", "job", job])
        known = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        is_free = all(known.get(name, _NONE) == _NONE for name in _CHOICES)
        if len(shown.splitlines()) != 1 or not is_free or "Partition" not in known:
            return False
        return any(other.name != node for other in read_nodes(known["Partition"].split(",")).nodes)
    except (SlurmError, SlurmMissing, ValueError):
        return False
