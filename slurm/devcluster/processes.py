"""Processes that outlive their parent, and are never mistaken for others with the same id."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.devcluster.errors import DevclusterError

_POLL_SECONDS = 0.01
_RECORD_SECONDS = 20.0
# The process writes its identity before it becomes the daemon, so that it never runs unrecorded.
_RECORD_AND_BECOME = (
    '{ cat /proc/$$/stat /proc/sys/kernel/random/boot_id; } >"$0.new" && mv "$0.new" "$0" && exec "$@"'
)
_IN_BACKGROUND = 'sh -c "$@" </dev/null >>"$0" 2>&1 &'


@dataclass(frozen=True)
class Process:
    """A process as the kernel describes it."""

    pid: int
    name: str
    state: str
    parent: int
    session: int
    started: int
    """Start in clock ticks since the machine booted. With ``pid`` it identifies a process uniquely."""


def start_daemon(command: Sequence[str], record: Path, log: Path, environment: Mapping[str, str]) -> None:
    """Start a process in a session of its own. Its identity goes to ``record``, its output to ``log``."""
    record.unlink(missing_ok=True)
    shell = ["sh", "-c", _IN_BACKGROUND, str(log), _RECORD_AND_BECOME, str(record), *command]
    subprocess.run(shell, check=True, env=dict(environment), cwd="/", start_new_session=True)
    until = time.monotonic() + _RECORD_SECONDS
    while not record.exists():
        if time.monotonic() > until:
            raise DevclusterError(f"{command[0]} did not start within {_RECORD_SECONDS:g} s; see {log}")
        time.sleep(_POLL_SECONDS / 5)


def recorded(record: Path) -> Process | None:
    """Return the process that ``record`` names, or None if it is not alive."""
    try:
        *stat, boot = record.read_text().splitlines()
    except FileNotFoundError:
        return None
    if boot != Path("/proc/sys/kernel/random/boot_id").read_text().strip():
        return None
    return alive(_parse("\n".join(stat)))


def alive(process: Process) -> Process | None:
    """Return the same process as it is now; None if it has ended, even if its parent has not noticed yet."""
    now = look_up(process.pid)
    return now if now and now.started == process.started and now.state not in "ZX" else None


def look_up(pid: int) -> Process | None:
    """Return the process that has this id now; None if there is none."""
    try:
        return _parse(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def everything() -> list[Process]:
    """List every process that is alive."""
    found = (look_up(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())  # noqa: PTH208
    return [process for process in found if process and process.state not in "ZX"]


def environment_of(process: Process) -> dict[str, str]:
    """Return a process's environment at its start; empty if it may not be read."""
    try:
        text = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.partition("=")[::2] for item in text.split("\0"))


def open_files(process: Process) -> set[str]:
    """Return the targets of a process's file descriptors, as the kernel writes them."""
    found = set()
    with contextlib.suppress(OSError):  # it has ended, or is not ours
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it has closed this one
                found.add(str(entry.readlink()))
    return found


def end(processes: Iterable[Process], patience: float) -> None:
    """End processes by SIGTERM, after ``patience`` seconds by SIGKILL (at once if 0), and wait for that."""
    left = send(processes, signal.SIGTERM) if patience else list(processes)
    left = _wait_for_end(left, patience)
    left = _wait_for_end(send(left, signal.SIGKILL), 5.0)
    if left:
        raise DevclusterError(f"processes {[process.pid for process in left]} do not end after SIGKILL")


def send(processes: Iterable[Process], number: signal.Signals) -> list[Process]:
    """Signal the processes that are alive, and return them."""
    reached = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if alive(process):
                os.kill(process.pid, number)
                reached.append(process)
    return reached


def _wait_for_end(processes: list[Process], seconds: float) -> list[Process]:
    until = time.monotonic() + seconds
    left = [process for process in processes if alive(process)]
    while left and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        left = [process for process in left if alive(process)]
    return left


def _parse(stat: str) -> Process:
    # "pid (name) state parent group session ... started": a name may hold spaces and brackets.
    head, _, tail = stat.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()
    return Process(int(pid), name, fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


# --- processes of jobs -----------------------------------------------------------------------------------

# Found without Slurm's help: it may be what has just been killed.


_PASSES = 50
_BETWEEN_PASSES_SECONDS = 0.05


def kill_jobs(cluster_name: str, logs: Path, node: str | None = None) -> None:
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
