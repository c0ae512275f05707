"""Nodes that are machines of their own to their jobs: a host name, process ids, a boot, a clock.

A node with a host name has namespaces, held by the first process in them; ``slurmd`` and its jobs enter them.
A clock that is off is a library which the node's jobs load: ``slurmd`` itself needs the right time.
"""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from slurm.devcluster import programs
from slurm.devcluster.errors import DevclusterError
from slurm.devcluster.layout import TASK_PROLOG, Layout, PracticeIdentity, PracticeNode, filled, template

_LIBRARY = "clock.so"
_NAMESPACES = ("--uts", "--mount", "--pid")


def check(layout: Layout) -> None:
    """Raise DevclusterError unless this process may make the machines of a layout."""
    if not any(node.host for node in layout.nodes):
        return
    if os.geteuid() != 0:
        raise DevclusterError("nodes with host names of their own need root; leave the option out")
    unshare = [programs.program("unshare"), *_NAMESPACES, "--fork", "--mount-proc", "true"]
    tried = subprocess.run(unshare, capture_output=True, text=True, check=False)
    if tried.returncode:
        raise DevclusterError(f"nodes with host names of their own need namespaces: {tried.stderr.strip()}")


def write_clocks(root: Path, nodes: Iterable[PracticeNode]) -> None:
    """Build the library by which clocks are off, and write what puts it into the environment of jobs."""
    source, library = root / "clock.c", root / _LIBRARY
    source.write_text(template("clock.c").read_text())
    build = [programs.program("cc"), "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DevclusterError(f"the library for clocks that are off cannot be built:\n{done.stderr.strip()}")
    (root / TASK_PROLOG).write_text(task_prolog(root, nodes))
    (root / TASK_PROLOG).chmod(0o700)


def task_prolog(root: Path, nodes: Iterable[PracticeNode]) -> str:
    """Return the script that Slurm asks what else a task has in its environment."""
    load = f'echo "export LD_PRELOAD=${{LD_PRELOAD:+$LD_PRELOAD:}}{root}/{_LIBRARY}"'
    lines = (
        f"{node.name}) {load}; echo export DEVCLUSTER_CLOCK_SECONDS={node.clock_seconds} ;;"
        for node in nodes
        if node.clock_seconds
    )
    return "#!/bin/sh\n" + filled("task_prolog", clocks="\n".join(lines))


def machine_of(node: str) -> str:
    """Return the name of the process that holds a node's machine."""
    return f"machine-{node}"


def command(identity: PracticeIdentity, node: PracticeNode) -> list[str]:
    """Return the command line of a machine's first process."""
    options = (*_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation=private")
    holder = ("sh", str(template("machine.sh")), node.host, str(boot(identity, node)))
    return [programs.program("unshare"), *options, *holder]


def boot(identity: PracticeIdentity, node: PracticeNode) -> Path:
    """Return the file with the id of a machine's boot, which exists once the machine can be entered."""
    return identity.root / "run" / f"{node.name}.boot"


def inside(pid: int, command: list[str]) -> list[str]:
    """Wrap a command so that it runs on the machine that a process holds, and ends as its wrapper does."""
    spaces = (f"--uts=/proc/{pid}/ns/uts", f"--mount=/proc/{pid}/ns/mnt")
    ids = f"--pid=/proc/{pid}/ns/pid_for_children"
    return [programs.program("nsenter"), *spaces, ids, "setpriv", "--pdeathsig=KILL", *command]
