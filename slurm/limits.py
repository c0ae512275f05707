"""Limits of a cluster, its partitions and their nodes; and Slurm's notation of time and memory."""

import math
import os
import pwd
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from slurm.commands import SlurmError, SlurmMissing, run_command


class Per(StrEnum):
    """Settings of a cluster or a partition that give jobs memory by default."""

    NODE = "DefMemPerNode"
    CPU = "DefMemPerCPU"
    GPU = "DefMemPerGPU"


Defaults = Mapping[str, int]
"""MiB by setting (:class:`Per`), of those that are set: by Slurm's rules one of them at most."""


@dataclass(frozen=True)
class ClusterMemory:
    """A cluster's default memory."""

    defaults: Defaults
    """Defaults of partitions that have none of their own."""
    is_counted: bool
    """Whether Slurm shares a node's memory among jobs at all."""


def parse_defaults(settings: Mapping[str, str]) -> dict[str, int]:
    """Return the defaults among settings as ``scontrol show config`` and ``show partition`` print them."""
    jobs = dict(word.partition("=")[::2] for word in settings.get("JobDefaults", "").split(","))
    given = {name: value for name in Per if (value := jobs.get(name) or settings.get(name, ""))}
    return {name: int(value) for name, value in given.items() if value.isdecimal() and int(value)}


def parse_cluster_memory(settings: Mapping[str, str]) -> ClusterMemory:
    """Parse the settings of ``scontrol show config``."""
    parameters = settings.get("SelectTypeParameters", "").upper()
    return ClusterMemory(parse_defaults(settings), "MEMORY" in parameters)


def given_memory(defaults: Defaults, cpus: int, gpus: int) -> tuple[int | None, str]:
    """Return the MiB that a job gets on a node which asks for none, and how that comes about.

    Args:
        defaults: the partition's own, or else the cluster's.
        cpus: CPUs of the job on the node.
        gpus: GPUs of the job on the node.

    Returns:
        None for the memory where it is all that the node has.
    """
    for name, count in ((Per.GPU, gpus), (Per.CPU, cpus), (Per.NODE, 1)):
        if name in defaults and count:
            times = "" if name is Per.NODE else f" x {count}"
            return defaults[name] * count, f"{name}={defaults[name]}{times}"
    return None, f"no {Per.CPU}, no {Per.NODE}"


_RETRIES = 2
PATIENCE = 60.0
_OF_ACCOUNT = "format=MaxSubmitJobs,GrpSubmit,QOS,DefaultQOS,MaxJobs,GrpJobs,Partition"
_OF_QOS = "format=Name,MaxSubmitJobsPerUser,GrpSubmit,MaxJobsPerUser,GrpJobs"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@dataclass(frozen=True)
class ClusterLimits:
    """Limits of the whole cluster and of this user."""

    version: tuple[int, int]
    max_array_size: int
    """Upper bound of array indices, exclusive."""
    max_jobs: int
    """Jobs that the controller keeps at once, of all users; each array element counts."""
    min_job_age: float
    """Seconds for which the controller remembers an ended job."""
    max_submit: int | None
    """Jobs that this user may have waiting and running; None where there is no limit or none can be read."""
    name: str = ""
    """Name of the cluster; empty where unknown."""
    max_running: int | None = None
    """Jobs of this user that may run at once; None where there is no limit or none can be read."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that have the same hardware."""

    count: int
    cpus: int
    memory: int
    """Memory of each node in MiB."""
    gres: Mapping[str, int]
    """Devices of each node, by name and by name:type, e.g. gpu -> 4 and gpu:a100 -> 4."""


@dataclass(frozen=True)
class Partition:
    """Partition that jobs may be submitted to."""

    name: str
    max_time: float | None
    """Longest time of a job in seconds; None where there is no limit."""
    state: str
    """State: UP, or DOWN, DRAIN or INACTIVE, in which no jobs start."""
    nodes: int
    default: bool
    allowed_accounts: frozenset[str] | None
    """Accounts that may use it; None: all but those that are denied."""
    allowed_qos: frozenset[str] | None
    kinds: tuple[NodeKind, ...]
    default_memory: Defaults = field(default_factory=dict)
    """Memory of jobs that ask for none; empty: as the cluster says."""

    def most(self, device: str) -> int:
        """Return the most devices of a name (gpu) or name and type (gpu:a100) that one node has."""
        return max((kind.gres.get(device, 0) for kind in self.kinds), default=0)


def read_limits(qos: Collection[str] = ()) -> ClusterLimits:
    """Ask the controller for limits, and accounting where there is any.

    Args:
        qos: names of the QOS that jobs are submitted with.

    Raises :class:`SlurmError`, :class:`SlurmMissing`.
    """
    found = parse_limits(_settings())
    max_submit, max_running = _of_user(found.name, qos)
    return replace(found, max_submit=max_submit, max_running=max_running)


def read_cluster_name(timeout: float = PATIENCE) -> str:
    """Ask the controller for the name of its cluster. Raises as :func:`read_limits`.

    ``timeout``: seconds to wait; for less than usual it is asked only once.
    """
    return parse_limits(_settings(timeout)).name


