"""Layout of a development cluster, and its configuration files as text. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from slurm.devcluster.errors import DevclusterError

TASK_PROLOG = "task_prolog"
"""Name of the program in a cluster's folder that Slurm runs before each task, where clocks are off."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_SECONDS = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True)
class PracticeNode:
    """Node with a ``slurmd`` of its own. Its resources are only declared, not measured or enforced."""

    name: str
    gpu_type: str = "a100"
    gpus: int = 2
    """Number of pretended GPUs: they are counted, and jobs see ``CUDA_VISIBLE_DEVICES``."""
    cpus: int = 32
    memory_mb: int = 64_000
    host: str = ""
    """Host name that jobs see, of a machine of its own: process ids and boot are other than those of every
    node, even of one with the same name. Empty: this machine's, which nodes share."""
    clock_seconds: int = 0
    """Seconds by which the clock that jobs see is ahead; negative if it is behind."""


@dataclass(frozen=True)
class PracticePartition:
    """Partition: a queue over some nodes."""

    name: str
    nodes: tuple[str, ...]
    default: bool = False
    max_time: str = "UNLIMITED"
    """Time limit in Slurm's notation; a bare number is minutes."""
    priority_tier: int = 1
    """Tier: jobs of a higher one start first, and preempt preemptible jobs of a lower one."""
    preemptible: bool = False
    """Whether its jobs are requeued when a higher tier needs their place."""
    grace_seconds: int = 0
    """Seconds between the signal to a preempted job and its end."""


NODES = (
    PracticeNode("rollout0"),
    PracticeNode("reward0", gpu_type="l40"),
    PracticeNode("update0"),
    PracticeNode("update1"),
)
_EVERY_NODE = tuple(node.name for node in NODES)
PARTITIONS = (
    PracticePartition("cpu", _EVERY_NODE, default=True),
    PracticePartition("rollout", ("rollout0",)),
    PracticePartition("reward", ("reward0",)),
    PracticePartition("update", ("update0", "update1")),
    PracticePartition("all", _EVERY_NODE),
    PracticePartition("rollout-low", ("rollout0",), preemptible=True, grace_seconds=5),
    PracticePartition("rollout-high", ("rollout0",), priority_tier=10),
)


@dataclass(frozen=True)
class Layout:
    """Nodes, partitions and how quickly Slurm acts. Times in seconds.

    The defaults are for short tests: Slurm's own make a requeued job wait for two minutes.
    """

    nodes: tuple[PracticeNode, ...] = NODES
    partitions: tuple[PracticePartition, ...] = PARTITIONS
    slurmd_timeout: int = 10
    """Silence after which a node is down. Slurm checks about every 15 s, which comes on top."""
    kill_wait: int = 5
    """Time between SIGTERM and SIGKILL at a time limit or a cancellation."""
    min_job_age: int = 300
    """Time for which the controller remembers an ended job."""
    cred_expire: int = 5
    """Time for which a requeued job is held back."""
    backfill_interval: int = 1
    max_array_size: int = 1001
    """Upper bound of array indices, exclusive."""
    default_memory_mb_per_cpu: int = 100
    network_filesystem: bool = False
    """Whether the cluster has one, with a mount for each node (see :mod:`slurm.devcluster.network`)."""
    more: tuple[str, ...] = ()
    """Lines appended to slurm.conf, e.g. ``EnforcePartLimits=ALL``."""

    @property
    def has_clocks(self) -> bool:
        """Whether the clock of a node is off."""
        return any(node.clock_seconds for node in self.nodes)

    def node(self, name: str) -> PracticeNode:
        """Return the node of a name. Raises DevclusterError."""
        if found := [node for node in self.nodes if node.name == name]:
            return found[0]
        names = ", ".join(node.name for node in self.nodes)
        raise DevclusterError(f"no node {name!r}; the nodes are {names}")

    def with_node(self, name: str, **changes: Any) -> "Layout":
        """Return a layout in which fields of a node are changed. Raises DevclusterError if there is none."""
        changed = replace(self.node(name), **changes)
        return replace(self, nodes=tuple(changed if node.name == name else node for node in self.nodes))

    def with_machines(self, hosts: Iterable[str], clocks: Iterable[str]) -> "Layout":
        """Return a layout in which some nodes have a host name or a clock of their own.

        Args:
            hosts: words of the form NODE=NAME.
            clocks: words of the form NODE=SECONDS, see :attr:`PracticeNode.clock_seconds`.

        Raises:
            DevclusterError: another word, or a node that does not exist.
        """
        layout = self
        for word in hosts:
            node, name = _halves(word, _HOST, "NODE=NAME, with a host name of letters, digits and hyphens")
            layout = layout.with_node(node, host=name)
        for word in clocks:
            node, seconds = _halves(word, _SECONDS, "NODE=SECONDS, with a whole number")
            layout = layout.with_node(node, clock_seconds=int(seconds))
        return layout


