"""Source of a worker, wherever it runs.

The task on the command line (:mod:`stages.workers.start`) is the first. After it the worker finds its next
ones in the run directory, from commits and claims alone, until it pays more to leave
(:mod:`pipeline.workers`).
"""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.scheduler import ResourcesConfig
from pipeline.decide import choosing, estimates, staying
from pipeline.decide.budgets import next_halvings
from pipeline.decide.choosing import Step, View
from pipeline.decide.staying import FIRST_POLL
from pipeline.run.directory import Run
from pipeline.run.failures import DISK_EXIT, is_of_disk
from pipeline.run.records import Frontier, FrontierFinder, recorded
from pipeline.run.tasks import Task, task_key
from pipeline.workers.beats import Beat, Doing, LiveWorkers, Reason
from pipeline.workers.claims import (
    Attempt,
    Claim,
    Known,
    Saves,
    attempts_of,
    budgets_tried,
    claims_of,
    commit_and_claims,
    is_unlisted,
    next_number,
    take,
    with_saves,
)
from pipeline.workers.handover import must_leave
from pipeline.workers.outside import WorkerHost
from stages.attempts.arguments import Arguments
from stages.logs import log
from stages.process.imported import OwnCode
from stages.process.parent import hear_of_policy, hear_of_release
from stages.workers.kept_trainer import has_kept_trainer, is_writing_state
from stages.workers.limit import TaskLimit
from stages.workers.measuring import Besides, release_scorer
from stages.workers.pulse import Pulse
from stages.workers.surroundings import Output, OwnSettings, Wakeup, control_of, is_called_off
from stages.workers.waiting import Waiting

_BEATS_SECONDS, _BEATS_SECONDS_ON_NETWORK = 1.0, 5.0
"""Seconds after which beats are read again where no claim is to be judged by them."""
_SLOT_SECONDS = 1.0
"""Seconds for which one waits for a slot until it looks again whether its task is still to be done."""
_MOST_FAILURES = 2
"""Failures in a row after which a worker leaves: its node may be at fault, and others are to try."""


