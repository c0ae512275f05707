"""Plants at random, and what is wrong with how a run fares on one.

Sizes and times are drawn log-uniformly from a seed that is given as text: a small cluster is as likely as a
large one, tasks of a tenth of a second as likely as those of minutes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pipeline.decide.measuring import MEASURED, MEASURES
from pipeline.run.plan import Plan
from pipeline.run.tasks import Stage
from pipeline.simulate.cluster import SimulatedCluster
from pipeline.simulate.plant import (
    Others,
    Plant,
    PlantKind,
    PlantNode,
    PlantPartition,
    PlantRequest,
    Slurm,
    UserLimits,
    uniform,
)
from pipeline.simulate.results import SimulationResult
from pipeline.simulate.simulation import simulate

_TASKS = 800
"""Tasks of a run, about: fewer iterations where there are many shards."""
_ITERATIONS = (5, 16)
"""Least and most of a run: what is learned of a cluster in the first ones is to pay in the others."""
_MOST_LOOKED_AT = 64
_MEMORY = 2**17
"""MiB of a node for each of its GPUs."""
_LIMITS = (5400.0, 86_400.0)
"""Least and most seconds that jobs may run, where it is not four hours: the longest task has time."""
MOST_TIMES = 1.3
"""A run may take so many times what it takes with the best of the simple strategies."""
MOST_IN_VAIN = 0.05
"""Share of starts that may do no task."""


@dataclass(frozen=True)
class Draw:
    """Draws for one plant: a function of the seed, the plant's number and the name of what is drawn."""

    seed: str
    number: int

    def share(self, name: str) -> float:
        return uniform(self.seed, str(self.number), name)

    def is_one_of(self, name: str, times: float) -> bool:
        """Draw something that is so in one of so many cases."""
        return self.share(f"{name}?") * times < 1

    def between(self, name: str, least: float, most: float) -> float:
        """Draw log-uniformly."""
        return float(least * (most / least) ** self.share(name))

    def whole(self, name: str, least: int, most: int) -> int:
        return min(most, int(self.between(name, least, most + 1)))

    def pick(self, name: str, *values: int) -> int:
        return values[int(self.share(name) * len(values))]


