"""Workers on a shared filesystem: ``python -m stages.pulling``, with the arguments of ``python -m stages``.

The task on the command line is the first. After it the worker finds its next ones in the run directory, from
commits and claims alone, until it pays more to leave (:mod:`pipeline.workers`).
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.scheduler import ResourcesConfig, SlurmConfig, resources_of
from pipeline.run import journal
from pipeline.run.attempts import AttemptId
from pipeline.run.commits import CorruptData, read_record
from pipeline.run.control import Control, SpoiltControl, read_control
from pipeline.run.directory import Run, load_run
from pipeline.run.durable import is_there, link_once, opened_folder, private_file
from pipeline.run.failures import FailureKind
from pipeline.run.records import find_frontier, recorded
from pipeline.run.tasks import Task, task_key
from pipeline.workers import choosing, estimates, staying
from pipeline.workers.beats import Beat, Crew, Doing, Reason, process_space
from pipeline.workers.choosing import Choice, Step, View
from pipeline.workers.claims import Claim, Known, attempts_of, claims_of, next_number, take
from pipeline.workers.outside import Outside, of_environment
from pipeline.workers.staying import Wait
from stages import preemption
from stages.pulse import Pulse
from stages.runner import Arguments, parse
from stages.surroundings import (
    ASK_SECONDS,
    Asking,
    Bell,
    Output,
    Package,
    is_network,
    resident_bytes,
)
from stages.worker import Source, work

INPUT_SECONDS = 30.0
"""Seconds that a task waits for inputs that are not there: caches of network filesystems may be as old."""
_LOOK_SECONDS, _LOOK_SECONDS_ON_NETWORK = 1.0, 5.0
"""Seconds after which one who waits looks at everything again, and not only at what it waits for."""
_ESTIMATE_AFTER = 0.2
"""Seconds of waiting after which it is worth to ask how long it will take."""
_SPANS_BYTES = 1 << 18
_MOST_FAILURES = 2
"""Failures in a row after which a worker leaves: its node may be at fault, and others are to try."""


@dataclass
class Pulling:
    """Source of a worker that finds its tasks in the run directory."""

    run: Run
    first: Arguments
    outside: Outside
    settings: ResourcesConfig
    """Resources of the stage, with what is set for staying."""
    pulse: Pulse
    linger_max: float = 600.0
    max_attempts: int = 3
    worker: choosing.Worker = field(init=False)
    bell: Bell = field(default_factory=Bell)
    output: Output = field(default_factory=Output)
    reason: Reason | None = None
    """Why it leaves; None: it stays."""
    wait: Wait | None = None
    sizes: list[int] = field(default_factory=list)
    """Bytes of memory after each task."""
    failures: int = 0
    """Tasks that have failed in a row."""
    known: Known = field(default_factory=dict)
    beats: dict[str, Beat] = field(default_factory=dict)
    """Last beats of all workers of the run, those that have left too."""
    crew: Crew = field(init=False)
    queue: Asking = field(init=False)
    package: Package = field(init=False)
    is_network: bool = field(init=False)
    _estimated: tuple[Task, float] | None = None
    """Task whose input was last estimated, and when (monotonic)."""
    _partitions: frozenset[str] | None = None
    _claim: Claim | None = None

    def __post_init__(self) -> None:
        task = self.first.task
        self.worker = choosing.Worker(task.job_kind, task.shard, task, takes_over=self.settings.has_gpus)
        self.crew, self.package = Crew(self.run.paths), Package(self.run)
        self.queue = Asking(self.outside.ask_queue)
        self.package.has_changed()  # from here on
        self.is_network = is_network(self.run.paths.root)

    # --- the source ---

    def next(self) -> Arguments | None:
        """Return the next attempt, once its task is claimed. None: leave."""
        self.bell.listen()
        while self.reason is None:
            view = self.look()
            choice = choosing.choose(view, self.worker)
            if self.reason or self.bell.warned:
                self.reason = self.reason or Reason.WARNED
            elif choice.step is Step.DONE:
                self.reason = Reason.DONE
            elif choice.step is Step.WAIT:
                self._wait(choice)
            elif choice.task and (given := self._take(view, choice.task)):
                return given
        self.pulse.say(doing=Doing.LEAVING, reason=self.reason, task="", until=None)
        if not self._is_cancelled():
            self.outside.leaves()
        return None

    def ended(self, arguments: Arguments, exit_code: int) -> None:
        """Note the end of an attempt: whoever reads the claim sees by the beat that nobody is at it."""
        self.pulse.set_alarm(None)
        self.output.turn_back()
        startup = self._startup_of(arguments) if exit_code == 0 and not self.pulse.beat.tasks else 0.0
        self.pulse.say(doing=Doing.WAITING, task="", attempt="")
        beat = self.pulse.beat
        startup = min(startup, beat.busy_seconds)
        self.pulse.say(
            tasks=beat.tasks + (exit_code == 0),
            startup_seconds=beat.startup_seconds + startup,
            busy_seconds=beat.busy_seconds - startup,
        )
        self.sizes.append(resident_bytes())
        self.failures = self.failures + 1 if exit_code else 0
        self.reason = self._reason_after_task()
        if exit_code == 0:
            self.outside.committed(arguments.task)

    def _reason_after_task(self) -> Reason | None:
        if self.bell.warned or preemption.warned():
            return Reason.WARNED
        if self.failures >= _MOST_FAILURES:
            return Reason.FAILED
        return Reason.GREW if staying.has_grown(self.sizes) else None

    def _startup_of(self, arguments: Arguments) -> float:
        """Return the seconds of the first task from its start to the first compute: what loading took."""
        with contextlib.suppress(CorruptData, OSError):
            record = read_record(self.run.paths, arguments.task)
            if record is not None and record.attempt == arguments.attempt:
                return record.metrics.get("startup_seconds", 0.0)
        return 0.0

    # --- looking ---

    def look(self) -> View:
        """Look at the run directory: how far the run is, what is committed, who works on what."""
        run, paths = self.run, self.run.paths
        frontier = find_frontier(run.plan, paths)
        tasks = choosing.candidates(run.plan, frontier, self.worker)
        committed = frozenset(recorded(paths, choosing.relevant(run.plan, tasks)))
        since = self._look_at_control()
        undone = [task for task in tasks if task not in committed]
        claims = claims_of(paths, choosing.claimed(run.plan, undone), self.known)
        now = time.time()
        live = self.crew.live(now)
        self.beats = {**self.crew.left, **live}
        attempts = {task: attempts_of(paths, claims[task], live, since) for task in claims}
        seconds = estimates.task_seconds(self.beats.values(), self.worker.job_kind)
        return View(run.plan, frontier, committed, attempts, self.max_attempts, now, seconds)

    def _is_cancelled(self) -> bool:
        """Whether people cancelled the run: nothing follows then, and Slurm soon kills who has not ended."""
        control = self._control()
        return control is not None and control.cancelled

    def _control(self) -> Control | None:
        try:
            return read_control(self.run.paths)
        except SpoiltControl:  # for people to mend; a pass will say so
            return None

    def _look_at_control(self) -> float:
        """Leave if people, or a pass that gave up, ended the run. Returns when this invocation began."""
        control = self._control()
        if control is None:
            return 0.0
        if control.cancelled or control.has_failed:
            self.reason = Reason.TURNED
        return control.begun

    # --- taking ---

    def _take(self, view: View, task: Task) -> Arguments | None:
        """Claim a task. None if another was first, or has done it since the records were looked at, or there
        is no time left for it."""
        if task in recorded(self.run.paths, [task]):
            return None
        limit = self._limit(view)
        is_first = task == self.worker.first
        if not is_first and not self._has_time(view.now, limit):
            self.reason = Reason.TIME
            return None
        number = self._number(task, is_first)
        claim = Claim(task, number, self.outside.new_attempt(number), self.outside.name, view.now)
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
        self.wait, self._claim = None, claim
        self._set_alarm(limit, task)
        return self._begin(claim)

    def _begin(self, claim: Claim) -> Arguments:
        files = self.run.paths.task(claim.task)
        self.output.turn_to(files.log(claim.number))
        failure = files.failure(claim.number)
        return Arguments(claim.task, self.run.paths.root, claim.attempt, failure, INPUT_SECONDS, stays=True)

    def _has_time(self, now: float, limit: float | None) -> bool:
        self.queue.ask_again()
        return staying.has_time(now, self.queue.ends, limit, self.settings.signal)

    def _number(self, task: Task, is_first: bool) -> int:
        """Return the number of the next attempt: of the first task the submission's, if nobody has it."""
        claims = claims_of(self.run.paths, [task], self.known).get(task, ())
        given = AttemptId.parse(self.first.attempt).number
        if is_first and given > max((claim.number for claim in claims), default=0):
            return given
        return next_number(self.run.paths, task, claims)

    def _limit(self, view: View) -> float | None:
        known = estimates.startup(self.beats.values(), self.worker.job_kind) if self._is_fresh else None
        return staying.task_limit(
            self.settings.task_seconds, view.median_seconds, known.median if known else None
        )

    @property
    def _is_fresh(self) -> bool:
        """Whether the next task begins with loading."""
        return self.pulse.beat.tasks == 0 or self.failures > 0

    def _set_alarm(self, limit: float | None, task: Task) -> None:
        """End the task when it has taken too long; one that can save is warned before."""
        if limit is None:
            return
        warning = min(float(self.settings.signal), limit / 2) if task.stage.generates else 0.0

        def warn() -> None:
            self.pulse.set_alarm(warning, lambda: self._end_task(limit))
            os.kill(os.getpid(), signal.SIGUSR2)

        self.pulse.set_alarm(limit - warning, warn if warning else lambda: self._end_task(limit))

    def _end_task(self, limit: float) -> None:
        """End the process: a task in native code cannot be stopped in another way."""
        if (claim := self._claim) is not None:
            told = {"kind": FailureKind.TIMEOUT, "message": f"it took more than {limit:g} s", "suspect": None}
            path = self.run.paths.task(claim.task).failure(claim.number)
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                link_once(path, json.dumps(told) + "\n")
        self.pulse.say(doing=Doing.LEAVING, reason=Reason.FAILED)
        os._exit(5)

    # --- waiting ---

    def _wait(self, choice: Choice) -> None:
        """Wait until an input of a task has come, or it is time to look at everything again, or to leave."""
        assert choice.task is not None
        self._begin_wait(choice.task)
        self.outside.waits()
        look_again = time.monotonic() + (_LOOK_SECONDS_ON_NETWORK if self.is_network else _LOOK_SECONDS)
        while self.wait is not None and self.reason is None and time.monotonic() < look_again:
            waited = time.time() - self.wait.began
            if self.bell.wait(staying.pause(waited, self.is_network)) or self._has_come(choice):
                break
            self.reason = self._why_leave(choice.task, waited)

    def _begin_wait(self, task: Task) -> None:
        key = task_key(task)
        if self.wait is None:
            self.wait = Wait(time.time(), self._bound())
        if (self.pulse.beat.doing, self.pulse.beat.task) != (Doing.WAITING, key):
            self.pulse.say(doing=Doing.WAITING, task=key, attempt="", until=self.wait.until)

    def _bound(self) -> float:
        """Return the seconds that it waits at most; before its first task it was submitted to wait."""
        beats, job_kind = list(self.beats.values()), self.worker.job_kind
        startup, queue = estimates.startup(beats, job_kind), estimates.queue_wait(beats, job_kind)
        own = self.pulse.beat
        bound = staying.bound(
            self.settings.linger,
            self.linger_max,
            startup.median if startup else own.startup_seconds,
            queue.median if queue else own.queued_seconds,
        )
        if self.worker.first is None:
            return bound
        return max(bound, self.linger_max if self.settings.start_early else INPUT_SECONDS)

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
                self.run.plan, task, self._committed_at, seen, time.time(), at_best=True
            )
            self.wait = replace(self.wait, expected=when)

    def _committed_at(self, task: Task) -> float | None:
        with contextlib.suppress(CorruptData, OSError):
            record = read_record(self.run.paths, task)
            return None if record is None else record.ended
        return None


