"""The processes of a cluster's jobs, found without Slurm's help: it may be what has just been killed."""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from slurm.devcluster.errors import DevclusterError
from slurm.devcluster.processes import Process, end, environment_of, everything, open_files, send

_PASSES = 50
_BETWEEN_PASSES_SECONDS = 0.05


def kill(cluster_name: str, logs: Path, node: str | None = None) -> None:
    """SIGKILL every process of the jobs of one node, or of all nodes, and wait until they have ended.

    A scan may miss a process that is just being forked, so two in a row have to find nothing.
    """
    nothing = 0
    for _ in range(_PASSES):
        found = find(cluster_name, logs, node)
        send(found, signal.SIGSTOP)  # none of them may fork once it has been found
        end(found, patience=0)
        nothing = 0 if found else nothing + 1
        if nothing == 2:
            return
        time.sleep(_BETWEEN_PASSES_SECONDS)
    raise DevclusterError(f"jobs of {cluster_name} start processes faster than they can be killed")


def find(cluster_name: str, logs: Path, node: str | None = None) -> list[Process]:
    """Find step daemons, their descendants, and processes that left them but still carry their variables.

    ``logs`` is the folder with the logs of the node daemons; step daemons write there, too.
    """
    processes = everything()
    prefix = f"{logs.resolve()}/slurmd-{f'{node}.log' if node else ''}"
    roots = {
        process.pid
        for process in processes
        if _is_step_daemon(process, prefix) or _is_marked(process, cluster_name, node)
    }
    return _with_descendants_and_sessions(processes, roots)


def _is_step_daemon(process: Process, log_prefix: str) -> bool:
    # Its title overwrites its arguments and environment, so it is recognised by its open log.
    return process.name == "slurmstepd" and any(name.startswith(log_prefix) for name in open_files(process))


def _is_marked(process: Process, cluster_name: str, node: str | None) -> bool:
    environment = environment_of(process)
    if environment.get("SLURM_CLUSTER_NAME") != cluster_name:
        return False
    # What salloc or a script on the submitting side runs carries the cluster's name, too, but no node's.
    where = environment.get("SLURMD_NODENAME")
    return where == node if node else where is not None


def _with_descendants_and_sessions(processes: Iterable[Process], roots: set[int]) -> list[Process]:
    """Extend a set of processes by all children and sessions, except the caller's own session."""
    by_pid = {process.pid: process for process in processes}
    found = {pid for pid in roots if pid in by_pid}
    while True:
        sessions = {by_pid[pid].session for pid in found} - {os.getsid(0), 0}
        more = {
            pid
            for pid, process in by_pid.items()
            if pid not in found and (process.parent in found or process.session in sessions)
        }
        if not more:
            return [by_pid[pid] for pid in sorted(found) if pid != os.getpid()]
        found |= more
