"""Showing logs of a run: their ends, those of failed attempts, and what is being written to them."""

import contextlib
import shlex
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from pipeline.executors.slurm.queue import is_live, look_at_queue
from pipeline.run import journal
from pipeline.run.control import read_control
from pipeline.run.directory import Run, resume_command
from pipeline.run.failures import FOR_PEOPLE, Failure
from pipeline.run.journal import last_lines, tail
from pipeline.run.lease import holder_of
from pipeline.run.packed import BadArchive, archives, packed_below, read_packed
from pipeline.run.paths import RunPaths
from pipeline.run.records import Records, find_frontier
from pipeline.run.tasks import PREPARE, Task, parse_task, task_of
from pipeline.status.journal_end import Event, slurm_state
from pipeline.status.log_files import (
    CHUNK,
    DRIVER_LOGS,
    Log,
    LogChoice,
    Reader,
    end_of,
    find_logs,
    known_logs,
    logs_in,
    packed_logs,
    parse_choice,
)
from pipeline.status.remedies import command
from pipeline.status.snapshot import is_complete
from pipeline.text import moment, printable
from slurm.commands import SlurmError, SlurmMissing, on_cluster
from slurm.ended import NoAccounting, read_ended
from slurm.query import Element
from slurm.sharedfiles import is_there, size_of
from slurm.states import UnknownState, exit_in_words

_POLL_SECONDS = 1.0
_ASK_SECONDS = 30.0
"""Seconds between two questions of --follow to Slurm, whether anything is left in the queue."""
_MOST_SHOWN = 10
_PACKED = " (packed)"
_ENDS = {
    "complete": "the run is complete",
    "cancelled": "the run was cancelled",
    "paused": "the run pauses, as its jobs were cancelled by hand",
    "failed": "the run has failed",
    "stopped": "nothing of the run is left in Slurm's queue",
    "incomplete": "no process is running the run",
}
"""End of a run that is followed, by its state, in words."""


def show_logs(run: Run, text: str | None, failed: bool, follow: bool, num_lines: int) -> None:
    """Print logs for ``slurm-ppo logs``."""
    choice = parse_choice(text, run.plan)
    if failed:
        events = journal.read(run.paths.events)
        print("\n".join(describe_failed(run.paths, events, choice, num_lines)))
    elif follow:
        Follower(run, choice, sys.stdout).follow(num_lines)
    else:
        print("\n".join(describe_logs(run, choice, num_lines)))


def describe_logs(run: Run, choice: LogChoice, num_lines: int) -> Iterator[str]:
    """Yield the ends of the newest logs, each under its path."""
    try:
        logs = newest(run, known_logs(run.paths, choice, find_frontier(run.plan, run.paths).updated), choice)
    except BadArchive as error:
        yield str(error)
        logs = newest(run, find_logs(run.paths, choice), choice)
    if not logs:
        yield f"no log yet: {choice} has started nothing ({run.paths.log_root})"
        return
    for log in logs[-_MOST_SHOWN:]:
        yield f"==> {log.name}: {log.path}{_PACKED if log.is_packed else ''}"
        yield from _end_in_words(run.paths, log, num_lines) or ["(empty)"]
        yield ""
    others = logs[:-_MOST_SHOWN]
    if folders := dict.fromkeys(str(log.path.parent) for log in others if not log.is_packed):
        yield f"and {sum(not log.is_packed for log in others)} more in {', '.join(folders)}"
    for iteration, count in Counter(log.iteration for log in others if log.is_packed).items():
        packed = archives(run.paths, iteration)[0].with_name("*.zip")
        yield f"and {count} more (packed): unzip -p {shlex.quote(str(packed))} 'logs/*'"


def _end_in_words(paths: RunPaths, log: Log, num_lines: int) -> list[str]:
    try:
        return end_of(paths, log, num_lines)
    except BadArchive as error:
        return [str(error)]