def read_cluster_names() -> list[str]:
    """Ask accounting for the names of all clusters that it knows; none where there is no accounting, or none
    that answers."""
    try:
        return _sacctmgr("cluster", "format=Cluster").split()
    except (SlurmError, SlurmMissing):
        return []


def hides_jobs() -> bool:
    """Ask the controller whether users see jobs of their own alone (PrivateData). Raises as
    :func:`read_limits`."""
    hidden = parse_settings(_settings()).get("PrivateData", "").lower()
    return bool({"jobs", "all"} & set(hidden.split(",")))


def read_cluster_memory() -> ClusterMemory:
    """Ask the controller for the memory of jobs that ask for none. Raises as :func:`read_limits`."""
    return parse_cluster_memory(parse_settings(_settings()))


def parse_settings(text: str) -> dict[str, str]:
    """Parse the output of ``scontrol show config``: values by name."""
    return dict(re.findall(r"^(\w+)\s+=\s*(.*?)\s*$", text, re.MULTILINE))


def _settings(timeout: float = PATIENCE) -> str:
    retries = _RETRIES if timeout >= PATIENCE else 0
    return run_command(["scontrol", "show", "config"], timeout=timeout, retries=retries)


def parse_limits(text: str, max_submit: int | None = None) -> ClusterLimits:
    """Parse the limits in the output of ``scontrol show config``."""
    settings = parse_settings(text)
    try:
        major, minor = settings["SLURM_VERSION"].split(".")[:2]
        return ClusterLimits(
            version=(int(major), int(minor)),
            max_array_size=int(settings["MaxArraySize"]),
            max_jobs=int(settings["MaxJobCount"]),
            min_job_age=float(settings["MinJobAge"].removesuffix("sec")),
            max_submit=max_submit,
            name=settings.get("ClusterName", ""),
        )
    except (KeyError, ValueError) as error:
        raise SlurmError(["scontrol", "show"], 0, f"its output is not understood: {error}") from None


def _of_user(cluster: str, named: Collection[str]) -> tuple[int | None, int | None]:
    """Return the strictest limits of submitted and of running jobs of the user's accounts, default QOS and
    named ones; None if unknown.

    A QOS that a user may name and does not (for interactive work, say) bounds nothing. Limits that are not
    seen here show when sbatch refuses a job for them, or by why a job waits.
    """
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
        which = (f"user={user}", *of_cluster(cluster))
        associations = _sacctmgr("assoc", *which, _OF_ACCOUNT)
        of_qos = _sacctmgr("qos", _OF_QOS)
    except (KeyError, SlurmError, SlurmMissing):
        return None, None  # no account of this name here, or no accounting
    return parse_job_limits(associations, of_qos, named)


def of_cluster(name: str) -> list[str]:
    """Return the words by which sacctmgr leaves out what is of other clusters of the same database."""
    return [f"cluster={name.lower()}"] if name else []  # there all names are in small letters


def _sacctmgr(what: str, *options: str) -> str:
    return run_command(["sacctmgr", "-n", "-P", "-r", "show", what, *options], retries=_RETRIES)


def parse_job_limits(
    associations: str, qos: str, named: Collection[str] = ()
) -> tuple[int | None, int | None]:
    """Return the smallest of a user's limits of submitted and of running jobs; None where there is none.

    Args:
        associations: rows of MaxSubmitJobs|GrpSubmit|QOS|DefaultQOS|MaxJobs|GrpJobs|Partition. What may run
            by one that holds in one partition alone is left out.
        qos: rows of Name|limit|limit|limit|limit, first those of submitted jobs.
        named: names of the QOS that jobs are submitted with.
    """
    rows = [line.split("|") for line in associations.splitlines() if line]
    # Of several QOS without a default, none is sure to apply.
    names = {row[3] or row[2] for row in rows}.union(named)
    of_qos = [row for line in qos.splitlines() if (row := line.split("|"))[0] in names]
    submitted = [*(row[:2] for row in rows), *(row[1:3] for row in of_qos)]
    running = [*(row[4:6] for row in rows if not any(row[6:7])), *(row[3:] for row in of_qos)]
    return _least(submitted), _least(running)


def _least(rows: Iterable[Sequence[str]]) -> int | None:
    return min((int(bound) for row in rows for bound in row if bound.isdigit()), default=None)


def read_partitions() -> dict[str, Partition]:
    """Read every partition, by name: a call of scontrol and one of sinfo. Raises as :func:`read_limits`."""
    shown = run_command(["scontrol", "-a", "-o", "show", "partition"], retries=_RETRIES)
    nodes = run_command(["sinfo", "-a", "-e", "-h", "-o", "%R|%D|%c|%m|%G"], retries=_RETRIES)
    return parse_partitions(shown, nodes)


def partitions_of(named: Iterable[str], known: Mapping[str, Partition]) -> list[Partition]:
    """Return the partitions that a job goes to which names these: the cluster's default where it names none.
    Unknown ones are left out. Pure."""
    named = list(named) or [name for name, found in known.items() if found.default]
    return [known[name] for name in named if name in known]


