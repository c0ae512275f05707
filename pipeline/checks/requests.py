"""What jobs ask for, compared with what a cluster has and allows. Pure."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.checks.finding import Finding, ok, warning
from pipeline.config.issue import ConfigIssue
from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, key_of
from slurm.associations import Associations, Ceiling, Ceilings
from slurm.limits import (
    ClusterLimits,
    ClusterMemory,
    NodeKind,
    Partition,
    format_duration,
    given_memory,
    parse_duration,
    parse_gres,
    parse_memory,
    partitions_of,
)

_ELEMENTS_NEEDED = 6
"""Elements that a run needs in the queue at once: one iteration's in the smallest pieces, and driver jobs."""


MEMORY = "memory"
_MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
"""sbatch options that ask for memory."""
_MOST_NAMED = 3
"""Most nodes that a line names."""
_WHOLE = "all the memory of its node, so that no other job fits beside it"


@dataclass(frozen=True)
class ClusterFacts:
    """Limits, partitions and associations that a cluster offers this user."""

    limits: ClusterLimits
    partitions: Mapping[str, Partition]
    associations: Associations | None
    """Accounts and QOS of the user; None where they are not known."""
    ceilings: Ceilings | None = None
    """What these allow one job; None where that is not known, or not enforced."""


def limit_problems(
    given: SlurmConfig, limits: ClusterLimits, ceilings: Ceilings | None = None
) -> Iterator[ConfigIssue]:
    """Find limits of submitted jobs that leave a run no room: of the user, and of QOS that it names."""
    of_qos = [ceilings.qos[name].submitted for name in given.qos_named if ceilings and name in ceilings.qos]
    most = min((bound for bound in (limits.max_submit, *of_qos) if bound is not None), default=None)
    if most is not None and most < _ELEMENTS_NEEDED:
        why = f"you may queue {most} jobs; a run needs at least {_ELEMENTS_NEEDED}, ask for more"
        yield ConfigIssue("scheduler.max_submitted", given.max_submitted, why)


def stage_problems(job_kind: str, given: ResourcesConfig, cluster: ClusterFacts) -> Iterator[ConfigIssue]:
    """Find reasons why jobs of one job kind cannot run in their partitions. Pure."""
    key = key_of(job_kind)
    legal = names_in_words(cluster.partitions)
    unknown = [name for name in given.partition if name not in cluster.partitions]
    for name in unknown:
        yield ConfigIssue(f"{key}.partition", name, f"no such partition; legal: {legal}")
    partitions = partitions_of(given.partition, cluster.partitions)
    if not partitions and not given.partition:
        yield ConfigIssue(f"{key}.partition", "null", f"the cluster has no default; legal: {legal}")
    for partition in partitions:
        if partition.state != "UP":
            why = f"it is {partition.state}: no job starts there"
            yield ConfigIssue(f"{key}.partition", partition.name, why)
    yield from _association_problems(key, given, partitions, cluster.associations)
    if partitions and not unknown:
        yield from _time_problems(key, given, partitions)
        yield from ceiling_problems(key, given, cluster.ceilings or Ceilings())
        yield from _size_problems(key, given, partitions)


def _association_problems(
    key: str, given: ResourcesConfig, partitions: Sequence[Partition], known: Associations | None
) -> Iterator[ConfigIssue]:
    """Find accounts and QOS that the user does not have or a partition does not allow."""
    for name, value, mine in (
        ("account", given.account, known.accounts if known else None),
        ("qos", given.qos, known.qos if known else None),
    ):
        if value is None:
            continue
        if known and known.enforced and mine is not None and value not in mine:
            yield ConfigIssue(f"{key}.{name}", value, f"not one of yours; legal: {names_in_words(mine)}")
            continue
        for partition in partitions:
            allowed = partition.allowed_accounts if name == "account" else partition.allowed_qos
            if allowed is not None and value not in allowed:
                why = f"partition {partition.name} does not take it; legal: {names_in_words(allowed)}"
                yield ConfigIssue(f"{key}.{name}", value, why)


def _time_problems(
    key: str, given: ResourcesConfig, partitions: Sequence[Partition]
) -> Iterator[ConfigIssue]:
    """Find a time that no partition allows: sbatch --test-only takes it, and the job would wait for ever."""
    seconds = parse_duration(given.time)
    longest = max(math.inf if one.max_time is None else one.max_time for one in partitions)
    if longest < math.inf and (seconds is None or seconds > longest):
        where = names_in_words(partition.name for partition in partitions)
        why = f"longer than partition {where} allows; legal: up to {format_duration(longest)}"
        yield ConfigIssue(f"{key}.time", given.time, why)


def _size_problems(
    key: str, given: ResourcesConfig, partitions: Sequence[Partition]
) -> Iterator[ConfigIssue]:
    """Find requests that exceed every node, first each resource by itself, then all together."""
    where = f"partition {names_in_words(partition.name for partition in partitions)}"
    kinds, needs = [kind for partition in partitions for kind in partition.kinds], needs_of(given)
    most = [max((need.of_node(kind) for kind in kinds), default=0) for need in needs]
    found = {
        (need.key, need.device.partition(":")[0]): (need, there)
        for need, there in zip(needs, most, strict=True)
        if need.count > there
    }
    for need, there in found.values():
        yield ConfigIssue(f"{key}.{need.key}", need.value, _too_much(need, there, where, kinds))
    fits = (all(need.count <= need.of_node(kind) for need in needs) for kind in kinds)
    if not found and kinds and not any(fits):
        asked = ", ".join(dict.fromkeys(f"{need.key}={need.value}" for need in needs))
        yield ConfigIssue(key, asked, f"nodes of {where} have each of these, but none has all of them")
    nodes = max((partition.nodes for partition in partitions), default=0)
    if given.nodes > nodes:
        legal = f"has fewer; legal: 1 to {nodes}" if nodes else "has none; choose another partition"
        yield ConfigIssue(f"{key}.nodes", given.nodes, f"{where} {legal}")