def newest(run: Run, logs: Sequence[Log], choice: LogChoice) -> list[Log]:
    """Return the logs to show: for a stage those of the given iteration, else of its newest attempt.

    Without a stage, those of the newest driver job and of tasks that are not done.
    """
    if choice.job_kind is None:
        drivers = [log for log in logs if log.job_kind in DRIVER_LOGS]
        latest = sorted(drivers, key=lambda log: log.modified)[-1:]
        tasks = [log for log in logs if log.job_kind not in DRIVER_LOGS]
        first, records = max(1, find_frontier(run.plan, run.paths).updated + 1), Records(run.paths)
        last = {(log.iteration, log.job_kind, log.path.name): log for log in tasks if log.iteration >= first}
        unfinished = [log for log in last.values() if records.get(log.task) is None]
        return [*latest, *(unfinished or _of_last(tasks))]
    return list(logs) if choice.iteration is not None else _of_last(logs)


def _of_last(logs: Sequence[Log]) -> list[Log]:
    """Return the newest iteration's logs, of the folder that was written to last."""
    iteration = max((log.iteration for log in logs), default=0)
    newest = [log for log in logs if log.iteration == iteration]
    last = max(newest, key=lambda log: (log.modified, log.attempt), default=None)
    folder = last.path.parent if last else None
    return [log for log in newest if log.path.parent == folder]


def log_to_show(
    paths: RunPaths, iteration: int, job_kind: str, events: Sequence[Event], has_failed: bool
) -> Log | None:
    """Find one log for the live view: of the attempt that failed last, else the newest of the last attempt.

    Args:
        has_failed: whether a shard's last attempt failed.

    Raises:
        BadArchive: one of the iteration's archives cannot be read.
    """
    choice = LogChoice(job_kind, iteration)
    logs = list(logs_in(paths.logs(task_of(iteration, job_kind)), iteration, job_kind))
    logs += packed_logs(paths, choice, iteration)
    by_path = {log.path: log for log in logs}
    for task, event in failures(events, choice) if has_failed else ():
        if log := by_path.get(paths.task(task).log(int(event["attempt"]))):
            return log
    last = max((log.attempt for log in logs), default=0)
    return max((log for log in logs if log.attempt == last), key=lambda log: log.modified, default=None)


def failures(events: Sequence[Event], choice: LogChoice) -> Iterator[tuple[Task, Event]]:
    """Yield failed attempts, newest first, each with its event."""
    for event in reversed(events):
        if event.get("event") == "failed":
            task = parse_task(event["task"])
            if choice.takes(task.iteration, task.job_kind):
                yield task, event


def describe_failed(
    paths: RunPaths, events: Sequence[Event], choice: LogChoice, num_lines: int
) -> Iterator[str]:
    """Yield failed attempts, newest first, each with the end of its log."""
    found = list(failures(events, choice))
    if not found:
        yield f"no failed attempt of {choice}" if choice.job_kind else "no attempt has failed"
    for task, event in found[:_MOST_SHOWN]:
        attempt = f"{task}, attempt {event['attempt']} ({event['kind']})"
        yield f"==> {moment(event['time'])} {attempt}: {event['message']}"
        if event.get("job"):
            yield where(event["job"], event.get("node", ""), None)
        yield from _logs_of(paths, task, paths.task(task).log(event["attempt"]), num_lines)
        yield ""
    if len(found) > _MOST_SHOWN:
        yield f"and {len(found) - _MOST_SHOWN} earlier; all are in {paths.events}"


def _logs_of(paths: RunPaths, task: Task, log: Path, num_lines: int) -> Iterator[str]:
    """Yield the end of an attempt's log, and of those of its other ranks."""
    if not is_there(log):  # a worker that ended before it took its task has written into a log of its own
        number = log.parent.name.rpartition("-")[2]
        of_worker = log.parent.with_name(f"worker-{number}") / log.name
        if not is_there(of_worker):
            is_packed = of_worker.name in _packed_names(paths, task, of_worker.parent)
            yield from _packed_log(paths, task, of_worker if is_packed else log, num_lines)
            return
        log = of_worker
    for path in (log, *sorted(log.parent.glob(f"{log.stem}.rank-*{log.suffix}"))):
        yield str(path)
        yield from (f"  | {line}" for line in tail(path, num_lines))


