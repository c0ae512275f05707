"""How a status is shown to a person, in 80 columns. Pure: data in, lines out."""

import shlex
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.metrics.advice import worst
from pipeline.metrics.starts import costs_much, parts_of_starts
from pipeline.metrics.terminal import Row
from pipeline.run.retention import in_words
from pipeline.run.tasks import parse_task
from pipeline.status.trainer_state import doubtful_replay
from pipeline.status.trainer_state import in_words as in_words_of_state
from pipeline.status.whose import in_words as whose_in_words
from pipeline.status.whose import next_step
from pipeline.text import MISSING, duration, number, printable, shortened

if TYPE_CHECKING:  # a run of this machine needs nothing of Slurm's
    from pipeline.status.lanes import StageProgress
    from pipeline.status.slurm import DriverJob, SlurmStatus
    from pipeline.status.state import Status
    from pipeline.workers.summary import WorkersOf

_WIDTH = 80
_ROW = "{:>4} {:<9}{:>8}{:>9}{:>9}{:>8}{:>13}{:>13}{:>6}"
_TITLES = ("iter", "stage", "done", "running", "waiting", "failed", "waited", "ran", "again")
_LONGEST_NAME = 9
_INDENT = " " * 6
_MOST_NAMED = 4
_NEXT = {
    "complete": "report {run}",
    "unknown": "status {run}",
    **dict.fromkeys(("incomplete", "failed", "cancelled", "paused", "stopped"), "resume {run}"),
}


_OF_A_PAUSE = "nothing is submitted until you resume the run; to end it for good: slurm-ppo cancel"
_OF_ANOTHERS_PAUSE = "nothing is submitted until it is resumed"


def clock(seconds: float) -> str:
    """Write a unix time as time of day."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def moment(seconds: float) -> str:
    """Write a unix time as date and time of day."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def describe(status: "Status") -> str:
    """Describe a status for a person, ending in the next command."""
    lines = list(_first_lines(status))
    if status.driver:
        lines.append(status.driver)
    elif status.stopped and not status.slurm and status.state != "complete":
        lines.append(f"last driver: {status.stopped}")
    if status.slurm:
        until = _OF_ANOTHERS_PAUSE if status.slurm.whose else f"{_OF_A_PAUSE} {shlex.quote(status.run)}"
        lines += wrapped(f"{status.paused}; {until}", "", _INDENT) if status.paused else []
        lines += [*_whose(status), *describe_slurm(status.slurm, status.state)]
        lines += [line for text in status.held_back for line in wrapped(printable(text), "", _INDENT)]
        lines += [*describe_workers(status.workers), *describe_starts(status.workers)]
    elif status.state != "complete":
        stages = ", ".join(f"{s.stage} {s.done}/{s.total}" for s in status.current)
        lines += wrapped(f"at hand: {stages}")
    if status.kept:
        best = "" if status.best is None else f", and the best policy ({status.best})"
        lines += wrapped(f"kept: iteration {in_words(status.kept)}{best}")
    if status.benchmarks_told:
        lines += wrapped(status.benchmarks_told)
    if status.rows_missing and status.iterations_done == status.iterations:
        lines += wrapped(f"every update is committed; rows not written yet: {status.rows_missing}")
    if status.missing_state:
        lines += wrapped(in_words_of_state(status.missing_state, status.iterations))
    if replay := doubtful_replay(status.events):
        lines += wrapped(printable(replay))
    for trouble in status.troubles:
        lines += wrapped(trouble)
    lines += _last_lines(status)
    lines += [f"{advice.severity}: {advice.title} ({advice.rule})" for advice in worst(status.advice)]
    if status.cost:
        from pipeline.metrics.costs import describe_costs

        lines += ["", describe_costs(status.cost)]
    return "\n".join([*lines, *_next_commands(status)])


def standing(status: "Status") -> str:
    """Return a phrase like ``runs/first: running, 3/100 iterations``."""
    return f"{status.run}: {status.state}, {status.iterations_done}/{status.iterations} iterations"


def _whose(status: "Status") -> list[str]:
    """Return lines on whose the run is, where another user looks, or from another cluster."""
    whose = status.slurm.whose if status.slurm else None
    if whose is None or status.state == "complete":
        return []
    return wrapped(whose_in_words(whose, status.state, status.time), "", _INDENT)


def _first_lines(status: "Status") -> Iterator[str]:
    line = standing(status)
    if status.evaluations:
        line += f", {status.evaluations_done}/{status.evaluations} evaluations"
    yield f"{line}, forked from {status.forked_from}" if status.forked_from else line
    if status.copy_of:
        yield from wrapped(
            f"a copy of {status.copy_of}, whose jobs are not shown here; if it goes on, it does so as a run "
            "of its own"
        )


def _last_lines(status: "Status") -> Iterator[str]:
    """Yield the last row, and the last failure of a run that is not complete."""
    if row := status.last_row:
        told = (
            ("reward/mean", "reward {:+.4f}", float),
            ("seconds/elapsed", "{} elapsed", duration),
            ("seconds/remaining", "{} remaining", duration),
        )
        parts = [text.format(show(row[name])) for name, text, show in told if name in row]
        yield ", ".join([f"last row: iteration {row.get('iteration')}", *parts])
    if (failure := status.last_failure) and status.state != "complete":
        said = printable(failure["message"])
        yield f"last failure: {moment(failure['time'])} {attempt_in_words(failure)}: {said}"