@dataclass(frozen=True)
class ResourceNeed:
    """Amount of one resource that a job wants on each node."""

    key: str
    value: object
    """Value of the key as the user gave it."""
    count: int
    of_node: Callable[[NodeKind], int]
    device: str = ""

    @property
    def tres(self) -> str:
        """Name of the resource in limits of accounts and QOS."""
        return f"gres/{self.device}" if self.device else {"cpus_per_task": "cpu"}.get(self.key, self.key)


def needs_of(given: ResourcesConfig) -> list[ResourceNeed]:
    """Return the CPUs, memory and devices that a job wants on each node. Pure."""
    cpus = given.cpus_per_task * given.ntasks_per_node
    needs = [ResourceNeed("cpus_per_task", given.cpus_per_task, cpus, lambda kind: kind.cpus)]
    if given.mem is not None:
        needs.append(ResourceNeed("mem", given.mem, parse_memory(given.mem), lambda kind: kind.memory))
    key = "gres" if given.gres else "gpus_per_node"
    for name, number in parse_gres(given.gres or f"gpu:{given.gpus_per_node or 0}").items():
        needs.append(_device_need(key, getattr(given, key), name, number))
    return [need for need in needs if need.count]


def _device_need(key: str, value: object, device: str, count: int) -> ResourceNeed:
    return ResourceNeed(key, value, count, lambda kind: kind.gres.get(device, 0), device)


def _too_much(need: ResourceNeed, most: int, where: str, kinds: Sequence[NodeKind]) -> str:
    if need.device and not most:
        devices = {name for kind in kinds for name in kind.gres}
        return f"no node of {where} has {need.device}; legal: {names_in_words(devices)}"
    if need.key == "mem":
        return f"no node of {where} has so much; legal: up to {most}M"
    return f"{need.count} on a node, and no node of {where} has more than {most}; legal: up to {most}"


def names_in_words(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def shortened(names: Sequence[str]) -> str:
    """Name the first few, and say how many more there are."""
    more = [f"{len(names) - _MOST_NAMED} more"] * (len(names) > _MOST_NAMED)
    return ", ".join([*names[:_MOST_NAMED], *more])


# --- what accounts and QOS allow one job ---


def ceiling_problems(key: str, given: ResourcesConfig, known: Ceilings) -> Iterator[ConfigIssue]:
    """Find what one job asks for beyond the limits of its account and QOS.

    Args:
        key: of the resources, like ``scheduler.update``.
    """
    yield from _wall_problems(key, given, known.wall_of(given.account, given.qos))
    asked: list[tuple[str, str, object, int]] = [("node", "nodes", given.nodes, given.nodes)]
    asked += [(need.tres, need.key, need.value, need.count * given.nodes) for need in needs_of(given)]
    for ceiling in known.of_job(given.account, given.qos):
        for name, of, value, count in asked:
            most = ceiling.amounts.get(name)
            if most is not None and count > most:
                why = f"{count} {name} in one job, and {ceiling.whose} allows {most}: it would wait for ever"
                yield ConfigIssue(f"{key}.{of}", value, why)


def _wall_problems(key: str, given: ResourcesConfig, ceiling: Ceiling | None) -> Iterator[ConfigIssue]:
    seconds = parse_duration(given.time)
    if ceiling is not None and (math.inf if seconds is None else seconds) > (ceiling.wall or math.inf):
        most = format_duration(ceiling.wall or 0.0)
        why = f"longer than {ceiling.whose} allows (MaxWall), so its jobs would never start"
        yield ConfigIssue(f"{key}.time", given.time, f"{why}; legal: up to {most}")


# --- memory that is not asked for ---


def asks_for_memory(given: ResourcesConfig) -> bool:
    return given.mem is not None or any(name in given.options for name in _MEMORY_OPTIONS)


def judge_memory(
    asked: Mapping[str, ResourcesConfig], partitions: Mapping[str, Partition], cluster: ClusterMemory
) -> Iterator[Finding]:
    """Say what the cluster gives jobs that ask for no memory, too little or a whole node: a finding for those
    that get the same.

    Args:
        asked: resources by job kind.
    """
    found: dict[str, list[str]] = {}
    for job_kind, given in asked.items():
        if not asks_for_memory(given):
            places = partitions_of(given.partition, partitions)
            text = "; ".join(_given(given, place, cluster) for place in places)
            found.setdefault(text, []).append(f"{key_of(job_kind)}.mem")
    for text, keys in found.items():
        unset = f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} not set"
        if not cluster.is_counted:
            facts = "this cluster does not count memory: a job may use what its node has"
            yield ok(MEMORY, f"{unset}; {facts}")
        elif _WHOLE in text:
            yield warning(MEMORY, f"{unset}; {text}", "set it to what a job needs")
        elif text:
            yield ok(MEMORY, f"{unset}; {text}")


def _given(given: ResourcesConfig, place: Partition, cluster: ClusterMemory) -> str:
    cpus = given.cpus_per_task * given.ntasks_per_node
    megabytes, why = given_memory(place.default_memory or cluster.defaults, cpus, given.num_gpus or 0)
    amount = _WHOLE if megabytes is None else f"{megabytes}M on a node"
    return f"partition {place.name} gives a job {amount} ({why})"
