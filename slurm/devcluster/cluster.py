"""A real Slurm on this machine, as root or as an ordinary user, with everything it has in one folder."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm.devcluster import database, machines, network, programs
from slurm.devcluster import folder as files
from slurm.devcluster.errors import DevclusterError
from slurm.devcluster.layout import Layout, PracticeIdentity, PracticeNode
from slurm.devcluster.processes import Process, end, kill_jobs, recorded, start_daemon

_PATIENCE_SECONDS = 2.0
_FORGOTTEN = "Duplicate jobid"  # reason of a node that has a job which its controller does not know
_START_SECONDS = 60.0  # it takes one on an idle machine


@dataclass(frozen=True)
class DaemonStatus:
    """Name and process of one daemon."""

    name: str
    pid: int | None
    """Process id; None once it has ended."""

    @property
    def alive(self) -> bool:
        return self.pid is not None


@dataclass(frozen=True)
class ClusterStatus:
    """Daemons that run, and states of the nodes by the controller."""

    daemons: tuple[DaemonStatus, ...]
    nodes: Mapping[str, str]
    """Node states as ``sinfo`` writes them, e.g. ``idle`` or ``down*``; empty if no controller answers."""


@dataclass(frozen=True)
class PracticeCluster:
    """A cluster in a folder. :func:`start` and :func:`attach` give the same control over it."""

    folder: Path
    identity: PracticeIdentity
    layout: Layout
    accounting: bool

    @property
    def shared(self) -> Path | None:
        """Folder on the network filesystem, of a cluster that has one."""
        return self.folder / network.SHARED if self.layout.network_filesystem else None

    def environment(self) -> dict[str, str]:
        """Return the environment variables that make Slurm's commands talk to this cluster."""
        return {"SLURM_CONF": str(self.identity.root / "slurm.conf")}

    def stop(self) -> None:
        """End every daemon and every process of a job, and remove the folder."""
        self._end("slurmctld")
        if self.layout.network_filesystem:  # first: a process that waits for a frozen client cannot be killed
            network.unmount(self.folder)
            self._end(*self._filesystem_names())
            network.unmount(self.folder)  # of a client that mounted in between
        self._end(*(_slurmd(node.name) for node in self.layout.nodes))
        kill_jobs(self.identity.name, self.folder / "log")
        self._end(*self._machine_names(), patience=0)
        self._end("slurmdbd")
        self._end("mariadbd", "munged")
        files.remove(self.folder, self.identity)

    def inside(self, node: str, command: list[str]) -> list[str]:
        """Wrap a command to run as a node's processes do: with its mount of the network filesystem, on its
        machine, where it has them."""
        found = self.layout.node(node)
        if found.host:
            return machines.inside(self._machine(found), command)
        return self._with_mount(node, command)

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon and every process of its jobs, as when the node is lost."""
        self.kill_slurmd(name)
        kill_jobs(self.identity.name, self.folder / "log", name)
        self._end(machines.machine_of(name), network.client_of(name), patience=0)

    def start_node(self, name: str) -> None:
        """Start a node again, and return it to service if the controller has taken it out."""
        self.start_slurmd(name)
        self.call("scontrol", "update", f"nodename={name}", "state=resume")

    def kill_slurmd(self, name: str) -> None:
        """Kill a node's daemon. Its jobs go on, as when the network fails."""
        self._end(_slurmd(self.layout.node(name).name), patience=0)

    def start_slurmd(self, name: str) -> None:
        """Start a node's daemon again. Returns once the controller reports the node as up."""
        self._start_slurmd(self.layout.node(name).name)
        self._wait(_slurmd(name), "listens", lambda: _listens(self.identity.ports.slurmd[name]))
        self._wait_for_nodes({name})

    def kill_controller(self) -> None:
        """Kill slurmctld."""
        self._end("slurmctld", patience=0)

    def start_controller(self) -> None:
        """Start slurmctld with the state that it saved. Returns once it reports every running node as up.

        It saves with a delay: jobs submitted in the last 5 s or so may be forgotten and killed.
        """
        self._start("slurmctld", [programs.program("slurmctld"), "-D"])
        self._wait_for_nodes({one.name for one in self.layout.nodes if self._process(_slurmd(one.name))})

    def kill_file_server(self) -> None:
        """Kill the network filesystem's server: its users then get ENOTCONN (not connected)."""
        self._end(network.BRICK, patience=0)

    def start_file_server(self) -> None:
        """Start the network filesystem's server again. Clients connect within 4 s or so."""
        self._start(network.BRICK, network.brick_command(self.identity))
        self._wait(network.BRICK, "listens", lambda: _listens(self.identity.ports.filesystem))

    def stop_slurmdbd(self) -> None:
        """Stop accounting. slurmctld queues its messages for slurmdbd meanwhile."""
        self._end("slurmdbd")

    def start_slurmdbd(self) -> None:
        """Start accounting. Returns once it accepts connections."""
        # slurmdbd.conf has no option for the server's socket.
        socket_variable = {"MYSQL_UNIX_PORT": f"{self.identity.root}/mysql.sock"}
        self._start("slurmdbd", [programs.program("slurmdbd"), "-D"], socket_variable)
        self._wait("slurmdbd", "listens", lambda: _listens(self.identity.ports.slurmdbd))

    def status(self) -> ClusterStatus:
        """Return the daemons that run now, and the states of the nodes."""
        accounting = ["mariadbd", "slurmdbd"] if self.accounting else []
        slurmds = [_slurmd(node.name) for node in self.layout.nodes]
        held = [*self._filesystem_names(), *self._machine_names()]
        names = ["munged", *accounting, *held, "slurmctld", *slurmds]
        found = {name: self._process(name) for name in names}
        daemons = tuple(DaemonStatus(name, one.pid if one else None) for name, one in found.items())
        controller = found["slurmctld"] and found["munged"]
        return ClusterStatus(daemons, self.node_states() if controller else {})

    def node_states(self) -> dict[str, str]:
        """Ask the controller for the states of the nodes; empty if it does not answer."""
        said = self.call("sinfo", "--noheader", "--Node", "--format=%N %T")
        return dict(line.split() for line in said.stdout.splitlines()) if said.returncode == 0 else {}

    def return_nodes(self) -> list[str]:
        """Return to service, as an administrator would, the nodes that the controller has drained because of
        jobs there that it had forgotten. Returns their names; none while it is away."""
        if not self._process("slurmctld"):
            return []
        said = self.call("sinfo", "--noheader", "--list-reasons", "--format=%N|%E")
        drained = (line.split("|", 1) for line in said.stdout.splitlines() if "|" in line)
        names = [name for name, reason in drained if reason.strip() == _FORGOTTEN]
        if names:
            self.call("scontrol", "update", f"nodename={','.join(names)}", "state=resume")
        return names

    def call(self, name: str, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands with a clean environment."""
        command = [programs.program(name), *arguments]
        environment = _clean_environment() | self.environment()
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)

    def _bring_up(self) -> None:
        self._start("munged", _munged(self.identity.root))
        if self.layout.network_filesystem:
            self._start_filesystem()
        if self.accounting:
            database.create(self.identity, _clean_environment())
            self._start("mariadbd", database.command(self.identity))
            self._wait("mariadbd", "listens", lambda: _accepts(self.identity.root / "mysql.sock"))
        self._wait("munged", "listens", lambda: _accepts(self.identity.root / "munge.sock"))
        if self.accounting:
            self.start_slurmdbd()
        self._start("slurmctld", [programs.program("slurmctld"), "-D"])
        for node in self.layout.nodes:
            self._start_slurmd(node.name)
        self._wait_for_nodes({node.name for node in self.layout.nodes})

    def _start_slurmd(self, name: str) -> None:
        self._start(_slurmd(name), self.inside(name, [programs.program("slurmd"), "-D", "-N", name]))

    def _machine(self, node: PracticeNode) -> int:
        """Return the id of the process that holds a node's machine, which is started if it is not alive."""
        name, boot = machines.machine_of(node.name), machines.boot(self.identity, node)
        if self._process(name) is None:
            boot.unlink(missing_ok=True)
            self._start(name, self._with_mount(node.name, machines.command(self.identity, node)))
        self._wait(name, "has booted", boot.exists)
        process = self._process(name)
        assert process is not None, f"{name} has just been seen alive"
        return process.pid

    def _with_mount(self, node: str, command: list[str]) -> list[str]:
        if not self.layout.network_filesystem:
            return command
        return network.inside(self._mounted(network.client_of(node)), command)

    def _start_filesystem(self) -> None:
        """Start server and clients, the nodes' first: their namespaces must not copy the user's mount."""
        self.start_file_server()
        for node in self.layout.nodes:
            client = network.client_of(node.name)
            self._start(client, network.client_command(self.identity, client))
        for node in self.layout.nodes:
            self._mounted(network.client_of(node.name))
        self._mounted(network.OUTSIDE)

    def _mounted(self, client: str) -> int:
        """Return the process id of a client once it has mounted; it is started if it is not alive."""
        if self._process(client) is None:
            self._start(client, network.client_command(self.identity, client))

        def mounted() -> bool:
            process = self._process(client)
            return process is not None and network.is_mounted(self.identity, process.pid)

        self._wait(client, "has mounted", mounted)
        process = self._process(client)
        assert process is not None, f"{client} has just been seen alive"
        return process.pid

    def _filesystem_names(self) -> list[str]:
        if not self.layout.network_filesystem:
            return []
        clients = [network.client_of(node.name) for node in self.layout.nodes]
        return [network.OUTSIDE, *clients, network.BRICK]

    def _machine_names(self) -> list[str]:
        return [machines.machine_of(node.name) for node in self.layout.nodes if node.host]

    def _start(self, name: str, command: list[str], more: Mapping[str, str] | None = None) -> None:
        if self._process(name):
            raise DevclusterError(f"{name} of {self.folder} is running already")
        environment = _clean_environment() | self.environment() | dict(more or {})
        root = self.identity.root
        start_daemon(command, root / "run" / f"{name}.process", root / "log" / f"{name}.out", environment)

    def _end(self, *names: str, patience: float = _PATIENCE_SECONDS) -> None:
        end([process for name in names if (process := self._process(name))], patience)

    def _process(self, name: str) -> Process | None:
        return recorded(self.folder / "run" / f"{name}.process")

    def _wait_for_nodes(self, names: set[str]) -> None:
        def ready() -> bool:
            states = self.node_states()
            return bool(states) and all(_is_up(states[name]) for name in names)

        self._wait("slurmctld", f"says that {', '.join(sorted(names))} are up", ready)

    def _wait(self, name: str, does: str, condition: Callable[[], bool]) -> None:
        """Poll until ``condition`` holds. Raises DevclusterError, with the daemon's last output, if it ends
        or takes too long.
        """
        until = time.monotonic() + _START_SECONDS
        while not condition():
            ended = self._process(name) is None
            if ended or time.monotonic() > until:
                problem = "ended before it" if ended else f"took more than {_START_SECONDS:g} s until it"
                raise DevclusterError(f"{name} {problem} {does}:\n{self._last_words(name)}")
            time.sleep(0.02)

    def _last_words(self, name: str) -> str:
        logs = [self.folder / "log" / f"{name}.{ending}" for ending in ("out", "log")]
        lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()[-5:]]
        return "\n".join(lines) or "it wrote nothing"