def _packed_names(paths: RunPaths, task: Task, folder: Path) -> set[str]:
    with contextlib.suppress(BadArchive):
        return packed_below(paths, task.iteration, folder)
    return set()


def _packed_log(paths: RunPaths, task: Task, log: Path, num_lines: int) -> Iterator[str]:
    try:
        packed = read_packed(paths, task.iteration, paths.relative(log))
    except BadArchive as error:
        yield str(error)
        return
    yield f"it left no log: {log}" if packed is None else f"{log}{_PACKED}"
    yield from (f"  | {line}" for line in last_lines(packed or b"", num_lines))


@dataclass
class Follower:
    """Printer of what is appended to logs, new ones too, each line after the name of its log."""

    run: Run
    choice: LogChoice
    out: TextIO
    readers: dict[Log, Reader] = field(default_factory=dict)
    _asked: float = field(default_factory=time.monotonic)

    def follow(self, num_lines: int) -> None:
        """Print until the run has ended, or until Ctrl-C: that is how one stops looking."""
        try:
            self._begin(num_lines)
            while (ended := self._how_it_ended()) is None:
                self.read()
                time.sleep(_POLL_SECONDS)
            self.read()
            for log in find_logs(self.run.paths, self.choice):
                if log in self.readers:
                    self._print(*self.readers[log].remainder(), log=log)
            self._print(ended)
        except KeyboardInterrupt:
            return

    def _begin(self, num_lines: int) -> None:
        """Print the ends of what is there: from here on only what is new. What is packed is over."""
        logs = find_logs(self.run.paths, self.choice)
        shown = newest(self.run, logs, self.choice)
        for log in logs:
            with contextlib.suppress(FileNotFoundError):  # it was just packed
                size = size_of(log.path)
                reader = self.readers[log] = Reader(log.path, max(0, size - CHUNK) if log in shown else size)
                lines = reader.lines() if log in shown else []
                self._print(*lines[-num_lines:] if num_lines else (), log=log)
        if not logs:
            self._print(f"no log yet: {self.choice} has started nothing ({self.run.paths.log_root})")

    def read(self) -> None:
        """Print what is new in the logs of the iterations at hand."""
        since = find_frontier(self.run.plan, self.run.paths).updated - 1
        found = dict.fromkeys(find_logs(self.run.paths, self.choice, since))
        for log in found:
            with contextlib.suppress(FileNotFoundError):  # it was just packed
                self._print(*self.readers.setdefault(log, Reader(log.path)).lines(), log=log)
        for log in [log for log in self.readers if log.iteration >= since and log not in found]:
            self._print(*self._rest_of(log, self.readers.pop(log)), log=log)

    def _rest_of(self, log: Log, reader: Reader) -> list[str]:
        """Return what was not read of a log that is no file any more."""
        paths = self.run.paths
        try:
            content = read_packed(paths, log.iteration, paths.relative(log.path))
        except BadArchive as error:
            return [str(error)]
        return [] if content is None else reader.rest_of(content)

    def _how_it_ended(self) -> str | None:
        """Say how the run ended; None while it goes on."""
        has_ended, queue = is_complete(self.run), None
        if not self.run.config.slurm:
            is_driven = not has_ended and holder_of(self.run.paths.locks)
            return None if is_driven else _ENDS["complete" if has_ended else "incomplete"]
        if time.monotonic() - self._asked > _ASK_SECONDS:
            self._asked, queue = time.monotonic(), look_at_queue(self.run)
        return _ENDS.get(
            slurm_state(has_ended, read_control(self.run.paths), queue.has_jobs if queue else None)
        )

    def _print(self, *lines: str, log: Log | None = None) -> None:
        for line in lines:
            print(printable(f"{log.name} | {line}" if log else line), file=self.out, flush=True)


