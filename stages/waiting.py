"""A worker's waits for its next input: how long each may take, when to look, and why to leave."""

import contextlib
import time
from dataclasses import dataclass, field, replace

from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, resources_of
from pipeline.run import journal
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.directory import Run
from pipeline.run.durable import is_there, opened_folder, private_file
from pipeline.run.records import recorded
from pipeline.run.tasks import Task, task_key
from pipeline.workers import estimates, staying
from pipeline.workers.beats import Doing, Reason
from pipeline.workers.choosing import Choice
from pipeline.workers.living import Crew
from pipeline.workers.outside import Outside
from pipeline.workers.staying import ASK_SECONDS, Wait
from stages.pulse import Pulse
from stages.surroundings import Asking, Bell, Package, is_network

INPUT_SECONDS = 30.0
"""Seconds that a task waits for inputs that are not there: caches of network filesystems may be as old."""
_LOOK_SECONDS, _LOOK_SECONDS_ON_NETWORK = 1.0, 5.0
"""Seconds after which one who waits looks at everything again, and not only at what it waits for."""
_ESTIMATE_AFTER = 0.2
"""Seconds of waiting after which it is worth to ask how long it will take."""
_SPANS_BYTES = 1 << 18


@dataclass
class Waiting:
    """The waits of one worker, and what it asks meanwhile."""

    run: Run
    job_kind: str
    settings: ResourcesConfig
    """Resources of the stage, with what is set for staying."""
    linger_max: float
    outside: Outside
    pulse: Pulse
    crew: Crew
    bell: Bell = field(default_factory=Bell)
    wait: Wait | None = None
    """The wait that goes on; None: there is none."""
    queue: Asking = field(init=False)
    package: Package = field(init=False)
    is_network: bool = field(init=False)
    _estimated: tuple[Task, float] | None = None
    """Task whose input was last estimated, and when (monotonic)."""
    _partitions: frozenset[str] | None = None

    def __post_init__(self) -> None:
        self.queue, self.package = Asking(self.outside.ask_queue), Package(self.run)
        self.package.has_changed()  # from here on
        self.is_network = is_network(self.run.paths.root)

    def go_on(self, choice: Choice, is_first: bool) -> Reason | None:
        """Begin or continue a wait until an input of a task has come, or it is time to look at everything
        again. Returns a reason where it is time to leave.

        Args:
            is_first: whether the worker has done nothing yet.
        """
        assert choice.task is not None
        wait = self._begin(choice.task, is_first)
        self.outside.waits()
        look_again = time.monotonic() + (_LOOK_SECONDS_ON_NETWORK if self.is_network else _LOOK_SECONDS)
        reason = None
        while reason is None and time.monotonic() < look_again:
            waited = time.time() - wait.began
            if self.bell.wait(staying.pause(waited, self.is_network)):
                self.queue.rung()
                break
            if self._has_come(choice):
                break
            reason = self._why_leave(choice.task, waited)
        return reason

    def end(self) -> None:
        """End the wait: the worker has a task."""
        self.wait = None

    def has_time(self, now: float, limit: float | None) -> bool:
        """Whether a task that may take ``limit`` seconds ends before the worker's own time limit."""
        self.queue.ask_again()
        return staying.has_time(now, self.queue.ends, limit, self.settings.signal)

    def _begin(self, task: Task, is_first: bool) -> Wait:
        key = task_key(task)
        if self.wait is None:
            bound = self._bound(is_first)
            self.wait = Wait(time.time(), bound, allowance=self._allowance(bound))
        if (self.pulse.beat.doing, self.pulse.beat.task) != (Doing.WAITING, key):
            self.pulse.say(doing=Doing.WAITING, task=key, attempt="", until=self.wait.until)
        return self.wait

    def _bound(self, is_first: bool) -> float:
        """Return the seconds that it waits at most; before its first task it was submitted to wait."""
        own = self.pulse.beat
        # its own of now: what its first task has loaded is in its file with the next beat
        beats = list({**self.crew.beats, own.worker: own}.values())
        startup, queue = estimates.startup(beats, self.job_kind), estimates.queue_wait(beats, self.job_kind)
        bound = staying.bound(
            self.settings.linger,
            self.linger_max,
            max(startup.median if startup else 0.0, own.startup_seconds),
            queue.median if queue else own.queued_seconds,
        )
        if not is_first:
            return bound
        return max(bound, self.linger_max if self.settings.start_early else INPUT_SECONDS)

    def _allowance(self, bound: float) -> float:
        beats = list(self.crew.beats.values())
        others = [kind for kind in self.run.plan.job_kinds if kind != self.job_kind]
        costs = [estimates.coming_back(beats, kind) for kind in others]
        return staying.allowance(self.settings.linger, self.linger_max, bound, costs)

    def _has_come(self, choice: Choice) -> bool:
        """Whether a task that it waits for is ready. On a network filesystem a file is made and removed in
        each folder first: then the client asks the server what else is in there."""
        awaited = choice.all_awaited
        for folder in {self.run.paths.task(task).folder for task in awaited} if self.is_network else ():
            with contextlib.suppress(OSError):
                if is_there(folder):
                    with opened_folder(folder) as opened, private_file(opened, "look"):
                        pass
        return choice.is_due(set(recorded(self.run.paths, awaited)))

    def _why_leave(self, task: Task, waited: float) -> Reason | None:
        assert self.wait is not None
        if waited > _ESTIMATE_AFTER:
            self._estimate(task)
            pending = self.queue.pending(time.monotonic() - waited)
            if pending and self._partitions is None:
                self._partitions = self.outside.partitions()
            if staying.is_in_the_way(pending, self._partitions, self.outside.is_peer):
                return Reason.NEEDED
            if self.package.has_changed():
                return Reason.CHANGED
        return staying.reason_to_leave(self.wait, time.time())

    def _estimate(self, task: Task) -> None:
        """Estimate, now and then, when the input of a task will come at the earliest."""
        assert self.wait is not None
        now = time.monotonic()
        if self._estimated and self._estimated[0] == task and now - self._estimated[1] < ASK_SECONDS:
            return
        self._estimated = task, now
        with contextlib.suppress(OSError):
            seen = estimates.passages(journal.read_tail(self.run.paths.spans, _SPANS_BYTES))
            when = estimates.expected_ready(
                self.run.plan, task, self._committed_at, seen, time.time(), self._staying()
            )
            self.wait = replace(self.wait, expected=when)

    def _staying(self) -> frozenset[str]:
        """Return the job kinds of which workers may stay."""
        scheduler, kinds = self.run.config.scheduler, map(str, self.run.plan.job_kinds)
        if not isinstance(scheduler, SlurmConfig):
            return frozenset(kinds)
        return frozenset(kind for kind in kinds if resources_of(scheduler, kind).linger != 0)

    def _committed_at(self, task: Task) -> float | None:
        with contextlib.suppress(CorruptData, OSError):
            record = read_record(self.run.paths, task)
            return None if record is None else record.ended
        return None
