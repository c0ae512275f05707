"""A run in simulated time: what its workers do. They choose, stay and leave by the rules of the program.

What is made up is how long things take. Which task a worker takes, whether it stays and when its input comes
is said by the program's rules, from what workers know (:mod:`pipeline.simulate.knowledge`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pipeline.decide import staying
from pipeline.decide.choosing import Step, is_ahead
from pipeline.decide.measuring import MEASURED, MEASURES
from pipeline.decide.staying import ASK_SECONDS
from pipeline.run.failures import FailureKind
from pipeline.run.tasks import Stage, Task
from pipeline.simulate.clock import SimulatedClock
from pipeline.simulate.cluster import SimulatedCluster
from pipeline.simulate.knowledge import LOOK_SECONDS, Knowledge
from pipeline.simulate.plant import Plant, PlantKind
from pipeline.simulate.progress import SimulatedProgress, attempt_id
from pipeline.simulate.results import JobRecord
from pipeline.simulate.worker import SimulatedWorker, Surroundings
from pipeline.workers.beats import Beat, Doing, Reason
from pipeline.workers.claims import Attempt, Claim
from pipeline.workers.handover import Handover

_ESTIMATE_AFTER = 0.2
"""Seconds of waiting after which a worker asks how long it will take, and whether it is to make place."""
_LEAVES_WITHIN = 120.0
"""Seconds that a worker which leaves waits for a pass."""
_MOST_FAILURES = 2


@dataclass(eq=False)
class SimulatedRun:
    """A run and its workers."""

    plant: Plant
    clock: SimulatedClock
    cluster: SimulatedCluster
    around: Surroundings = field(init=False)
    progress: SimulatedProgress = field(init=False)
    known: Knowledge = field(init=False)
    workers: dict[str, SimulatedWorker] = field(default_factory=dict)
    """By element: those that run, and those that wait in the queue."""
    idle: dict[str, dict[SimulatedWorker, None]] = field(default_factory=dict)
    """Workers that wait for an input, by job kind."""
    handovers: Sequence[Handover] = ()
    """What the last pass has decided on who makes place."""
    leaving: dict[str, float] = field(default_factory=dict)
    """Names of workers that make place once they have nothing to do, and the times before which they need
    not."""
    saved: dict[Task, float] = field(default_factory=dict)
    """Seconds of computing that failed attempts have saved."""
    unseen: dict[str, Claim] = field(default_factory=dict)
    """Attempts of killed workers that are not known yet, by their ids."""
    jobs: list[JobRecord] = field(default_factory=list)
    committed: float = 0.0
    """When something was last committed."""

    def __post_init__(self) -> None:
        self.progress = SimulatedProgress(self.plant.plan)
        self.known = Knowledge(self.plant, self.clock, self.progress)

    def kind(self, job_kind: str) -> PlantKind:
        return self.plant.kinds[job_kind]

    @property
    def now(self) -> float:
        return self.clock.now

    def running(self) -> Iterator[SimulatedWorker]:
        return (worker for found in self.known.at_work.values() for worker in found)

    # --- from the start of a job to its first look ---

    def start(self, worker: SimulatedWorker) -> None:
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
        self.known.at_work.setdefault(worker.job_kind, {})[worker] = None
        self.around.is_starting(worker)

    def load_ahead(self, worker: SimulatedWorker) -> float:
        """Return how long a worker that starts up reads the newest policy, if its tasks compute with one."""
        newest = min(self.progress.frontier.updated, self._version_of(worker.first))
        if newest < 0 or worker.first.stage not in (Stage.ROLLOUT, Stage.UPDATE):
            return 0.0
        worker.loaded = newest
        return self.plant.load_seconds

    def has_started(self, worker: SimulatedWorker) -> None:
        worker.beat = replace(worker.beat, startup_seconds=self.now - worker.since)
        worker.change(Doing.WAITING, self.now)
        self.look(worker)

    # --- looks ---

    def look(self, worker: SimulatedWorker) -> None:
        """A worker that has nothing to do looks for its next task."""
        if worker.is_warned:
            return self.leave(worker, Reason.WARNED)
        choice = self.known.choose(worker, makes_place=self.is_to_leave(worker))
        if choice.step is Step.DONE or choice.task is None:
            self.leave(worker, Reason.DONE)
        elif choice.step is Step.TAKE and self._is_in_the_way(worker, choice.task):
            self.leave(worker, Reason.NEEDED)
        elif choice.step is Step.TAKE:
            self._take(worker, choice.task)
        else:
            worker.awaited = choice.task
            self._wait(worker)
        return None

    def _is_in_the_way(self, worker: SimulatedWorker, task: Task) -> bool:
        plan, frontier = self.plant.plan, self.progress.frontier
        return is_ahead(plan, frontier, task) and self.is_to_leave(worker)

    def wake(self, job_kinds: Iterable[str]) -> None:
        """Have workers look that wait, where there is something for them."""
        for job_kind in job_kinds:
            if self.progress.open.get(job_kind):
                if self.idle.get(job_kind):
                    self.clock.after(0.0, self._look_some, job_kind)
                elif job_kind == MEASURED and self.known.measures:
                    self.clock.after(0.0, self._look_all, MEASURES)

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
            self.clock.after(LOOK_SECONDS, self._look_all, job_kind)

    def _look_all(self, job_kind: str) -> None:
        for worker in list(self.idle.get(job_kind, {})):
            if worker.doing is Doing.WAITING:
                self.look(worker)

    # --- tasks ---

    def _take(self, worker: SimulatedWorker, task: Task) -> None:
        if not self.known.has_time(worker, task):
            return self._lacks_time(worker, task)
        number = 1 + max((claim.number for claim in self.progress.claims.get(task, ())), default=0)
        attempt = attempt_id(worker.name, task, number)
        claim = Claim(task, number, attempt, worker.name, self.now)
        self.progress.claim(claim)
        self._end_wait(worker)
        worker.claim, worker.last, worker.has_first = claim, claim, False
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

    def _lacks_time(self, worker: SimulatedWorker, task: Task) -> None:
        if task.job_kind == worker.job_kind:
            return self.leave(worker, Reason.TIME)
        worker.measures = False
        return self.look(worker)

    def _load_seconds(self, worker: SimulatedWorker, task: Task) -> float:
        """Return how long it takes to read the policy that a task needs; its maker has it."""
        if task.stage not in (Stage.ROLLOUT, Stage.UPDATE, Stage.EVALUATE, Stage.BENCHMARK):
            return 0.0
        version = self._version_of(task)
        is_there, worker.loaded = worker.loaded == version, version
        return 0.0 if is_there else self.plant.load_seconds

    def _version_of(self, task: Task) -> int:
        """Return the version of the policy that a task computes with."""
        if task.stage is Stage.ROLLOUT:
            return self.plant.plan.policy_of(task.iteration)
        return task.iteration - (task.stage is Stage.UPDATE)

    def _succeed(self, worker: SimulatedWorker, claim: Claim) -> None:
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
        self.known.done[task.job_kind] += is_new
        worker.count_task(task, self.now, is_new)
        self.around.request_pass()
        if is_new and self.plant.writes_state(task):
            begins = max(self.now, worker.writes_until)  # one state at a time
            if self.goes_on(worker, task):
                self.clock.at(begins, self._begin_writing, worker, claim)
            else:
                self.clock.at(begins + self.plant.state_seconds, self._has_saved, worker, claim)
        else:
            is_kept = is_new and task.stage is Stage.UPDATE and self.plant.state_seconds > 0
            worker.unsaved = claim if is_kept else worker.unsaved
            self._finish(worker, claim)
        self.wake(self.plant.kinds)

    def goes_on(self, worker: SimulatedWorker, task: Task) -> bool:
        """Whether a worker may do the update after one, and writes the state meanwhile."""
        return not self.kind(worker.job_kind).does_one_task and task.iteration < self.plant.plan.iterations

    def _begin_writing(self, worker: SimulatedWorker, claim: Claim) -> None:
        """The state behind a policy is copied: it is written beside what follows."""
        if worker.claim is claim:
            worker.unsaved, worker.writes_until = claim, self.now + self.plant.state_seconds
            self.clock.at(worker.writes_until, self._has_written, worker, claim)
            self._finish(worker, claim)

    def _has_written(self, worker: SimulatedWorker, claim: Claim) -> None:
        if worker.unsaved is claim:
            worker.unsaved = None

    def _has_saved(self, worker: SimulatedWorker, claim: Claim) -> None:
        """The state behind a policy is written."""
        if worker.claim is claim:
            worker.unsaved = None
            self._finish(worker, claim)

    def _finish(self, worker: SimulatedWorker, claim: Claim) -> None:
        """An attempt is over, and its worker looks for the next."""
        self.progress.end(claim)
        worker.claim = None
        worker.change(Doing.WAITING, self.now)
        self._go_on(worker)
        self.wake([claim.task.job_kind])

    def _go_on(self, worker: SimulatedWorker) -> None:
        """A worker has done a task, or failed at one."""
        if self.kind(worker.job_kind).does_one_task:
            self.leave(worker, Reason.ONE)
        else:
            self.look(worker)

    def _fail(self, worker: SimulatedWorker, claim: Claim) -> None:
        if worker.claim is not claim:
            return
        worker.failed += 1
        self.progress.end(claim, FailureKind.ERROR)
        worker.claim = None
        worker.change(Doing.WAITING, self.now)
        self.around.request_pass()
        if worker.failed >= _MOST_FAILURES:
            self.leave(worker, Reason.FAILED)
        else:
            self._go_on(worker)
        self.wake([claim.task.job_kind])

    # --- waits ---

    def _wait(self, worker: SimulatedWorker) -> None:
        if self.is_to_leave(worker):
            return self.leave(worker, Reason.NEEDED)
        self.idle.setdefault(worker.job_kind, {})[worker] = None
        if worker.wait is None:
            worker.wait = self.known.wait_of(worker)
            if worker.has_first:
                self.around.request_pass()
            self.clock.at(
                min(self.now + 1.05 * _ESTIMATE_AFTER, worker.wait.until), self._check, worker, self.now
            )
        return None

    def _end_wait(self, worker: SimulatedWorker) -> None:
        self.idle.get(worker.job_kind, {}).pop(worker, None)
        worker.wait = None

    def _check(self, worker: SimulatedWorker, began: float) -> None:
        """A worker that waits considers whether it stays."""
        if worker.wait is None or worker.wait.began != began or worker.doing is not Doing.WAITING:
            return
        if self.now - began > _ESTIMATE_AFTER:
            self._estimate(worker)
        if reason := staying.reason_to_leave(worker.wait, self.now):
            return self.leave(worker, reason)
        self.clock.at(min(self.now + ASK_SECONDS, worker.wait.until), self._check, worker, began)
        return None

    def _estimate(self, worker: SimulatedWorker) -> None:
        assert worker.wait is not None
        assert worker.awaited is not None
        worker.wait = replace(worker.wait, expected=self.known.expected(worker.awaited))

    # --- ends ---

    def make_place(self, handovers: Sequence[Handover]) -> None:
        """Apply a pass's evictions: idle workers leave, others once they are idle."""
        self.handovers = handovers
        self.leaving = {one.worker: one.at for one in handovers}
        for at in {max(at, self.now) for at in self.leaving.values()}:
            self.clock.at(at, self._leave_places)

    def _leave_places(self) -> None:
        """Waiting workers are notified; each looks at everything each second in any case."""
        for worker in [w for idle in self.idle.values() for w in idle if self.is_to_leave(w)]:
            self.look(worker)

    def is_to_leave(self, worker: SimulatedWorker) -> bool:
        return self.leaving.get(worker.name, math.inf) <= self.now

    def leave(self, worker: SimulatedWorker, reason: Reason) -> None:
        """A worker leaves, once it has saved what it alone has."""
        self._end_wait(worker)
        worker.reason = worker.reason or reason
        if (claim := worker.unsaved) is not None:
            worker.unsaved, worker.claim = None, claim
            self.progress.attempts.setdefault(claim.task, []).append(Attempt(claim, True))
            worker.change(Doing.BUSY, self.now)
            is_written = worker.writes_until > self.now
            until = worker.writes_until if is_written else self.now + self.plant.state_seconds
            self.clock.at(until, self._has_left, worker, claim)
        else:
            self._say_left(worker)

    def _has_left(self, worker: SimulatedWorker, claim: Claim) -> None:
        if worker.claim is claim:
            self.progress.end(claim)
            worker.claim = None
            self._say_left(worker)
            self.wake([claim.task.job_kind])

    def _say_left(self, worker: SimulatedWorker) -> None:
        worker.change(Doing.LEAVING, self.now)
        self.around.request_pass()
        self.clock.after(_LEAVES_WITHIN, self._end_left, worker, worker.since)

    def _end_left(self, worker: SimulatedWorker, since: float) -> None:
        if worker.doing is Doing.LEAVING and worker.since == since:
            self.end(worker)

    def release(self, before: float) -> None:
        """End the jobs of workers that a pass has seen leave."""
        for worker in [w for w in self.running() if w.doing is Doing.LEAVING and w.since <= before]:
            self.end(worker)

    def end(self, worker: SimulatedWorker) -> None:
        """A worker's job ends, and its element with it."""
        self.free(worker)
        del self.workers[worker.element]
        self.around.has_ended(worker)

    def free(self, worker: SimulatedWorker, sum_of: str = "") -> None:
        """Have a worker's job end, whatever becomes of its element.

        Args:
            sum_of: what its last seconds are counted as, if not as what it did in them.
        """
        job = worker.job
        worker.change(None, self.now, sum_of)
        del self.known.at_work[worker.job_kind][worker]
        self._end_wait(worker)
        self.known.note_end(worker)
        gpus = job.request.gpus * len(job.nodes)
        self.jobs.append(
            JobRecord(
                name=worker.name,
                job_kind=worker.job_kind,
                gpus=gpus,
                began=job.begun,
                ended=self.now,
                spent=dict(worker.spent),
                tasks=worker.beat.tasks,
                reason=worker.reason,
            )
        )
        self.around.is_gone(worker)
        self.cluster.end(job)
        self.around.try_jobs()
