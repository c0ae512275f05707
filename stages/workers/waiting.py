"""A worker's waits for its next input: how long each may take, when to look, and why to leave."""

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, resources_of
from pipeline.decide import estimates, passages, staying
from pipeline.decide.choosing import Chosen
from pipeline.decide.staying import ALWAYS, ASK_SECONDS, Terms, Wait
from pipeline.run import journal
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.directory import Run
from pipeline.run.durable import is_there, make_folder, names_in, opened_folder, private_file
from pipeline.run.tasks import Task, task_key
from pipeline.workers.beats import Doing, LiveWorkers, Reason
from pipeline.workers.filesystems import is_network, keeps_listings
from pipeline.workers.handover import must_leave, read_instructions
from pipeline.workers.outside import WorkerHost
from stages.workers.kept_trainer import seconds_to_save_trainer
from stages.workers.noticing import FolderEvents
from stages.workers.pulse import Pulse
from stages.workers.surroundings import Asking, Package, Wakeup

_LOOK_SECONDS, _LOOK_SECONDS_ON_NETWORK = 1.0, 5.0
"""Seconds after which one who waits looks at everything again, and not only at what it waits for."""
_TOLD_SECONDS = 0.5
"""Seconds after which one looks which is notified of what is new."""
_REST = 9.0
"""Times what a look took of a processor, for which there is no other: looks take a tenth of a core, however
many shards are awaited and come one by one."""
_ESTIMATE_AFTER = 0.2
"""Seconds of waiting after which it is worth to ask how long it will take."""
_WAITS, _HABIT = 4, 0.8
"""Number of a worker's last waits; the next takes at least this share of the shortest of them."""
_SPANS_BYTES = 1 << 18

_Awaited = Mapping[Path, Mapping[str, Task]]
"""Tasks whose commits are awaited, by folder and by name of the record."""


