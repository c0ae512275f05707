"""Passes of a simulated run: who makes them and when, what they take, and the driver jobs behind workers."""

import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.config.job_kinds import DRIVER
from pipeline.decide.elements import free_elements, most_elements
from pipeline.decide.places import KEPT_SECONDS, Held, is_contended
from pipeline.decide.situation import Foreign, WorkerRequest
from pipeline.decide.staffing import is_freeing_slots
from pipeline.decide.staying import QUEUE_SECONDS
from pipeline.run.pass_requests import rest_after
from pipeline.run.tasks import Task
from pipeline.simulate.clock import SimulatedClock
from pipeline.simulate.cluster import SimulatedJob
from pipeline.simulate.looks import QueueLooks
from pipeline.simulate.mishaps import see_killed, watch_limit
from pipeline.simulate.passes import Around, PassDecision, PassTerms, decide, need_of, nodes_of
from pipeline.simulate.plant import Plant
from pipeline.simulate.run import SimulatedRun
from pipeline.simulate.scheduling import Scheduling
from pipeline.simulate.startups import StartUps
from pipeline.simulate.worker import SimulatedWorker
from pipeline.workers.beats import Doing
from pipeline.workers.looking import FROM_NOW, PASS_AGE, WORKER_AGE
from pipeline.workers.overdue import is_overdue

_OVERDUE_SECONDS = 60.5
_SOON_SECONDS = 1.0
_RECENT = 8
"""Iterations of which it is known what one takes."""


