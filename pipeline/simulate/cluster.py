"""Slurm in simulated time: nodes, the queue, and what starts. It knows nothing of runs.

Jobs are tried in the order of their priority. One that finds no room keeps all later jobs from the nodes of
its partitions, as Slurm's main scheduler has it; they start by backfill alone, where they delay none.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from pipeline.simulate.plant import PlantNode, PlantPartition, PlantRequest, UserLimits


@dataclass(eq=False)
class SimulatedJob:
    """A job, or an element of an array, from its submission on."""

    name: str
    request: PlantRequest
    partitions: tuple[str, ...]
    eligible: float
    """Time from which it is considered."""
    is_mine: bool = True
    """Whether it is the user's whose runs are simulated."""
    priority: int = 0
    order: int = 0
    nodes: tuple[int, ...] = ()
    """Numbers of the nodes that it runs on."""
    submitted: float = 0.0
    begun: float = 0.0
    lacks_room: bool = False
    """Whether it was tried in vain since it was submitted."""
    is_limited: bool = False
    """Whether a limit of the user's kept it waiting then."""

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.priority, self.order)

    @property
    def ends(self) -> float:
        """Time at which its limit ends it."""
        return self.begun + self.request.limit


@dataclass
class NodeRoom:
    """What is free on a node."""

    cpus: int
    gpus: int
    memory: int

    def holds(self, request: PlantRequest) -> bool:
        return self.gpus >= request.gpus and self.cpus >= request.cpus and self.memory >= request.memory

    def change(self, request: PlantRequest, sign: int) -> None:
        self.cpus += sign * request.cpus
        self.gpus += sign * request.gpus
        self.memory += sign * request.memory


@dataclass
class SimulatedCluster:
    """Nodes and the jobs on and before them."""

    nodes: Sequence[PlantNode]
    partitions: Sequence[PlantPartition]
    limits: UserLimits = field(default_factory=UserLimits)
    free: list[NodeRoom] = field(init=False)
    pending: list[SimulatedJob] = field(default_factory=list)
    """By priority, then by submission."""
    running: list[dict[SimulatedJob, None]] = field(init=False)
    """On each node."""
    used: list[int] = field(default_factory=lambda: [0, 0])
    """Jobs and GPUs of the user's that run."""
    _order: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.free = [NodeRoom(node.cpus, node.gpus, node.memory) for node in self.nodes]
        self.running = [{} for _ in self.nodes]
        numbers = {node.name: number for number, node in enumerate(self.nodes)}
        self._nodes_of = {p.name: [numbers[name] for name in p.nodes] for p in self.partitions}

    def submit(self, job: SimulatedJob) -> None:
        job.order, job.nodes, job.lacks_room, job.is_limited = next(self._order), (), False, False
        insort(self.pending, job, key=lambda one: one.rank)

    def cancel(self, job: SimulatedJob) -> None:
        """Take a job out of the queue."""
        del self.pending[bisect_left(self.pending, job.rank, key=lambda one: one.rank)]

    def end(self, job: SimulatedJob) -> None:
        """Free what a job held."""
        for number in job.nodes:
            self.free[number].change(job.request, 1)
            del self.running[number][job]
        self._count(job, -1)

    def start(self, job: SimulatedJob, nodes: Sequence[int], now: float) -> None:
        self.cancel(job)
        job.nodes, job.begun = tuple(nodes), now
        for number in nodes:
            self.free[number].change(job.request, -1)
            self.running[number][job] = None
        self._count(job, 1)

    def _count(self, job: SimulatedJob, sign: int) -> None:
        if job.is_mine:
            self.used[0] += sign
            self.used[1] += sign * job.request.gpus * job.request.nodes

    def is_allowed(self, job: SimulatedJob) -> bool:
        """Whether the user's limits let it start. One that they hold back keeps no other waiting."""
        if not job.is_mine:
            return True
        gpus = self.used[1] + job.request.gpus * job.request.nodes
        jobs_fit = self.limits.jobs is None or self.used[0] < self.limits.jobs
        return jobs_fit and (self.limits.gpus is None or gpus <= self.limits.gpus)

    @property
    def has_others(self) -> bool:
        """Whether other people's jobs run."""
        return any(not job.is_mine for jobs in self.running for job in jobs)

    def nodes_for(self, job: SimulatedJob) -> list[int]:
        """Return the numbers of all nodes that a job may use."""
        if len(job.partitions) == 1:
            return self._nodes_of[job.partitions[0]]
        return list(dict.fromkeys(n for name in job.partitions for n in self._nodes_of[name]))

    def could_start(self, request: PlantRequest, partitions: Iterable[str]) -> int:
        """Count the jobs of one kind for which an empty cluster would have room."""
        job = SimulatedJob("", request, tuple(partitions), 0.0)
        each = [_times(self.nodes[number], request) for number in self.nodes_for(job)]
        if request.nodes == 1:
            return sum(each)
        return sum(times > 0 for times in each) // request.nodes

    def find(self, job: SimulatedJob, blocked: frozenset[int] | set[int] = frozenset()) -> list[int] | None:
        """Return nodes that have room for a job now, those with the least that is free first."""
        request, free = job.request, self.free
        fitting = [n for n in self.nodes_for(job) if free[n].holds(request) and n not in blocked]
        if len(fitting) < request.nodes:
            return None
        if request.nodes == 1:
            return [min(fitting, key=lambda n: (free[n].gpus, free[n].cpus))]
        return sorted(fitting, key=lambda n: (free[n].gpus, free[n].cpus))[: request.nodes]

    def start_in_order(self, now: float) -> list[SimulatedJob]:
        """Start what has room, in the order of priority. A job that finds none blocks its nodes."""
        started: list[SimulatedJob] = []
        blocked: set[int] = set()
        for job in list(self.pending):
            if job.eligible > now:
                continue
            job.lacks_room, job.is_limited = True, not self.is_allowed(job)
            if len(blocked) == len(self.nodes) or job.is_limited:
                continue
            if (nodes := self.find(job, blocked)) is not None:
                self.start(job, nodes, now)
                started.append(job)
            else:
                blocked.update(self.nodes_for(job))
        return started


def _times(node: PlantNode, request: PlantRequest) -> int:
    """Return how many jobs with a request fit on an empty node."""
    each = [(node.cpus, request.cpus), (node.gpus, request.gpus), (node.memory, request.memory)]
    return int(min(has // needs for has, needs in each if needs))
