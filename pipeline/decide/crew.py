"""Workers of a run at one moment, and the tasks that they hold. Pure: no clock, queue or disk is read."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipeline.run.plan import Plan
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from pipeline.workers.claims import Claim


@dataclass(frozen=True)
class Worker:
    """A worker whose job runs, as Slurm and its beat show it."""

    name: str
    """Array job, element and restart, like ``4711_3r0``."""
    first: Task
    """Task that its element was submitted for."""
    doing: Doing = Doing.STARTING
    """Also STARTING where it has not beaten yet."""
    task: Task | None = None
    """Task that it does, or waits for."""
    since: float = 0.0
    """Unix time, by the worker's own clock, at which it began to do that."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes that it runs on."""
    has_worked: bool = False
    """Whether it has done a task."""

    @property
    def job_kind(self) -> str:
        return self.first.job_kind

    @property
    def stays(self) -> bool:
        """Whether it may take another task."""
        return self.doing is not Doing.LEAVING

    def is_at(self, claim: Claim) -> bool:
        """Whether it works on what it claimed: the newest claim that it took.

        A claim that is newer than its state is of a task that it has just begun.
        """
        if self.doing is Doing.STARTING or claim.time > self.since:
            return True
        return self.doing is Doing.BUSY and self.task == claim.task


@dataclass(frozen=True)
class Pending:
    """An element that waits in the queue: a worker to be, or one that Slurm put back."""

    name: str
    """Array job and element, like ``4711_3``."""
    first: Task
    begin: float | None = None
    """Unix time before which it does not start; None: as soon as there is room."""
    since: float = 0.0
    """Unix time from which it may start, as far as the run is concerned."""
    lacks_room: bool = False
    """Whether Slurm says that it waits for resources, behind others or at a limit."""
    is_limited: bool = False
    """Whether that is a limit of the user: others are not in its way."""

    @property
    def job_kind(self) -> str:
        return self.first.job_kind


@dataclass(frozen=True)
class Crew:
    """Workers of a run at one moment."""

    workers: Sequence[Worker] = ()
    pending: Sequence[Pending] = ()

    def count(self, job_kind: str) -> int:
        """Count those that may do a task of a job kind."""
        return self._count[job_kind]

    @cached_property
    def _count(self) -> Counter[str]:
        staying = {kind: len(workers) for kind, workers in self.staying.items()}
        return Counter(staying) + self.waiting

    @cached_property
    def staying(self) -> Mapping[str, Sequence[Worker]]:
        """Return the workers that may take another task, by job kind."""
        found: dict[str, list[Worker]] = {}
        for worker in self.workers:
            if worker.stays:
                found.setdefault(worker.job_kind, []).append(worker)
        return found

    @cached_property
    def waiting(self) -> Counter[str]:
        """Return the number of pending elements of each job kind."""
        return Counter(element.job_kind for element in self.pending)

    def without(self, names: Collection[str]) -> "Crew":
        """Return the crew without some pending elements."""
        return replace(self, pending=[element for element in self.pending if element.name not in names])


def wanted_workers(plan: Plan, most_of: Callable[[str], int | None]) -> dict[str, int]:
    """Return the number of workers that a run is to have where there are places for all, by job kind.

    Args:
        most_of: returns the most that the settings allow of a sharded job kind at once; None: no limit.
    """
    wanted = {}
    benchmarks = (Stage.BENCHMARK,) if plan.benchmark_every else ()
    for job_kind in map(str, (PREPARE.job_kind, *plan.job_kinds, Stage.EVALUATE, *benchmarks)):
        is_sharded = any(t.job_kind == job_kind and t.stage.is_sharded for t in plan.tasks(plan.iterations))
        wanted[job_kind] = min(plan.num_shards, most_of(job_kind) or plan.num_shards) if is_sharded else 1
    return wanted


def held_tasks(claims: Iterable[Claim], crew: Crew, is_committed: Collection[Task]) -> dict[Task, str]:
    """Return the tasks that are being done or begun, each with the name of its worker or element.

    A task that is committed is held only by a worker that is still at it: an update writes the trainer's
    state behind its policy. What a claim says goes before what an element was submitted for.
    """
    workers = {worker.name: worker for worker in crew.workers}
    newest = _newest_claims(claims)
    held = {claim.task: name for name, claim in newest.items() if _is_held(workers.get(name), claim)}
    starting = [w for w in crew.workers if w.doing is Doing.STARTING and w.name not in newest]
    beginning: list[Worker | Pending] = [*starting, *crew.pending]
    for one in beginning:
        if one.first not in is_committed:
            held.setdefault(one.first, one.name)
    return held


def _newest_claims(claims: Iterable[Claim]) -> dict[str, Claim]:
    """Return each worker's newest claim: it does one task at a time."""
    newest: dict[str, Claim] = {}
    for claim in claims:
        known = newest.get(claim.worker)
        if known is None or (claim.time, claim.number) > (known.time, known.number):
            newest[claim.worker] = claim
    return newest


def _is_held(worker: Worker | None, claim: Claim) -> bool:
    return worker is not None and worker.is_at(claim)


def failed_claims(
    claims: Sequence[Claim],
    crew: Crew,
    committed: Collection[Task],
    judged: Collection[str],
    broken: Collection[str] = (),
) -> list[Claim]:
    """Return claims that came to nothing: not committed, and their worker is gone or does something else.

    Args:
        judged: ids of the attempts whose end is known already.
        broken: ids of attempts that failed at tasks which are committed now, by other attempts. Any other
            attempt at such a task was only too late.
    """
    workers, newest = {worker.name: worker for worker in crew.workers}, _newest_claims(claims)
    left_out = {c.attempt for name, c in newest.items() if _is_held(workers.get(name), c)}.union(judged)
    missing = (c for c in claims if c.task not in committed or c.attempt in broken)
    return [c for c in missing if c.attempt not in left_out]
