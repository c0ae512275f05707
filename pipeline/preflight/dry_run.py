"""Dry run: the batch scripts that ``submit`` would submit next. Runs nothing.

Dependencies name jobs by placeholders such as JOB-1-rollout. Where jobs are workers, each array is shown
that the iteration at hand gets, when its inputs are there or early; whoever lives by then goes on instead.
"""

from collections.abc import Iterable, Iterator, Mapping

from pipeline.config.job_kinds import DRIVER, GUARD
from pipeline.executors.slurm.arrays import array_of, driver_submission, in_order, stage_submissions
from pipeline.executors.slurm.crew import wanted_by
from pipeline.executors.slurm.dependencies import (
    ArrayElement,
    Watch,
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
_OF_WORKERS = """\
Jobs go on with the next task of their stage (scheduler.workers), and no array waits for another: each is
submitted when its input is there, or early, so that it has started by then."""


def scripts(run: Run) -> str:
    """Return every script of the next submission, each under its file's name. Raises RunError."""
    ledger = Ledger(run.paths)
    parts = [f"### {ledger.script(s)}\n{text}" for s, text in _rendered(run, ledger)]
    told = [_OF_WORKERS] if slurm_settings(run).has_workers else []
    return "\n".join([*parts, "This was a dry run: nothing was submitted.", *told])


def _rendered(run: Run, ledger: Ledger) -> Iterator[tuple[Submission, str]]:
    config = slurm_settings(run)
    tasks, committed = _outstanding(run, max(1, config.lookahead))
    carriers: dict[Task, ArrayElement] = {}
    wanted = wanted_by(config, run.plan) if config.has_workers else {}
    for group in in_order([Launch(task, "") for task in tasks]):
        number = ledger.next_number(group[0].iteration, group[0].job_kind)
        if config.has_workers:
            group = group[-wanted[group[0].job_kind] :]
        for submission in stage_submissions(run, 1, number, group, _CHUNK_SIZE, stays=config.has_workers):
            waits = [
                (task, index, elements_of(run.plan, task, committed.__contains__, carriers) or ())
                for index, task in submission.tasks()
            ]
            dependency = "" if config.has_workers else dependency_of(waits, config.dependency)[0]
            yield submission, render(array_of(run, config, submission, Escalation(), None, dependency))
            job = f"JOB-{submission.iteration}-{submission.job_kind}"
            carriers |= {task: ArrayElement(job, index) for index, task in submission.tasks()}
    for watch in _watches(carriers, config.has_workers):
        expression = watch_expression(watch.last, watch.earlier)
        number = ledger.next_number(watch.iteration, watch.job_kind)
        driver = driver_submission(run, 1, watch.iteration, watch.job_kind, number)
        yield driver, render(array_of(run, config, driver, Escalation(), None, expression))
    for waiting in range(WATCHDOGS):
        guard = driver_submission(run, 1, 0, GUARD, ledger.next_number(0, GUARD) + waiting)
        begin = f"now+{60 * config.check_minutes * (waiting + 1)}"
        yield guard, render(array_of(run, config, guard, Escalation(), None, begin=begin))


def _watches(carriers: Mapping[Task, ArrayElement], has_workers: bool) -> Iterable[Watch]:
    """Return what driver jobs wait for; with workers, one for the end of any array."""
    if not has_workers:
        return watches((task, carrier.array) for task, carrier in carriers.items())
    return [Watch(0, DRIVER, tuple(dict.fromkeys(carrier.array for carrier in carriers.values())), ())]


def _outstanding(run: Run, horizon: int) -> tuple[list[Task], set[Task]]:
    """Return the uncommitted tasks of the window, and the committed tasks of it and its inputs."""
    if not is_run(run.paths.root):
        return list(run.plan.window(-1, 0, horizon)), set()
    frontier = find_frontier(run.plan, run.paths)
    window = frontier.window(run.plan, horizon)
    records = Records(run.paths)
    records.refresh([*window, *(source for task in window for source in run.plan.inputs(task))])
    return [task for task in window if task not in records.known], set(records.known)
