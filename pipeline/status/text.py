"""What a status says to a person: in words, for text, screen, lines and JSON; as text of 80 columns. Pure."""

import shlex
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pipeline.metrics.advice import worst
from pipeline.metrics.starts import costs_much, key_to_change, starts_in_words
from pipeline.metrics.terminal import Row
from pipeline.run.retention import in_words
from pipeline.run.tasks import parse_task
from pipeline.status.trainer_state import doubtful_replay
from pipeline.status.trainer_state import in_words as in_words_of_state
from pipeline.status.whose import in_words as whose_in_words
from pipeline.status.whose import next_step
from pipeline.text import MISSING, clock, duration, moment, number, printable, shortened, table

if TYPE_CHECKING:  # a run of this machine needs nothing of Slurm's
    from pipeline.status.lanes import Lane, StageProgress
    from pipeline.status.slurm import DriverJob, SlurmStatus
    from pipeline.status.state import Status
    from pipeline.workers.summary import WorkersOf

_WIDTH = 80
_TITLES = ("iter", "stage", "done", "running", "waiting", "failed", "waited", "ran", "again")
_LONGEST_NAME = 9
_INDENT = " " * 6
_MOST_NAMED = 4
_NEXT = {
    "complete": "report {run}",
    "unknown": "status {run}",
    **dict.fromkeys(("incomplete", "failed", "cancelled", "paused", "stopped"), "resume {run}"),
}


_OF_A_PAUSE = "nothing is submitted until you resume the run; to end it: slurm-ppo cancel"
_OF_ANOTHERS_PAUSE = "nothing is submitted until it is resumed"
_NO_DRIVER = "no driver job is in the queue: what is queued will run, and nothing after it"


class About(StrEnum):
    """What a status says something about."""

    STATE = "state"
    COPY = "copy"
    SETTINGS = "settings"
    DRIVER = "driver"
    AWAITED = "awaited"
    PAUSE = "pause"
    OWNER = "owner"
    SILENCE = "silence"
    QUEUE = "queue"
    FINISH = "finish"
    DRIVERS = "driver_jobs"
    HELD = "held_back"
    BUDGET = "smaller_budgets"
    WORKERS = "workers"
    STARTS = "starts"
    FEW_STARTS = "few_starts"
    """Starts of workers that cost something, and not so much that a key should change."""
    KEPT = "kept"
    BENCHMARKS = "benchmarks"
    ROWS = "rows"
    TRAINER = "trainer"
    REPLAY = "replay"
    TROUBLE = "trouble"
    WAY_ON = "way_on"
    LAST_ROW = "last_row"
    LAST_FAILURE = "last_failure"
    ADVICE = "advice"


_ONLY_SHOWN = ("missing_state", "time", "created", "awaited", "answered", "finish", "lanes", "rows", "events")
"""Attributes of a status that are not in its JSON."""
_WHOLE = (About.STATE, About.DRIVER, About.WAY_ON, About.LAST_FAILURE)


@dataclass(frozen=True)
class Sentence:
    """One thing that a status says, in words. Text, screen, lines and JSON show these."""

    about: About
    text: str
    key: object = None
    """What tells it from another one about the same: while that stays, it is no news."""

    @property
    def news(self) -> tuple[object, ...]:
        """What is the same in two looks where nothing is new."""
        return self.about, self.key or self.text


def said(status: "Status", findings: int = 2) -> list[Sentence]:
    """Say where a run stands, most wanted first.

    Args:
        findings: how many of the advice rules' findings, of those that are more than notes.
    """
    return [*_said_now(status), *_said_of_results(status, findings)]


def _said_now(status: "Status") -> list[Sentence]:
    return _printable(_of_state(status), _of_jobs(status), _of_workers(status))


def _said_of_results(status: "Status", findings: int = 2) -> list[Sentence]:
    return _printable(_of_files(status), _of_rows(status), _of_advice(status, findings))


def _printable(*parts: Iterable[Sentence]) -> list[Sentence]:
    return [replace(one, text=printable(one.text)) for part in parts for one in part]


def standing(status: "Status") -> str:
    """Return a phrase like ``runs/first: running, 3/100 iterations``."""
    return f"{status.run}: {status.state}, {progress(status)}"


def progress(status: "Status") -> str:
    """Return a phrase like ``3/100 iterations, 1/11 evaluations``."""
    parts = [f"{status.iterations_done}/{status.iterations} iterations"]
    if status.evaluations:
        parts.append(f"{status.evaluations_done}/{status.evaluations} evaluations")
    return ", ".join([*parts, *([f"forked from {status.forked_from}"] if status.forked_from else [])])


