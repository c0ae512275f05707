"""Checks whether a cluster can give what a configuration asks for, before any job is submitted."""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.issue import ConfigError, ConfigIssue
from pipeline.config.job_kinds import DRIVER
from pipeline.config.scheduler import SLURM_STAGES, ResourcesConfig, SlurmConfig, key_of, resources_of
from pipeline.config.schema import Config
from pipeline.executors.slurm.arrays import array_of, driver_submission, stage_submissions
from pipeline.executors.slurm.resources import Escalation
from pipeline.preflight.ceilings import ceiling_problems
from pipeline.preflight.default_memory import asks_for_memory, default_memory_lines
from pipeline.preflight.disk_need import existing_folder
from pipeline.run.directory import imagined_run
from pipeline.run.tasks import Stage, Task, task_of
from slurm.associations import Associations, read_associations
from slurm.ceilings import Ceilings, read_ceilings
from slurm.clusters import on_cluster
from slurm.commands import SlurmError, SlurmTimeout, run_command
from slurm.limits import (
    ClusterLimits,
    NodeKind,
    Partition,
    format_duration,
    parse_duration,
    parse_gres,
    parse_memory,
    partitions_of,
    read_cluster_memory,
    read_limits,
    read_partitions,
    unavailable_nodes,
)
from slurm.submission import render

PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "srun")
_TEST_SECONDS = 30.0
_NO_SUCH_NODES = "Requested node configuration is not available"
_LATER = "--begin=now+1hour"
_MOST_NAMED = 3
"""Most nodes that a line names."""
_ELEMENTS_NEEDED = 6
"""Elements that a run needs in the queue at once: one iteration's in the smallest pieces, and driver jobs."""


@dataclass(frozen=True)
class Cluster:
    """Limits, partitions and associations that a cluster offers this user."""

    limits: ClusterLimits
    partitions: Mapping[str, Partition]
    associations: Associations | None
    """Accounts and QOS of the user; None where they are not known."""
    ceilings: Ceilings | None = None
    """What these allow one job; None where that is not known, or not enforced."""


def read_cluster() -> Cluster:
    mine = read_associations()
    return Cluster(
        *(read_limits(), read_partitions(), mine),
        read_ceilings() if mine and mine.is_limited else None,
    )


def check_cluster(config: Config) -> list[str]:
    """Check what can be checked in a second and without a job. Returns lines for people: what jobs will have
    to wait for, what they get that ask for no memory, and what nobody could be asked. Raises ConfigError with
    every problem that does not pass by itself."""
    assert config.slurm
    with on_cluster(config.slurm.cluster):
        return _check_cluster(config, config.slurm)


def _check_cluster(config: Config, given: SlurmConfig) -> list[str]:
    cluster, found = cluster_at_hand(given), list(run_dir_problems(Path(config.run_dir)))
    if isinstance(cluster, ConfigIssue):
        raise ConfigError("\n".join(map(str, [*found, cluster])))
    found += cluster_problems(config, cluster)
    if problems := [issue for issue in found if not issue.is_passing]:
        raise ConfigError("\n".join(map(str, problems)))
    asked = {job_kind: resources_of(given, job_kind) for job_kind in job_kinds_used(config)}
    return [*map(str, found), *not_asked(asked.values(), cluster), *_default_memory(asked, cluster)]


def cluster_at_hand(given: SlurmConfig) -> Cluster | ConfigIssue:
    """Ask the cluster what it offers. Returns why that cannot be asked where it cannot."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        why = f"{', '.join(missing)} not found; type this on a login node"
        return ConfigIssue("scheduler", given.kind, why)
    try:
        return read_cluster()
    except SlurmError as error:
        return ConfigIssue("scheduler", given.kind, f"Slurm does not answer: {error}")


def cluster_problems(config: Config, cluster: Cluster) -> Iterator[ConfigIssue]:
    """Find reasons why jobs of this configuration cannot run on a cluster."""
    assert config.slurm
    yield from limit_problems(config.slurm, cluster.limits, cluster.ceilings)
    for job_kind in job_kinds_used(config):
        yield from job_kind_problems(config, job_kind, cluster)


def not_asked(asked: Iterable[ResourcesConfig], cluster: Cluster) -> Iterator[str]:
    """Yield a line on accounts and QOS of which nobody can say whether they are the user's. Pure."""
    if cluster.associations is not None:
        return
    given = [(name, getattr(one, name)) for one in asked for name in ("account", "qos")]
    if words := dict.fromkeys(f"{name}={value}" for name, value in given if value is not None):
        why = "no accounting answers here (sacctmgr), so nobody was asked whether you may use them"
        yield f"not looked at: {', '.join(words)}; {why}"


