"""Memory of hosts: what each process of a stage needs there, beside what its jobs get."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pipeline.checks.finding import Finding, Verdict
from pipeline.checks.requests import asks_for_memory
from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, key_of, resources_of
from pipeline.config.schema import Config
from pipeline.forecast.changes import smallest_change
from pipeline.forecast.parts import GIB, StageNeed
from pipeline.forecast.stages import GpusOf, stage_needs
from slurm.commands import SlurmError, SlurmMissing, on_cluster
from slurm.limits import (
    ClusterMemory,
    Partition,
    given_memory,
    parse_memory,
    partitions_of,
    read_cluster_memory,
)

TITLE = "host memory of "
_TIGHT = 0.9
"""Share of a job's memory from which on there is a warning: libraries and buffers are not counted."""
_MIB = 2.0**20
_UNKNOWN = 1
"""MiB of a node whose memory Slurm does not know."""
_OWN_WAYS = frozenset({"mem", "mem-per-cpu", "mem-per-gpu", "exclusive"})
"""Options of sbatch by which a job gets other memory than its partition's default."""


@dataclass(frozen=True)
class HostRoom:
    """Memory that the jobs of a stage have on each node."""

    key: str
    """Key that asks for it."""
    size: float
    """Bytes."""
    most: float | None
    """Bytes of the largest node that they may run on; None where that is not known."""
    processes: int
    """Processes of a job on a node."""
    why: str
    """Source of the size, in words."""


def host_need(need: StageNeed, gpus: int) -> StageNeed:
    """Return what each process needs of its host: beside a GPU, or, without one, all of it."""
    return StageNeed(need.stage, need.host if gpus else need.parts)


class HostRooms:
    """Memory of the jobs of each stage of a configuration; the cluster is asked where a stage names none."""

    def __init__(self, config: Config, partitions: Mapping[str, Partition]) -> None:
        self._config, self._partitions = config, partitions

    def of(self, job_kind: str) -> HostRoom | None:
        """Return what the jobs of a job kind get; None where that is not known, or there are none."""
        scheduler = self._config.scheduler
        if not isinstance(scheduler, SlurmConfig):
            return None
        given = resources_of(scheduler, job_kind)
        cluster = None if asks_for_memory(given) or not self._partitions else self._defaults
        return room_of(f"{key_of(job_kind)}.mem", given, self._partitions, cluster)

    @cached_property
    def _defaults(self) -> ClusterMemory | None:
        assert self._config.slurm is not None
        try:
            with on_cluster(self._config.slurm.cluster):
                return read_cluster_memory()
        except (SlurmError, SlurmMissing):
            return None


def room_of(
    key: str, given: ResourcesConfig, partitions: Mapping[str, Partition], cluster: ClusterMemory | None
) -> HostRoom | None:
    """Return the least that a job may get, over the partitions that it names; None where it is not known, or
    is asked for by an option of sbatch. Pure.

    Args:
        cluster: memory of jobs that ask for none; None where that is not known.
    """
    places, tasks = partitions_of(given.partition, partitions), given.ntasks_per_node
    nodes = [kind.memory for place in places for kind in place.kinds]
    most = max(nodes) * _MIB if nodes and min(nodes) > _UNKNOWN else None
    if given.mem is not None:
        return HostRoom(key, parse_memory(given.mem) * _MIB, most, tasks, f"{key}={given.mem}")
    if _OWN_WAYS & given.options.keys() or cluster is None or most is None:
        return None
    size, why = min(_given(given, place, cluster) for place in places if place.kinds)
    return HostRoom(key, size * _MIB, most, tasks, f"partition {why}")


def _given(given: ResourcesConfig, place: Partition, cluster: ClusterMemory) -> tuple[int, str]:
    """Return the MiB that a partition gives a job, and how that comes about."""
    cpus = given.cpus_per_task * given.ntasks_per_node
    defaults = (place.default_memory or cluster.defaults) if cluster.is_counted else {}
    size, why = given_memory(defaults, cpus, given.num_gpus or 0)
    if size is None:
        return min(kind.memory for kind in place.kinds), f"{place.name} gives it a whole node"
    return size, f"{place.name} gives it {why}"


def judge_host(config: Config, need: StageNeed, room: HostRoom | None, gpus_of: GpusOf) -> Finding | None:
    """Judge what a stage's processes need of their host: a problem where what they need for certain is more
    than their job has. None where it suffices. Pure, but for models' headers."""
    job_kind = need.stage.partition(" ")[0]
    found = host_need(need, gpus_of(job_kind))
    if room is None or found.peak * room.processes <= _TIGHT * room.size:
        return None
    is_certain = found.certain * room.processes > room.size
    verdict = Verdict.PROBLEM if is_certain else Verdict.WARNING
    advice = _advice(config, found, room, gpus_of)
    begin = f"scheduler: {need.stage} cannot fit: " if is_certain else ""
    times = f" for each of {room.processes} processes" if room.processes > 1 else ""
    amount = f"{found.peak / GIB:.2f} GiB of the host{times}"
    parts = ", ".join(f"{part.name} {part.size / GIB:.2f}" for part in found.at_peak)
    text = f"{begin}{amount} ({parts}), and a job has {room.size / GIB:.2f} GiB on a node ({room.why})"
    numbers = {"need_bytes": found.peak * room.processes, "room_bytes": room.size}
    return Finding(TITLE + need.stage, verdict, f"{text}; {advice}", advice, numbers)


def _advice(config: Config, found: StageNeed, room: HostRoom, gpus_of: GpusOf) -> str:
    """Return more memory for the job, or, where no node has it, the smallest change of the stage."""
    enough = found.peak * room.processes / _TIGHT
    if room.most is None or enough <= room.most:
        return f"it would fit with {room.key}={_in_slurms_words(enough)}"
    most = room.most

    def fits(changed: Config) -> bool:
        one = next(one for one in stage_needs(changed, gpus_of) if one.stage == found.stage)
        needed = host_need(one, gpus_of(one.stage.partition(" ")[0])).peak
        return needed * room.processes <= _TIGHT * most

    words = smallest_change(config, found.stage, fits)
    if words is None:
        return "take nodes with more memory"
    return f"it would fit with {' '.join([*words, f'{room.key}={_in_slurms_words(most - _MIB)}'])}"


def _in_slurms_words(size: float) -> str:
    """Return bytes as Slurm writes memory, rounded up to a MiB."""
    return f"{int(-(-size // _MIB))}M"
