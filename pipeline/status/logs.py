"""Logs of a run: which there are, their ends, and what is being written to them."""

import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from pipeline.config.job_kinds import DRIVER, GUARD, parts_of
from pipeline.executors.slurm.queue import look_at_queue
from pipeline.run import journal
from pipeline.run.control import read_control
from pipeline.run.directory import Run
from pipeline.run.identity import RunError
from pipeline.run.journal import tail
from pipeline.run.lease import holder_of
from pipeline.run.packed import BadArchive, archives, read_packed
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan
from pipeline.run.records import Records, find_frontier
from pipeline.run.tasks import JOB_KIND_PATTERN, Stage, Task, parse_task, task_of
from pipeline.status.failure import where
from pipeline.status.local import Event
from pipeline.status.slurm import state_of
from pipeline.status.snapshot import is_complete
from pipeline.status.text import moment
from pipeline.text import printable
from slurm.sharedfiles import is_there, names_in, opened_file, persistently, size_of

_PASSES = "passes"
"""Name of the log of passes that workers start, and of its folder."""
_SLURM = "slurm"
"""Name of the log of what Slurm prints of driver jobs."""
_DRIVERS = (DRIVER, GUARD, _PASSES)
_FOLDER = re.compile(rf"(\d+)-({JOB_KIND_PATTERN})")
_POLL_SECONDS = 1.0
_ASK_SECONDS = 30.0
"""Seconds between two questions of --follow to Slurm, whether anything is left in the queue."""
_MOST_SHOWN = 10
_CHUNK = 1 << 20
"""Bytes read from one log at a time, so that a log of gigabytes holds up no other."""
_LONGEST_LINE = 1 << 16
_ENDS = {
    "complete": "the run is complete",
    "cancelled": "the run was cancelled",
    "paused": "the run pauses, as its jobs were cancelled by hand",
    "failed": "the run has failed",
    "stopped": "nothing of the run is left in Slurm's queue",
    "incomplete": "nobody is at work on the run",
}
"""End of a run that is followed, by its state, in words."""


@dataclass(frozen=True)
class Choice:
    """Selection of logs."""

    job_kind: str | None = None
    """A stage, one pool's scores, or a kind of driver job. None: whatever is newest."""
    iteration: int | None = None

    def takes(self, iteration: int, job_kind: str) -> bool:
        of_drivers = self.job_kind == DRIVER and job_kind in _DRIVERS
        is_job_kind = of_drivers or self.job_kind in (None, job_kind, parts_of(job_kind)[0])
        return is_job_kind and self.iteration in (None, iteration)

    def __str__(self) -> str:
        at = "" if self.iteration is None else f"@{self.iteration}"
        return f"{self.job_kind or 'this run'}{at}"


def parse_choice(text: str | None, plan: Plan) -> Choice:
    """Parse ``STAGE[@ITERATION]``.

    Raises:
        RunError: there is no such stage or iteration.
    """
    if text is None:
        return Choice()
    job_kind, at, number = text.partition("@")
    scores = (Stage.SCORE,) if plan.pools else ()
    legal = (Stage.PREPARE, *plan.job_kinds, *scores, Stage.EVALUATE, Stage.BENCHMARK, *_DRIVERS, _SLURM)
    if job_kind not in legal:
        raise RunError(f"{text}: no such stage; legal: {', '.join(legal)}, each with @ITERATION or not")
    if at and not (number.isdigit() and int(number) <= plan.iterations):
        raise RunError(f"{text}: no such iteration; legal: 0 to {plan.iterations}")
    return Choice(job_kind, int(number) if at else None)


@dataclass(frozen=True)
class Log:
    """One log file."""

    path: Path
    iteration: int
    job_kind: str
    attempt: int

    @property
    def name(self) -> str:
        """Short name, for the beginning of a line."""
        parts = [f"{self.job_kind}@{self.iteration}" if self.iteration else self.job_kind]
        if parts_of(self.job_kind)[0] in [stage for stage in Stage if stage.is_sharded]:
            parts.append(str(self.task.shard))
        if rank := self.path.stem.partition(".rank-")[2]:
            parts.append(f"rank {rank}")
        if self.attempt > 1 and self.job_kind not in _DRIVERS:
            parts.append(f"#{self.attempt}")
        return " ".join(parts)

    @property
    def task(self) -> Task:
        """Task whose log it is, of a stage that is sharded or comes once in an iteration."""
        shard = int(self.path.stem.partition(".")[0].removeprefix("shard-"))
        return task_of(self.iteration, self.job_kind, shard)

    @property
    def modified(self) -> float:
        """Unix time of the last write; 0 if the file is gone."""
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return 0.0