def _default_memory(asked: Mapping[str, ResourcesConfig], cluster: Cluster) -> list[str]:
    if all(map(asks_for_memory, asked.values())):
        return []
    gpus = {job_kind: gpus_wanted(given) for job_kind, given in asked.items()}
    try:
        return list(default_memory_lines(asked, gpus, cluster.partitions, read_cluster_memory()))
    except SlurmError as error:
        return [f"not looked at: memory of jobs that ask for none ({error})"]


def job_kind_problems(config: Config, job_kind: str, cluster: Cluster) -> list[ConfigIssue]:
    """Find reasons why jobs of one job kind cannot run: by what the cluster has, then by what sbatch says."""
    assert config.slurm
    found = list(stage_problems(job_kind, resources_of(config.slurm, job_kind), cluster))
    return found or list(refusals(config, config.slurm, job_kind))


def job_kinds_used(config: Config) -> list[str]:
    """Return the job kinds that have jobs in a run of this configuration: stages, driver, ``score-POOL``."""
    unused: dict[str, bool] = {
        Stage.EVALUATE: not config.evaluate.every,
        Stage.BENCHMARK: not config.evaluate.command,
    }
    stages = [stage for stage in SLURM_STAGES if not unused.get(stage)]
    return [*stages, *(Task(1, Stage.SCORE, pool=pool).job_kind for pool in config.reward.pools)]


def run_dir_problems(run_dir: Path) -> Iterator[ConfigIssue]:
    parent = existing_folder(run_dir.absolute().parent)
    if not os.access(parent, os.W_OK | os.X_OK):
        why = f"{parent} is not writable; give a folder on a shared filesystem"
        yield ConfigIssue("run_dir", run_dir, why)


def limit_problems(
    given: SlurmConfig, limits: ClusterLimits, ceilings: Ceilings | None = None
) -> Iterator[ConfigIssue]:
    """Find limits of submitted jobs that leave a run no room: of the user, and of QOS that it names."""
    of_qos = [ceilings.qos[name].submitted for name in given.qos_named if ceilings and name in ceilings.qos]
    most = min((bound for bound in (limits.max_submit, *of_qos) if bound is not None), default=None)
    if most is not None and most < _ELEMENTS_NEEDED:
        why = f"you may queue {most} jobs; a run needs at least {_ELEMENTS_NEEDED}, ask for more"
        yield ConfigIssue("scheduler.max_submitted", given.max_submitted, why)


def stage_problems(job_kind: str, given: ResourcesConfig, cluster: Cluster) -> Iterator[ConfigIssue]:
    """Find reasons why jobs of one job kind cannot run in their partitions. Pure."""
    key = key_of(job_kind)
    legal = _names(cluster.partitions)
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
            yield ConfigIssue(f"{key}.{name}", value, f"not one of yours; legal: {_names(mine)}")
            continue
        for partition in partitions:
            allowed = partition.allowed_accounts if name == "account" else partition.allowed_qos
            if allowed is not None and value not in allowed:
                why = f"partition {partition.name} does not take it; legal: {_names(allowed)}"
                yield ConfigIssue(f"{key}.{name}", value, why)


def _time_problems(
    key: str, given: ResourcesConfig, partitions: Sequence[Partition]
) -> Iterator[ConfigIssue]:
    """Find a time that no partition allows: sbatch --test-only takes it, and the job would wait for ever."""
    seconds = parse_duration(given.time)
    longest = max(math.inf if one.max_time is None else one.max_time for one in partitions)
    if longest < math.inf and (seconds is None or seconds > longest):
        where = _names(partition.name for partition in partitions)
        why = f"longer than partition {where} allows; legal: up to {format_duration(longest)}"
        yield ConfigIssue(f"{key}.time", given.time, why)


def _size_problems(
    key: str, given: ResourcesConfig, partitions: Sequence[Partition]
) -> Iterator[ConfigIssue]:
    """Find requests that exceed every node, first each resource by itself, then all together."""
    where = f"partition {_names(partition.name for partition in partitions)}"
    kinds, needs = [kind for partition in partitions for kind in partition.kinds], needs_of(given)
    most = [max((need.of_node(kind) for kind in kinds), default=0) for need in needs]
    found = [(need, there) for need, there in zip(needs, most, strict=True) if need.count > there]
    for need, there in found:
        yield ConfigIssue(f"{key}.{need.key}", need.value, _too_much(need, there, where, kinds))
    fits = (all(need.count <= need.of_node(kind) for need in needs) for kind in kinds)
    if not found and kinds and not any(fits):
        asked = ", ".join(f"{need.key}={need.value}" for need in needs)
        yield ConfigIssue(key, asked, f"nodes of {where} have each of these, but none has all of them")
    nodes = max((partition.nodes for partition in partitions), default=0)
    if given.nodes > nodes:
        legal = f"has fewer; legal: 1 to {nodes}" if nodes else "has none; choose another partition"
        yield ConfigIssue(f"{key}.nodes", given.nodes, f"{where} {legal}")