@dataclass
class Pulling:
    """Source of a worker that finds its tasks in the run directory."""

    run: Run
    first: Arguments
    outside: WorkerHost
    settings: ResourcesConfig
    """Resources of the stage, with what is set for staying."""
    pulse: Pulse
    linger_max: float = 3600.0
    max_attempts: int = 3
    worker: choosing.Chooser = field(init=False)
    waiting: Waiting = field(init=False)
    besides: Besides = field(init=False)
    limit: TaskLimit = field(init=False)
    output: Output = field(default_factory=Output)
    own_code: OwnCode = field(default_factory=OwnCode)
    own_settings: OwnSettings = field(init=False)
    reason: Reason | None = None
    """Why it leaves; None: it stays."""
    failures: int = 0
    """Tasks that have failed in a row."""
    has_loaded: bool = False
    """Whether it has loaded what its tasks need."""
    known: Known = field(default_factory=dict)
    _saves: Saves = field(default_factory=dict)
    crew: LiveWorkers = field(init=False)
    frontier: FrontierFinder = field(init=False)
    _live: dict[str, Beat] = field(default_factory=dict)
    """Newest beats of the workers that live, as of the last look at them."""
    _looked: float = float("-inf")
    """Time of that look (monotonic)."""
    _listed: Mapping[Task, Sequence[Claim]] = field(default_factory=dict)
    """Claims as of the last look at everything, on tasks that were ready then."""
    _claim: Claim | None = None
    _invocation: int = 0
    """The last that it took."""
    _lost: OSError | None = None
    """Error of the disk for which it leaves, if it came outside of a task."""
    _is_unsaid: bool = False
    """Whether only its exit code tells why its last attempt failed."""
    _is_known: bool = False
    """Whether the pass that its last attempt asked for sees that it leaves."""

    def __post_init__(self) -> None:
        task, self.has_loaded = self.first.task, not self.outside.keeps
        element = self.outside.name.rpartition("r")[0]
        self.worker = choosing.Chooser(
            task.job_kind, task.shard, task, self.outside.known, element, takes_over=self.settings.has_gpus
        )
        self.crew, self.own_settings = LiveWorkers(self.run.paths), OwnSettings(self.run, task.job_kind)
        self.frontier = FrontierFinder(self.run.plan, self.run.paths)
        self.limit = TaskLimit(self.run.paths, self.settings, self.outside, self.pulse, self.crew)
        self.waiting = Waiting(
            self.run, task.job_kind, self.settings, self.linger_max, self.outside, self.pulse, self.crew
        )
        self.besides = Besides(self.run, task.job_kind, self.outside.name, self.waiting, self.crew)

    @property
    def wakeup(self) -> Wakeup:
        return self.waiting.wakeup

    # --- the source ---

    def next(self) -> Arguments | None:
        """Return the next attempt, once its task is claimed. None: leave."""
        given = None
        try:
            given = self._find()
        except OSError as error:
            self._lose_disk(error)
        if (
            given is None
            and (claim := self._claim)
            and (has_kept_trainer() or is_writing_state(claim.attempt))
        ):
            # Until that is saved: another worker would begin the next update, and learn it again.
            task, attempt = task_key(claim.task), claim.attempt
            self.pulse.say(doing=Doing.BUSY, task=task, attempt=attempt, until=None)
        return given

    def _find(self) -> Arguments | None:
        self.wakeup.listen()
        view = None
        while self.reason is None:
            view = (self._look_at_come(view) if view else None) or self.look()
            choice = choosing.choose(view, self.worker)
            if self.reason or self.wakeup.warned:
                self.leave(Reason.WARNED)
            elif choice.step is Step.DONE:
                self.leave(Reason.DONE)
            elif not self.has_loaded and choice.task:
                return self._load(choice.task)
            elif choice.step is Step.WAIT:
                self.reason = self.waiting.go_on(choice, is_first=self.worker.first is not None)
            elif self.own_code.has_changed():
                self.leave(Reason.CHANGED)
            elif choice.task and self._is_in_the_way(view, choice.task):
                self.leave(Reason.NEEDED)
            elif (
                choice.task and self._has_slot(view, choice.task) and (given := self._take(view, choice.task))
            ):
                return given
            elif self.outside.slots:
                self.outside.slots.give_back()
        return None

    def _is_in_the_way(self, view: View, task: Task) -> bool:
        """Whether something of an earlier iteration waits for the place of a worker that would go ahead."""
        is_ahead = choosing.is_ahead(view.plan, view.frontier, task)
        return is_ahead and must_leave(self.run.paths, self.outside.name, time.time())

    def _has_slot(self, view: View, task: Task) -> bool:
        """Wait for a slot until it is time to look again. Returns whether there is one."""
        slots, until = self.outside.slots, time.monotonic() + _SLOT_SECONDS
        while slots and not slots.take(choosing.urgency(self.run.plan, view.frontier, task)):
            if self.wakeup.wait(FIRST_POLL) or time.monotonic() > until:
                return False
        return True

    def _load(self, task: Task) -> Arguments:
        """Have what a task needs loaded, once, before the worker takes any: what it takes is computed at
        once then, and others see that it starts up, and does not compute."""
        self.has_loaded = True
        own = len(self.run.changes)
        return replace(self.first, task=task, failure_file=None, stays=True, loads=True, settings=own)

    def ended(self, arguments: Arguments, exit_code: int) -> None:
        """Note the end of an attempt. Of a failed one a reader of the claim sees by the beat that no worker
        is at it; after a commit the next word, that it waits or what it does, is soon enough. Where a full
        disk took no word of why it failed nothing is said: it is judged when the job has ended, by its exit
        code."""
        if arguments.loads:
            return
        self.pulse.set_alarm(None)
        self.output.turn_back()
        self.own_code.note()
        if self.outside.slots:
            self.outside.slots.give_back()
        self._is_unsaid = exit_code == DISK_EXIT and not arguments.has_said_why()
        if self._is_unsaid:
            return
        own = arguments.own_record(self.run.paths) if exit_code == 0 else None
        self.pulse.end_attempt(own, self._is_own(arguments.task))
        self.failures = self.failures + 1 if exit_code else 0
        if self.failures >= _MOST_FAILURES:
            self.leave(Reason.FAILED)
        elif self.settings.does_one_task:
            self._end_after_one()
        if exit_code:
            self.pulse.say()
            self.outside.failed(True)
        elif not self._is_over():  # else those who wait may be jobs of another cluster, which counts from 0
            self.outside.committed(arguments.task)
        if not self._is_own(arguments.task):
            release_scorer()

    def _is_own(self, task: Task) -> bool:
        """Whether a task is of the worker's own kind, and not one that it does besides."""
        return task.job_kind == self.worker.job_kind

    def _end_after_one(self) -> None:
        """Leave, even if another task is ready. Said before a pass is asked for, which then counts on it no
        more; of one that is still to save what it has kept :meth:`next` says what it does."""
        self.leave(Reason.ONE)
        self._is_known = not has_kept_trainer()
        if self._is_known:
            self.pulse.say(doing=Doing.LEAVING, reason=self.reason)

    def leave(self, reason: Reason) -> None:
        """Have :meth:`next` give nothing more. The first reason counts."""
        self.reason = self.reason or reason

    def left(self) -> None:
        """Say that the worker has left, and why; and wait for a pass that sees it, unless others have yet to
        do what is left of the run, after whom there are passes anyway.

        Raises:
            OSError: the disk for which it leaves took nothing, outside of a task.
        """
        if self._lost is not None:
            raise self._lost
        if self._is_unsaid:
            self.pulse.fall_silent()
            return
        self.pulse.say(doing=Doing.LEAVING, reason=self.reason, task="", attempt="", until=None)
        with contextlib.suppress(OSError):  # that its job has ended is seen all the same
            control = control_of(self.run)
            if control is None or not is_called_off(control):
                is_last = self.frontier.find().is_committed(self.run.plan)
                # a pass decided that, or no worker follows
                is_known = self._is_known or self.reason in (Reason.DONE, Reason.NEEDED)
                self.outside.leaves(is_last or not is_known)

    def _lose_disk(self, error: OSError) -> None:
        """Leave because of an error of the disk, with what is kept saved if that goes. Raises any other."""
        if not is_of_disk(error):
            raise error
        log.error(f"the worker leaves: {error}")
        self._lost = error
        self.leave(Reason.FAILED)

    # --- looking ---

    def look(self) -> View:
        """Look at the run directory: how far the run is, what is committed, who works on what."""
        run, paths, began = self.run, self.run.paths, time.thread_time()
        frontier = self.frontier.find()
        own, besides = choosing.candidates(run.plan, frontier, self.worker), self._besides(frontier)
        tasks = (*own, *besides)
        there = recorded(paths, choosing.relevant(run.plan, tasks))
        committed = frontier.passed(run.plan, tasks).union(there)
        self._invocation = self._look_at_control()
        seen = View(run.plan, frontier, committed, {}, self.max_attempts, time.time())
        due = [task for task in tasks if task not in committed and not choosing.missing(seen, task)]
        self._listed = claims = claims_of(paths, choosing.claimed(run.plan, due), self.known)
        if claims or time.monotonic() - self._looked > self._beats_seconds:
            self._look_who_lives()
        attempts = {task: self._attempts(claims[task]) for task in claims}
        seconds = estimates.task_seconds(self.crew.beats.values(), self.worker.job_kind)
        view = replace(seen, attempts=attempts, median_seconds=seconds)
        slow = [task for task in attempts if self.worker.takes_over and choosing.is_slow(view, task)]
        saved = {task: with_saves(paths, attempts[task], self._saves, view.now) for task in slow}
        view = replace(view, attempts={**attempts, **saved})
        if besides and choosing.choose(view, self.worker).step is not Step.TAKE:
            self._look_who_lives()
            view = replace(view, measuring=self.besides.known(view, own, besides, self._live))
        self.waiting.look_seconds = time.thread_time() - began
        return view

    def _look_who_lives(self) -> None:
        self._looked = time.monotonic()
        self._live = self.crew.live(self._looked)
        if own := self._live.get(self.outside.name):  # the state that it writes itself keeps it from nothing
            self._live[self.outside.name] = replace(own, saving="", saving_attempt="")

    def _besides(self, frontier: Frontier) -> tuple[Task, ...]:
        """Return the evaluations that it may do besides: one that has started up does a task of its own
        first."""
        is_ready = self.has_loaded and self.worker.first is None
        return self.besides.tasks(frontier) if is_ready else ()

    def _attempts(self, claims: Iterable[Claim]) -> tuple[Attempt, ...]:
        """Return what has become of claims, with how far their workers' clocks are ahead of this one."""
        found, ahead = attempts_of(self.run.paths, claims, self._live, self._invocation), self.crew.ahead
        return tuple(replace(one, ahead=ahead.get(one.claim.worker, 0.0)) for one in found)

    @property
    def _beats_seconds(self) -> float:
        return _BEATS_SECONDS_ON_NETWORK if self.waiting.is_network else _BEATS_SECONDS

    def _look_at_come(self, view: View) -> View | None:
        """Return the last view with what has come since, if there is a task that the worker takes for it.
        None: look at everything, as after any other wait, and where another has tried that task."""
        come, self.waiting.come = self.waiting.come, frozenset()
        later = replace(view, committed=frozenset(view.committed) | come, now=time.time())
        choice = choosing.choose(later, self.worker)
        if not come or not choice.task or choice.step is not Step.TAKE:
            return None
        before = self.run.plan.must_have_ended(choice.task)
        return later if before is None or before in view.committed else None

    def _is_over(self) -> bool:
        """Whether nothing follows, as far as the disk says."""
        with contextlib.suppress(OSError):
            control = control_of(self.run)
            return control is not None and is_called_off(control)
        return False

    def _look_at_control(self) -> int:
        """Leave if people, or a pass that gave up, ended the run. Returns the invocation's number; the last
        known one where that cannot be read."""
        control = control_of(self.run)
        if control is None:
            return self._invocation
        if control.has_failed or is_called_off(control):
            self.leave(Reason.TURNED)
        if self.own_settings.have_changed(control.invocation):
            self.leave(Reason.CHANGED)
        return control.invocation

    # --- taking ---

    def _take(self, view: View, task: Task) -> Arguments | None:
        """Claim a task. None if another was first, or has tried or done it since everything was looked at, or
        there is no time left for it."""
        is_done, claims = commit_and_claims(self.run.paths, task, self.known)
        if is_done or claims != self._listed.get(task, ()):
            return None
        is_own = self._is_own(task)
        limit = self.limit.seconds(view.usual_seconds(is_own), self._is_fresh)
        # asked at the first one too: the answer is for the next
        has_time = self.waiting.has_time(view.now, self.limit.or_own(limit))
        if task != self.worker.first and not has_time:
            self._lacks_time(is_own)
            return None
        number = next_number(self.run.paths, task, claims)
        if is_unlisted(self.run.paths, task, claims, number):
            return None
        attempt, name = self.outside.new_attempt(number), self.outside.name
        tried = budgets_tried(self.run.paths, task, claims) if number > 1 else ()
        claim = Claim(task, number, attempt, name, view.now, self._invocation, next_halvings(tried))
        first, last = self.pulse.beat.iterations
        self.pulse.say(
            doing=Doing.BUSY,
            task=task_key(task),
            attempt=claim.attempt,
            until=None,
            iterations=(first or task.iteration, max(last, task.iteration)),
        )
        if not take(self.run.paths, claim):
            self.pulse.say(doing=Doing.WAITING, task="", attempt="")
            return None
        self.worker = replace(self.worker, first=None)
        self.waiting.end()
        self._claim, self.besides.has_measured = claim, not is_own
        self.limit.begin(limit, claim)
        return self._begin(claim)

    def _lacks_time(self, for_own: bool) -> None:
        """Leave where there is no time for a task of its own; else do no evaluation from now on."""
        if for_own:
            self.leave(Reason.TIME)
        self.besides.is_able = False

    @property
    def _is_fresh(self) -> bool:
        """Whether the next task begins with loading."""
        return self.pulse.beat.tasks == 0 or self.failures > 0

    def _begin(self, claim: Claim) -> Arguments:
        hear_of_policy(lambda: self.outside.committed(claim.task))
        if self.outside.slots:
            hear_of_release(self.outside.slots.give_back)
        files = self.run.paths.task(claim.task)
        self.output.turn_to(files.log(claim.number), self.run.paths.root)
        failure = files.failure(claim.number)
        about = claim.task, self.run.paths.root, claim.attempt, failure, staying.INPUT_SECONDS
        own = len(self.run.changes)
        return Arguments(*about, stays=self.outside.keeps, halvings=claim.halvings, settings=own)
