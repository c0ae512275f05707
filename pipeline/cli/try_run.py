"""``slurm-ppo try``: judge settings as validate does, carry out one small iteration by the run's own tasks,
show what came of it, and leave nothing behind."""

import contextlib
import glob
import json
import os
import shlex
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.checks.candidates import check_trainer, timed_lines
from pipeline.checks.disk import existing_folder
from pipeline.checks.finding import Finding, Verdict, describe
from pipeline.checks.suites import start
from pipeline.cli.queue import cancel_run, patient_hold
from pipeline.cli.run import executor_of
from pipeline.cli.samples import say
from pipeline.cli.try_text import as_object, before_lines, result_lines
from pipeline.config.allocation import AllocationConfig
from pipeline.config.findings import Findings
from pipeline.config.schema import Config
from pipeline.executors.local import drive
from pipeline.executors.processes import Processes
from pipeline.executors.slurm.passes import make_pass
from pipeline.executors.slurm.queue import wait_until_gone
from pipeline.metrics.terminal import Row
from pipeline.orchestrate.driver import Outcome, Pass
from pipeline.plugins.load import MissingImport
from pipeline.process import interruptible, uninterrupted
from pipeline.run.control import Control, begin_invocation, write_control
from pipeline.run.directory import Run, claimed_run
from pipeline.run.failures import FOR_PEOPLE
from pipeline.run.lease import holder_of
from pipeline.run.paths import RunPaths
from pipeline.run.records import Frontier, Records
from pipeline.run.sizes import bytes_below
from pipeline.run.tasks import Task
from pipeline.status.logs import describe_failure
from pipeline.status.progress import speed_of
from pipeline.text import printable, size
from pipeline.tryout.judgement import judge
from pipeline.tryout.outlook import TryOutlook, outlook
from pipeline.tryout.places import places_of
from pipeline.tryout.prompt_look import PromptLook, check_likelihood, look_at_prompts
from pipeline.tryout.result import TryResult, read_result
from pipeline.tryout.small_run import prompts_to_try, small_config
from pipeline.workers.looking import PASS_AGE

_WIDEST = 100
_POLL_SECONDS = 3.0
"""Seconds between two passes over a small run on Slurm."""
_GONE_SECONDS = 60.0
_QUIET_SECONDS = 60.0
"""Seconds without a commit after which it is said what is waited for."""
_INTERRUPTED = 130
_MARK = 3
"""Bytes, in hexadecimal digits, that tell directories of small runs apart."""


@dataclass(frozen=True)
class TryOptions:
    """What was asked for beside settings."""

    prompts: int | None = None
    minutes: float = 30.0
    """Minutes after which jobs of Slurm are cancelled."""
    keeps: bool = False
    """Whether the small run's directory is left."""
    is_full: bool = False
    is_json: bool = False
    times_candidates: bool = False
    """Whether to time settings of the update on this machine as well."""


def try_run(config: Config, found: Findings, options: TryOptions) -> int:
    """Try a configuration. Returns the exit code.

    Args:
        found: what is wrong with ``config`` so far; nothing is started unless that is nothing.

    Raises:
        UserError: with every problem, one per line.
    """
    prompts = prompts_to_try(config, options.prompts)
    root = _place_of(config, options.keeps)
    small, executor = small_config(config, prompts, root), None
    if options.times_candidates:
        with found.collecting("the trainer to be timed"):
            check_trainer(config)
    with found.collecting("the scheduler"):
        executor = executor_of(small, watch=True)
    shown = _Shown(options)
    for _, one in list(start(config, found)):
        shown.finding(one)
    found.refuse()
    _say_what_is_left(root)
    shown.prompts(config)
    with interruptible(signal.SIGHUP), _carried_out(small, executor, options) as (run, done):
        if done.outcome is not Outcome.COMPLETE:
            shown.end()
            return _say_why_not(done, options)
        result = read_result(run, config)
        shown.result(result, places_of(config))
    if options.times_candidates:
        shown.candidates(config, result)
    shown.end()
    return int(shown.has_problems)


