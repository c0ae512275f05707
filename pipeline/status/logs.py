"""Logs of a run: which there are, their ends, and what is being written to them."""

import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pipeline.config.job_kinds import DRIVER, EVALUATION_DRIVER, GUARD, parts_of
from pipeline.config.scheduler import SlurmConfig
from pipeline.executors.slurm.queue import look_at_queue
from pipeline.run import journal
from pipeline.run.control import read_control
from pipeline.run.directory import Run, RunError
from pipeline.run.journal import tail
from pipeline.run.lease import holder_of
from pipeline.run.packed import BadArchive, archives, read_packed
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan
from pipeline.run.records import Records, find_frontier
from pipeline.run.tasks import JOB_KIND_PATTERN, Stage, Task, parse_task, task_of
from pipeline.status.failure import where
from pipeline.status.snapshot import is_complete
from pipeline.text import printable
from slurm.sharedfiles import is_there, names_in, persistently, size_of

_DRIVERS = (DRIVER, EVALUATION_DRIVER, GUARD)
_FOLDER = re.compile(rf"(\d+)-({JOB_KIND_PATTERN})")
_POLL_SECONDS = 1.0
_ASK_SECONDS = 30.0
"""Seconds between two questions of --follow to Slurm, whether anything is left in the queue."""
_MOST_SHOWN = 10
_CHUNK = 1 << 20
"""Bytes read from one log at a time, so that a log of gigabytes holds up no other."""
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class Choice:
    """Selection of logs."""

    job_kind: str | None = None
    """A stage, one pool's scores, or a kind of driver job. None: whatever is newest."""
    iteration: int | None = None

    def takes(self, iteration: int, job_kind: str) -> bool:
        of_drivers = self.job_kind == DRIVER and job_kind in _DRIVERS
        of_pools = self.job_kind == Stage.SCORE and parts_of(job_kind)[0] == Stage.SCORE
        is_job_kind = self.job_kind in (None, job_kind) or of_drivers or of_pools
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
    legal = (Stage.PREPARE, *plan.job_kinds, *scores, Stage.EVALUATE, *_DRIVERS)
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
            parts.append(str(self.shard))
        if rank := self.path.stem.partition(".rank-")[2]:
            parts.append(f"rank {rank}")
        if self.attempt > 1 and self.job_kind not in _DRIVERS:
            parts.append(f"#{self.attempt}")
        return " ".join(parts)

    @property
    def shard(self) -> int:
        """Shard of the task, for tasks' logs only."""
        return int(self.path.stem.partition(".")[0].removeprefix("shard-"))


def find_logs(paths: RunPaths, choice: Choice, since: int = 0) -> list[Log]:
    """Find the logs that a choice takes, sorted; only of iterations from ``since`` on, and of 0."""
    found: list[Log] = []
    for folder in _listing(paths.log_root):
        name = _FOLDER.fullmatch(folder.name)
        if name is None or not choice.takes(int(name[1]), name[2]) or 0 < int(name[1]) < since:
            continue
        for attempt in _listing(folder):
            number = int(attempt.name.removeprefix("attempt-"))
            files = (path for path in _listing(attempt) if path.suffix == ".log")
            found += [Log(path, int(name[1]), name[2], number) for path in files]
    return sorted(found, key=lambda log: (log.iteration, log.job_kind, log.attempt, log.path.name))


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
    yield from _ends(logs[-_MOST_SHOWN:], num_lines)
    if (others := len(logs) - _MOST_SHOWN) > 0:
        yield f"and {others} more in {', '.join(_folders(logs[:-_MOST_SHOWN]))}"


def newest(run: Run, logs: Sequence[Log], choice: Choice) -> list[Log]:
    """Return the logs to show: for a stage those of the given iteration, else of its newest attempt.

    Without a stage, those of the newest driver job and of tasks that are not done.
    """
    if choice.job_kind is None:
        drivers = [log for log in logs if log.job_kind in _DRIVERS]
        latest = sorted(drivers, key=lambda log: log.path.stat().st_mtime)[-1:]
        tasks = [log for log in logs if log.job_kind not in _DRIVERS]
        return [*latest, *(unfinished(run, tasks) or _of_last(tasks))]
    return list(logs) if choice.iteration is not None else _of_last(logs)


def unfinished(run: Run, logs: Sequence[Log]) -> list[Log]:
    """Return the last log of each task of the iterations at hand that is not committed."""
    first = max(1, find_frontier(run.plan, run.paths).updated + 1)
    records = Records(run.paths)
    last = {(log.iteration, log.job_kind, log.path.name): log for log in logs if log.iteration >= first}
    found = []
    for log in last.values():
        if records.get(task_of(log.iteration, log.job_kind, log.shard)) is None:
            found.append(log)
    return found


