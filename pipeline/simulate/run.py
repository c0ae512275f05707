"""A run in simulated time: what its workers do. They choose, stay and leave by the rules of the program.

What is made up is how long things take. Which task a worker takes is :func:`choosing.choose`, whether it
stays :mod:`pipeline.workers.staying`, when its input comes :mod:`pipeline.workers.estimates`.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from pipeline.run.failures import FailureKind
from pipeline.run.records import Frontier
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.simulate.clock import Clock
from pipeline.simulate.cluster import Cluster
from pipeline.simulate.plant import Kind, Plant
from pipeline.simulate.progress import Progress, attempt_id
from pipeline.simulate.results import JobRecord, Result
from pipeline.simulate.worker import Worker
from pipeline.workers import choosing, estimates, staying
from pipeline.workers.beats import Beat, Doing, Reason
from pipeline.workers.choosing import Choice, Step, View
from pipeline.workers.claims import Attempt, Claim
from pipeline.workers.handover import Handover
from pipeline.workers.staying import ASK_SECONDS, Wait

_ESTIMATE_AFTER = 0.2
"""Seconds of waiting after which a worker asks how long it will take, and whether it is to make place."""
_INPUT_SECONDS = 30.0
"""Seconds that a worker which did not start early waits for its first task's inputs."""
_LEAVES_WITHIN = 120.0
"""Seconds that a worker which leaves waits for a pass."""
_LOOK_SECONDS = 1.0
_MOST_FAILURES = 2
_KEPT_BEATS = 40
_FEW = 8


class Surroundings(Protocol):
    """What the workers of a run have others do."""

    def try_jobs(self) -> None:
        """Have Slurm try what waits, as something has ended."""

    def wish_for_pass(self) -> None: ...

    def is_starting(self, worker: Worker) -> None:
        """Have a worker start up, beside others of its node."""

    def is_gone(self, worker: Worker) -> None:
        """Note that a worker's job no longer runs."""

    def has_ended(self, worker: Worker) -> None:
        """Note that no job of an element is left."""


