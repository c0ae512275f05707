"""When simulated Slurm tries its jobs: soon after something has changed, and by backfill now and then.

By backfill jobs start before others of higher priority where these start no later for it. Time limits tell
when running jobs will have ended. Each job that cannot start now is given the earliest place that it could
have, and what comes after it must be over by then, or fit beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.simulate.clock import SimulatedClock
from pipeline.simulate.cluster import NodeRoom, SimulatedCluster, SimulatedJob
from pipeline.simulate.plant import PlantRequest, Slurm

_MOST_RESERVED = 20
"""Jobs that get a place in the future: Slurm has the same bound for the elements of one array."""


@dataclass(eq=False)
class Scheduling:
    """Slurm's own clockwork."""

    settings: Slurm
    clock: SimulatedClock
    cluster: SimulatedCluster
    starts: dict[SimulatedJob, Callable[[SimulatedJob], None]] = field(default_factory=dict)
    """What is done when a job starts, for jobs that live."""
    _is_due: bool = False
    _backfills: bool = False
    _has_changed: bool = False
    """Whether anything has come or ended since the last backfill: else that would find the same."""

    def submit(self, job: SimulatedJob, starts: Callable[[SimulatedJob], None]) -> None:
        self.starts[job] = starts
        self.cluster.submit(job)
        self.clock.at(job.eligible, self.try_jobs)

    def cancel(self, job: SimulatedJob) -> None:
        """Take a job out of the queue."""
        self.cluster.cancel(job)
        del self.starts[job]

    def end(self, job: SimulatedJob) -> None:
        """A job that ran ends."""
        self.cluster.end(job)
        del self.starts[job]
        self.try_jobs()

    def try_jobs(self) -> None:
        self._has_changed = True
        if not self._is_due:
            self._is_due = True
            self.clock.after(self.settings.tried_after, self._try_in_order)

    def try_now(self) -> None:
        """Start what has room."""
        self._tell(self.cluster.start_in_order(self.clock.now))

    def _try_in_order(self) -> None:
        self._is_due = False
        self.try_now()
        if not self._backfills and self._waits:
            self._backfills = True
            self.clock.after(self.settings.backfill, self._backfill)

    def _backfill(self) -> None:
        self._has_changed, self._backfills = False, False
        started = backfill(self.cluster, self.clock.now)
        self._tell(started)
        if self._waits and (started or self._has_changed):
            self._backfills = True
            self.clock.after(self.settings.backfill, self._backfill)

    @property
    def _waits(self) -> bool:
        return any(job.eligible <= self.clock.now for job in self.cluster.pending)

    def _tell(self, started: Sequence[SimulatedJob]) -> None:
        for job in started:
            self.starts[job](job)


@dataclass
class _Future:
    """What is free on each node, now and later."""

    cluster: SimulatedCluster
    now: float
    reserved: dict[int, list[tuple[float, float, PlantRequest]]] = field(default_factory=dict)
    """Start, end and request, by node."""

    def times(self, number: int) -> Iterator[float]:
        """Yield the times at which something gets free on a node, from now on."""
        ends = {max(self.now, job.ends) for job in self.cluster.running[number]}
        ends |= {end for _, end, _ in self.reserved.get(number, ())}
        yield self.now
        yield from sorted(ends)

    def holds(self, number: int, request: PlantRequest, begin: float) -> bool:
        """Whether a node has room from a time on, for as long as a job may run."""
        taken = self.reserved.get(number, ())
        starts = [begin, *(s for s, _, _ in taken if begin < s < begin + request.limit)]
        return all(self._room(number, time).holds(request) for time in starts)

    def _room(self, number: int, time: float) -> NodeRoom:
        free = self.cluster.free[number]
        room = NodeRoom(free.cpus, free.gpus, free.memory)
        if time > self.now:
            for job in self.cluster.running[number]:
                if job.ends <= time:
                    room.change(job.request, 1)
        for start, end, request in self.reserved.get(number, ()):
            if start <= time < end:
                room.change(request, -1)
        return room

    def earliest(self, job: SimulatedJob) -> tuple[float, list[int]] | None:
        """Return when and where a job could start."""
        found = []
        for number in self.cluster.nodes_for(job):
            fits = (t for t in self.times(number) if self.holds(number, job.request, t))
            if (begin := next(fits, None)) is not None:
                found.append((begin, number))
        chosen = sorted(found)[: job.request.nodes]
        if len(chosen) < job.request.nodes:
            return None
        return chosen[-1][0], [number for _, number in chosen]

    def reserve(self, job: SimulatedJob, begin: float, nodes: list[int]) -> None:
        for number in nodes:
            entry = (begin, begin + job.request.limit, job.request)
            self.reserved.setdefault(number, []).append(entry)


def backfill(cluster: SimulatedCluster, now: float) -> list[SimulatedJob]:
    """Start jobs that delay none before them. Returns those that it started."""
    waiting = [job for job in cluster.pending if job.eligible <= now]
    if not any(cluster.find(job) for job in _one_of_each(waiting)):
        return []
    future, started, reserved = _Future(cluster, now), [], 0
    for job in waiting:
        if not cluster.is_allowed(job) or (found := future.earliest(job)) is None:
            continue
        begin, nodes = found
        if begin <= now:
            cluster.start(job, nodes, now)
            started.append(job)
        elif reserved < _MOST_RESERVED:
            future.reserve(job, begin, nodes)
            reserved += 1
    return started


def _one_of_each(jobs: list[SimulatedJob]) -> list[SimulatedJob]:
    """Return one job for each request and partition."""
    return list({(job.request, job.partitions): job for job in jobs}.values())
