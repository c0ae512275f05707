"""Dry run: the batch scripts that ``submit`` would submit next. Runs nothing.

Dependencies name jobs by placeholders such as JOB-1-rollout.
"""

from collections.abc import Iterator

from pipeline.config.job_kinds import GUARD
from pipeline.config.scheduler import SlurmConfig
from pipeline.executors.slurm.arrays import array_of, driver_submission, in_order, stage_submissions
from pipeline.executors.slurm.dependencies import (
    ArrayElement,
    dependency_of,
    elements_of,
    watch_expression,
    watches,
)
from pipeline.executors.slurm.resources import Escalation
from pipeline.executors.slurm.watchdogs import WATCHDOGS
from pipeline.orchestrate.reconcile import Launch
from pipeline.run.directory import Run, is_run, slurm_settings
from pipeline.run.records import Records, find_frontier
from pipeline.run.submissions import Ledger, Submission
from pipeline.run.tasks import Task
from slurm.submission import render

_CHUNK_SIZE = 1000
"""Elements of an array with Slurm's default MaxArraySize; a real submission asks the cluster."""


def scripts(run: Run) -> str:
    """Return every script of the next submission, each under its file's name.

    Raises:
        RunError: the run is not one on Slurm.
    """
    ledger = Ledger(run.paths)
    parts = [f"### {ledger.script(s)}\n{text}" for s, text in _rendered(run, ledger)]
    return "\n".join([*parts, "This was a dry run: nothing was submitted."])


def _rendered(run: Run, ledger: Ledger) -> Iterator[tuple[Submission, str]]:
    config = slurm_settings(run)
    tasks, committed = _outstanding(run)
    carriers: dict[Task, ArrayElement] = {}
    for group in in_order([Launch(task, "") for task in tasks]):
        number = ledger.next_number(group[0].iteration, group[0].job_kind)
        for submission in stage_submissions(run, 1, number, group, _CHUNK_SIZE):
            waits = [
                (task, index, elements_of(run.plan, task, committed.__contains__, carriers) or ())
                for index, task in submission.tasks()
            ]
            dependency, _ = dependency_of(waits, config.dependency)
            yield (
                submission,
                render(array_of(run, config, submission, Escalation(), None, dependency)),
            )
            job = f"JOB-{submission.iteration}-{submission.job_kind}"
            carriers |= {task: ArrayElement(job, index) for index, task in submission.tasks()}
    for watch in watches((task, carrier.array) for task, carrier in carriers.items()):
        expression = watch_expression(watch.last, watch.earlier)
        number = ledger.next_number(watch.iteration, watch.job_kind)
        driver = driver_submission(run, 1, watch.iteration, watch.job_kind, number)
        yield _driver(run, config, driver, expression, "")
    for waiting in range(WATCHDOGS):
        guard = driver_submission(run, 1, 0, GUARD, ledger.next_number(0, GUARD) + waiting)
        yield _driver(run, config, guard, "", f"now+{60 * config.check_minutes * (waiting + 1)}")


def _driver(
    run: Run, config: SlurmConfig, submission: Submission, dependency: str, begin: str
) -> tuple[Submission, str]:
    array = array_of(run, config, submission, Escalation(), None, dependency, begin)
    return submission, render(array)


def _outstanding(run: Run) -> tuple[list[Task], set[Task]]:
    """Return the uncommitted tasks of the window, and the committed tasks of it and its inputs."""
    config = slurm_settings(run)
    if not is_run(run.paths.root):
        return list(run.plan.window(-1, 0, config.horizon)), set()
    frontier = find_frontier(run.plan, run.paths)
    window = run.plan.window(frontier.updated, frontier.evaluated, config.horizon)
    records = Records(run.paths)
    records.refresh([*window, *(source for task in window for source in run.plan.inputs(task))])
    return [task for task in window if task not in records.known], set(records.known)
