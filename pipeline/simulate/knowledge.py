"""What the workers of a simulated run know, and what the program's rules make of it: which task one takes,
how long it stays, when its input comes. Nothing is done here.

What is asked again and again by many workers at once is asked once, and kept for as long as a look takes.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipeline.decide import choosing, estimates, passages, staying
from pipeline.decide.choosing import Chosen, Measuring, Step, View
from pipeline.decide.measuring import MEASURED, MEASURES, Helper, stays_for_last
from pipeline.decide.staying import Terms, Wait
from pipeline.run.records import Frontier
from pipeline.run.tasks import Task
from pipeline.simulate.clock import SimulatedClock
from pipeline.simulate.plant import Plant
from pipeline.simulate.progress import SimulatedProgress
from pipeline.simulate.worker import SimulatedWorker
from pipeline.workers.beats import Beat, Doing
from pipeline.workers.claims import Claim

LOOK_SECONDS = 1.0
"""Seconds between two looks at everything."""
_KEPT_BEATS = 40
_FEW = 8


@dataclass(eq=False)
class Knowledge:
    """What workers have said and done, and how far the run is."""

    plant: Plant
    clock: SimulatedClock
    progress: SimulatedProgress
    at_work: dict[str, dict[SimulatedWorker, None]] = field(default_factory=dict)
    """Workers whose jobs run, by job kind."""
    past: dict[str, deque[Beat]] = field(default_factory=dict)
    """Last beats of the workers of each job kind that ended last."""
    done: Counter[str] = field(default_factory=Counter)
    """Tasks of each job kind that are committed."""
    is_contended: bool = False
    """Whether other people's jobs hold places, by the last pass."""
    measures: bool = False
    """Whether workers of rollouts measure policies, by the last pass."""
    _found: dict[str, tuple[tuple[Frontier, int], Chosen]] = field(default_factory=dict)
    """What workers of a kind last found that have nothing to do, and how far the run was then."""
    _seen: tuple[float, list[Beat]] = field(default_factory=lambda: (-math.inf, []))
    _costs: dict[str, float | None] = field(default_factory=dict)
    _seconds: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    _far: dict[tuple[int, str, int], tuple[float, float | None]] = field(default_factory=dict)
    """What was last estimated for an iteration's tasks of a kind, and when."""

    @property
    def now(self) -> float:
        return self.clock.now

    # --- what workers say ---

    def note_end(self, worker: SimulatedWorker) -> None:
        """Keep what a worker said last."""
        self.past.setdefault(worker.job_kind, deque(maxlen=_KEPT_BEATS)).append(worker.beat)

    def beats(self, job_kind: str) -> list[Beat]:
        """Return what workers of a kind say, those that live and the last that ended."""
        live = [worker.beat for worker in self.at_work.get(job_kind, ())]
        return [*self.past.get(job_kind, ()), *live]

    def task_seconds(self, job_kind: str) -> float | None:
        """Return what a task of a kind takes; asked again once a few more are done."""
        number, seconds = self._seconds.get(job_kind, (-1, None))
        done = self.done[job_kind] // (1 if job_kind == MEASURED else _FEW)
        if number != done:
            besides = self.beats(MEASURES) if job_kind == MEASURED else ()
            seconds = estimates.task_seconds([*self.beats(job_kind), *besides], job_kind)
            self._seconds[job_kind] = done, seconds
        return seconds

    def all_beats(self) -> list[Beat]:
        """Return what all workers said at the last look, which is not long ago."""
        time, seen = self._seen
        if self.now - time > LOOK_SECONDS:
            seen = [beat for job_kind in self.plant.kinds for beat in self.beats(job_kind)]
            self._seen, self._costs = (self.now, seen), {}
        return seen

    # --- what a worker does next ---

    def choose(self, worker: SimulatedWorker, makes_place: bool = False) -> Chosen:
        """Choose what a worker does next; asked once for all who find nothing where nothing has changed.

        Args:
            makes_place: whether it is to leave once it has nothing to do.
        """
        job_kind, done = worker.job_kind, self.progress
        if self._may_measure(worker) and not makes_place:
            return self._choose_besides(worker)
        known, state = self._found.get(job_kind), (done.frontier, done.opened[job_kind])
        if known and known[0] == state and not done.open.get(job_kind) and not self._may_be_slow(job_kind):
            return known[1]
        takes_over = self.plant.kinds[job_kind].request.gpus > 0
        choice = choosing.choose(self._view(worker, takes_over), worker.chooser(takes_over))
        if choice.step is not Step.TAKE:
            self._found[job_kind] = state, choice
        return choice

    def _may_measure(self, worker: SimulatedWorker) -> bool:
        is_able = worker.job_kind == MEASURES and worker.measures and not worker.has_first
        if not (self.measures and is_able):
            return False
        done, is_manned = self.progress, any(map(_stays, self.at_work.get(MEASURED, ())))
        is_at_end = done.frontier.updated >= self.plant.plan.iterations - 1
        return not is_manned and (is_at_end or bool(done.open.get(MEASURED)))

    def _choose_besides(self, worker: SimulatedWorker) -> Chosen:
        """Choose what a worker does next that may measure policies."""
        takes_over = self.plant.kinds[worker.job_kind].request.gpus > 0
        view, chooser = self._view(worker, takes_over), worker.chooser(takes_over)
        if choosing.choose(view, chooser).step is not Step.TAKE:
            view = replace(view, measuring=self._measuring(worker, view, chooser))
        return choosing.choose(view, chooser)

    def _measuring(self, worker: SimulatedWorker, view: View, chooser: choosing.Chooser) -> Measuring:
        done, plan = self.progress, self.plant.plan
        beside = (one for one in self.at_work[MEASURES] if one is not worker and _stays(one))
        others = [Helper(one.name, one.beat.measured, _measures(one.claim)) for one in beside]
        own_state = Helper(worker.name, worker.beat.measured, _measures(worker.last))
        own = choosing.candidates(plan, done.frontier, chooser)
        awaited = next((t for t in own if t not in done.committed and choosing.missing(view, t)), None)
        due = [t for t in done.open.get(MEASURED, ()) if t in choosing.to_measure(plan, done.frontier)]
        return Measuring(
            seconds=self.task_seconds(MEASURED),
            own_seconds=self.task_seconds(MEASURES),
            input_at=self.expected(awaited) if awaited and due else None,
            others=len(others),
            is_last=stays_for_last(own_state, others),
            ready_at={t: max(done.at(s) or 0.0 for s in plan.inputs(t)) for t in due},
        )

    def _may_be_slow(self, job_kind: str) -> bool:
        """Whether a worker is at a task for so long that another might take it over: see
        :func:`choosing.is_slow`, which looks at more."""
        median = self.task_seconds(job_kind)
        if median is None or not self.plant.kinds[job_kind].request.gpus:
            return False
        at_work = (w for w in self.at_work.get(job_kind, ()) if w.doing is Doing.BUSY)
        return any(self.now - worker.since > choosing.SLOW_FACTOR * median for worker in at_work)

    def _view(self, worker: SimulatedWorker, takes_over: bool) -> View:
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

    def has_time(self, worker: SimulatedWorker, task: Task) -> bool:
        kind = self.plant.kinds[worker.job_kind]
        limit = staying.task_limit(None, self.task_seconds(task.job_kind))
        has_time = staying.has_time(self.now, worker.job.ends, limit, kind.signal)
        return has_time or (worker.has_first and task == worker.first)

    # --- how long it stays ---

    def wait_of(self, worker: SimulatedWorker) -> Wait:
        """Return the wait that a worker begins now."""
        kind, beats = self.plant.kinds[worker.job_kind], self.all_beats()
        terms = Terms(kind.linger, self.plant.linger_max, kind.start_early, self.is_contended)
        others = (other for other in self.plant.plan.job_kinds if other != worker.job_kind)
        costs = [self._coming_back(beats, other) for other in others]
        leaving = self.plant.state_seconds if worker.unsaved else 0.0
        own = worker.beat
        return staying.begin_wait(terms, self.now, worker.has_first, beats, own, costs, leaving)

    def _coming_back(self, beats: Sequence[Beat], job_kind: str) -> float | None:
        """Return what coming back costs workers of a kind; asked once for all who begin to wait."""
        if job_kind not in self._costs:
            self._costs[job_kind] = estimates.coming_back(beats, job_kind)
        return self._costs[job_kind]

    def expected(self, task: Task) -> float | None:
        """Return when the input of a task will come at the earliest; asked once for all who wait for it."""
        key = task.iteration, task.job_kind, self.progress.rows
        time, when = self._far.get(key, (-1.0, None))
        if time < 0 or self.now - time > 1.0:
            when = passages.expected_ready(
                self.plant.plan, task, self.progress.at, self.progress.passages, self.now, self._staying()
            )
            self._far = {} if len(self._far) > len(self.plant.kinds) else self._far
            self._far[key] = self.now, when
        return when

    def _staying(self) -> frozenset[str]:
        kinds = self.plant.plan.job_kinds
        return frozenset(kind for kind in kinds if self.plant.kinds[kind].linger != 0)


def _stays(worker: SimulatedWorker) -> bool:
    return worker.doing is not Doing.LEAVING


def _measures(claim: Claim | None) -> bool:
    return claim is not None and claim.task.job_kind == MEASURED