def find_logs(paths: RunPaths, choice: Choice, since: int = 0) -> list[Log]:
    """Find the logs that a choice takes, sorted; only of iterations from ``since`` on, and of 0."""
    output = paths.slurm_log
    has_said = choice.job_kind == _SLURM and is_there(output) and size_of(output) > 0
    found = [Log(output, 0, _SLURM, 1)] if has_said else []
    for folder in _listing(paths.log_root):
        name = _FOLDER.fullmatch(folder.name)
        if folder.name in (GUARD, _PASSES) and choice.takes(0, folder.name):  # each has one log for all
            found += [Log(path, 0, folder.name, 1) for path in _listing(folder) if path.suffix == ".log"]
        if name is None or not choice.takes(int(name[1]), name[2]) or 0 < int(name[1]) < since:
            continue
        found += logs_in(folder, int(name[1]), name[2])
    return sorted(found, key=lambda log: (log.iteration, log.job_kind, log.attempt, log.path.name))


def logs_in(folder: Path, iteration: int, job_kind: str) -> Iterator[Log]:
    """Yield the logs of one job kind in an iteration."""
    for attempt in _listing(folder):
        number = attempt.name.removeprefix("attempt-")
        files = (path for path in _listing(attempt) if path.suffix == ".log" and number.isdigit())
        yield from (Log(path, iteration, job_kind, int(number)) for path in files)


def _listing(folder: Path) -> list[Path]:
    """Return a folder's entries, sorted; none if the folder is not there (any more)."""
    return [folder / name for name in sorted(names_in(folder))]


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


def describe_logs(run: Run, choice: Choice, num_lines: int) -> Iterator[str]:
    """Yield the ends of the newest logs, each under its path."""
    logs = newest(run, find_logs(run.paths, choice), choice)
    if not logs and choice.iteration and (path := archives(run.paths, choice.iteration)[1]).exists():
        command = f"unzip -p {shlex.quote(str(path))} 'logs/*'"
        yield f"the logs of iteration {choice.iteration} are packed; to read them: {command}"
        return
    if not logs:
        yield f"no log yet: {choice} has started nothing ({run.paths.log_root})"
        return
    for log in logs[-_MOST_SHOWN:]:
        yield f"==> {log.name}: {log.path}"
        yield from tail(log.path, num_lines) or ["(empty)"]
        yield ""
    if others := logs[:-_MOST_SHOWN]:
        folders = dict.fromkeys(str(log.path.parent) for log in others)
        yield f"and {len(others)} more in {', '.join(folders)}"


def newest(run: Run, logs: Sequence[Log], choice: Choice) -> list[Log]:
    """Return the logs to show: for a stage those of the given iteration, else of its newest attempt.

    Without a stage, those of the newest driver job and of tasks that are not done.
    """
    if choice.job_kind is None:
        drivers = [log for log in logs if log.job_kind in _DRIVERS]
        latest = sorted(drivers, key=lambda log: log.modified)[-1:]
        tasks = [log for log in logs if log.job_kind not in _DRIVERS]
        first, records = max(1, find_frontier(run.plan, run.paths).updated + 1), Records(run.paths)
        last = {(log.iteration, log.job_kind, log.path.name): log for log in tasks if log.iteration >= first}
        unfinished = [log for log in last.values() if records.get(log.task) is None]
        return [*latest, *(unfinished or _of_last(tasks))]
    return list(logs) if choice.iteration is not None else _of_last(logs)


def _of_last(logs: Sequence[Log]) -> list[Log]:
    """Return the newest iteration's logs, of the folder that was written to last."""
    iteration = max((log.iteration for log in logs), default=0)
    newest = [log for log in logs if log.iteration == iteration]
    folder = max(newest, key=lambda log: log.modified).path.parent if newest else None
    return [log for log in newest if log.path.parent == folder]


