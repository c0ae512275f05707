"""Plants at random on which stages have places of their own, and how near a run with staleness
(rollout.staleness) comes to the least that an iteration can take there."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.decide.staying import PASS_SECONDS
from pipeline.run.plan import Plan
from pipeline.run.tasks import Stage
from pipeline.simulate.plant import Plant, PlantKind, PlantNode, PlantPartition, PlantRequest, Slurm
from pipeline.simulate.plants import Draw
from pipeline.simulate.results import SimulationResult
from pipeline.simulate.simulation import simulate

MOST_TIMES = 1.05
"""An iteration may take so many times the least that is possible."""
MOST_HELD = 1.25
"""Jobs may hold their devices for so many times what they compute, and for as long as coming back takes for
each task: a worker stays where its wait is shorter."""
_ITERATIONS = 24
_SETTLED = 8
"""Iterations after which all that estimates are made from is known: the first ones are not judged."""


def overlap_plant_of(seed: str, number: int) -> Plant:
    """Draw a plant: as many places as workers, for each stage on nodes of its own, and hardly a
    queue: where that is as long as an iteration, workers stay and hold more."""
    draw = Draw(seed, number)
    shards, staleness = draw.whole("shards", 1, 8), draw.pick("staleness", 1, 2)
    places = {str(Stage.ROLLOUT): shards, str(Stage.REWARD): shards, str(Stage.UPDATE): 1}
    nodes = {kind: [PlantNode(f"{kind}-{at}", 8, 1) for at in range(many)] for kind, many in places.items()}
    startup = draw.between("startup", 0.5, 60)
    kinds = {
        kind: PlantKind(draw.between(f"seconds of {kind}", 5, 300), (kind,), PlantRequest(4, 1), startup)
        for kind in places
    }
    prepare = PlantKind(5.0, (Stage.UPDATE,), PlantRequest(4, 1), startup, linger=0, start_early=False)
    driver = PlantKind(0.0, tuple(places), PlantRequest(), 2.0, linger=0, start_early=False)
    return Plant(
        Plan(_ITERATIONS, shards, 0, staleness=staleness),
        tuple(node for of_kind in nodes.values() for node in of_kind),
        tuple(PlantPartition(kind, tuple(node.name for node in mine)) for kind, mine in nodes.items()),
        kinds | {"prepare": prepare, "driver": driver},
        seed=f"{seed}/{number}",
        slurm=Slurm(queue=draw.between("queue", 0.5, 5)),
        policy_gb=draw.between("policy", 0.1, 20),
        gb_per_second=2.0,
    )


def least_period(plant: Plant) -> float:
    """Return the least seconds from one policy to the next: what the longest stage takes, or all of them by
    the number of iterations that may go on at once."""
    seconds = {kind: plant.kinds[kind].seconds for kind in plant.plan.job_kinds}
    seconds[str(Stage.ROLLOUT)] += plant.load_seconds
    return max(*seconds.values(), sum(seconds.values()) / (1 + plant.plan.staleness))


@dataclass(frozen=True)
class OverlapVerdict:
    """How a run fares on such a plant."""

    number: int
    plant: Plant
    result: SimulationResult

    @property
    def times(self) -> float:
        """How many times the least an iteration takes, once the run has settled."""
        recent = self.result.iterations[_SETTLED:]
        return sum(recent) / len(recent) / least_period(self.plant)

    @property
    def held(self) -> float:
        """How many times what they compute jobs hold their devices, beyond what coming back takes for each
        task: in the queue, to start up, and to read a policy."""
        coming_back = {kind: self._coming_back(kind) for kind in self.plant.kinds}
        jobs = [(job, job.spent.get("busy", 0.0)) for job in self.result.jobs]
        idle = [max(0.0, job.held - busy - job.tasks * coming_back[job.job_kind]) for job, busy in jobs]
        busy = sum(job.gpus * busy for job, busy in jobs)
        return 1 + sum(job.gpus * more for (job, _), more in zip(jobs, idle, strict=True)) / busy

    def _coming_back(self, job_kind: str) -> float:
        plant = self.plant
        loading = 0.0 if job_kind == Stage.REWARD else plant.load_seconds
        return plant.kinds[job_kind].startup + loading + plant.slurm.queue + PASS_SECONDS

    @property
    def wrong(self) -> tuple[str, ...]:
        """What must not be, in words."""
        return tuple(self._what_is_wrong())

    def _what_is_wrong(self) -> Iterator[str]:
        if self.result.why:
            yield self.result.why
            return
        if self.times > MOST_TIMES:
            yield f"an iteration takes {self.times:.3f} times the least"
        if self.held > MOST_HELD:
            yield f"jobs hold their devices {self.held:.2f} times as long as they compute and come back"


def judge_overlap(seed: str, number: int) -> OverlapVerdict:
    """Simulate a run on a plant."""
    plant = overlap_plant_of(seed, number)
    return OverlapVerdict(number, plant, simulate(plant))