def _of_last(logs: Sequence[Log]) -> list[Log]:
    """Return the newest iteration's logs, of the folder that was written to last."""
    if not logs:
        return []
    iteration = max(log.iteration for log in logs)
    latest = max(
        (log for log in logs if log.iteration == iteration), key=lambda log: log.path.stat().st_mtime
    )
    return [log for log in logs if log.path.parent == latest.path.parent]


def _ends(logs: Iterable[Log], num_lines: int) -> Iterator[str]:
    for log in logs:
        yield f"==> {log.name}: {log.path}"
        yield from tail(log.path, num_lines) or ["(empty)"]
        yield ""


def _folders(logs: Iterable[Log]) -> list[str]:
    return list(dict.fromkeys(str(log.path.parent) for log in logs))


def describe_failed(
    paths: RunPaths, events: Sequence[Mapping[str, Any]], choice: Choice, num_lines: int
) -> Iterator[str]:
    """Yield failed attempts, newest first, each with the end of its log."""
    failures = []
    for event in reversed(events):
        if event.get("event") == "failed":
            task = parse_task(event["task"])
            if choice.takes(task.iteration, task.job_kind):
                failures.append((task, event))
    if not failures:
        yield f"no failed attempt of {choice}" if choice.job_kind else "no attempt has failed"
    for task, event in failures[:_MOST_SHOWN]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        yield f"==> {when} {task}, attempt {event['attempt']} ({event['kind']}): {event['message']}"
        if event.get("job"):
            yield where(event["job"], event.get("node", ""), None)
        yield from _logs_of(paths, task, paths.task(task).log(event["attempt"]), num_lines)
        yield ""
    if len(failures) > _MOST_SHOWN:
        yield f"and {len(failures) - _MOST_SHOWN} earlier; all are in {paths.events}"


def _logs_of(paths: RunPaths, task: Task, log: Path, num_lines: int) -> Iterator[str]:
    """Yield the end of an attempt's log, and of those of its other ranks."""
    if not is_there(log):
        yield from _packed_log(paths, task, log, num_lines)
        return
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

    def last_lines(self, num_lines: int) -> list[str]:
        """Go to the end of what is there. Returns its last whole lines."""
        self.offset = max(0, size_of(self.path) - _CHUNK)
        found = self.lines()
        return found[-num_lines:] if num_lines else []

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
        with self.path.open("rb") as file:
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
    readers: dict[Path, Reader] = field(default_factory=dict)
    _asked: float = field(default_factory=time.monotonic)

    def follow(self, num_lines: int) -> None:
        """Print until the run has ended, or until Ctrl-C: that is how one stops looking."""
        try:
            self._begin(num_lines)
            while (ended := self._how_it_ended()) is None:
                self.read()
                time.sleep(_POLL_SECONDS)
            self.read()
            self.read_remainders()
            self._print(ended)
        except KeyboardInterrupt:
            return

    def _begin(self, num_lines: int) -> None:
        """Print the ends of what is there: from here on only what is new."""
        logs = find_logs(self.run.paths, self.choice)
        shown = newest(self.run, logs, self.choice)
        for log in logs:
            reader = self.readers[log.path] = Reader(log.path, 0 if log in shown else size_of(log.path))
            for line in reader.last_lines(num_lines) if log in shown else ():
                self._print(f"{log.name} | {line}")
        if not logs:
            self._print(f"no log yet: {self.choice} has started nothing ({self.run.paths.log_root})")

    def read(self) -> None:
        """Print what is new in the logs of the iterations at hand."""
        since = find_frontier(self.run.plan, self.run.paths).updated - 1
        for log in find_logs(self.run.paths, self.choice, since):
            reader = self.readers.setdefault(log.path, Reader(log.path))
            for line in reader.lines():
                self._print(f"{log.name} | {line}")

    def read_remainders(self) -> None:
        for log in find_logs(self.run.paths, self.choice):
            for line in self.readers[log.path].remainder() if log.path in self.readers else ():
                self._print(f"{log.name} | {line}")

    def _how_it_ended(self) -> str | None:
        """Say how the run ended; None while it goes on."""
        if is_complete(self.run):
            return "the run is complete"
        if isinstance(self.run.config.scheduler, SlurmConfig):
            return self._how_jobs_ended()
        return None if holder_of(self.run.paths.locks) else "nobody is at work on the run"

    def _how_jobs_ended(self) -> str | None:
        control = read_control(self.run.paths)
        if control.cancelled or control.has_failed:
            return f"the run {'was cancelled' if control.cancelled else 'has failed'}"
        if time.monotonic() - self._asked < _ASK_SECONDS:
            return None
        self._asked = time.monotonic()
        queue = look_at_queue(self.run)
        is_over = not queue.live and queue.unanswered is None
        return "nothing of the run is left in Slurm's queue" if is_over else None

    def _print(self, line: str) -> None:
        print(printable(line), file=self.out, flush=True)
