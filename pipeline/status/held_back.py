"""Stages that could go on and have no job in the queue, as it takes no more of the run: what holds them back,
and until when. Pure."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.config.job_kinds import DRIVERS
from pipeline.config.scheduler import SlurmConfig
from pipeline.executors.slurm.fullness import standing_refusal
from pipeline.orchestrate.elements import most_elements
from pipeline.run.submissions import job_kind_of
from pipeline.run.tasks import Task
from pipeline.workers.summary import WorkersOf
from slurm.limits import ClusterLimits
from slurm.query import Element

_MOMENT = 10.0
"""Seconds that a pass and Slurm may take to see to a task whose input has just come."""


def held_back(
    ready: Mapping[Task, float],
    live: Sequence[Element],
    workers: Iterable[WorkersOf],
    why: str | None,
    now: float,
) -> Iterator[str]:
    """Yield a line for each job kind that has something to do and no job.

    Args:
        ready: tasks that nobody is at, whose inputs are committed, and since when (unix time).
        live: elements of the run that wait or run.
        why: why the queue takes no more, from :func:`why_full`; None where it does.
        now: unix time.
    """
    if why is None:
        return
    there = Counter(job_kind_of(element.name) for element in live)
    waiting: dict[str, Task] = {}
    for task in (task for task, since in ready.items() if now - since > _MOMENT):
        waiting.setdefault(task.job_kind, task)
    holders = _holders(there, {one.job_kind: one for one in workers})
    for job_kind, task in waiting.items():
        if not there[job_kind]:
            yield f"{job_kind} of iteration {task.iteration} cannot be submitted: {why}{holders}"


def why_full(
    config: SlurmConfig,
    limits: ClusterLimits | None,
    live: Sequence[Element],
    events: Sequence[Mapping[str, Any]],
) -> str | None:
    """Return why the queue takes no more of a run's jobs; None where nothing says so.

    Args:
        limits: those of the cluster, as passes know them; None where these are not kept.
        live: elements of the run that wait or run.
        events: the journal's end.
    """
    if refusal := standing_refusal(events):
        return str(refusal["message"])
    of_drivers = sum(job_kind_of(element.name) in DRIVERS for element in live)
    if limits is None:
        return None
    own_bound = config.max_submitted or limits.max_jobs // 2
    if len(live) - of_drivers < most_elements(own_bound, limits.max_submit, of_drivers):
        return None
    if limits.max_submit is not None and limits.max_submit - of_drivers <= own_bound:
        return f"you may have {limits.max_submit} jobs in the queue, driver jobs too (MaxSubmitJobs)"
    return f"the run may have {own_bound} jobs of stages in the queue (scheduler.max_submitted)"


def _holders(there: Counter[str], workers: Mapping[str, WorkersOf]) -> str:
    """Return who has the places, and how long those stay who have nothing to do."""
    found = []
    for job_kind, number in there.items():
        if job_kind in DRIVERS:
            continue
        idle = workers[job_kind].waiting if job_kind in workers else 0
        until = workers[job_kind].until if idle else None
        leaves = f", leave {time.strftime('%H:%M:%S', time.localtime(until))}" if until is not None else ""
        found.append(f"{job_kind} {number}" + (f" ({idle} with nothing to do{leaves})" if idle else ""))
    return f"; now there: {', '.join(found)}" if found else ""