def _of_state(status: "Status") -> Iterator[Sentence]:
    yield Sentence(About.STATE, standing(status), status.state)
    if status.copy_of:
        message = "whose jobs are not shown here; if it goes on, it does so as a run of its own"
        yield Sentence(About.COPY, f"a copy of {status.copy_of}, {message}")
    if status.settings_changed:
        yield Sentence(About.SETTINGS, status.settings_changed)
    if status.awaited:
        yield Sentence(About.AWAITED, f"waiting: {status.awaited}", "awaited")
    elif status.driver:
        yield Sentence(About.DRIVER, status.driver)
    elif status.stopped and not status.slurm and status.state != "complete":
        yield Sentence(About.DRIVER, f"last driver: {status.stopped}")


def _of_jobs(status: "Status") -> Iterator[Sentence]:
    slurm, whose = status.slurm, status.slurm.whose if status.slurm else None
    if slurm and status.paused:
        until = _OF_ANOTHERS_PAUSE if whose else f"{_OF_A_PAUSE} {shlex.quote(status.run)}"
        yield Sentence(About.PAUSE, f"{status.paused}; {until}")
    if whose and status.state != "complete":
        yield Sentence(About.OWNER, whose_in_words(whose, status.state, status.time), "whose")
    if slurm and status.state != "complete":
        yield from _of_queue(status, slurm)
    if status.state == "running":
        yield Sentence(About.FINISH, _estimate(status.finish, status.time))
    if slurm and status.state == "running" and not is_hidden(slurm):
        drivers = ", ".join(map(_driver, slurm.drivers))
        yield Sentence(About.DRIVERS, f"driver jobs: {drivers}" if drivers else _NO_DRIVER)
    yield from (Sentence(About.HELD, text) for text in status.held_back)
    if status.state != "complete":
        yield from (Sentence(About.BUDGET, one.words) for one in status.smaller_budgets)


def _of_queue(status: "Status", slurm: "SlurmStatus") -> Iterator[Sentence]:
    if slurm.unanswered:
        last = f" (last {clock(status.answered)})" if status.answered else ""
        message = f"Slurm does not answer{last}, so this is from files alone"
        yield Sentence(About.SILENCE, f"{message}: {slurm.unanswered}", slurm.unanswered)
    if is_hidden(slurm) or (slurm.whose and status.state == "stopped"):
        return  # said with whose they are
    if status.state == "running" or slurm.jobs_running + slurm.jobs_waiting:
        there = f"in the queue: {slurm.jobs_running} running, {slurm.jobs_waiting} waiting"
        yield Sentence(About.QUEUE, there)
    elif status.state == "stopped":
        yield Sentence(About.QUEUE, "nothing of this run is in Slurm's queue, and it is not complete")
    elif status.state == "unknown" and not slurm.unanswered:
        yield Sentence(About.QUEUE, "asking Slurm ...")


def _of_workers(status: "Status") -> Iterator[Sentence]:
    for one in status.workers:
        if one.live + one.silent:
            key = (one.job_kind, one.starting, one.busy, one.waiting, one.silent, one.waits_for)
            yield Sentence(About.WORKERS, workers_in_words(one), key)
    for one in filter(costs_much, status.workers):
        change = key_to_change(one)
        words = f"{starts_in_words(one)}; change {change}" if change else starts_in_words(one)
        yield Sentence(About.STARTS if change else About.FEW_STARTS, words)


def _of_files(status: "Status") -> Iterator[Sentence]:
    """Say what is kept, is missing, or does not work."""
    if status.kept:
        best = "" if status.best is None else f", and the best policy ({status.best})"
        yield Sentence(About.KEPT, f"kept: iteration {in_words(status.kept)}{best}")
    if status.benchmarks_told:
        yield Sentence(About.BENCHMARKS, status.benchmarks_told)
    if status.rows_missing and status.iterations_done == status.iterations:
        message = f"every update is committed; rows not written yet: {status.rows_missing}"
        yield Sentence(About.ROWS, message)
    if status.missing_state:
        yield Sentence(About.TRAINER, in_words_of_state(status.missing_state, status.iterations))
    if replay := doubtful_replay(status.events):
        yield Sentence(About.REPLAY, replay)
    yield from (Sentence(About.TROUBLE, trouble) for trouble in status.troubles)
    yield from (Sentence(About.WAY_ON, way) for way in status.ways_on)


def _of_rows(status: "Status") -> Iterator[Sentence]:
    """Say what the last row says, and the last failure of a run that is not complete."""
    if row := status.last_row:
        told = (
            ("reward/mean", "reward {:+.4f}", float),
            ("seconds/elapsed", "{} elapsed", duration),
            ("seconds/remaining", "{} remaining", duration),
        )
        parts = [text.format(show(row[name])) for name, text, show in told if name in row]
        message = ", ".join([f"last row: iteration {row.get('iteration')}", *parts])
        yield Sentence(About.LAST_ROW, message)
    if (failure := status.last_failure) and status.state != "complete":
        where = f"{moment(failure['time'])} {attempt_in_words(failure)}"
        yield Sentence(About.LAST_FAILURE, f"last failure: {where}: {failure['message']}")
        if status.remedy and status.state == "failed":
            yield Sentence(About.LAST_FAILURE, f"go on {status.remedy}")