def unavailable_nodes(partitions: Iterable[str]) -> list[str]:
    """Return the nodes of some partitions, of all if none is named, that take no job now: down, drained,
    silent or kept back. Raises as :func:`read_limits`."""
    which = f"--partition={','.join(partitions)}" if partitions else "--all"
    return parse_unavailable(run_command(["sinfo", which, "-N", "-h", "-o", "%N|%T"], retries=_RETRIES))


def parse_unavailable(shown: str) -> list[str]:
    """Parse the output of ``sinfo -N -h -o '%N|%T'``: a node's state may end with a sign, like * for one
    that does not answer."""
    states = dict(line.split("|") for line in shown.splitlines())
    return sorted(name for name, state in states.items() if not takes_jobs(state))


def takes_jobs(state: str) -> bool:
    """Whether a node takes jobs, now or when others have ended, by its state in sinfo's words."""
    return state.rstrip("~#+-") in _TAKES_JOBS


def parse_partitions(shown: str, nodes: str) -> dict[str, Partition]:
    """Parse the output of ``scontrol -o show partition`` and ``sinfo -e -h -o '%R|%D|%c|%m|%G'``."""
    kinds: dict[str, list[NodeKind]] = {}
    for line in nodes.splitlines():
        name, count, cpus, memory, gres = line.split("|", 4)
        # sinfo writes 8+ where nodes differ and 8 is the least of them.
        number, cores, mebibytes = (int(text.rstrip("+")) for text in (count, cpus, memory))
        kind = NodeKind(number, cores, mebibytes, parse_gres(gres))
        kinds.setdefault(name, []).append(kind)
    lines = (line for line in shown.splitlines() if line.startswith("PartitionName="))
    partitions = (_partition(line, kinds) for line in lines)
    return {partition.name: partition for partition in partitions}


def _partition(line: str, kinds: Mapping[str, Iterable[NodeKind]]) -> Partition:
    settings: dict[str, str] = dict(word.partition("=")[::2] for word in line.split())
    name = settings["PartitionName"]
    return Partition(
        name=name,
        max_time=parse_duration(settings.get("MaxTime", "UNLIMITED")),
        state=settings.get("State", ""),
        nodes=int(settings.get("TotalNodes", 0)),
        default=settings.get("Default") == "YES",
        allowed_accounts=_allowed(settings.get("AllowAccounts", "ALL")),
        allowed_qos=_allowed(settings.get("AllowQos", "ALL")),
        kinds=tuple(kinds.get(name, ())),
        default_memory=parse_defaults(settings),
    )


def _allowed(text: str) -> frozenset[str] | None:
    return None if text in ("ALL", "N/A", "(null)") else frozenset(text.split(","))


def parse_gres(text: str) -> dict[str, int]:
    """Count devices in sinfo's notation, e.g. ``gpu:a100:4(S:0-1),nvme:1``, by name and by name:type."""
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *rest = [word for word in item.split(":") if word != "no_consume"]
        counts = _COUNT.fullmatch(rest.pop()) if rest and _COUNT.fullmatch(rest[-1]) else None
        count = int(counts[1]) * _MULTIPLES[counts[2]] if counts else 1
        for key in [name, *(f"{name}:{kind}" for kind in rest)] if name else []:
            found[key] = found.get(key, 0) + count
    return found


_TAKES_JOBS = frozenset({"idle", "mixed", "allocated", "completing", "planned"})
"""States of a node that takes jobs now or when others have ended."""
_COUNT = re.compile(r"(\d+)([KMGT]?)")
_MULTIPLES = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_MEBIBYTES = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


def parse_duration(text: str) -> float | None:
    """Parse Slurm's notation of a time into seconds; None for UNLIMITED.

    Takes minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises :class:`ValueError`.
    """
    if text.strip().upper() in ("UNLIMITED", "INFINITE"):
        return None
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"not a time that Slurm knows (like 90, 4:00:00 or 1-12:00:00): {text!r}")
    numbers = [int(number) for number in found.groups()[1:] if number is not None]
    has_hours = found["days"] is not None or len(numbers) == 3
    units = [_HOUR, _MINUTE, 1] if has_hours else [_MINUTE, 1]
    seconds = sum(number * unit for number, unit in zip(numbers, units, strict=False))
    return float(_DAY * int(found["days"] or 0) + seconds)


def format_duration(seconds: float) -> str:
    """Write seconds as D-HH:MM:SS, for ``--time``, rounded up."""
    days, rest = divmod(math.ceil(seconds), _DAY)
    return f"{days}-{rest // _HOUR:02}:{rest % _HOUR // _MINUTE:02}:{rest % _MINUTE:02}"


def parse_memory(text: str) -> int:
    """Parse memory like 16G, 512M, 1.5T or 4096 into MiB, rounded up. Raises :class:`ValueError`."""
    found = _MEMORY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"not a size of memory that Slurm knows (like 4096, 512M or 16G): {text!r}")
    return math.ceil(float(found[1]) * _MEBIBYTES[found[2].upper()])