def plant_of(seed: str, number: int) -> Plant:
    """Draw a plant."""
    draw = Draw(seed, number)
    shards = draw.whole("shards", 1, 256)
    pools = ("judge",) if draw.is_one_of("pools", 6) else ()
    least, most = _ITERATIONS
    iterations = max(least, min(most, _TASKS // (shards * (2 + len(pools)))))
    plan = Plan(iterations, shards, draw.pick("every", 0, 0, 1, 2, 4), pools=pools)
    kinds = ("prepare", *plan.job_kinds, *(("evaluate",) if plan.evaluate_every else ()))
    nodes, partitions, where = _cluster(draw, kinds)
    largest = {p.name: max(n.gpus for n in nodes if n.name in p.nodes) for p in partitions}
    is_busy, is_disturbed = draw.is_one_of("others", 2), draw.is_one_of("preemption", 3)
    stages = {kind: _kind(draw, kind, where[kind], largest[where[kind][0]]) for kind in kinds}
    return Plant(
        plan,
        nodes,
        partitions,
        stages | {"driver": _driver(tuple(partition.name for partition in partitions))},
        seed=f"{seed}/{number}",
        slurm=Slurm(queue=0.0 if draw.is_one_of("queue", 4) else draw.between("queue", 0.5, 1800)),
        limits=_limits(draw),
        others=Others(draw.between("load", 0.05, 0.7) if is_busy else 0.0, draw.between("other", 30, 7200)),
        spread=draw.pick("spread", 0, 1, 2, 4) / 8,
        queue_spread=draw.pick("queues", 0, 0, 1) / 2,
        crowding=draw.pick("crowding", 0, 1, 2) / 2,
        failures=draw.between("failures", 0.001, 0.05) if draw.is_one_of("failures", 4) else 0.0,
        disturbed_every=draw.between("disturbed", 1800, 86_400) if is_disturbed else math.inf,
        policy_gb=draw.between("policy", 0.1, 100),
        gb_per_second=draw.between("bandwidth", 0.5, 20),
        state_seconds=draw.between("state", 0.1, 60),
        save_every=draw.pick("save", 1, 1, 4),
        measures=MEASURED in stages and _asks_alike(stages[MEASURES], stages[MEASURED]),
    )


def size_of(plant: Plant) -> int:
    """Return what the seconds that a simulation of a plant takes grow with, about: its tasks, and how many of
    them each pass looks at."""
    shards = plant.plan.num_shards
    return shards * plant.plan.iterations * min(_MOST_LOOKED_AT, shards)


def _cluster(
    draw: Draw, kinds: tuple[str, ...]
) -> tuple[tuple[PlantNode, ...], tuple[PlantPartition, ...], dict[str, tuple[str, ...]]]:
    """Draw nodes, and the partitions of each job kind: one for all, or one for each of its own."""
    gpus, places = draw.pick("gpus", 1, 2, 4, 8), draw.whole("places", 1, 64)
    where: dict[str, tuple[str, ...]]
    if draw.is_one_of("shared", 2):
        names = {"all": places}
        where = dict.fromkeys(kinds, ("all",))
    else:
        names = {kind: draw.whole(f"places of {kind}", 1, 64) for kind in kinds}
        where = {kind: (kind,) for kind in kinds}
    nodes: list[PlantNode] = []
    partitions = []
    for name, number in names.items():
        mine = [_node(f"{name}-{at}", gpus) for at in range(number // gpus)]
        rest = number - gpus * len(mine)
        mine += [_node(f"{name}-rest", rest)] if rest else []
        partitions.append(PlantPartition(name, tuple(node.name for node in mine)))
        nodes += mine
    if draw.is_one_of("overlap", 3):
        partitions = _overlapping(draw, partitions)
    return tuple(nodes), tuple(partitions), where


def _node(name: str, gpus: int) -> PlantNode:
    return PlantNode(name, 8 * gpus, gpus, _MEMORY * gpus)


def _overlapping(draw: Draw, partitions: list[PlantPartition]) -> list[PlantPartition]:
    """Have each partition use a part of the next one's nodes too, from one of them to all."""
    found = []
    for one, other in zip(partitions, [*partitions[1:], partitions[0]], strict=True):
        number = draw.whole(f"overlap of {one.name}", 1, len(other.nodes))
        found.append(PlantPartition(one.name, tuple(dict.fromkeys((*one.nodes, *other.nodes[:number])))))
    return found


def _limits(draw: Draw) -> UserLimits:
    """Draw what one user may have at once: in most cases as much as there is."""
    return UserLimits(
        jobs=draw.whole("most jobs", 4, 64) if draw.is_one_of("job limit", 6) else None,
        submitted=draw.whole("most submitted", 12, 128) if draw.is_one_of("submit limit", 6) else None,
    )


def _kind(draw: Draw, job_kind: str, partitions: tuple[str, ...], gpus: int) -> PlantKind:
    """Draw what is said of a job kind.

    Args:
        gpus: of the largest node that it may use.
    """
    startup = 0.0 if draw.is_one_of("startup", 8) else draw.between("startup", 0.5, 120)
    seconds = draw.between(f"seconds of {job_kind}", 0.1, 600)
    limit = draw.between("limit", *_LIMITS) if draw.is_one_of("own limit", 3) else PlantRequest().limit
    if job_kind == "prepare":
        request = PlantRequest(4, 1, limit=limit)
        return PlantKind(min(seconds, 60.0), partitions, request, startup, linger=0, start_early=False)
    startup *= draw.between(f"start {job_kind}", 0.5, 1)
    number = draw.whole(f"gpus of {job_kind}", 1, gpus) if draw.is_one_of("several gpus", 3) else 1
    is_large = draw.is_one_of(f"memory of {job_kind}", 6)
    memory = _MEMORY * (draw.whole(f"much memory of {job_kind}", number, gpus) if is_large else number)
    request = PlantRequest(4 * number, number, memory, limit=limit)
    return PlantKind(seconds, partitions, request, startup, start_early=job_kind != Stage.EVALUATE)


def _asks_alike(one: PlantKind, other: PlantKind) -> bool:
    """Whether jobs of two kinds ask for the same, so that workers of one may do the other's tasks besides, as
    the shipped settings have it (:func:`pipeline.decide.measuring.measures_policies`)."""
    return (one.request, one.partitions) == (other.request, other.partitions)


def _driver(partitions: tuple[str, ...]) -> PlantKind:
    return PlantKind(0.0, partitions, PlantRequest(), 2.0, linger=0, start_early=False)


@dataclass(frozen=True)
class PlantVerdict:
    """How a run fares on a plant, beside the simple strategies."""

    number: int
    result: SimulationResult
    best: str
    """Name of the simple strategy that is quickest there."""
    best_seconds: float
    wrong: tuple[str, ...] = field(default=())
    """What must not be, in words."""

    @property
    def times(self) -> float:
        """How many times as long it takes as with the best strategy; 1 where none of them is as quick: they
        are carried on no longer than that."""
        return max(1.0, self.result.seconds / self.best_seconds)


def judge(seed: str, number: int) -> PlantVerdict:
    """Simulate a run on a plant with the rules, and with each simple strategy until that is slower."""
    plant = plant_of(seed, number)
    result = simulate(plant)
    others, least = dict[str, float](), result.seconds
    for name, change in BASELINES.items():
        others[name] = simulate(change(plant), least).seconds
        least = min(least, others[name])
    best = min(others, key=lambda name: others[name])
    found = PlantVerdict(number, result, best, others[best])
    return PlantVerdict(number, result, best, others[best], tuple(_what_is_wrong(found)))


def _what_is_wrong(found: PlantVerdict) -> Iterator[str]:
    result = found.result
    if result.why:
        yield result.why
    elif found.times > MOST_TIMES:
        yield f"takes {found.times:.2f} times as long as {found.best}"
    if result.without_task > max(1, MOST_IN_VAIN * result.starts):
        yield f"{result.without_task} of {result.starts} starts did no task"
    if not result.adds_up:
        yield "what jobs spent is not what they held"


def in_words(plant: Plant) -> str:
    """Describe a plant in a line."""
    plan, kinds = plant.plan, plant.kinds
    work = ", ".join(f"{kind} {kinds[kind].seconds:.3g} s" for kind in plan.job_kinds)
    places = ", ".join(f"{p.name} {_places(plant, p)}" for p in plant.partitions)
    others = f", others {plant.others.load:.2f} of {plant.others.seconds:.0f} s" if plant.others.load else ""
    disturbed = plant.disturbed_every
    preempted = f", preempted each {disturbed:.0f} s" if math.isfinite(disturbed) else ""
    return (
        f"{plan.num_shards} shards, {plan.iterations} iterations, places {places}; {work}; start-up "
        f"{kinds['rollout'].startup:.3g} s, queue {plant.slurm.queue:.3g} s, crowding {plant.crowding:g}"
        f"{others}{preempted}{_asked(plant)}{'; rollouts measure besides' if plant.measures else ''}"
    )


def _asked(plant: Plant) -> str:
    """Say what jobs ask for, and what is limited, where that is not the usual."""
    kinds = {name: kind.request for name, kind in plant.kinds.items() if name in plant.plan.job_kinds}
    large = [f"{name} {r.gpus} GPUs and {r.memory >> 10} GiB" for name, r in kinds.items() if _is_large(r)]
    limits, limit = plant.limits, kinds[Stage.UPDATE].limit
    return "".join(
        (
            f"; a job of {', '.join(large)}" if large else "",
            f"; at most {limits.jobs} jobs run" if limits.jobs else "",
            f"; at most {limits.submitted} jobs are there" if limits.submitted else "",
            f"; jobs run {limit / 3600:.1f} h" if limit != PlantRequest().limit else "",
        )
    )


def _is_large(request: PlantRequest) -> bool:
    return request.gpus > 1 or request.memory > _MEMORY


def _places(plant: Plant, partition: PlantPartition) -> int:
    return sum(node.gpus for node in plant.nodes if node.name in partition.nodes)


_FOR_EVER = 10**9


def never_leave(plant: Plant) -> Plant:
    """Each worker stays for ever. Where stages share places, the first to come keep the others out."""
    return replace(_each(plant, linger=_FOR_EVER), linger_max=float(_FOR_EVER), evicts=False)


def job_for_each_task(plant: Plant) -> Plant:
    """No worker stays, none starts early."""
    return replace(_each(plant, linger=0, start_early=False), evicts=False, measures=False)


def one_worker_a_place(plant: Plant) -> Plant:
    """Each kind has at most as many workers as places; they stay for as long as coming back costs."""
    cluster = SimulatedCluster(plant.nodes, plant.partitions, plant.limits)
    kinds = {
        name: replace(kind, parallelism=_most(plant, kind, cluster)) for name, kind in plant.kinds.items()
    }
    return replace(plant, kinds=kinds, evicts=False)


def _most(plant: Plant, kind: PlantKind, cluster: SimulatedCluster) -> int:
    return max(1, min(plant.plan.num_shards, cluster.could_start(kind.request, kind.partitions)))


BASELINES: Mapping[str, Callable[[Plant], Plant]] = {
    "never leave": never_leave,
    "a job for each task": job_for_each_task,
    "one worker a place": one_worker_a_place,
}


def _each(plant: Plant, **changes: object) -> Plant:
    kinds = {name: replace(kind, **changes) for name, kind in plant.kinds.items()}  # type: ignore[arg-type]
    return replace(plant, kinds=kinds)