def _of_advice(status: "Status", findings: int) -> Iterator[Sentence]:
    for one in worst(status.advice, findings):
        message = f"{one.severity}: {one.title} ({one.rule}): {one.what}"
        yield Sentence(About.ADVICE, message, (one.rule, one.title))


def describe(status: "Status") -> str:
    """Describe a status for a person, ending in the next command."""
    lines = _lines(_said_now(status))
    if status.state != "complete" and status.lanes:
        lines += ["", *describe_lanes(status.lanes), ""]
    lines += _lines(_said_of_results(status))
    if status.cost:
        from pipeline.metrics.costs import describe_costs

        lines += ["", describe_costs(status.cost)]
    return "\n".join([*lines, *_next_commands(status)])


def to_json(status: "Status") -> dict[str, Any]:
    """Return stable keys and plain values, and what is said in words."""
    shown = asdict(replace(status, lanes=(), rows=(), events=()))
    words = [{"about": one.about, "text": one.text} for one in said(status, len(status.advice))]
    more = {"cost": status.cost.to_json() if status.cost else None, "said": words}
    return {key: value for key, value in shown.items() if key not in _ONLY_SHOWN} | more


def _lines(words: Iterable[Sentence]) -> list[str]:
    """Fold what is said, but for lines with a path or a message to be copied."""
    folded = ([w.text] if w.about in _WHOLE else wrapped(w.text, "", _INDENT) for w in words)
    return [line for lines in folded for line in lines]


def describe_lanes(lanes: "Sequence[Lane]") -> list[str]:
    """Return a line of titles, and for each lane one with its counts, then what is known of its jobs."""
    stages = [lane.progress for lane in lanes]
    titles, *rows = table([_TITLES, *map(_cells, stages)], left=2)
    lines = [titles]
    for stage, row in zip(stages, rows, strict=True):
        details = job_details(stage, len(stage.stage) > _LONGEST_NAME)
        lines += [row, *wrapped("; ".join(details), _INDENT)]
    return lines


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
    if status.state == "failed" and status.remedy:
        return  # said where the failure is; without the setting the run would fail again
    command = _NEXT.get(status.state) or ("logs {run} --follow" if status.slurm else "report {run}")
    yield f"next: slurm-ppo {command.format(run=run)}"


def is_hidden(status: "SlurmStatus") -> bool:
    """Whether the jobs are another user's, and Slurm does not show them here."""
    return status.whose is not None and status.whose.is_hidden


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


def _estimate(finish: float | None, now: float) -> str:
    if finish is None:
        return "estimated finish: known once an iteration is done"
    when = f"estimated finish: {time.strftime('%Y-%m-%d %H:%M', time.localtime(finish))}"
    left = finish - now
    return f"{when}, in {duration(left)}" if left > 0 else f"{when}, {duration(-left)} ago: it is late"


def _cells(stage: "StageProgress") -> list[str]:
    return [
        f"{stage.iteration:4d}",
        shortened(stage.stage, _LONGEST_NAME),
        f"{stage.done}/{stage.total}",
        *(str(count or MISSING) for count in (stage.running, stage.waiting, stage.failed)),
        *(time_or_dash(seconds) for seconds in (stage.queue_seconds, stage.run_seconds)),
        str(stage.resubmitted or MISSING),
    ]


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
        retries = "1 retry" if stage.resubmitted == 1 else f"{stage.resubmitted} retries"
        parts.append(f"{stage.attempts} attempts, {retries}")
    return parts


def lane_in_words(lane: "Lane") -> str:
    """Return a phrase like ``iteration 2 rollout: 3/8 done, 5 running``; empty for a lane that has not
    begun."""
    stage, (iteration, name) = lane.progress, lane.key
    counts = {"running": stage.running, "waiting": stage.waiting, "failed": stage.failed}
    parts = [f"{stage.done}/{stage.total} done"] if stage.done else []
    parts += [f"{count} {word}" for word, count in counts.items() if count]
    if not parts:
        return ""
    why = f"{stage.reason}; {stage.helps}" if stage.helps else stage.reason
    where = f"iteration {iteration} {name}" if iteration else name
    return f"{where}: {', '.join(parts)}" + (f" ({why})" if stage.waiting and why else "")


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _driver(driver: "DriverJob") -> str:
    """Describe a driver job: running, or what it waits for."""
    waits = "by the clock" if driver.is_timed else "when jobs end"
    return f"{driver.job} {'running' if driver.is_running else waits}"


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