def log_to_show(
    paths: RunPaths, iteration: int, job_kind: str, events: Sequence[Event], has_failed: bool
) -> Log | None:
    """Find one log for the live view: of the attempt that failed last, else the newest of the last attempt.

    Args:
        has_failed: whether a shard's last attempt failed.
    """
    for task, event in failures(events, Choice(job_kind, iteration)) if has_failed else ():
        log = Log(paths.task(task).log(int(event["attempt"])), iteration, job_kind, int(event["attempt"]))
        if log.path.is_file():
            return log
    logs = list(logs_in(paths.logs(task_of(iteration, job_kind)), iteration, job_kind))
    last = max((log.attempt for log in logs), default=0)
    return max((log for log in logs if log.attempt == last), key=lambda log: log.modified, default=None)


def failures(events: Sequence[Event], choice: Choice) -> Iterator[tuple[Task, Event]]:
    """Yield failed attempts, newest first, each with its event."""
    for event in reversed(events):
        if event.get("event") == "failed":
            task = parse_task(event["task"])
            if choice.takes(task.iteration, task.job_kind):
                yield task, event


def describe_failed(
    paths: RunPaths, events: Sequence[Event], choice: Choice, num_lines: int
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
            yield from _packed_log(paths, task, log, num_lines)
            return
        log = of_worker
    for path in (log, *sorted(log.parent.glob(f"{log.stem}.rank-*{log.suffix}"))):
        yield str(path)
        yield from (f"  | {line}" for line in tail(path, num_lines))


def _packed_log(paths: RunPaths, task: Task, log: Path, num_lines: int) -> Iterator[str]:
    try:
        packed = read_packed(paths, task.iteration, paths.relative(log))
    except BadArchive as error:
        yield str(error)
        return
    yield f"it left no log: {log}" if packed is None else f"{log} (packed)"
    lines = (packed or b"").decode(errors="replace").splitlines()
    yield from (f"  | {printable(line)}" for line in lines[-num_lines:] if num_lines)


@dataclass
class Reader:
    """Reader of what is appended to one log, whole lines at a time."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def lines(self) -> list[str]:
        """Return the lines that have been completed since the last call."""
        size = size_of(self.path)
        if size < self.offset:  # truncated, or replaced
            self.offset, self.rest = 0, b""
        if size == self.offset:
            return []
        text = persistently(self.path, self._read)
        self.offset += len(text)
        *whole, self.rest = (self.rest + text).split(b"\n")
        if len(self.rest) > _LONGEST_LINE:  # a progress bar, say, redrawn without line ends
            whole, self.rest = [*whole, self.rest], b""
        return [line.decode(errors="replace").rpartition("\r")[2] for line in whole]

    def _read(self) -> bytes:
        with opened_file(self.path) as file:
            file.seek(self.offset)
            return file.read(_CHUNK)

    def remainder(self) -> list[str]:
        """Return the last, incomplete line, which nobody will end."""
        rest, self.rest = self.rest, b""
        return [rest.decode(errors="replace")] if rest else []


@dataclass
class Follower:
    """Printer of what is appended to logs, new ones too, each line after the name of its log."""

    run: Run
    choice: Choice
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
        """Print the ends of what is there: from here on only what is new."""
        logs = find_logs(self.run.paths, self.choice)
        shown = newest(self.run, logs, self.choice)
        for log in logs:
            size = size_of(log.path)
            reader = self.readers[log] = Reader(log.path, max(0, size - _CHUNK) if log in shown else size)
            lines = reader.lines() if log in shown else []
            self._print(*lines[-num_lines:] if num_lines else (), log=log)
        if not logs:
            self._print(f"no log yet: {self.choice} has started nothing ({self.run.paths.log_root})")

    def read(self) -> None:
        """Print what is new in the logs of the iterations at hand."""
        since = find_frontier(self.run.plan, self.run.paths).updated - 1
        for log in find_logs(self.run.paths, self.choice, since):
            self._print(*self.readers.setdefault(log, Reader(log.path)).lines(), log=log)

    def _how_it_ended(self) -> str | None:
        """Say how the run ended; None while it goes on."""
        has_ended, queue = is_complete(self.run), None
        if not self.run.config.slurm:
            is_driven = not has_ended and holder_of(self.run.paths.locks)
            return None if is_driven else _ENDS["complete" if has_ended else "incomplete"]
        if time.monotonic() - self._asked > _ASK_SECONDS:
            self._asked, queue = time.monotonic(), look_at_queue(self.run)
        return _ENDS.get(state_of(has_ended, read_control(self.run.paths), queue))

    def _print(self, *lines: str, log: Log | None = None) -> None:
        for line in lines:
            print(printable(f"{log.name} | {line}" if log else line), file=self.out, flush=True)
