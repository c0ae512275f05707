"""What the starts of workers cost, in words, and rules about them. Pure."""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from pipeline.config.scheduler import key_of
from pipeline.metrics.advice_input import MIN_ROWS, Advice, AdviceInput, Findings, Rule, Severity
from pipeline.run.tasks import is_sharded
from pipeline.text import duration
from pipeline.workers.beats import Reason
from pipeline.workers.summary import WorkersOf

_FEWEST, _SHARE = 5, 0.1
"""Starts without a task, and their share of all, above which it is worth changing something: at the end of a
run, or where the run goes back, some are normal."""
_WORTH_SECONDS = 60.0
"""Seconds of start-up from which on they are worth a line if nothing else is: each stage starts up once."""
_COMES_BACK = (Reason.NEEDED, Reason.FAR, Reason.LONG)
"""Reasons after which another worker starts in the place of the one that left."""


class Change(StrEnum):
    """Keys of a stage that say how often its workers start, by their last part."""

    PARALLEL = "array_parallelism"
    EARLY = "start_early"
    LINGER = "linger"
    TIME = "time"
    PARTITION = "partition"


_CHANGES: Mapping[str, Change] = {
    Reason.NEEDED: Change.PARALLEL,
    Reason.DONE: Change.PARALLEL,
    Reason.FAR: Change.EARLY,
    Reason.LONG: Change.LINGER,
    Reason.TIME: Change.TIME,
    Reason.WARNED: Change.PARTITION,
}
"""What to change where workers leave without a task, by why they do."""
_OF_ONE_TASK: Mapping[str, Change] = {Reason.NEEDED: Change.PARTITION, Reason.DONE: Change.EARLY}
"""The same of stages that have one task in an iteration, where it differs."""
_REMEDIES: Mapping[Change, str] = {
    Change.PARALLEL: "lower {key}.array_parallelism to as many as find a place at once, or give the stage a "
    "{key}.partition of its own",
    Change.EARLY: "set {key}.start_early=false: workers come before there is work for them",
    Change.LINGER: "raise {key}.linger, so that workers that have started wait for their input",
    Change.TIME: "raise {key}.time, or set {key}.task_time: no task fits into what is left of their time",
    Change.PARTITION: "name another {key}.partition, which has places for it and does not preempt",
}


def starts_in_words(workers: WorkersOf) -> str:
    """Return a phrase like ``reward: 38 of 60 starts did no task, 41 evicted; start-up 45 s, work 40 s``."""
    spent = workers.spent
    return f"{_counts(workers)}; start-up {duration(spent.startup)}, work {duration(spent.busy)}"


def _counts(workers: WorkersOf) -> str:
    last, count = "the last " * workers.is_cut, workers.starts
    evicted = f", {workers.evicted} evicted" if workers.evicted else ""
    idle = f"{workers.without_task} of {last}{count} start{'s' * (count != 1)} did no task"
    return f"{workers.job_kind}: {idle}{evicted}"


def costs_much(workers: WorkersOf) -> bool:
    """Whether starts are worth a line: some did no task, made place, or all took much more than the work."""
    startup, busy = workers.spent.startup, workers.spent.busy
    return bool(workers.without_task or workers.evicted) or startup > max(busy, _WORTH_SECONDS)


def key_to_change(workers: WorkersOf) -> str | None:
    """Return the key of the configuration to change, such as ``scheduler.rollout.linger``; None for none."""
    found = None
    if has_empty_starts(workers):
        found = _main_change(workers)
    elif has_many_starts(workers):
        found = _against_many(workers)
    return f"{key_of(workers.job_kind)}.{found}" if found else None


def has_empty_starts(workers: WorkersOf) -> bool:
    """Whether so many starts did no task that something should change."""
    return workers.without_task >= _FEWEST and workers.without_task > _SHARE * workers.starts


def has_many_starts(workers: WorkersOf) -> bool:
    """Whether workers start up for longer than they work, and do so since they leave and come back."""
    back = sum(workers.reasons.get(reason, 0) for reason in _COMES_BACK)
    return back >= _FEWEST and workers.spent.startup > workers.spent.busy


def _main_change(workers: WorkersOf) -> Change | None:
    """Return what most of the starts without a task ask for."""
    known = _CHANGES if is_sharded(workers.job_kind) else {**_CHANGES, **_OF_ONE_TASK}
    changes: Counter[Change] = Counter()
    for reason, count in workers.without_task_reasons.items():
        if change := known.get(reason):
            changes[change] += count
    return changes.most_common(1)[0][0] if changes else None


def _against_many(workers: WorkersOf) -> Change:
    """Return what keeps workers from leaving: a place of their own, or waiting for longer."""
    waited = sum(workers.reasons.get(reason, 0) for reason in (Reason.FAR, Reason.LONG))
    return Change.PARTITION if workers.evicted >= waited else Change.LINGER


def empty_starts(evidence: AdviceInput) -> Findings:
    """Detect workers that start up, do no task, and leave."""
    for one in _long_enough(evidence):
        if has_empty_starts(one):
            key, change = key_of(one.job_kind), _main_change(one)
            remedy = _REMEDIES[change].format(key=key) if change else "see why: slurm-ppo logs RUN --failed"
            title = f"many starts of {one.job_kind} did no task"
            yield Advice(Severity.WARNING, Rule.EMPTY_STARTS, title, starts_in_words(one), remedy)


def many_starts(evidence: AdviceInput) -> Findings:
    """Detect workers that come and go so often that they start up for longer than they work."""
    for one in _long_enough(evidence):
        if has_many_starts(one):
            key = key_of(one.job_kind)
            more = (
                f"give the stage a {key}.partition of its own, or more places where it is"
                if _against_many(one) is Change.PARTITION
                else f"raise {key}.linger and scheduler.linger_max, so that workers stay"
            )
            remedy = f"{more}; or give each start more work: raise data.prompts_per_iteration"
            title = f"workers of {one.job_kind} start up for longer than they work"
            yield Advice(Severity.WARNING, Rule.MANY_STARTS, title, starts_in_words(one), remedy)


def _long_enough(evidence: AdviceInput) -> list[WorkersOf]:
    """Return the workers of a run that is long enough for advice."""
    return list(evidence.workers) if len(evidence.trained) >= MIN_ROWS else []


START_RULES = (empty_starts, many_starts)
