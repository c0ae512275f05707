"""What jobs get whose memory is not set, in lines for people: too little, or a whole node."""

from collections.abc import Iterator, Mapping, Sequence

from pipeline.config.scheduler import ResourcesConfig, key_of
from slurm.limits import Partition, partitions_of
from slurm.memory import ClusterMemory, given_memory

_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
"""sbatch options that ask for memory."""


def asks_for_memory(given: ResourcesConfig) -> bool:
    return given.mem is not None or any(name in given.options for name in _OPTIONS)


def default_memory_lines(
    asked: Mapping[str, ResourcesConfig],
    gpus: Mapping[str, int],
    partitions: Mapping[str, Partition],
    cluster: ClusterMemory,
) -> Iterator[str]:
    """Yield what the cluster gives jobs that ask for no memory, a line for those that get the same. Pure.

    Args:
        asked: resources by job kind.
        gpus: GPUs of a job on each node, by job kind.
    """
    found: dict[str, list[str]] = {}
    for job_kind, given in asked.items():
        if not asks_for_memory(given):
            places = partitions_of(given.partition, partitions)
            text = "; ".join(_given(given, gpus[job_kind], place, cluster) for place in places)
            found.setdefault(text, []).append(f"{key_of(job_kind)}.mem")
    for text, keys in found.items():
        yield from _lines(text, keys, cluster)


def _lines(text: str, keys: Sequence[str], cluster: ClusterMemory) -> Iterator[str]:
    unset = f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} not set"
    if not cluster.is_counted:
        yield f"memory: {unset}; this cluster does not count memory: a job may use what its node has"
    elif text:
        yield f"{'warning: ' * (_WHOLE in text)}memory: {unset}; {text}"


_WHOLE = "all the memory of its node, so that no other job fits beside it"


def _given(given: ResourcesConfig, gpus: int, place: Partition, cluster: ClusterMemory) -> str:
    cpus = given.cpus_per_task * given.ntasks_per_node
    megabytes, why = given_memory(place.default_memory or cluster.defaults, cpus, gpus)
    amount = _WHOLE if megabytes is None else f"{megabytes}M on a node"
    return f"partition {place.name} gives a job {amount} ({why})"
