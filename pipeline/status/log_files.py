"""Log files of a run: which there are, packed ones too, and what is in them."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.job_kinds import DRIVER, GUARD, parts_of
from pipeline.run import journal
from pipeline.run.identity import RunError
from pipeline.run.packed import packed_below, read_packed
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan
from pipeline.run.tasks import JOB_KIND_PATTERN, Stage, Task, is_sharded, task_of
from slurm.sharedfiles import is_there, names_in, opened_file, persistently, size_of

_PASSES = "passes"
"""Name of the log of passes that workers start, and of its folder."""
_SLURM = "slurm"
"""Name of the log of what Slurm prints of driver jobs."""
DRIVER_LOGS = (DRIVER, GUARD, _PASSES)
"""Kinds of logs that driver jobs, and passes, write."""
_FOLDER = re.compile(rf"(\d+)-({JOB_KIND_PATTERN})")
_LOOKED_AT = 3
"""Number of newest iterations among which packed logs are looked for."""
CHUNK = 1 << 20
"""Bytes read from one log at a time, so that a log of gigabytes holds up no other."""
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class LogChoice:
    """Selection of logs."""

    job_kind: str | None = None
    """A stage, one pool's scores, or a kind of driver job. None: whatever is newest."""
    iteration: int | None = None

    def takes(self, iteration: int, job_kind: str) -> bool:
        of_drivers = self.job_kind == DRIVER and job_kind in DRIVER_LOGS
        is_job_kind = of_drivers or self.job_kind in (None, job_kind, parts_of(job_kind)[0])
        return is_job_kind and self.iteration in (None, iteration)

    def __str__(self) -> str:
        at = "" if self.iteration is None else f"@{self.iteration}"
        return f"{self.job_kind or 'this run'}{at}"


def parse_choice(text: str | None, plan: Plan) -> LogChoice:
    """Parse ``STAGE[@ITERATION]``.

    Raises:
        RunError: there is no such stage or iteration.
    """
    if text is None:
        return LogChoice()
    job_kind, at, number = text.partition("@")
    scores = (Stage.SCORE,) if plan.pools else ()
    legal = (Stage.PREPARE, *plan.job_kinds, *scores, Stage.EVALUATE, Stage.BENCHMARK, *DRIVER_LOGS, _SLURM)
    if job_kind not in legal:
        raise RunError(f"{text}: no such stage; legal: {', '.join(legal)}, each with @ITERATION or not")
    if at and not (number.isdigit() and int(number) <= plan.iterations):
        raise RunError(f"{text}: no such iteration; legal: 0 to {plan.iterations}")
    return LogChoice(job_kind, int(number) if at else None)


@dataclass(frozen=True)
class Log:
    """One log file."""

    path: Path
    iteration: int
    job_kind: str
    attempt: int
    is_packed: bool = False
    """Whether it is in an archive, and no file any more."""

    @property
    def name(self) -> str:
        """Short name, for the beginning of a line."""
        parts = [f"{self.job_kind}@{self.iteration}" if self.iteration else self.job_kind]
        if is_sharded(self.job_kind):
            parts.append(str(self.task.shard))
        if rank := self.path.stem.partition(".rank-")[2]:
            parts.append(f"rank {rank}")
        if self.attempt > 1 and self.job_kind not in DRIVER_LOGS:
            parts.append(f"#{self.attempt}")
        return " ".join(parts)

    @property
    def task(self) -> Task:
        """Task whose log it is, of a stage that is sharded or comes once in an iteration."""
        shard = int(self.path.stem.partition(".")[0].removeprefix("shard-"))
        return task_of(self.iteration, self.job_kind, shard)

    @property
    def modified(self) -> float:
        """Unix time of the last write; 0 if the file is gone, or packed."""
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return 0.0


def find_logs(paths: RunPaths, choice: LogChoice, since: int = 0) -> list[Log]:
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
    return _in_order(found)


def known_logs(paths: RunPaths, choice: LogChoice, newest: int) -> list[Log]:
    """Find the logs that a choice takes, sorted, and packed ones: of its iteration, else of the newest of the
    last few that have any, unless there are files of newer ones.

    Args:
        newest: the newest iteration that may have packed logs.

    Raises:
        BadArchive: an archive of theirs cannot be read.
    """
    found = find_logs(paths, choice)
    if choice.iteration is not None:
        return _in_order([*found, *packed_logs(paths, choice, choice.iteration)])
    last = max((log.iteration for log in found), default=0)
    for iteration in range(newest, max(newest - _LOOKED_AT, last - 1, 0), -1):
        if packed := packed_logs(paths, choice, iteration):
            return _in_order([*found, *packed])
    return found


def packed_logs(paths: RunPaths, choice: LogChoice, iteration: int) -> list[Log]:
    """Return the logs of an iteration that a choice takes and that are packed. Raises BadArchive."""
    found = []
    for name in packed_below(paths, iteration, paths.log_root):
        parts = name.split("/")
        kind = _FOLDER.fullmatch(parts[0])
        number = parts[1].removeprefix("attempt-") if len(parts) == 3 else ""
        if kind and number.isdigit() and name.endswith(".log") and choice.takes(iteration, kind[2]):
            found.append(Log(paths.log_root / name, iteration, kind[2], int(number), is_packed=True))
    return _in_order(log for log in found if not log.path.exists())


def _in_order(logs: Iterable[Log]) -> list[Log]:
    return sorted(logs, key=lambda log: (log.iteration, log.job_kind, log.attempt, log.path.name))


def end_of(paths: RunPaths, log: Log, num_lines: int) -> list[str]:
    """Return the last lines of a log, wherever it is by now. Raises BadArchive."""
    if not log.is_packed:
        with contextlib.suppress(FileNotFoundError):  # packed since it was found
            if lines := journal.tail(log.path, num_lines):
                return lines
    content = read_packed(paths, log.iteration, paths.relative(log.path)) or b""
    return journal.last_lines(content, num_lines)


def logs_in(folder: Path, iteration: int, job_kind: str) -> Iterator[Log]:
    """Yield the logs of one job kind in an iteration."""
    for attempt in _listing(folder):
        number = attempt.name.removeprefix("attempt-")
        files = (path for path in _listing(attempt) if path.suffix == ".log" and number.isdigit())
        yield from (Log(path, iteration, job_kind, int(number)) for path in files)


def _listing(folder: Path) -> list[Path]:
    """Return a folder's entries, sorted; none if the folder is not there (any more)."""
    return [folder / name for name in sorted(names_in(folder))]


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
            return file.read(CHUNK)

    def rest_of(self, content: bytes) -> list[str]:
        """Return what of a log's whole content was not read yet, as lines."""
        text, self.offset, self.rest = self.rest + content[self.offset :], len(content), b""
        return [line.rpartition("\r")[2] for line in text.decode(errors="replace").split("\n") if line]

    def remainder(self) -> list[str]:
        """Return the last, incomplete line, which stays so."""
        rest, self.rest = self.rest, b""
        return [rest.decode(errors="replace")] if rest else []
