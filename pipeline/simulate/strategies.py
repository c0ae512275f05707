"""What the rules of workers are measured by: simple strategies, each the best for some plants."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from pipeline.simulate.cluster import Cluster
from pipeline.simulate.plant import Kind, Plant

_FOR_EVER = 10**9


def never_leave(plant: Plant) -> Plant:
    """Each worker stays for ever. Where stages share places, the first to come keep the others out."""
    return replace(_each(plant, linger=_FOR_EVER), linger_max=float(_FOR_EVER), evicts=False)


def job_for_each_task(plant: Plant) -> Plant:
    """Nobody stays, and nobody starts early."""
    return replace(_each(plant, linger=0, start_early=False), evicts=False)


def one_worker_a_place(plant: Plant) -> Plant:
    """Each kind has at most as many workers as places; they stay for as long as coming back costs."""
    cluster = Cluster(plant.nodes, plant.partitions, plant.limits)
    kinds = {
        name: replace(kind, parallelism=_most(plant, kind, cluster)) for name, kind in plant.kinds.items()
    }
    return replace(plant, kinds=kinds, evicts=False)


def _most(plant: Plant, kind: Kind, cluster: Cluster) -> int:
    return max(1, min(plant.plan.num_shards, cluster.could_start(kind.request, kind.partitions)))


BASELINES: Mapping[str, Callable[[Plant], Plant]] = {
    "never leave": never_leave,
    "a job for each task": job_for_each_task,
    "one worker a place": one_worker_a_place,
}


def _each(plant: Plant, **changes: object) -> Plant:
    kinds = {name: replace(kind, **changes) for name, kind in plant.kinds.items()}  # type: ignore[arg-type]
    return replace(plant, kinds=kinds)
