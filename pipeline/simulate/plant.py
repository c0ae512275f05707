"""What is simulated: a cluster, a run's job kinds on it, and what disturbs them. Values only.

Everything that is drawn is a function of the seed and of what it is about (a task, its attempt, a node),
never of when it is asked for: two strategies meet the same durations, failures and other people's jobs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist

from pipeline.config.types import Linger
from pipeline.run.plan import Plan
from pipeline.run.tasks import Stage, Task, task_key

_NORMAL = NormalDist()


@dataclass(frozen=True)
class PlantNode:
    """A node of the cluster."""

    name: str
    cpus: int = 64
    gpus: int = 0
    memory: int = 2**40
    """MiB."""


@dataclass(frozen=True)
class PlantPartition:
    """A partition; two may share nodes."""

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class PlantRequest:
    """What one job asks for, on each of its nodes."""

    cpus: int = 1
    gpus: int = 0
    memory: int = 0
    nodes: int = 1
    limit: float = 14_400.0
    """Seconds that it may run."""


@dataclass(frozen=True)
class PlantKind:
    """Jobs of one kind: what they ask for, how long their tasks take, how long they stay."""

    seconds: float
    """Median of what a task takes to compute."""
    partitions: tuple[str, ...]
    """Partitions that it may run in."""
    request: PlantRequest = PlantRequest()
    startup: float = 0.0
    """Seconds from a job's start until it can begin a task, where no other starts beside it."""
    linger: Linger = "auto"
    start_early: bool = True
    parallelism: int | None = None
    """Most workers (``array_parallelism``)."""
    signal: float = 120.0
    """Seconds before its limit at which a job is warned."""

    @property
    def does_one_task(self) -> bool:
        """Whether each of its jobs ends after one task, even if another is ready."""
        return self.linger == 0 and not self.start_early


@dataclass(frozen=True)
class Others:
    """Other people's jobs: they come at random, and each asks for one node."""

    load: float = 0.0
    """Share of the cluster that they would keep busy."""
    seconds: float = 600.0
    """Median of what one takes."""
    ahead: float = 0.5
    """Share of them that have a higher priority than the run's jobs."""


@dataclass(frozen=True)
class UserLimits:
    """What one user may have at once; None: as much as there is."""

    jobs: int | None = None
    """That run."""
    gpus: int | None = None
    """That running jobs hold."""
    submitted: int | None = None
    """Jobs that wait or run."""


@dataclass(frozen=True)
class Slurm:
    """How the cluster's scheduler works, in seconds."""

    queue: float = 0.0
    """Median of the time from when a job could start until it is first considered."""
    tried_after: float = 0.5
    """From a submission, or an end, until jobs are tried in their order."""
    backfill: float = 30.0
    """From one backfill to the next."""
    requeue: float = 120.0
    """From a preemption until a job may start again."""


@dataclass(frozen=True)
class Plant:
    """A run and the cluster that it is on."""

    plan: Plan
    nodes: tuple[PlantNode, ...]
    partitions: tuple[PlantPartition, ...]
    kinds: Mapping[str, PlantKind]
    """By job kind, those of prepare and of driver jobs too."""
    seed: str = "0"
    slurm: Slurm = Slurm()
    limits: UserLimits = UserLimits()
    others: Others = Others()
    spread: float = 0.0
    """Standard deviation of the logarithm of what tasks of a kind take."""
    queue_spread: float = 0.0
    crowding: float = 0.0
    """How much a start-up slows another on the same node: 0 not at all; 1 as if they shared one core."""
    failures: float = 0.0
    """Share of attempts that fail; no third one does."""
    disturbed_every: float = math.inf
    """Mean seconds between two preemptions on a node."""
    policy_gb: float = 0.0
    """Size of a policy, which a job reads before its first task with it."""
    gb_per_second: float = 1.0
    state_seconds: float = 0.0
    """Seconds that an update takes to write the trainer's state, behind its policy."""
    save_every: int = 1
    """Updates between two such states."""
    passes: tuple[float, float] = (0.1, 0.1)
    """Seconds that a pass takes until it looks, and from then on."""
    maker_startup: float = 0.0
    """Seconds until a worker's own process can make passes, which ends with that worker."""
    pass_cpu: float = 0.09
    """Seconds of a core that a pass takes: the next rests the longer for it."""
    linger_max: float = 3600.0
    evicts: bool = True
    """Whether workers make place for others where a pass says so."""
    measures: bool = False
    """Whether workers of rollouts are able to measure policies (:mod:`pipeline.decide.measuring`)."""
    max_attempts: int = 3
    check_seconds: float = 900.0
    """Most seconds between two driver jobs."""

    def seconds_of(self, task: Task) -> float:
        """Return what a task takes to compute."""
        return self.kinds[task.job_kind].seconds * spread(self.spread, self.seed, "task", task_key(task))

    def queue_of(self, element: str) -> float:
        return self.slurm.queue * spread(self.queue_spread, self.seed, "queue", element)

    def fails_at(self, task: Task, number: int) -> float | None:
        """Return the share of a task after which an attempt at it fails; None: it does not."""
        if number >= self.max_attempts or not self.failures:
            return None
        key = self.seed, "failure", task_key(task), str(number)
        return uniform(*key, "when") if uniform(*key) < self.failures else None

    @property
    def load_seconds(self) -> float:
        """Seconds that it takes to read a policy."""
        return self.policy_gb / self.gb_per_second

    def writes_state(self, task: Task) -> bool:
        """Whether a state is due behind the policy of an update."""
        is_due = task.iteration % self.save_every == 0 or task.iteration == self.plan.iterations
        return task.stage is Stage.UPDATE and self.state_seconds > 0 and is_due


def uniform(*key: str) -> float:
    """Draw a number between 0 and 1, always the same one for a key."""
    digest = blake2b("/".join(key).encode(), digest_size=6).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**48


def spread(sigma: float, *key: str) -> float:
    """Draw a factor whose logarithm is normal; its median is 1."""
    return math.exp(sigma * _NORMAL.inv_cdf(uniform(*key))) if sigma else 1.0


def exponential(mean: float, *key: str) -> float:
    return -mean * math.log(uniform(*key))