@dataclass(eq=False)
class Keeper:
    """Keeps a run going: makes its passes, and carries out what they decide."""

    run: SimulatedRun
    scheduling: Scheduling
    startups: list[StartUps]
    """By number of the node."""
    numbers: Iterator[int]
    """Numbers of jobs, of all runs of the cluster."""
    looks: QueueLooks
    kin: Sequence[SimulatedRun] = ()
    """The user's other runs."""
    passes: int = 0
    given_up: str = ""
    """Why the run stopped, if it did."""
    arrays: Counter[str] = field(default_factory=Counter)
    """Elements that live, by array."""
    submitted_for: set[Task] = field(default_factory=set)
    _is_requested: bool = False
    _is_at_work: bool = False
    _rested: float = 0.0
    """Time before which there is no other pass."""
    _last: float = 0.0
    """When the last pass ended."""
    _nodes_seen: float = -math.inf
    """When a pass last looked at the nodes, and when other people's jobs were last seen there."""
    _others_seen: float | None = None
    _lacking: set[SimulatedJob] = field(default_factory=set)
    """Jobs of the user that waited for room when workers last looked."""
    _behind: frozenset[str] | None = None
    """Arrays of which a driver job in the queue awaits one's end; None: no driver job is there."""
    _drivers: dict[SimulatedJob, None] = field(default_factory=dict)
    """Driver jobs that run, and do not rest."""
    _driver_jobs: int = 0
    """Driver jobs that wait or run."""
    _maker: str = ""
    """Name of the worker whose process makes passes."""

    def __post_init__(self) -> None:
        self.run.around = self
        self.nodes, self.terms = nodes_of(self.run.plant), PassTerms.of(self.run.plant)

    @property
    def clock(self) -> SimulatedClock:
        return self.run.clock

    @property
    def plant(self) -> Plant:
        return self.run.plant

    def submit(self) -> None:
        """The user submits the run: the first pass is made at once."""
        self._is_requested = True
        self._begin()
        self.clock.after(self.plant.check_seconds, self._guard)
        self.clock.after(_OVERDUE_SECONDS, self._look_whether_overdue)
        self.clock.after(QUEUE_SECONDS, self._look_at_queue)

    # --- what workers have done ---

    def try_jobs(self) -> None:
        self.scheduling.try_jobs()

    def request_pass(self) -> None:
        self._is_requested = True
        self._begin_if_possible()

    def is_starting(self, worker: SimulatedWorker) -> None:
        def ended() -> None:
            if worker.doing is Doing.STARTING:
                self.run.has_started(worker)

        seconds = self.run.kind(worker.job_kind).startup + self.run.load_ahead(worker)
        self.startups[worker.job.nodes[0]].add(worker.job, seconds, ended)

    def is_gone(self, worker: SimulatedWorker) -> None:
        """A worker's job no longer runs."""
        self.startups[worker.job.nodes[0]].remove(worker.job)

    def has_ended(self, worker: SimulatedWorker) -> None:
        del self.scheduling.starts[worker.job]
        self.arrays[worker.array] -= 1
        if not self.arrays[worker.array]:
            del self.arrays[worker.array]
            if self._behind is not None and worker.array in self._behind:
                self._behind = None
                self._submit_driver()

    # --- who makes a pass, and when ---

    def _begin_if_possible(self) -> None:
        if self._is_requested and not self._is_at_work and self._has_maker():
            if self.clock.now >= self._rested:
                self._begin()
            else:
                self.clock.at(self._rested, self._begin_if_possible)

    def _has_maker(self) -> bool:
        """Whether any process can make a pass: a driver job, or a worker that has started up."""
        started = (Doing.BUSY, Doing.WAITING, Doing.LEAVING)
        return bool(self._drivers) or any(w.doing in started for w in self.run.workers.values())

    def _begin(self) -> None:
        if self.given_up or self._is_at_work:
            return
        self._is_requested, self._is_at_work = False, True
        self.clock.after(self._maker_seconds() + self.plant.passes[0], self._look)

    def _maker_seconds(self) -> float:
        """Return how long the process takes to start that makes the next pass: it is there while the worker
        lives that began it, and a driver job makes one itself."""
        there = {worker.name: worker for worker in self.run.running() if worker.doing is not Doing.STARTING}
        if self._drivers or self._maker in there or not there:
            return 0.0
        self._maker = min(there, key=lambda name: (there[name].doing is Doing.LEAVING, -there[name].since))
        return self.plant.maker_startup

    def _look_at_nodes(self) -> None:
        """Note, now and then, whether other people's jobs hold places."""
        if self.clock.now - self._nodes_seen >= KEPT_SECONDS:
            self._nodes_seen = self.clock.now
            if self.scheduling.cluster.has_others:
                self._others_seen = self.clock.now
        self.run.known.is_contended = is_contended(self._others_seen, self.clock.now)

    def _look(self) -> None:
        self._look_at_nodes()
        self.looks.look(PASS_AGE if not self.run.unseen else 0.0)  # ends are looked for once more
        decision = decide(self.run, self.terms, self.submitted_for, self._around())
        self.clock.after(
            self.plant.passes[1], self._carry_out, decision, self.clock.now, tuple(self._drivers)
        )

    def _around(self) -> Around:
        """Return what a pass sees of the user's other runs."""
        others, foreign, lacking = [], [], self.looks.lacking
        for kin in self.kin:
            for worker in kin.workers.values():
                need = need_of(kin.kind(worker.job_kind))
                if worker.doing is not None:
                    others += [Held(self.nodes[number].name, need) for number in worker.job.nodes]
                elif worker.job in lacking:
                    foreign.append(Foreign(worker.element, need, lacking[worker.job]))
        return Around(self.nodes, others, foreign, lacking, self._slots())

    def _look_whether_overdue(self) -> None:
        """Waiting workers request a pass where none was made for long."""
        if self._is_over:
            return
        recent = self.run.progress.iteration_seconds()[-_RECENT:]
        usual = statistics.median(recent) if recent else None
        if is_overdue(self._last, self.clock.now, usual) and any(self.run.idle.values()):
            self.request_pass()
        self.clock.after(_OVERDUE_SECONDS, self._look_whether_overdue)

    def _look_at_queue(self) -> None:
        """Waiting workers request a pass where a job has begun to wait for room since they last looked."""
        if self._is_over:
            return
        if any(self.run.idle.values()):
            self.looks.look(WORKER_AGE)
            waiting = (worker for run in (self.run, *self.kin) for worker in run.workers.values())
            lacking = {w.job for w in waiting if w.doing is None and w.job in self.looks.lacking}
            if lacking - self._lacking:
                self.request_pass()
            self._lacking = lacking
        self.clock.after(QUEUE_SECONDS, self._look_at_queue)

    @property
    def _is_over(self) -> bool:
        return bool(self.given_up) or (self.run.progress.is_over and not self.run.workers)

    # --- what it does ---

    def _carry_out(self, decision: PassDecision, looked: float, drivers: tuple[SimulatedJob, ...]) -> None:
        run, staffing = self.run, decision.staffing
        self.passes += 1
        for task in decision.left_out:
            run.progress.commit(task, self.clock.now)
        if decision.given_up:
            self.given_up = f"gave up {decision.given_up[0].task}"
        self._cancel_and_hurry(decision)
        taken = [self._submit(request, decision) for request in staffing.requests]
        run.make_place(staffing.end_idle)
        run.known.measures = staffing.measures
        run.progress.write_rows()
        see_killed(run, decision.failed)
        self._watch(looked)
        run.release(looked)
        for job in [job for job in drivers if job in self._drivers]:
            del self._drivers[job]
            self._driver_jobs -= 1
            self.scheduling.end(job)
        self._follow_up()
        if not all(taken) and is_freeing_slots(
            staffing, (w.doing for w in run.workers.values()), self.clock.now
        ):
            self.clock.after(_SOON_SECONDS, self.request_pass)
        self._end()

    def _watch(self, looked: float) -> None:
        """Have a driver job await the end of arrays; not of those whose workers all leave, as this pass has
        seen or decided."""
        staying = {w.array for w in self.run.workers.values() if not self._leaves(w, looked)}
        if staying:
            self._behind = frozenset(staying)

    def _leaves(self, worker: SimulatedWorker, looked: float) -> bool:
        if worker.doing is Doing.WAITING:
            return self.run.is_to_leave(worker)
        return worker.doing is Doing.LEAVING and worker.since <= looked

    def _follow_up(self) -> None:
        """Request another pass, with a newer look, where a worker waits without a task and something was
        submitted or has started since this one's."""
        asked, workers = self.looks.kept.asked, self.run.workers.values()
        moments = (w.job.submitted if w.doing is None else w.job.begun for w in workers)
        if any(self.run.idle.values()) and any(moment > asked for moment in moments):
            self.clock.at(max(self.clock.now + _SOON_SECONDS, self.looks.renewed), self.request_pass)

    def _end(self) -> None:
        now, plant = self.clock.now, self.plant
        self._is_at_work, self._last = False, now
        self._rested = now + rest_after(sum(plant.passes), plant.pass_cpu)
        oldest = self.run.progress.rows - 1
        self.submitted_for = {task for task in self.submitted_for if task.iteration >= oldest}
        self._begin_if_possible()

    def _cancel_and_hurry(self, decision: PassDecision) -> None:
        workers, staffing = self.run.workers, decision.staffing
        for name in staffing.start_now:
            if (worker := workers.get(name)) and worker.doing is None:
                worker.begin, worker.wanted = None, self.clock.now
                self._consider_at(worker, self.clock.now)
        for name in staffing.cancel_pending:
            if (worker := workers.get(name)) and worker.doing is None:
                self.scheduling.cluster.cancel(worker.job)
                del workers[name]
                self.has_ended(worker)

    def _consider_at(self, worker: SimulatedWorker, time: float) -> None:
        worker.job.eligible = time + self.plant.queue_of(worker.name)
        self.clock.at(worker.job.eligible, self.scheduling.try_jobs)

    def _submit(self, request: WorkerRequest, decision: PassDecision) -> bool:
        """Submit an array, as far as the queue takes it. Returns whether that is all of it."""
        array, wanted = next(self.numbers), max(self.clock.now, request.begin or 0.0)
        tasks = request.tasks[: self._free_elements()]
        self.submitted_for |= set(tasks)
        for index, task in enumerate(tasks):
            element = f"{array}_{index}"
            eligible = wanted + self.plant.queue_of(f"{element}r0")
            kind = self.run.kind(task.job_kind)
            job = SimulatedJob(element, kind.request, kind.partitions, eligible, submitted=self.clock.now)
            worker = SimulatedWorker(element, task, job, request.begin, wanted, decision.known.get(task, 0))
            self.run.workers[element] = worker
            self.scheduling.submit(job, self._starter(worker))
        if tasks:
            self.arrays[str(array)] += len(tasks)
        return len(tasks) == len(request.tasks)

    def _slots(self) -> int | None:
        """Return how many elements the run may have in the queue at once."""
        submitted, others = self.plant.limits.submitted, sum(len(run.workers) for run in self.kin)
        if submitted is None:
            return None
        return max(0, most_elements(sys.maxsize, submitted, self._driver_jobs) - others)

    def _free_elements(self) -> int:
        """Return how many elements the user may submit."""
        mine = sum(len(run.workers) for run in (self.run, *self.kin))
        return free_elements(sys.maxsize, self.plant.limits.submitted, mine, self._driver_jobs)

    def _starter(self, worker: SimulatedWorker) -> "Callable[[SimulatedJob], None]":
        def start(job: SimulatedJob) -> None:
            self.run.start(worker)
            watch_limit(self.run, worker)

        return start

    # --- driver jobs ---

    def _guard(self) -> None:
        """A driver job is there every so often, whatever happens."""
        if not self.given_up and not self.run.progress.is_over:
            self._submit_driver()
            self.clock.after(self.plant.check_seconds, self._guard)

    def _submit_driver(self) -> None:
        if DRIVER not in self.plant.kinds:
            return
        kind, number = self.plant.kinds[DRIVER], next(self.numbers)
        self._driver_jobs += 1
        eligible = self.clock.now + self.plant.queue_of(str(number))
        self.scheduling.submit(
            SimulatedJob(str(number), kind.request, kind.partitions, eligible), self._driver_starts
        )

    def _driver_starts(self, job: SimulatedJob) -> None:
        self.clock.after(self.plant.kinds[DRIVER].startup, self._driver_is_ready, job)

    def _driver_is_ready(self, job: SimulatedJob) -> None:
        """It rests where much has been asked, as its pass needs an answer of now; not once the last policy is
        there."""
        run = self.run
        is_last = run.progress.frontier.updated == run.plant.plan.iterations
        self.clock.after(0.0 if is_last else self.looks.rest(), self._driver_looks, job, self.clock.now)

    def _driver_looks(self, job: SimulatedJob, since: float) -> None:
        self.looks.look(FROM_NOW, since)
        self._drivers[job] = None
        self.request_pass()