@dataclass(frozen=True)
class Ports:
    """TCP ports on 127.0.0.1."""

    slurmctld: int
    slurmdbd: int
    slurmd: Mapping[str, int]
    """Port of each node's slurmd, by node name."""
    filesystem: int = 0
    """Port of the network filesystem's server, where there is one."""


@dataclass(frozen=True)
class PracticeIdentity:
    """Identity of a cluster among others of this machine: name, paths, ports."""

    name: str
    root: Path
    """Path of its folder, or a link to it, that is short enough for Unix sockets."""
    user: str
    host: str
    ports: Ports
    version: tuple[int, int]
    """Version of Slurm, e.g. (22, 5)."""


def template(name: str) -> Path:
    """Return the path of a file of templates/."""
    return Path(__file__).parent / "templates" / name


def filled(name: str, /, **values: object) -> str:
    """Fill in a file of templates/. Its comments and empty lines are left out."""
    text = Template(template(name).read_text()).substitute(values)
    return "".join(f"{line}\n" for line in text.splitlines() if line and not line.startswith("#"))


def slurm_conf(identity: PracticeIdentity, layout: Layout, accounting: bool) -> str:
    """Return the text of slurm.conf."""
    known = vars(identity) | vars(identity.ports) | vars(layout)
    types = sorted({node.gpu_type for node in layout.nodes if node.gpus})
    tracked = ",".join(["gres/gpu", *(f"gres/gpu:{name}" for name in types)])
    known["tracked"] = f"AccountingStorageTRES={tracked}" if types else ""
    storage = (
        filled("accounting.conf", **known) if accounting else "AccountingStorageType=accounting_storage/none"
    )
    nodes = [_node(node, identity) for node in layout.nodes]
    gres = ["GresTypes=gpu"] if types else []
    clocks = [f"TaskProlog={identity.root}/{TASK_PROLOG}"] if layout.has_clocks else []
    machines = "\n".join([*gres, *nodes, *map(_partition, layout.partitions), *clocks, *layout.more])
    # The option that sends a preempted job its --signal was renamed.
    moved = identity.version >= (23, 2)
    signal = "PreemptParameters=send_user_signal" if moved else "SlurmctldParameters=preempt_send_user_signal"
    return filled("slurm.conf", **known, preempt_signal=signal, accounting=storage, machines=machines)


def gres_conf(identity: PracticeIdentity, layout: Layout) -> str:
    """Return the text of gres.conf: the pretended GPUs."""
    lines = [
        f"NodeName={node.name} Name=gpu Type={node.gpu_type} "
        f"File={identity.root}/dev/{node.name}/gpu[0-{node.gpus - 1}]"
        for node in layout.nodes
        if node.gpus
    ]
    return "\n".join(["AutoDetect=off", *lines]) + "\n"


def cgroup_conf(identity: PracticeIdentity) -> str:
    """Return the text of cgroup.conf: cgroups are not used, so that no special rights are needed."""
    return "CgroupPlugin=disabled\n" if identity.version >= (23, 11) else "ConstrainCores=no\n"


def slurmdbd_conf(identity: PracticeIdentity) -> str:
    """Return the text of slurmdbd.conf."""
    return filled("slurmdbd.conf", **vars(identity) | vars(identity.ports))


def _node(node: PracticeNode, identity: PracticeIdentity) -> str:
    gres = f" Gres=gpu:{node.gpu_type}:{node.gpus}" if node.gpus else ""
    return (
        f"NodeName={node.name} NodeHostname={identity.host} NodeAddr=127.0.0.1 "
        f"Port={identity.ports.slurmd[node.name]} CPUs={node.cpus} RealMemory={node.memory_mb}{gres}"
    )


def _partition(partition: PracticePartition) -> str:
    return (
        f"PartitionName={partition.name} Nodes={','.join(partition.nodes)} "
        f"Default={'YES' if partition.default else 'NO'} MaxTime={partition.max_time} "
        f"PriorityTier={partition.priority_tier} "
        f"PreemptMode={'REQUEUE' if partition.preemptible else 'OFF'} GraceTime={partition.grace_seconds}"
    )


def _halves(word: str, form: re.Pattern[str], expected: str) -> tuple[str, str]:
    node, _, value = word.partition("=")
    if not form.fullmatch(value):
        raise DevclusterError(f"{word!r} must be {expected}")
    return node, value


def layout_from_json(record: Mapping[str, Any]) -> Layout:
    """Undo ``dataclasses.asdict`` of a layout that was stored as JSON."""
    nodes = tuple(PracticeNode(**node) for node in record["nodes"])
    partitions = tuple(
        PracticePartition(**one | {"nodes": tuple(one["nodes"])}) for one in record["partitions"]
    )
    converted = {"nodes": nodes, "partitions": partitions, "more": tuple(record["more"])}
    return Layout(**{**record, **converted})


def identity_from_json(record: Mapping[str, Any]) -> PracticeIdentity:
    """Undo ``dataclasses.asdict`` of an identity that was stored as JSON."""
    ports, version = Ports(**record["ports"]), tuple(record["version"])
    return PracticeIdentity(**{**record, "root": Path(record["root"]), "ports": ports, "version": version})