def attempt_in_words(event: Mapping[str, Any]) -> str:
    """Return task, number and place of a failed attempt, from its event."""
    words = (("job", event.get("job")), ("on", event.get("node")))
    place = " ".join(f"{word} {name}" for word, name in words if name)
    attempt = f"attempt {event['attempt']}" + (f" ({place})" if place else "")
    return f"{parse_task(event['task'])}, {attempt}"


def _next_commands(status: "Status") -> Iterator[str]:
    run = shlex.quote(status.run)
    if status.state == "failed":
        yield f"why:  slurm-ppo logs {run} --failed"
    whose = status.slurm.whose if status.slurm else None
    if whose and (step := next_step(whose, status.state, status.run)):
        yield f"next: {step}"
        return
    command = _NEXT.get(status.state) or ("logs {run} --follow" if status.slurm else "report {run}")
    yield f"next: slurm-ppo {command.format(run=run)}"


def describe_slurm(status: "SlurmStatus", state: str) -> list[str]:
    """Return lines on the queue, the iterations at hand, driver jobs and the estimate."""
    lines = list(_queue_lines(status, state))
    if state != "complete" and status.stages:
        lines += ["", _ROW.format(*_TITLES)]
        for stage in status.stages:
            details = job_details(stage, len(stage.stage) > _LONGEST_NAME)
            lines += [_row(stage), *wrapped("; ".join(details), _INDENT)]
        lines.append("")
    if is_hidden(status):
        return lines
    if state == "running" and not status.drivers:
        lines += wrapped(
            "no driver job is in the queue: what is queued will be done, and then nothing follows"
        )
    elif state == "running":
        drivers = ", ".join(map(describe_driver, status.drivers))
        lines += wrapped(f"driver jobs: {drivers}", subsequent=_INDENT)
    return lines


def is_hidden(status: "SlurmStatus") -> bool:
    """Whether the jobs are somebody else's, and Slurm does not show them here."""
    return status.whose is not None and status.whose.is_hidden


def describe_workers(workers: Sequence["WorkersOf"]) -> list[str]:
    """Return a line for each job kind that has workers now."""
    return [
        line
        for one in workers
        if one.live + one.silent
        for line in wrapped(workers_in_words(one), "", _INDENT)
    ]


def describe_starts(workers: Sequence["WorkersOf"]) -> list[str]:
    """Return lines on each job kind whose starts cost much, or made place."""
    return [line for one in workers if costs_much(one) for line in packed(parts_of_starts(one))]


def packed(parts: Sequence[str], width: int = _WIDTH, indent: str = _INDENT) -> list[str]:
    """Join parts by semicolons, on as many lines as they need; none is broken."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"; {part}"
        else:
            lines.append(indent * bool(lines) + part)
    return lines


def workers_in_words(workers: "WorkersOf") -> str:
    """Return a phrase like ``rollout 3 workers: 2 busy, 1 waiting for policy 7 (leaves 12:40)``."""
    count = workers.live + workers.silent
    waiting = f"{workers.waiting} waiting" + (f" for {workers.waits_for}" if workers.waits_for else "")
    if workers.until is not None:
        leaves = time.strftime("%H:%M", time.localtime(workers.until))
        waiting += f" (leaves {leaves})"
    told = (
        (workers.starting, f"{workers.starting} starting"),
        (workers.busy, f"{workers.busy} busy"),
        (workers.waiting, waiting),
        (workers.silent, f"{workers.silent} silent for 5 minutes or more"),
    )
    parts = ", ".join(words for number, words in told if number)
    return f"{workers.job_kind} {count} worker{'s' * (count != 1)}: {parts}"


def _queue_lines(status: "SlurmStatus", state: str) -> Iterator[str]:
    if state == "complete":
        return
    if status.unanswered:
        yield from wrapped(f"Slurm does not answer, so this is what the disk knows: {status.unanswered}")
    elif status.whose and (state == "stopped" or status.whose.is_hidden):
        pass  # said before, with whose they are
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


def _row(stage: "StageProgress") -> str:
    return _ROW.format(
        stage.iteration,
        shortened(stage.stage, _LONGEST_NAME),
        f"{stage.done}/{stage.total}",
        *(count or MISSING for count in (stage.running, stage.waiting, stage.failed)),
        *(time_or_dash(seconds) for seconds in (stage.queue_seconds, stage.run_seconds)),
        stage.resubmitted or MISSING,
    )


def time_or_dash(seconds: float | None) -> str:
    return MISSING if seconds is None else duration(seconds)


def job_details(stage: "StageProgress", is_cut: bool) -> list[str]:
    """List the whole name if it was cut, which jobs, where, why they wait, how often they were repeated."""
    parts = [stage.stage] if is_cut else []
    if stage.jobs:
        parts.append(f"job {_some(stage.jobs)}" + (f" on {_some(stage.nodes)}" if stage.nodes else ""))
    if stage.reason:
        parts.append(f"{stage.reason} ({stage.helps})" if stage.helps else stage.reason)
    if stage.resubmitted:
        parts.append(f"{stage.attempts} attempts, {stage.resubmitted} of them again")
    return parts


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def describe_driver(driver: "DriverJob") -> str:
    """Describe a driver job: at work, or what it waits for."""
    waits = "by the clock" if driver.is_timed else "when jobs end"
    return f"{driver.job} {'at work' if driver.is_running else waits}"


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