def start(folder: Path, layout: Layout | None = None, accounting: bool = False) -> PracticeCluster:
    """Bring a cluster up in a new or empty folder. Returns once every node is idle.

    Raises PackagesMissing without Slurm, DevclusterError if the folder is in use or a daemon does not come
    up. Nothing is left running then.
    """
    layout = layout or Layout()
    programs.check(layout, accounting)
    machines.check(layout)
    if layout.network_filesystem:
        network.check()
    folder = folder.absolute()
    files.claim(folder)
    cluster = None
    try:
        cluster = PracticeCluster(folder, files.identity(folder, layout), layout, accounting)
        files.write(folder, cluster.identity, layout, accounting)
        cluster._bring_up()
    except BaseException:
        if cluster:
            cluster.stop()
        else:
            files.remove(folder, None)
        raise
    return cluster


def attach(folder: Path) -> PracticeCluster:
    """Return the cluster that was started in a folder, running or not."""
    folder = folder.absolute()
    identity, layout, accounting = files.read(folder)
    return PracticeCluster(folder, identity, layout, accounting)


def _munged(root: Path) -> list[str]:
    return [
        programs.program("munged"),
        "--foreground",
        "--force",  # it dislikes folders that only their owner may enter
        f"--key-file={root}/munge.key",
        f"--socket={root}/munge.sock",
        f"--pid-file={root}/run/munged.pid",
        f"--log-file={root}/log/munged.log",
        f"--seed-file={root}/munge.seed",
        "--num-threads=2",
    ]


def _slurmd(node: str) -> str:
    return f"slurmd-{node}"


def _clean_environment() -> dict[str, str]:
    """Return a minimal environment: the caller's SLURM_* and SBATCH_* would change what programs do."""
    return {"PATH": programs.search_path(), "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", "/")}


def _is_up(state: str) -> bool:
    # A star: the node does not answer.
    return not state.endswith("*") and state not in ("down", "unknown")


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