@dataclass(frozen=True)
class Need:
    """Amount of one resource that a job wants on each node."""

    key: str
    value: object
    """Value of the key as the user gave it."""
    count: int
    of_node: Callable[[NodeKind], int]
    device: str = ""


def needs_of(given: ResourcesConfig) -> list[Need]:
    """Return the CPUs, memory and devices that a job wants on each node. Pure."""
    cpus = given.cpus_per_task * given.ntasks_per_node
    needs = [Need("cpus_per_task", given.cpus_per_task, cpus, lambda kind: kind.cpus)]
    if given.mem is not None:
        needs.append(Need("mem", given.mem, parse_memory(given.mem), lambda kind: kind.memory))
    if given.gpus_per_node is not None:
        kind_of_gpu, _, count = str(given.gpus_per_node).rpartition(":")
        device = f"gpu:{kind_of_gpu}" if kind_of_gpu else "gpu"
        needs.append(_device_need("gpus_per_node", given.gpus_per_node, device, int(count)))
    for name, number in parse_gres(given.gres or "").items():
        needs.append(_device_need("gres", given.gres, name, number))
    return needs


def gpus_wanted(given: ResourcesConfig) -> int:
    """Return the number of GPUs wanted on each node."""
    return max((need.count for need in needs_of(given) if need.device.startswith("gpu")), default=0)


def _device_need(key: str, value: object, device: str, count: int) -> Need:
    return Need(key, value, count, lambda kind: kind.gres.get(device, 0), device)


def _too_much(need: Need, most: int, where: str, kinds: Sequence[NodeKind]) -> str:
    if need.device and not most:
        devices = {name for kind in kinds for name in kind.gres}
        return f"no node of {where} has {need.device}; legal: {_names(devices)}"
    if need.key == "mem":
        return f"no node of {where} has so much; legal: up to {most}M"
    return f"{need.count} on a node, and no node of {where} has more than {most}; legal: up to {most}"


def refusals(config: Config, given: SlurmConfig, job_kind: str) -> Iterator[ConfigIssue]:
    """Ask sbatch (``--test-only``) for objections to the very script that would be submitted.

    While nodes are down, drained or silent, that refuses also what sbatch takes and what starts when they are
    back. Then a job that could not begin for an hour is submitted, and cancelled at once.
    """
    script, key = script_of(config, given, job_kind), key_of(job_kind)
    partitions = resources_of(given, job_kind).partition
    away: list[str] = []
    try:
        try:
            run_command(["sbatch", "--test-only"], input=script, timeout=_TEST_SECONDS)
        except SlurmError as error:
            if _NO_SUCH_NODES not in error.stderr or not (away := unavailable_nodes(partitions)):
                raise
            job = run_command(["sbatch", "--parsable", _LATER], input=script, timeout=_TEST_SECONDS)
            run_command(["scancel", job.strip().partition(";")[0]], timeout=_TEST_SECONDS)
    except SlurmTimeout:
        return  # a controller that is busy now says nothing about the settings
    except SlurmError as error:
        yield ConfigIssue(key, _names(partitions), f"{error}")
        return
    if away:
        yield ConfigIssue(f"{key}.partition", _names(partitions), _in_words(away), is_passing=True)


def _in_words(away: Sequence[str]) -> str:
    named = ", ".join(
        [*away[:_MOST_NAMED], *([f"{len(away) - _MOST_NAMED} more"] * (len(away) > _MOST_NAMED))]
    )
    return f"its jobs wait for nodes that are down, drained or silent: {named} (sinfo -R)"


def script_of(config: Config, given: SlurmConfig, job_kind: str) -> str:
    """Render the batch script of a job kind's job, with one element."""
    run = imagined_run(config)
    if job_kind == DRIVER:
        submission = driver_submission(run, 1, DRIVER, 1)
    else:
        iteration = 0 if job_kind == Stage.PREPARE else 1
        (submission,) = stage_submissions(run, 1, 1, [task_of(iteration, job_kind)], 1000)
    return render(array_of(run, given, submission, Escalation(), None))


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