@dataclass(eq=False)
class SimulatedRun:
    """A run and its workers."""

    plant: Plant
    clock: Clock
    cluster: Cluster
    around: Surroundings = field(init=False)
    progress: Progress = field(init=False)
    workers: dict[str, Worker] = field(default_factory=dict)
    """By element: those that run, and those that wait in the queue."""
    idle: dict[str, dict[Worker, None]] = field(default_factory=dict)
    """Workers that wait for an input, by job kind."""
    past: dict[str, deque[Beat]] = field(default_factory=dict)
    """Last beats of the workers of each job kind that ended last."""
    at_work: dict[str, dict[Worker, None]] = field(default_factory=dict)
    """Workers whose jobs run, by job kind."""
    leaving: dict[str, float] = field(default_factory=dict)
    """Names of workers that make place once they have nothing to do, and the times before which they need
    not."""
    saved: dict[Task, float] = field(default_factory=dict)
    """Seconds of computing that failed attempts have saved."""
    unseen: dict[str, Claim] = field(default_factory=dict)
    """Attempts of killed workers, of which nobody knows yet, by their ids."""
    jobs: list[JobRecord] = field(default_factory=list)
    committed: float = 0.0
    """When something was last committed."""
    done: dict[str, int] = field(default_factory=dict)
    """Tasks of each job kind that are committed."""
    _found: dict[str, tuple[tuple[Frontier, int], Choice]] = field(default_factory=dict)
    """What workers of a kind last found that have nothing to do, and how far the run was then."""
    _seen: tuple[float, list[Beat]] = field(default_factory=lambda: (-math.inf, []))
    _allowances: dict[tuple[str, float], float] = field(default_factory=dict)
    _seconds: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    _far: dict[tuple[int, str, int], tuple[float, float | None]] = field(default_factory=dict)
    """What was last estimated for an iteration's tasks of a kind, and when."""

    def __post_init__(self) -> None:
        self.progress = Progress(self.plant.plan)

    def kind(self, job_kind: str) -> Kind:
        return self.plant.kinds[job_kind]

    @property
    def now(self) -> float:
        return self.clock.now

    def running(self) -> Iterator[Worker]:
        return (worker for found in self.at_work.values() for worker in found)

    def beats(self, job_kind: str) -> list[Beat]:
        """Return what workers of a kind say, those that live and the last that ended."""
        live = [worker.beat for worker in self.at_work.get(job_kind, ())]
        return [*self.past.get(job_kind, ()), *live]

    def task_seconds(self, job_kind: str) -> float | None:
        """Return what a task of a kind takes; asked anew once a few more are done."""
        number, seconds = self._seconds.get(job_kind, (-1, None))
        done = self.done.get(job_kind, 0) // _FEW
        if number != done:
            seconds = estimates.task_seconds(self.beats(job_kind), job_kind)
            self._seconds[job_kind] = done, seconds
        return seconds

    def all_beats(self) -> list[Beat]:
        """Return what all workers said when somebody last looked, which is not long ago."""
        time, seen = self._seen
        if self.now - time > _LOOK_SECONDS:
            seen = [beat for job_kind in self.plant.kinds for beat in self.beats(job_kind)]
            self._seen, self._allowances = (self.now, seen), {}
        return seen

    # --- from the start of a job to its first look ---

    def start(self, worker: Worker) -> None:
        """A worker's job starts."""
        worker.beat = Beat(
            worker.name,
            worker.job_kind,
            self.cluster.nodes[worker.job.nodes[0]].name,
            1,
            self.now,
            queued_seconds=max(0.0, self.now - worker.wanted),
        )
        worker.change(Doing.STARTING, self.now)
        self.at_work.setdefault(worker.job_kind, {})[worker] = None
        kind, start = self.kind(worker.job_kind), worker.restart
        ends = self.now + kind.request.limit
        self.clock.at(max(self.now, ends - kind.signal), self._warn, worker, start)
        self.clock.at(ends, self._end_in_time, worker, start)
        self.around.is_starting(worker)

    def has_started(self, worker: Worker) -> None:
        worker.beat = replace(worker.beat, startup_seconds=self.now - worker.since)
        worker.change(Doing.WAITING, self.now)
        self.look(worker)

    # --- looks ---

    def look(self, worker: Worker) -> None:
        """A worker that has nothing to do looks for its next task."""
        if worker.is_warned:
            return self.leave(worker, Reason.WARNED)
        choice = self._choose(worker)
        if choice.step is Step.DONE or choice.task is None:
            self.leave(worker, Reason.DONE)
        elif choice.step is Step.TAKE:
            self._take(worker, choice.task)
        else:
            worker.awaited = choice.task
            self._wait(worker)
        return None

    def _choose(self, worker: Worker) -> Choice:
        """Choose what a worker does next; asked once for all who find nothing where nothing has changed."""
        job_kind, done = worker.job_kind, self.progress
        known, state = self._found.get(job_kind), (done.frontier, done.opened[job_kind])
        if known and known[0] == state and not done.open.get(job_kind) and not self._may_be_slow(job_kind):
            return known[1]
        takes_over = self.kind(job_kind).request.gpus > 0
        choice = choosing.choose(self._view(worker, takes_over), worker.chooser(takes_over))
        if choice.step is not Step.TAKE:
            self._found[job_kind] = state, choice
        return choice

    def _may_be_slow(self, job_kind: str) -> bool:
        """Whether somebody is at a task for so long that another might take it over: see
        :func:`choosing.is_slow`, which looks at more."""
        median = self.task_seconds(job_kind)
        if median is None or not self.kind(job_kind).request.gpus:
            return False
        at_work = (w for w in self.at_work.get(job_kind, ()) if w.doing is Doing.BUSY)
        return any(self.now - worker.since > choosing.SLOW_FACTOR * median for worker in at_work)

    def _view(self, worker: Worker, takes_over: bool) -> View:
        done = self.progress
        median = self.task_seconds(worker.job_kind) if takes_over else None
        return View(
            self.plant.plan,
            done.frontier,
            done.committed,
            done.attempts,
            self.plant.max_attempts,
            self.now,
            median,
        )

    def wake(self, job_kinds: Iterable[str]) -> None:
        """Have workers look that wait, where there is something for them."""
        for job_kind in job_kinds:
            number = len(self.progress.open.get(job_kind, ()))
            idle = self.idle.get(job_kind, {})
            if number and idle:
                self.clock.after(0.0, self._look_some, job_kind)

    def _look_some(self, job_kind: str) -> None:
        """Have as many look as there are tasks, those first whose own these are."""
        tasks, idle = self.progress.open.get(job_kind, {}), self.idle.get(job_kind, {})
        shards = {task.shard for task in tasks}
        own = [w for w in idle if w.first in tasks or w.first.shard in shards]
        for worker in list(dict.fromkeys((*own, *idle)))[: len(tasks)]:
            if worker.doing is Doing.WAITING:
                self.look(worker)

    def _look_at_end(self, job_kind: str) -> None:
        """Have those look who may find that nothing is left for them."""
        if self.progress.frontier.updated >= self.plant.plan.iterations - 1:
            self.clock.after(_LOOK_SECONDS, self._look_all, job_kind)

    def _look_all(self, job_kind: str) -> None:
        for worker in list(self.idle.get(job_kind, {})):
            if worker.doing is Doing.WAITING:
                self.look(worker)

    # --- tasks ---

    def _take(self, worker: Worker, task: Task) -> None:
        if not self._has_time(worker, task):
            return self.leave(worker, Reason.TIME)
        number = 1 + max((claim.number for claim in self.progress.claims.get(task, ())), default=0)
        attempt = attempt_id(worker.name, task, number)
        claim = Claim(task, number, attempt, worker.name, self.now)
        self.progress.claim(claim)
        self._end_wait(worker)
        worker.claim, worker.has_first = claim, False
        worker.change(Doing.BUSY, self.now)
        worker.computes = self.now + self._load_seconds(worker, task)
        seconds = max(0.0, self.plant.seconds_of(task) - self.saved.get(task, 0.0))
        share = self.plant.fails_at(task, number)
        if share is None:
            self.clock.at(worker.computes + seconds, self._succeed, worker, claim)
        else:
            self.clock.at(worker.computes + share * seconds, self._fail, worker, claim)
        self._look_at_end(worker.job_kind)
        return None

    def _has_time(self, worker: Worker, task: Task) -> bool:
        kind = self.kind(worker.job_kind)
        limit = staying.task_limit(None, self.task_seconds(worker.job_kind))
        has_time = staying.has_time(self.now, worker.job.ends, limit, kind.signal)
        return has_time or (worker.has_first and task == worker.first)

    def _load_seconds(self, worker: Worker, task: Task) -> float:
        """Return how long it takes to read the policy that a task needs; who has made it has it."""
        if task.stage not in (Stage.ROLLOUT, Stage.UPDATE, Stage.EVALUATE, Stage.BENCHMARK):
            return 0.0
        version = task.iteration - (task.stage in (Stage.ROLLOUT, Stage.UPDATE))
        is_there, worker.loaded = worker.loaded == version, version
        return 0.0 if is_there else self.plant.load_seconds

    def _succeed(self, worker: Worker, claim: Claim) -> None:
        if worker.claim is not claim:
            return
        task, done = claim.task, self.progress
        is_new = task not in done.committed
        if is_new:
            done.begun[task], done.computing[task] = claim.time, worker.computes
            self.saved.pop(task, None)
            done.commit(task, self.now)
            self.committed = self.now
            worker.loaded = task.iteration if task.stage is Stage.UPDATE else worker.loaded
        self._count_task(worker, is_new)
        self.around.wish_for_pass()
        if is_new and self.plant.writes_state(task):
            self.clock.after(self.plant.state_seconds, self._has_saved, worker, claim)
        else:
            is_kept = is_new and task.stage is Stage.UPDATE and self.plant.state_seconds > 0
            worker.unsaved = claim if is_kept else worker.unsaved
            self._finish(worker, claim)
        self.wake(self.plant.kinds)

    def _count_task(self, worker: Worker, is_new: bool) -> None:
        beat = worker.beat
        busy = beat.busy_seconds + self.now - worker.since
        self.done[worker.job_kind] = self.done.get(worker.job_kind, 0) + is_new
        worker.beat, worker.failed = replace(beat, tasks=beat.tasks + is_new, busy_seconds=busy), 0

    def _has_saved(self, worker: Worker, claim: Claim) -> None:
        """The state behind a policy is written."""
        if worker.claim is claim:
            worker.unsaved = None
            self._finish(worker, claim)

    def _finish(self, worker: Worker, claim: Claim) -> None:
        """An attempt is over, and its worker looks for the next."""
        self.progress.end(claim)
        worker.claim = None
        worker.change(Doing.WAITING, self.now)
        self.look(worker)
        self.wake([claim.task.job_kind])

    def _fail(self, worker: Worker, claim: Claim) -> None:
        if worker.claim is not claim:
            return
        worker.failed += 1
        self.progress.end(claim, FailureKind.ERROR)
        worker.claim = None
        worker.change(Doing.WAITING, self.now)
        self.around.wish_for_pass()
        if worker.failed >= _MOST_FAILURES:
            self.leave(worker, Reason.FAILED)
        else:
            self.look(worker)
        self.wake([claim.task.job_kind])

    # --- waits ---

    def _wait(self, worker: Worker) -> None:
        if self._is_to_leave(worker):
            return self.leave(worker, Reason.NEEDED)
        self.idle.setdefault(worker.job_kind, {})[worker] = None
        if worker.wait is None:
            bound = self._bound(worker)
            back = staying.coming_back_of(self.all_beats(), worker.beat)
            allowance = self._allowance(worker, bound)
            worker.wait = Wait(self.now, bound, None, allowance, worker.has_first, back)
            worker.estimated = None
            self.clock.at(
                min(self.now + 1.05 * _ESTIMATE_AFTER, worker.wait.until), self._check, worker, self.now
            )
        return None

    def _bound(self, worker: Worker) -> float:
        kind = self.kind(worker.job_kind)
        first = min(staying.FIRST_SECONDS, self.plant.linger_max)
        least = first if kind.start_early else _INPUT_SECONDS
        return staying.bound_of(
            kind.linger,
            self.plant.linger_max,
            self.all_beats(),
            worker.beat,
            least if worker.has_first else 0.0,
        )

    def _allowance(self, worker: Worker, bound: float) -> float:
        beats, key = self.all_beats(), (worker.job_kind, bound)
        if key not in self._allowances:
            others = [kind for kind in self.plant.plan.job_kinds if kind != worker.job_kind]
            linger = self.kind(worker.job_kind).linger
            found = staying.allowance_of(linger, self.plant.linger_max, bound, beats, others)
            self._allowances[key] = found
        return self._allowances[key]

    def _end_wait(self, worker: Worker) -> None:
        self.idle.get(worker.job_kind, {}).pop(worker, None)
        worker.wait = None

    def _check(self, worker: Worker, began: float) -> None:
        """A worker that waits considers whether it stays."""
        if worker.wait is None or worker.wait.began != began or worker.doing is not Doing.WAITING:
            return
        if self.now - began > _ESTIMATE_AFTER:
            self._estimate(worker)
        if reason := staying.reason_to_leave(worker.wait, self.now):
            return self.leave(worker, reason)
        self.clock.at(min(self.now + ASK_SECONDS, worker.wait.until), self._check, worker, began)
        return None

    def _estimate(self, worker: Worker) -> None:
        assert worker.wait is not None
        assert worker.awaited is not None
        worker.wait = replace(worker.wait, expected=self._expected(worker.awaited))

    def _expected(self, task: Task) -> float | None:
        """Return when the input of a task will come at the earliest; asked once for all who wait for it."""
        key = task.iteration, task.job_kind, self.progress.rows
        time, when = self._far.get(key, (-1.0, None))
        if time < 0 or self.now - time > 1.0:
            when = estimates.expected_ready(
                self.plant.plan, task, self.progress.at, self.progress.passages, self.now, self._staying()
            )
            self._far = {} if len(self._far) > len(self.plant.kinds) else self._far
            self._far[key] = self.now, when
        return when

    def _staying(self) -> frozenset[str]:
        kinds = self.plant.plan.job_kinds
        return frozenset(kind for kind in kinds if self.kind(kind).linger != 0)

    # --- ends ---

    def make_place(self, handovers: Iterable[Handover]) -> None:
        """A pass has said who makes place: those leave who have nothing to do, others once that is so."""
        self.leaving = {one.worker: one.at for one in handovers}
        for at in {max(at, self.now) for at in self.leaving.values()}:
            self.clock.at(at, self._leave_places)

    def _leave_places(self) -> None:
        """Those who wait are rung; each looks at everything each second in any case."""
        for worker in [w for idle in self.idle.values() for w in idle if self._is_to_leave(w)]:
            self.look(worker)

    def _is_to_leave(self, worker: Worker) -> bool:
        return self.plant.evicts and self.leaving.get(worker.name, math.inf) <= self.now

    def leave(self, worker: Worker, reason: Reason) -> None:
        """A worker leaves, once it has saved what it alone has."""
        self._end_wait(worker)
        worker.reason = worker.reason or reason
        if (claim := worker.unsaved) is not None:
            worker.unsaved, worker.claim = None, claim
            self.progress.attempts.setdefault(claim.task, []).append(Attempt(claim, True))
            worker.change(Doing.BUSY, self.now)
            self.clock.after(self.plant.state_seconds, self._has_left, worker, claim)
        else:
            self._say_left(worker)

    def _has_left(self, worker: Worker, claim: Claim) -> None:
        if worker.claim is claim:
            self.progress.end(claim)
            worker.claim = None
            self._say_left(worker)
            self.wake([claim.task.job_kind])

    def _say_left(self, worker: Worker) -> None:
        worker.change(Doing.LEAVING, self.now)
        self.around.wish_for_pass()
        self.clock.after(_LEAVES_WITHIN, self._end_left, worker, worker.since)

    def _end_left(self, worker: Worker, since: float) -> None:
        if worker.doing is Doing.LEAVING and worker.since == since:
            self.end(worker)

    def release(self, before: float) -> None:
        """End the jobs of workers that a pass has seen leave."""
        for worker in [w for w in self.running() if w.doing is Doing.LEAVING and w.since <= before]:
            self.end(worker)

    def end(self, worker: Worker) -> None:
        """A worker's job ends, and its element with it."""
        self._free(worker)
        del self.workers[worker.element]
        self.around.has_ended(worker)

    def _free(self, worker: Worker, sum_of: str = "") -> None:
        job = worker.job
        worker.change(None, self.now, sum_of)
        del self.at_work[worker.job_kind][worker]
        self._end_wait(worker)
        kept = self.past.setdefault(worker.job_kind, deque(maxlen=_KEPT_BEATS))
        kept.append(worker.beat)
        gpus = job.request.gpus * len(job.nodes)
        self.jobs.append(
            JobRecord(
                *(worker.name, worker.job_kind, gpus, job.begun, self.now, dict(worker.spent)),
                *(worker.beat.tasks, worker.reason),
            )
        )
        self.around.is_gone(worker)
        self.cluster.end(job)
        self.around.try_jobs()

    # --- from outside ---

    def _warn(self, worker: Worker, restart: int) -> None:
        """Slurm warns a worker of its time limit."""
        if worker.doing is None or worker.restart != restart or worker.doing is Doing.LEAVING:
            return
        worker.is_warned = True
        if worker.doing is Doing.WAITING:
            self.leave(worker, Reason.WARNED)
        elif worker.claim is not None and worker.claim.task.stage.generates:
            claim = worker.claim
            self._save(worker)
            self.progress.end(claim, FailureKind.PAUSED)
            worker.claim = None
            worker.change(Doing.WAITING, self.now)
            self.leave(worker, Reason.WARNED)
            self.wake([claim.task.job_kind])

    def _save(self, worker: Worker) -> None:
        """Keep what an attempt that is warned has computed."""
        assert worker.claim is not None
        task, computed = worker.claim.task, max(0.0, self.now - worker.computes)
        self.saved[task] = self.saved.get(task, 0.0) + computed

    def _end_in_time(self, worker: Worker, restart: int) -> None:
        """Slurm ends a job at its time limit."""
        if worker.doing is not None and worker.restart == restart:
            self.kill(worker, FailureKind.TIMEOUT)
            del self.workers[worker.element]
            self.around.has_ended(worker)

    def preempt(self, worker: Worker) -> None:
        """Slurm takes a worker's place, and puts its job back into the queue."""
        self.kill(worker, FailureKind.PREEMPTED)
        slurm = self.plant.slurm
        worker.start_again(self.now + slurm.requeue + self.plant.queue_of(worker.name))
        self.cluster.submit(worker.job)
        self.clock.at(worker.job.eligible, self.around.try_jobs)

    def kill(self, worker: Worker, why: FailureKind) -> None:
        """End a worker's job at once. Nobody else knows of it before a pass has seen it."""
        claim = worker.claim
        if claim is not None and claim.task.stage.generates:
            self._save(worker)
            why = FailureKind.PAUSED
        if claim is not None:
            self.progress.end(claim, why, is_known=False)
            self.unseen[claim.attempt] = claim
        is_lost = claim is not None and why is not FailureKind.PAUSED
        worker.claim, worker.reason = None, None
        self._free(worker, "lost" if is_lost else "")

    def see_killed(self, failed: Iterable[Claim]) -> None:
        """A pass has seen which attempts came to nothing: others may take their tasks."""
        names = {claim.attempt for claim in failed}
        gone = [c for c in self.unseen.values() if c.attempt in names or c.task in self.progress.committed]
        self.unseen = {name: c for name, c in self.unseen.items() if c not in gone}
        for claim in gone:
            self.progress.close(claim)
        self.wake(dict.fromkeys(claim.task.job_kind for claim in gone))


def results(run: SimulatedRun, why: str, passes: int, events: int) -> Result:
    """Return what came of a run that has ended, or stands still."""
    done, plan = run.progress, run.plant.plan
    ends = [done.at(PREPARE) or 0.0]
    for version in range(plan.start + 1, plan.iterations + 1):
        if (time := done.at(Task(version, Stage.UPDATE))) is not None:
            ends.append(time)
    seconds = [after - before for before, after in pairwise(ends)]
    whole = float("inf") if why else run.committed
    return Result(seconds, whole, why, run.jobs, passes, events)
