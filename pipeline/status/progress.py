"""Progress on standard error: a bar per stage on a terminal, a line per event elsewhere."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from pipeline.metrics.terminal import Row
from pipeline.run.commits import Record
from pipeline.run.plan import Plan
from pipeline.run.records import Frontier, Records
from pipeline.run.tasks import Task
from pipeline.status.text import describe_row
from pipeline.text import printable

if TYPE_CHECKING:  # a log needs no terminal library
    from rich.progress import Progress, TaskID


def watcher_for(stream: TextIO, plan: Plan) -> "Lines":
    """Return bars where a person looks at a terminal, lines in a log."""
    return Bars(plan, stream) if stream.isatty() else Lines(plan, stream)


_QUIET_SECONDS = 60.0
"""Seconds without a line in the first iteration, of which the usual length is not known yet."""
_QUIET_SECONDS_LATER = 600.0


def done_in(plan: Plan, records: Records, iteration: int) -> dict[str, tuple[list[Record], int]]:
    """Return by stage and pool the records of an iteration's tasks that are done, and how many there are."""
    tasks = plan.tasks(iteration)
    of_job_kind = {
        job_kind: [task for task in tasks if task.job_kind == job_kind] for job_kind in plan.job_kinds
    }
    return {
        job_kind: ([records.known[task] for task in tasks if task in records.known], len(tasks))
        for job_kind, tasks in of_job_kind.items()
    }


@dataclass
class Lines:
    """Progress as one line per event."""

    plan: Plan
    stream: TextIO
    is_timed: bool = True
    """Whether the time is written before each line; a log has it already."""
    _spoken: float = field(default_factory=time.monotonic)
    """Monotonic time of the last line."""

    def progress(self, frontier: Frontier, records: Records, tasks: tuple[Task, ...]) -> None:
        """Report how far the iteration is, once in a while: for short ones rows and notes say enough."""
        before = max(frontier.updated, self.plan.start)
        quiet = _QUIET_SECONDS if before == self.plan.start else _QUIET_SECONDS_LATER
        if before < self.plan.iterations and time.monotonic() - self._spoken > quiet:
            found = done_in(self.plan, records, before + 1)
            stages = (f"{name} {len(done)}/{total}" for name, (done, total) in found.items() if total)
            self._write(f"iteration {before + 1}/{self.plan.iterations} so far: {', '.join(stages)}")

    def row(self, row: Row) -> None:
        self.note(describe_row(row, self.plan.iterations))

    def note(self, text: str) -> None:
        self._write("\n".join(map(printable, text.splitlines())))

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""

    def _write(self, text: str) -> None:
        self._spoken = time.monotonic()
        clock = time.strftime("%H:%M:%S ") if self.is_timed else ""
        print(f"{clock}{text}", file=self.stream, flush=True)


def speed_of(done: Sequence[Record]) -> str:
    """Return seconds from first start to last end, and tokens per second where tokens were counted."""
    if not done:
        return ""
    wall = max(r.ended for r in done) - min(r.started for r in done)
    tokens = sum(r.metrics.get("response_tokens", 0.0) for r in done)
    return f"{wall:.1f} s" + (f"  {tokens / wall:,.0f} tokens/s" if tokens and wall > 0 else "")


@dataclass
class Bars(Lines):
    """Lines, and a bar per stage and pool: shards done and tokens per second of the current iteration."""

    _progress: "Progress" = field(init=False)
    _bars: dict[str, "TaskID"] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=self.stream, soft_wrap=True)
        columns = (
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} shards  {task.fields[speed]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=2)
        self._progress.start()
        totals = Counter(task.job_kind for task in self.plan.tasks(self.plan.start + 1))
        for stage in self.plan.job_kinds:
            self._bars[stage] = self._progress.add_task(stage, total=totals[stage], speed="")

    def progress(self, frontier: Frontier, records: Records, tasks: tuple[Task, ...]) -> None:
        iteration = max(frontier.updated, self.plan.start) + 1
        if iteration > self.plan.iterations:
            return  # only evaluation is left: the bars stay as the last iteration left them
        for stage, (done, _) in done_in(self.plan, records, iteration).items():
            text, speed = f"{iteration}/{self.plan.iterations} {stage}", speed_of(done)
            self._progress.update(self._bars[stage], description=text, completed=len(done), speed=speed)

    def _write(self, text: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(f"{time.strftime('%H:%M:%S')} {text}"))

    def close(self) -> None:
        self._progress.stop()
