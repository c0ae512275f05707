"""How many tasks of each stage run at once: by the GPUs and slots of this machine, or of the partitions."""

from collections.abc import Iterator, Mapping

from pipeline.config.scheduler import LocalConfig, ResourcesConfig, SlurmConfig, resources_of
from pipeline.config.schema import Config
from pipeline.executors.local_limits import local_limits
from pipeline.run.plan import Plan
from slurm.commands import SlurmError, SlurmMissing, on_cluster
from slurm.limits import Partition, partitions_of, read_partitions


def places_of(config: Config) -> dict[str, int]:
    """Return the most tasks of each job kind at once, where there is a bound.

    Raises:
        ConfigError: a task needs more GPUs than this machine has.
    """
    if isinstance(config.scheduler, LocalConfig):
        limits = local_limits(config)
        most = {kind: limits.most(kind) for kind in Plan.of(config).job_kinds}
        bounds = {kind: [n for n in (count, limits.slots) if n is not None] for kind, count in most.items()}
        return {kind: min(counts) for kind, counts in bounds.items() if counts}
    if isinstance(config.scheduler, SlurmConfig):
        return dict(_on_cluster(config, config.scheduler))
    return {}


def _on_cluster(config: Config, given: SlurmConfig) -> Iterator[tuple[str, int]]:
    """Yield the bounds of each job kind: its own, and the GPUs of its partitions if they were all free."""
    known: Mapping[str, Partition] = {}
    try:
        with on_cluster(given.cluster):
            known = read_partitions()
    except (SlurmError, SlurmMissing):
        pass
    for job_kind in Plan.of(config).job_kinds:
        asked = resources_of(given, job_kind)
        bounds = (asked.array_parallelism, gpu_places(asked, known))
        if found := [bound for bound in bounds if bound]:
            yield job_kind, min(found)


def gpu_places(asked: ResourcesConfig, known: Mapping[str, Partition]) -> int | None:
    """Return how many jobs find GPUs at once; None where none are asked for, or known. Pure."""
    gpus, nodes = asked.num_gpus or 0, asked.nodes
    kinds = [kind for place in partitions_of(asked.partition, known) for kind in place.kinds]
    if not gpus or not kinds:
        return None
    if nodes > 1:
        return sum(kind.count for kind in kinds if kind.gres.get("gpu", 0) >= gpus) // nodes or None
    return sum(kind.count * (kind.gres.get("gpu", 0) // gpus) for kind in kinds) or None
