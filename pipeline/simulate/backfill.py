"""Backfill: jobs start before others of higher priority where these start no later for it. Pure.

Time limits tell when running jobs will have ended. Each job that cannot start now is given the earliest place
that it could have, and what comes after it must be over by then, or fit beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.simulate.cluster import Cluster, Job, Room
from pipeline.simulate.plant import Request

_MOST_RESERVED = 20
"""Jobs that get a place in the future: Slurm has the same bound for the elements of one array."""


@dataclass
class _Future:
    """What is free on each node, now and later."""

    cluster: Cluster
    now: float
    reserved: dict[int, list[tuple[float, float, Request]]] = field(default_factory=dict)
    """Start, end and request, by node."""

    def times(self, number: int) -> Iterator[float]:
        """Yield the times at which something gets free on a node, from now on."""
        ends = {max(self.now, job.ends) for job in self.cluster.running[number]}
        ends |= {end for _, end, _ in self.reserved.get(number, ())}
        yield self.now
        yield from sorted(ends)

    def holds(self, number: int, request: Request, begin: float) -> bool:
        """Whether a node has room from a time on, for as long as a job may run."""
        taken = self.reserved.get(number, ())
        starts = [begin, *(s for s, _, _ in taken if begin < s < begin + request.limit)]
        return all(self._room(number, time).holds(request) for time in starts)

    def _room(self, number: int, time: float) -> Room:
        free = self.cluster.free[number]
        room = Room(free.cpus, free.gpus, free.memory)
        if time > self.now:
            for job in self.cluster.running[number]:
                if job.ends <= time:
                    room.change(job.request, 1)
        for start, end, request in self.reserved.get(number, ()):
            if start <= time < end:
                room.change(request, -1)
        return room

    def earliest(self, job: Job) -> tuple[float, list[int]] | None:
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

    def reserve(self, job: Job, begin: float, nodes: list[int]) -> None:
        for number in nodes:
            entry = (begin, begin + job.request.limit, job.request)
            self.reserved.setdefault(number, []).append(entry)


def backfill(cluster: Cluster, now: float) -> list[Job]:
    """Start jobs that delay nobody before them. Returns those that it started."""
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


def _one_of_each(jobs: list[Job]) -> list[Job]:
    """Return one job for each request and partition."""
    return list({(job.request, job.partitions): job for job in jobs}.values())