def pulling(first: Arguments, started: float) -> Pulling:
    """Make the source of the worker that begins with an attempt. Its pulse has begun."""
    run = load_run(first.run_dir)
    job_kind, scheduler = first.task.job_kind, run.config.scheduler
    outside = of_environment(run, job_kind, os.environ, started)
    beat = Beat(
        *(outside.name, job_kind, os.uname().nodename, os.getpid(), started),
        since=started,
        queued_seconds=outside.queued_seconds,
        process_space=process_space(),
        task=task_key(first.task),
    )
    pulse = Pulse(run.paths, beat)
    pulse.start()
    if isinstance(scheduler, SlurmConfig):
        settings, most = resources_of(scheduler, job_kind), float(scheduler.linger_max)
    else:
        settings, most = ResourcesConfig(linger="auto"), 600.0
    return Pulling(run, first, outside, settings, pulse, most, run.config.attempts_of(job_kind))


def import_stage(task: Task) -> None:
    """Import what a task of this kind needs: who starts early is ready when the input is."""
    importlib.import_module("stages.execution")
    importlib.import_module(f"stages.tasks.{task.stage}")


def main(argv: Sequence[str]) -> int:
    """Work; return the exit code."""
    started = time.time()
    first = parse(argv)
    source = source_of_rank(first, started)
    import_stage(first.task)
    return work(source)


def source_of_rank(first: Arguments, started: float) -> Source:
    """Return the source of this process: one that finds tasks, or one that is told by the first rank."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return pulling(first, started)
    from stages.following import Following, Leading, meet

    if os.environ["RANK"] == "0":
        source = pulling(first, started)
        return Leading(source, meet(os.environ))
    return Following(meet(os.environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
