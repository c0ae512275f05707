"""The simulation of runs of one user on a cluster, with other people's jobs and preemptions around them."""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

from pipeline.simulate.clock import SimulatedClock
from pipeline.simulate.cluster import SimulatedCluster, SimulatedJob
from pipeline.simulate.keeper import Keeper
from pipeline.simulate.looks import QueueLooks
from pipeline.simulate.mishaps import preempt
from pipeline.simulate.plant import Plant, PlantRequest, exponential, spread, uniform
from pipeline.simulate.results import SimulationResult
from pipeline.simulate.run import SimulatedRun
from pipeline.simulate.scheduling import Scheduling
from pipeline.simulate.startups import StartUps

_MOST_OTHERS = 20
"""Jobs of other people that wait at most: who sees a longer queue goes elsewhere."""
_OTHERS_SPREAD = 0.7
_LEAST_PATIENCE = 43_200.0
_PATIENCE_FACTOR = 20
"""A run is stalled after so many times what its longest steps take without a commit."""


@dataclass(eq=False)
class Simulation:
    """Runs on one cluster. The first one's plant says what the cluster is."""

    plants: Sequence[Plant]
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    cluster: SimulatedCluster = field(init=False)
    scheduling: Scheduling = field(init=False)
    looks: QueueLooks = field(init=False)
    keepers: list[Keeper] = field(init=False)
    _others: int = 0
    """Jobs of other people that wait."""

    def __post_init__(self) -> None:
        plant = self.plants[0]
        self.cluster = SimulatedCluster(plant.nodes, plant.partitions, plant.limits)
        self.scheduling = Scheduling(plant.slurm, self.clock, self.cluster)
        startups, numbers = [StartUps(self.clock, plant.crowding) for _ in plant.nodes], count(1)
        runs = [SimulatedRun(each, self.clock, self.cluster) for each in self.plants]
        self.looks = QueueLooks(self.clock, self.cluster, runs)
        self.keepers = [Keeper(run, self.scheduling, startups, numbers, self.looks) for run in runs]
        for keeper in self.keepers:
            keeper.kin = [other.run for other in self.keepers if other is not keeper]

    def carry_out(self, until: float = math.inf) -> list[SimulationResult]:
        """Go on until each run is committed, or stalled, and its workers have left.

        Args:
            until: seconds after which the simulation stops.
        """
        self._others_are_there()
        for keeper in self.keepers:
            keeper.submit()
        self._next_other(0)
        for number in range(len(self.cluster.nodes)):
            self._next_disturbance(number, 0)
        patience = max(map(patience_of, self.plants))
        while not self._is_over() and not self._stands_still(patience) and self.clock.now <= until:
            self.clock.step()
        return [self._result(keeper) for keeper in self.keepers]

    def _is_over(self) -> bool:
        return all(k.given_up or (k.run.progress.is_over and not k.run.workers) for k in self.keepers)

    def _stands_still(self, patience: float) -> bool:
        return self.clock.now - max(keeper.run.committed for keeper in self.keepers) > patience

    def _result(self, keeper: Keeper) -> SimulationResult:
        why = keeper.given_up or ("" if keeper.run.progress.is_over else "it is stalled")
        whole = math.inf if why else keeper.run.committed
        seconds = keeper.run.progress.iteration_seconds()
        return SimulationResult(seconds, whole, why, keeper.run.jobs, keeper.passes, self.clock.done)

    # --- other people ---

    def _next_other(self, number: int) -> None:
        """Have another's job come, as many as keep their share of the cluster busy."""
        plant = self.plants[0]
        if plant.others.load > 0:
            mean = plant.others.seconds * math.exp(_OTHERS_SPREAD**2 / 2)
            gap = mean / (plant.others.load * _places(plant))
            wait = exponential(gap, plant.seed, "other", str(number))
            self.clock.after(wait, self._other_comes, number)

    def _others_are_there(self) -> None:
        """Have as many of their jobs run from the start as mostly do, each with a part of its time left."""
        plant = self.plants[0]
        for place in range(round(_places(plant) * plant.others.load)):
            self._submit_other(f"there-{place}", uniform(plant.seed, "there", str(place)))
        self.scheduling.try_now()

    def _other_comes(self, number: int) -> None:
        self._next_other(number + 1)
        if self._others < _MOST_OTHERS:
            self._submit_other(str(number))

    def _submit_other(self, number: str, left: float = 1.0) -> None:
        """Submit another user's job.

        Args:
            left: share of its time that is left.
        """
        plant, key = self.plants[0], (self.plants[0].seed, "other", number)
        others = plant.others
        seconds = left * others.seconds * spread(_OTHERS_SPREAD, *key, "seconds")
        name = _partition_at(plant, uniform(*key, "partition"))
        has_gpus = any(node.gpus for node in plant.nodes)
        job = SimulatedJob(
            f"other-{number}",
            PlantRequest(gpus=int(has_gpus), limit=2 * seconds),
            (name,),
            self.clock.now,
            is_mine=False,
            priority=1 if uniform(*key, "ahead") < others.ahead else -1,
        )

        def start(started: SimulatedJob) -> None:
            self._others -= 1
            self.clock.after(seconds, self.scheduling.end, started)

        self._others += 1
        self.scheduling.submit(job, start)

    # --- preemption ---

    def _next_disturbance(self, node: int, number: int) -> None:
        plant = self.plants[0]
        if math.isfinite(plant.disturbed_every):
            wait = exponential(plant.disturbed_every, plant.seed, "preemption", str(node), str(number))
            self.clock.after(wait, self._disturb, node, number)

    def _disturb(self, node: int, number: int) -> None:
        """Give the place of the youngest job on a node to another user."""
        self._next_disturbance(node, number + 1)
        mine = {w.job: (k, w) for k in self.keepers for w in k.run.running() if node in w.job.nodes}
        if mine:
            keeper, worker = mine[max(mine, key=lambda job: (job.begun, job.order))]
            preempt(keeper.run, worker)


def simulate(plant: Plant, until: float = math.inf) -> SimulationResult:
    """Return what comes of one run.

    Args:
        until: seconds after which the simulation stops.
    """
    return Simulation([plant]).carry_out(until)[0]


def patience_of(plant: Plant) -> float:
    """Return the seconds after which a run without a commit is stalled."""
    longest = max(kind.seconds + kind.startup for kind in plant.kinds.values()) + plant.slurm.queue
    return _LEAST_PATIENCE + _PATIENCE_FACTOR * (longest + plant.linger_max + plant.slurm.requeue)


def _partition_at(plant: Plant, share: float) -> str:
    """Return the partition of one of other people's jobs: each has as many as it has places, so that none is
    busier than the cluster."""
    places = list(accumulate(_places_on(plant, partition.nodes) for partition in plant.partitions))
    return plant.partitions[bisect_right(places, share * places[-1])].name


def _places(plant: Plant) -> int:
    """Return how many jobs of other people the cluster holds."""
    return _places_on(plant, [node.name for node in plant.nodes])


def _places_on(plant: Plant, names: Collection[str]) -> int:
    has_gpus = any(node.gpus for node in plant.nodes)
    return sum(node.gpus if has_gpus else node.cpus for node in plant.nodes if node.name in names)