# --- why a run has failed --------------------------------------------------------------------------------

# Task, place, Slurm's state, end of the log, how to continue.


TAIL_LINES = 20
_MOST_FAILURES = 3


def failure_block(run: Run, given_up: tuple[Failure, ...]) -> str:
    """Return the report: what failed, where, the end of its log, and the command to continue."""
    shown = given_up[:_MOST_FAILURES]
    endings = read_endings(run, [f.job for f in shown if f.job]) if run.config.slurm else {}
    return render_block(shown, endings, len(given_up) - len(shown), way_out(run, given_up))


def render_block(
    failures: Sequence[Failure], endings: Mapping[str, Element], num_more: int, way_out: str
) -> str:
    """Render the report. Reads the logs and nothing else."""
    lines = [line for failure in failures for line in describe_failure(failure, endings.get(failure.job))]
    more = [f"and {num_more} more tasks"] if num_more else []
    return "\n".join([*lines, *more, way_out])


def describe_failure(failure: Failure, ending: Element | None) -> list[str]:
    """Describe one task that was given up."""
    said = "\n".join(map(printable, failure.message.splitlines()))
    lines = [f"failed: {failure.task}, attempt {failure.attempt} ({failure.kind}): {said}"]
    if failure.job:
        lines.append(f"  {where(failure.job, failure.node, ending)}")
    log = Path(failure.log)
    if failure.log and is_there(log):
        lines += [f"  last lines of {log}:", *(f"  | {line}" for line in tail(log, TAIL_LINES))]
    elif failure.log:
        lines.append(f"  it left no log: {log}")
    return lines


def where(job: str, node: str, ending: Element | None) -> str:
    """Return a phrase like ``job 34_1 on node gpu07: FAILED, exit code 1``."""
    node = node or (ending.node if ending else "")
    place = f"job {job}" + (f" on node {node}" if node else "")
    return f"{place}: {state_in_words(ending)}" if ending else place


def state_in_words(ending: Element) -> str:
    """Return Slurm's state, with exit code or signal in words."""
    words = exit_in_words(ending.state, ending.exit_code or 0, ending.signal or 0)
    known = words.removesuffix(f"({ending.state})").strip()
    return str(ending.state) if known == str(ending.state).lower() else f"{ending.state}, {known}"


def read_endings(run: Run, jobs: Collection[str]) -> dict[str, Element]:
    """Look up ended array elements in squeue and sacct, by id like ``34_1``; none where Slurm is silent.

    Errors of Slurm are ignored: its view is the least of what the report says.
    """
    queue = look_at_queue(run, max_age=0.0)  # what it is asked for may have ended just now
    found = {e.job_id: e for e in queue.elements if not is_live(e)}
    missing = {job.partition("_")[0] for job in jobs if job not in found}
    with on_cluster(run.cluster), contextlib.suppress(SlurmError, SlurmMissing, NoAccounting, UnknownState):
        known = read_ended(missing) if missing and not queue.unanswered else {}
        found = {f"{array}_{index}": element for (array, index), element in known.items()} | found
    return {job: found[job] for job in jobs if job in found}


def way_out(run: Run, given_up: tuple[Failure, ...]) -> str:
    """Return the command to continue with, or what to fix first; a line for each setting that helps."""
    ways = [way for way in dict.fromkeys(command(run, one) for one in given_up) if way]
    if not any(item.kind in FOR_PEOPLE for item in given_up):
        return "\n".join([f"nothing that was committed is lost; to continue: {resume_command(run)}", *ways])
    if not is_there(run.paths.task(PREPARE).record):
        return "nothing was committed: fix the settings and run the same command again"
    first = (
        f"fix what the message names, then: {resume_command(run)} (with KEY=VALUE for a setting to change; "
        "one that results depend on is refused, with the command that forks the run)"
    )
    return "\n".join([first, *ways])