def _place_of(config: Config, keeps: bool) -> Path:
    """Return a directory for the small run: beside the run's, where forecasts look for earlier ones, if it is
    kept; else in a folder that is there, on the run's filesystem."""
    wanted = Path(config.run_dir).absolute()
    folder = wanted.parent if keeps else existing_folder(wanted.parent)
    return folder / f"{wanted.name}-try-{os.urandom(_MARK).hex()}"


def _say_what_is_left(root: Path) -> None:
    """Say which directories of earlier tries lie beside this one: what is killed (-9) leaves its own."""
    stem = root.name[: -2 * _MARK]
    for left in sorted(root.parent.glob(f"{glob.escape(stem)}{'[0-9a-f]' * 2 * _MARK}")):
        with contextlib.suppress(OSError):  # it cannot be read, or has gone meanwhile
            found = left.lstat()
            if (
                not stat.S_ISDIR(found.st_mode)
                or found.st_uid != os.getuid()
                or holder_of(RunPaths(left).locks)
            ):
                continue
            way_out = shlex.join(["rm", "-r", str(left)])
            told = f"left of a try that was kept or killed: {size(bytes_below(left))}; if none is running: "
            print(f"{told}{way_out}", file=sys.stderr)


# --- what is shown ---


@dataclass
class _Shown:
    """Output, as it comes or as one object at the end."""

    options: TryOptions
    _found: list[Finding] = field(default_factory=list)
    _seen: PromptLook | None = None
    _result: TryResult | None = None
    _outlook: TryOutlook | None = None
    _timed: list[str] = field(default_factory=list)
    """Lines on candidates for the update's settings."""

    @property
    def has_problems(self) -> bool:
        return any(one.verdict is Verdict.PROBLEM for one in self._found)

    @property
    def _width(self) -> int:
        return min(shutil.get_terminal_size((80, 24)).columns, _WIDEST)

    def finding(self, one: Finding) -> None:
        """Show a finding that is a warning or worse, or says what was not checked."""
        if one.verdict is Verdict.OK:
            return
        self._found.append(one)
        if not self.options.is_json:
            in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
            titled = one if one.title else replace(one, title="settings")
            say([*describe(None, titled, in_colour).splitlines()])

    def prompts(self, config: Config) -> None:
        """Look at prompts before anything is started."""
        with contextlib.suppress(MissingImport):  # tasks may have it
            self._seen = look_at_prompts(config)
        if self._seen is None:
            return
        if not self.options.is_json:
            say(before_lines(self._seen, self._width, self.options.is_full))
            sys.stdout.flush()
        self.finding(check_likelihood(config, self._seen.prompts))

    def result(self, result: TryResult, places: dict[str, int]) -> None:
        """Show what a small run shows."""
        self._result, self._outlook = result, outlook(result, places)
        if not self.options.is_json:
            where = where_in_words(result)
            say(result_lines(result, self._outlook, where, self._width, self.options.is_full))
            say([""])
        for one in judge(result):
            self.finding(one)

    def candidates(self, config: Config, result: TryResult) -> None:
        """Time settings of the update on rows as long as those that were sampled, and say which are best."""
        lengths = [(result.prompt_lengths[one.prompt_id], one.length) for one in result.samples]
        for line in timed_lines(config, lengths):
            self._timed.append(line)
            if not self.options.is_json:
                say([line])
                sys.stdout.flush()

    def end(self) -> None:
        """Say how much there is to fix."""
        if self.options.is_json:
            print(
                json.dumps(
                    as_object(self._result, self._outlook, self._seen, self._found, self._timed), indent=1
                )
            )
            return
        numbers = [
            f"{number} {verdict}{'s' * (number != 1)}"
            for verdict in (Verdict.PROBLEM, Verdict.WARNING)
            for number in [sum(one.verdict is verdict for one in self._found)]
        ]
        say([", ".join(numbers)])


def where_in_words(result: TryResult) -> str:
    """Say where the tasks of a small run were done."""
    config = result.config
    if config.slurm is None:
        is_allocation = isinstance(config.scheduler, AllocationConfig)
        return "in this allocation" if is_allocation else "on this machine"
    places = (f"{one.partition or 'the default partition'} ({one.host})" for one in result.stages)
    return f"on {', '.join(dict.fromkeys(places))}"


# --- carrying it out ---


