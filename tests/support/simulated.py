"""A run with workers in simulated time: the real rules of workers and of passes, and made-up durations.

Nothing is computed, and no file is there: what workers and passes would see is made from what has happened.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pipeline.orchestrate.staffing import Crew, Estimate, Order, Pending, Situation, Worker, held_tasks, staff
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import Frontier
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from pipeline.workers import choosing, estimates, staying
from pipeline.workers.beats import Beat, Doing, Reason
from pipeline.workers.choosing import Step, View
from pipeline.workers.claims import Attempt, Claim
from pipeline.workers.estimates import Passage
from pipeline.workers.staying import Wait

_STEP = 0.1
_ESTIMATE_AFTER, _ESTIMATE_AGAIN = 0.2, 30.0
_SUMS = {Doing.STARTING: "startup", Doing.BUSY: "busy", Doing.WAITING: "waiting", Doing.LEAVING: "waiting"}


@dataclass
class Job:
    """An element, from its submission on. Times are seconds of the simulation."""

    name: str
    first: Task
    eligible: float
    """Time from which it may start."""
    begin: float | None
    beat: Beat
    doing: Doing | None = None
    """None while it waits in the queue."""
    since: float = 0.0
    task: Task | None = None
    until: float = 0.0
    has_first: bool = True
    """Whether its first task is still to be taken."""
    wait: Wait | None = None
    estimated: float | None = None
    reason: Reason | None = None
    is_over: bool = False
    spent: dict[str, float] = field(default_factory=lambda: {"startup": 0.0, "busy": 0.0, "waiting": 0.0})

    @property
    def job_kind(self) -> str:
        return self.first.job_kind

    def change(self, doing: Doing, now: float) -> None:
        if self.doing is not None:
            self.spent[_SUMS[self.doing]] += now - self.since
        self.doing, self.since = doing, now


@dataclass
class Simulation:
    """A run on a cluster with room for all its jobs."""

    plan: Plan
    seconds: Callable[[Task], float]
    """Seconds that a task takes."""
    startup: float
    queue: float
    linger: int | str = "auto"
    linger_max: float = 600.0
    passes: tuple[float, float] = (0.8, 0.7)
    """Seconds that a pass takes until it looks, and from then on."""
    now: float = 0.0
    committed: dict[Task, float] = field(default_factory=dict)
    began: dict[Task, float] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    begun_with: set[Task] = field(default_factory=set)
    is_wanted: bool = True
    """Whether somebody has asked for a pass."""
    at_work: float | None = None
    """Time at which the pass that is at work began."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return (PREPARE.job_kind, *self.plan.job_kinds)

    @property
    def updated(self) -> int:
        return max((task.iteration for task in self.committed if task.stage is Stage.UPDATE), default=0)

    @property
    def live(self) -> list[Job]:
        return [job for job in self.jobs if not job.is_over]

    def carry_out(self) -> "Simulation":
        """Go on until every policy is committed and every worker has left."""
        while self.updated < self.plan.iterations or any(job.doing for job in self.live):
            self.keep_books()
            for job in self.live:
                self.step(job)
            self.now += _STEP
            assert self.now < 1e5, "it does not come to an end"
        return self

    # --- what came of it ---

    def iterations(self, first: int) -> list[float]:
        """Seconds from one policy to the next, from that of iteration ``first`` on."""
        ends = [self.committed[policy_maker(k)] for k in range(first - 1, self.plan.iterations + 1)]
        return [after - before for before, after in pairwise(ends)]

    def spent(self, what: str) -> float:
        return sum(job.spent[what] for job in self.jobs)

    # --- passes ---

    def keep_books(self) -> None:
        if self.at_work is None and self.is_wanted:
            self.is_wanted, self.at_work = False, self.now
        if self.at_work is not None and self.now >= self.at_work + sum(self.passes):
            self.write_rows()
            self.make_pass()
            for job in self.live:
                if job.doing is Doing.LEAVING and job.since <= self.at_work + self.passes[0]:
                    job.change(Doing.LEAVING, self.now)
                    job.is_over = True
            self.at_work = None

    def write_rows(self) -> None:
        written = max((passage.iteration for passage in self.passages), default=0)
        for iteration in range(written + 1, self.updated + 1):
            for job_kind in self.plan.job_kinds:
                tasks = [task for task in self.plan.tasks(iteration) if task.job_kind == job_kind]
                inputs = [[self.committed[source] for source in self.plan.inputs(task)] for task in tasks]
                ended = max(self.committed[task] for task in tasks)
                passed, worked = ended - min(map(max, inputs)), ended - min(self.began[t] for t in tasks)
                self.passages.append(
                    Passage(iteration, job_kind, passed, min(passed, worked), min(passed, worked))
                )

    def tasks_at_hand(self) -> list[Task]:
        is_prepared = PREPARE in self.committed
        tasks = self.plan.window(self.updated if is_prepared else -1, 0)
        newest = max((task.iteration for task in tasks), default=self.plan.iterations)
        after = self.plan.tasks(newest + 1) if newest < self.plan.iterations else ()
        return sorted((*tasks, *after), key=lambda task: task.iteration)

    def make_pass(self) -> None:
        crew, tasks = self.crew(), self.tasks_at_hand()
        held = held_tasks(self.claims(), crew, self.committed)
        decided = staff(
            Situation(
                self.plan,
                tasks,
                crew,
                held,
                self.committed,
                [task for task in tasks if task not in held and self.is_ready(task)],
                {kind: self.plan.num_shards if kind in ("rollout", "reward") else 1 for kind in self.kinds},
                self.now,
                {kind: self.estimate(kind, tasks) for kind in self.plan.job_kinds},
                self.begun_with,
            )
        )
        for job in self.live:
            if job.doing is None and job.name in decided.hurried:
                job.begin, job.eligible = None, self.now
        for order in decided.orders:
            self.submit(order)

    def is_ready(self, task: Task) -> bool:
        return task not in self.committed and self.committed.keys() >= {*self.plan.inputs(task)}

    def crew(self) -> Crew:
        workers = [Worker(j.name, j.first, j.doing, j.task, j.since) for j in self.live if j.doing]
        pending = [Pending(j.name, j.first, j.begin) for j in self.live if j.doing is None]
        return Crew(workers, pending)

    def claims(self) -> list[Claim]:
        at_work = ((job, job.task) for job in self.live if job.task is not None)
        return [
            Claim(task, 1, f"1-{job.name}.{task_key(task)}", job.name, job.since) for job, task in at_work
        ]

    def estimate(self, job_kind: str, tasks: list[Task]) -> Estimate:
        wait, start = estimates.queue_wait(self.beats(), job_kind), estimates.startup(self.beats(), job_kind)
        coming = (
            t
            for t in tasks
            if t.job_kind == job_kind and not self.committed.keys() >= {t, *self.plan.inputs(t)}
        )
        task = next(coming, None)
        when = None if task is None else self.expected(task, early=self.plan.job_kinds)
        return Estimate(when, wait.late if wait else None, start.median if start else None)

    def expected(self, task: Task, **how: object) -> float | None:
        return estimates.expected_ready(self.plan, task, self.committed.get, self.passages, self.now, **how)

    def beats(self) -> list[Beat]:
        return [job.beat for job in self.jobs if job.doing is not None]

    def submit(self, order: Order) -> None:
        self.begun_with |= set(order.tasks)
        eligible = max(self.now, order.begin or 0.0)
        for task in order.tasks:
            name = f"{len(self.jobs)}_0"
            self.jobs.append(
                Job(name, task, eligible, order.begin, Beat(name, task.job_kind, "node", 1, 0.0))
            )

    # --- workers ---

    def step(self, job: Job) -> None:
        if job.doing is None:
            if self.now >= job.eligible + self.queue:
                job.beat = replace(job.beat, started=self.now, queued_seconds=self.now - job.eligible)
                job.change(Doing.STARTING, self.now)
        elif job.doing is Doing.STARTING and self.now >= job.since + self.startup:
            job.beat = replace(job.beat, startup_seconds=self.startup)
            job.change(Doing.WAITING, self.now)
        elif job.doing is Doing.BUSY and self.now >= job.until:
            assert job.task is not None
            self.committed[job.task] = self.now
            job.task, job.wait, self.is_wanted = None, None, True
            job.change(Doing.WAITING, self.now)
        elif job.doing is Doing.WAITING:
            self.look(job)

    def look(self, job: Job) -> None:
        attempts = {claim.task: [Attempt(claim, is_running=True)] for claim in self.claims()}
        frontier = Frontier(self.updated if PREPARE in self.committed else -1, 0)
        view = View(self.plan, frontier, self.committed, attempts, max_attempts=3, now=self.now)
        worker = choosing.Worker(job.job_kind, job.first.shard, job.first if job.has_first else None)
        choice = choosing.choose(view, worker)
        if choice.step is Step.DONE or choice.task is None:
            self.leave(job, Reason.DONE)
        elif choice.step is Step.TAKE:
            job.task, job.has_first, job.until = choice.task, False, self.now + self.seconds(choice.task)
            self.began[choice.task] = self.now
            job.change(Doing.BUSY, self.now)
        else:
            self.stay_or_leave(job, choice.task)

    def stay_or_leave(self, job: Job, task: Task) -> None:
        if job.wait is None:
            bound = self.bound(job)
            job.wait, job.estimated = Wait(self.now, bound, allowance=self.allowance(job, bound)), None
        since = job.wait.began + _ESTIMATE_AFTER if job.estimated is None else job.estimated + _ESTIMATE_AGAIN
        if self.now > since:
            job.estimated = self.now
            job.wait = replace(job.wait, expected=self.expected(task, staying=self.plan.job_kinds))
        if reason := staying.reason_to_leave(job.wait, self.now):
            self.leave(job, reason)

    def bound(self, job: Job) -> float:
        bound = staying.bound(self.linger, self.linger_max, self.startup, self.queue)
        return max(bound, self.linger_max) if job.has_first else bound

    def allowance(self, job: Job, bound: float) -> float:
        others = [kind for kind in self.plan.job_kinds if kind != job.job_kind]
        costs = [estimates.coming_back(self.beats(), kind) for kind in others]
        return staying.allowance(self.linger, self.linger_max, bound, costs)

    def leave(self, job: Job, reason: Reason) -> None:
        job.reason, self.is_wanted = reason, True
        job.change(Doing.LEAVING, self.now)