@dataclass
class Waiting:
    """The waits of one worker, and what it asks meanwhile."""

    run: Run
    job_kind: str
    settings: ResourcesConfig
    """Resources of the stage, with what is set for staying."""
    linger_max: float
    outside: WorkerHost
    pulse: Pulse
    crew: LiveWorkers
    wakeup: Wakeup = field(default_factory=Wakeup)
    notices: FolderEvents = field(default_factory=FolderEvents)
    wait: Wait | None = None
    """The wait that goes on, by the monotonic clock; None: there is none."""
    taken: deque[float] = field(default_factory=lambda: deque(maxlen=_WAITS))
    """Seconds that the last waits took which ended with a task."""
    come: frozenset[Task] = frozenset()
    """Commits with which a task has become ready since the last look at everything."""
    look_seconds: float = 0.0
    """Seconds of a processor that the last look at everything took."""
    queue: Asking = field(init=False)
    package: Package = field(init=False)
    is_network: bool = field(init=False)
    keeps_listings: bool = field(init=False)
    _estimated: tuple[Task, float, float | None] | None = None
    """Task whose input was last estimated, when, and what came of it (monotonic)."""
    _rest: float = 0.0
    """Seconds after the last look for what is awaited in which there is no other."""

    def __post_init__(self) -> None:
        self.queue, self.package = Asking(lambda: self.outside.ask_queue()), Package(self.run)
        if self.settings.linger != 0:  # else many end before they wait, and it takes a while
            self.package.has_changed()  # from here on
        self.is_network = is_network(self.run.paths.root)
        self.keeps_listings = keeps_listings(self.run.paths.root)

    def go_on(self, choice: Chosen, is_first: bool) -> Reason | None:
        """Begin or continue a wait until an input of a task has come, or it is time to look at everything
        again. Returns a reason where it is time to leave.

        Args:
            is_first: whether the worker has done nothing yet.
        """
        assert choice.task is not None
        wait, self.come = self._begin(choice.task, is_first), frozenset()
        if must_leave(self.run.paths, self.outside.name, time.time()):
            return Reason.NEEDED
        self.outside.waits()
        awaited = self._by_folder(choice)
        if self.is_network:
            self._make_folders(awaited)
        look_again = time.monotonic() + self._seconds_to_look
        reason, is_told = None, self._watch(awaited)
        if is_told and self._has_come(choice, awaited):  # since the last look, and before it was watched
            return None
        while reason is None and time.monotonic() < look_again:
            waited = time.monotonic() - wait.began
            if self._sleep(waited, is_told):
                break
            is_told = self._watch(awaited)
            if self._has_come(choice, awaited):
                break
            reason = self._why_leave(choice.task, time.monotonic() - wait.began)
        return reason

    @property
    def _seconds_to_look(self) -> float:
        """Seconds until it is time to look at everything again."""
        return max(_LOOK_SECONDS_ON_NETWORK if self.is_network else _LOOK_SECONDS, _REST * self.look_seconds)

    def _by_folder(self, choice: Chosen) -> _Awaited:
        """Sort what is awaited, once: each look is a listing of each folder then."""
        kinds: dict[tuple[int, str], dict[str, Task]] = {}
        for task in choice.all_awaited:
            kinds.setdefault((task.iteration, task.job_kind), {})[task.record_name] = task
        return {self._folder(next(iter(by_name.values()))): by_name for by_name in kinds.values()}

    def _make_folders(self, awaited: _Awaited) -> None:
        """Make the folders in which something is awaited: to find that one is not there yet takes a network
        filesystem three listings, of which one is as long as the run."""
        for folder in awaited:
            with contextlib.suppress(OSError):  # of a full disk, say: then looking takes longer
                if not is_there(folder):
                    make_folder(folder, self.run.paths.root)

    def _watch(self, awaited: _Awaited) -> bool:
        """Have the system tell of what is new where something is awaited. Returns whether it does."""
        return not self.is_network and bool(awaited) and self.notices.watch(awaited)

    def _sleep(self, waited: float, is_told: bool) -> bool:
        """Wait until it is time to look for what is awaited. Returns whether it was notified."""
        assert self.wait is not None
        if not is_told:
            pause = staying.pause(waited, self.is_network, self._ahead(waited))
            return self.wakeup.wait(max(pause, self._rest))
        seconds = _TOLD_SECONDS if waited > _ESTIMATE_AFTER else _ESTIMATE_AFTER
        left = max(0.0, min(seconds, self.wait.until - time.monotonic()))
        return self.wakeup.wait(min(left, self._rest)) or self.wakeup.wait(left, self.notices)

    def end(self) -> None:
        """End the wait: the worker has a task."""
        if self.wait is not None:
            self.taken.append(time.monotonic() - self.wait.began)
        self.wait = None

    def has_time(self, now: float, limit: float | None) -> bool:
        """Whether a task that may take ``limit`` seconds ends before the worker's own time limit."""
        self.queue.ask_again()
        return staying.has_time(now, self.queue.ends, limit, self.settings.signal)

    def _begin(self, task: Task, is_first: bool) -> Wait:
        key = task_key(task)
        if self.wait is None:
            beats = list(self.crew.beats.values())
            others = [kind for kind in self.run.plan.job_kinds if kind != self.job_kind]
            costs = [estimates.coming_back(beats, kind) for kind in others]
            contended = read_instructions(self.run.paths).is_contended
            terms = Terms(self.settings.linger, self.linger_max, self.settings.start_early, contended)
            began, own = time.monotonic(), self.pulse.beat
            leaving = seconds_to_save_trainer()
            self.wait = staying.begin_wait(terms, began, is_first, beats, own, costs, leaving)
        if (self.pulse.beat.doing, self.pulse.beat.task) != (Doing.WAITING, key):
            left = self.wait.until - time.monotonic()
            until = time.time() + left if left < ALWAYS else None
            self.pulse.say(doing=Doing.WAITING, task=key, attempt="", until=until)
            if is_first:  # what is wanted sooner may wait for this place
                self.outside.wanted()
        return self.wait

    def _has_come(self, choice: Chosen, awaited: _Awaited) -> bool:
        """Whether a task that it waits for is ready. A folder that the run has moved away when it went back
        may be found under its old name for a while."""
        began = time.thread_time()
        names = {folder: self._names_in(folder) & by_name.keys() for folder, by_name in awaited.items()}
        there = frozenset(awaited[folder][name] for folder, found in names.items() for name in found)
        is_due = choice.is_due(there) and all(is_there(folder) for folder, found in names.items() if found)
        self.come = there if is_due else frozenset()
        self._rest = _REST * (time.thread_time() - began)
        return is_due

    def _names_in(self, folder: Path) -> set[str]:
        """List a folder. Where the client may answer from its cache a file is made and removed in it first:
        then it asks the server what else is in there."""
        if self.keeps_listings:
            with contextlib.suppress(OSError):
                if is_there(folder):
                    with opened_folder(folder) as opened, private_file(opened, "look"):
                        pass
        return names_in(folder)

    def _folder(self, task: Task) -> Path:
        return self.run.paths.task(task).folder

    def _why_leave(self, task: Task, waited: float) -> Reason | None:
        assert self.wait is not None
        if waited > _ESTIMATE_AFTER:
            self.wait = replace(self.wait, expected=self._expected(task))
            self.queue.ask_again()
            if self.queue.newly_lacking_room():
                self.outside.wanted()
            if self.package.has_changed():
                return Reason.CHANGED
        return staying.reason_to_leave(self.wait, time.monotonic())

    def input_at(self, task: Task) -> float | None:
        """Return when the input of a task will come at the earliest (unix time); None if unknown."""
        expected = self._expected(task)
        return None if expected is None else time.time() + expected - time.monotonic()

    def _expected(self, task: Task) -> float | None:
        """Return the same by the monotonic clock; it is looked up now and then."""
        now = time.monotonic()
        known = self._estimated
        if known is None or known[0] != task or now - known[1] >= ASK_SECONDS:
            known = self._estimated = task, now, self._look_up(task, now)
        return known[2]

    def _look_up(self, task: Task, now: float) -> float | None:
        with contextlib.suppress(OSError):
            seen = passages.passages(journal.read_tail(self.run.paths.spans, _SPANS_BYTES))
            moment = time.time()
            when = passages.expected_ready(
                self.run.plan, task, self._committed_at, seen, moment, self._staying()
            )
            return None if when is None else now + when - moment
        return None

    def ready_at(self, task: Task) -> float | None:
        """Return when the last input of a task was committed (unix time); None while one is not."""
        times = [self._committed_at(source) for source in self.run.plan.inputs(task)]
        known = [moment for moment in times if moment is not None]
        return max(known, default=None) if len(known) == len(times) else None

    def _ahead(self, waited: float) -> float:
        """Return the seconds until the input is expected, by the run's estimate or by the worker's own last
        waits; 0 where it is due, or nothing is known."""
        expected = self.wait.expected if self.wait else None
        by_habit = _HABIT * min(self.taken, default=0.0) - waited
        return max(0.0, by_habit, 0.0 if expected is None else expected - time.monotonic())

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
