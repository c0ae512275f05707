"""How the jobs of a run are shown to a person, in 80 columns. Pure: data in, lines out."""

import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipeline.metrics.terminal import Row
from pipeline.text import MISSING, duration, number, shortened

if TYPE_CHECKING:  # a run of this machine needs nothing of Slurm's
    from pipeline.status.slurm import DriverJob, SlurmStatus, StageProgress

_WIDTH = 80
_TITLES = ("iter", "stage", "done", "running", "waiting", "failed", "waited", "ran", "again")
_WIDTHS = (4, 10, 8, 9, 9, 8, 13, 13, 6)
_INDENT = " " * 6
_MOST_NAMED = 4


def describe_slurm(status: "SlurmStatus", state: str) -> list[str]:
    """Return lines on the queue, the iterations at hand, driver jobs and the estimate."""
    lines = list(_queue_lines(status, state))
    if state != "complete" and status.stages:
        lines += ["", _row(_TITLES)]
        for stage in status.stages:
            lines += [_row(_cells(stage)), *_details(stage)]
        lines.append("")
    lines += _driver_lines(status, state)
    return lines


def _queue_lines(status: "SlurmStatus", state: str) -> Iterator[str]:
    if state == "complete":
        return
    if status.unanswered:
        yield from wrapped(f"Slurm does not answer, so this is what the disk knows: {status.unanswered}")
    elif state == "stopped":
        yield from wrapped("nothing of this run is in Slurm's queue, and it is not complete")
    elif state == "running" or status.jobs_running + status.jobs_waiting:
        yield f"in the queue: {status.jobs_running} running, {status.jobs_waiting} waiting"
    if state == "running":
        yield _estimate(status.finish)


def _estimate(finish: float | None) -> str:
    if finish is None:
        return "estimated finish: known once an iteration is done"
    when = f"estimated finish: {time.strftime('%Y-%m-%d %H:%M', time.localtime(finish))}"
    left = finish - time.time()
    return f"{when}, in {duration(left)}" if left > 0 else f"{when}, {duration(-left)} ago: it is late"


def _cells(stage: "StageProgress") -> tuple[str, ...]:
    return (
        str(stage.iteration),
        shortened(stage.stage, _WIDTHS[1] - 1),
        f"{stage.done}/{stage.total}",
        _count(stage.running),
        _count(stage.waiting),
        _count(stage.failed),
        _time(stage.queue_seconds),
        _time(stage.run_seconds),
        _count(stage.resubmitted + stage.requeued),
    )


def _count(number: int) -> str:
    return str(number) if number else MISSING


def _time(seconds: float | None) -> str:
    return MISSING if seconds is None else duration(seconds)


def _row(cells: Sequence[str]) -> str:
    iteration, stage, *others = cells
    numbers = (cell.rjust(width) for cell, width in zip(others, _WIDTHS[2:], strict=True))
    return f"{iteration.rjust(_WIDTHS[0])} {stage.ljust(_WIDTHS[1] - 1)}{''.join(numbers)}"


def _details(stage: "StageProgress") -> list[str]:
    """Describe a stage: its whole name if it was cut; which jobs, where, why they wait; further attempts."""
    parts = [stage.stage] if len(stage.stage) >= _WIDTHS[1] else []
    parts += job_details(stage)
    return wrapped("; ".join(parts), _INDENT) if parts else []


def job_details(stage: "StageProgress") -> list[str]:
    """List which jobs, where, why they wait, how often they were tried again; empty if nothing is known."""
    parts = []
    if stage.jobs:
        parts.append(f"job {_some(stage.jobs)}" + (f" on {_some(stage.nodes)}" if stage.nodes else ""))
    if stage.reason:
        parts.append(stage.reason)
    if stage.resubmitted or stage.requeued:
        told = ((stage.resubmitted, "submitted again"), (stage.requeued, "requeued by Slurm"))
        again = " and ".join(f"{number} {words}" for number, words in told if number)
        parts.append(f"{stage.attempts} attempts, {again}")
    return parts


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _driver_lines(status: "SlurmStatus", state: str) -> Iterator[str]:
    if state != "running":
        return
    if not status.drivers:
        yield from wrapped(
            "no driver job is in the queue: what is queued will be done, and then nothing follows"
        )
        return
    yield from wrapped(f"driver jobs: {', '.join(map(_driver, status.drivers))}", subsequent=_INDENT)


def _driver(driver: "DriverJob") -> str:
    if driver.is_running:
        return f"{driver.job} at work"
    return (
        f"{driver.job} after iteration {driver.iteration}"
        if driver.iteration
        else f"{driver.job} by the clock"
    )


def wrapped(text: str, indent: str = "", subsequent: str | None = None) -> list[str]:
    """Wrap a text into lines of 80 columns; words, such as paths, are never broken."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if subsequent is None else subsequent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def describe_row(row: Row, num_iterations: int) -> str:
    """Describe one iteration in one line."""
    parts = [f"iteration {row['iteration']:.0f}/{num_iterations}", f"reward {row['reward/mean']:+.3f}"]
    if "objective/kl" in row:
        parts.append(f"KL {number(row['objective/kl'], 3)}")
    if "evaluate/reward" in row:
        parts.append(f"held-out {row['evaluate/reward']:+.3f}")
    parts.append(f"length {row['response_length/mean']:.1f}")
    parts.append(f"{row['seconds/iteration']:.1f} s, {duration(row['seconds/remaining'])} left")
    return "  ".join(parts)