@contextlib.contextmanager
def _carried_out(
    small: Config, executor: Processes | None, options: TryOptions
) -> Iterator[tuple[Run, Pass]]:
    """Carry a small run out; after the block nothing of it is left, unless it is to be kept."""
    root, watcher = Path(small.run_dir), _Progress()
    try:
        with claimed_run(small) as (run, lease):
            watcher.begin(run)
            if executor is None:
                write_control(run.paths, Control())
            else:
                done = drive(run, executor, watcher, lease)
        if executor is None:
            with _without_jobs_left(run):
                done = _followed(run, watcher, options.minutes)
                yield run, done
        else:
            yield run, done
    finally:
        if options.keeps and root.exists():
            print(f"kept: {root}", file=sys.stderr)
        elif not options.keeps:
            with uninterrupted():
                shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _without_jobs_left(run: Run) -> Iterator[None]:
    """Cancel what is left in the queue after the block, and wait until it is gone."""
    try:
        yield
    finally:
        cancel_run(run)
        if left := wait_until_gone(run, _GONE_SECONDS):
            print(f"{left} cancelled jobs have not ended yet", file=sys.stderr)


def _followed(run: Run, watcher: "_Progress", minutes: float) -> Pass:
    """Make passes until the small run has ended, or the time is up."""
    with patient_hold(run):
        begin_invocation(run.paths, run.who_acts())
    until = time.monotonic() + 60 * minutes
    with interruptible():
        while True:
            try:
                done = make_pass(run, watcher, PASS_AGE)
                if done.outcome is not None or time.monotonic() > until:
                    return done
                time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt:
                return Pass(Outcome.INTERRUPTED)


def _say_why_not(done: Pass, options: TryOptions) -> int:
    """Say why there is nothing to show. Returns the exit code."""
    if done.outcome is Outcome.FAILED:
        lines = [line for failure in done.given_up for line in describe_failure(failure, None)]
        print("\n".join(lines), file=sys.stderr)
        if not options.keeps:
            print("its folder is removed; --keep leaves it, with all logs", file=sys.stderr)
        return 2 if any(failure.kind in FOR_PEOPLE for failure in done.given_up) else 1
    if done.outcome is Outcome.INTERRUPTED:
        print("interrupted" if options.keeps else "interrupted; nothing is left", file=sys.stderr)
        return _INTERRUPTED
    if done.outcome in (Outcome.PAUSED, Outcome.CANCELLED):
        print("its jobs were cancelled in the queue", file=sys.stderr)
        return 1
    waited = f"not done within {options.minutes:g} minutes, so its jobs are cancelled"
    print(f"{waited}; try again when the queue is shorter, or with --minutes", file=sys.stderr)
    return 1


@dataclass
class _Progress:
    """A line on standard error for each stage that is done, and now and then what is waited for."""

    _told: set[Task] = field(default_factory=set)
    _spoken: float = field(default_factory=time.monotonic)

    def begin(self, run: Run) -> None:
        config = run.config
        prompts, each = config.data.prompts_per_iteration, config.rollout.samples_per_prompt
        self._say(f"trying {prompts} prompts with {each} responses each, in {run.paths.root}")

    def progress(self, frontier: Frontier, records: Records, tasks: tuple[Task, ...]) -> None:
        for task in sorted(records.known, key=lambda task: (task.iteration, task.stage.position)):
            if task not in self._told:
                self._told.add(task)
                self._say(f"{task.job_kind} is done: {speed_of([records.known[task]])}")
        waiting = [task.job_kind for task in tasks if task not in records.known]
        if waiting and time.monotonic() - self._spoken > _QUIET_SECONDS:
            self._say(f"waiting for {waiting[0]}")

    def row(self, row: Row) -> None:
        """Show nothing: what the row says is shown at the end."""

    def note(self, text: str) -> None:
        """Show a retry or a repair; advice is given at the end, of the small run itself."""
        if not text.startswith(("warning: ", "problem: ")):
            self._say(text)

    def _say(self, text: str) -> None:
        self._spoken = time.monotonic()
        lines = "\n".join(map(printable, text.splitlines()))
        print(lines, file=sys.stderr, flush=True)
