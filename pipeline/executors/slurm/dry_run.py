"""Dry run: the batch scripts that ``submit`` would submit next. Runs nothing.

Each array is shown that the iteration at hand gets, when its inputs are there or early; workers that live by
then go on instead. What a driver job waits for is named by placeholders such as JOB-1-rollout.
"""

from collections.abc import Iterator, Sequence

from pipeline.config.job_kinds import DRIVER, GUARD
from pipeline.decide.escalating import Escalation
from pipeline.executors.slurm.arrays import array_of, driver_submission, stage_submissions
from pipeline.executors.slurm.crew import wanted_by
from pipeline.executors.slurm.watchdogs import WATCHDOGS, watch_expression
from pipeline.run.directory import Run, is_run, slurm_settings
from pipeline.run.records import Records, find_frontier
from pipeline.run.submissions import Ledger, Submission
from pipeline.run.tasks import Task
from slurm.submission import render

_CHUNK_SIZE = 1000
"""Elements of an array with Slurm's default MaxArraySize; a real submission asks the cluster."""
_CLOSING = """\
This was a dry run: nothing was submitted.
No array waits for another: each is submitted when its input is there, or early, so that it has started by
then (scheduler.STAGE.start_early); whose jobs are there goes on with them (scheduler.STAGE.linger)."""


def scripts(run: Run) -> str:
    """Return every script of the next submission, each under its file's name. Raises RunError."""
    ledger = Ledger(run.paths)
    parts = [f"### {ledger.script(s)}\n{text}" for s, text in _rendered(run, ledger)]
    return "\n".join([*parts, _CLOSING])


def _rendered(run: Run, ledger: Ledger) -> Iterator[tuple[Submission, str]]:
    config, arrays = slurm_settings(run), dict[str, None]()
    wanted = wanted_by(config, run.plan)
    for group in in_order(_outstanding(run)):
        number = ledger.next_number(group[0].iteration, group[0].job_kind)
        group = group[-wanted[group[0].job_kind] :]
        for submission in stage_submissions(run, 1, number, group, _CHUNK_SIZE):
            yield submission, render(array_of(run, config, submission, Escalation(), None))
            arrays[f"JOB-{submission.iteration}-{submission.job_kind}"] = None
    if arrays:
        driver = driver_submission(run, 1, DRIVER, ledger.next_number(0, DRIVER))
        expression = watch_expression(tuple(arrays))
        yield driver, render(array_of(run, config, driver, Escalation(), None, expression))
    for waiting in range(WATCHDOGS):
        guard = driver_submission(run, 1, GUARD, ledger.next_number(0, GUARD) + waiting)
        begin = f"now+{60 * config.check_minutes * (waiting + 1)}"
        yield guard, render(array_of(run, config, guard, Escalation(), None, begin=begin))


def in_order(tasks: Sequence[Task]) -> list[list[Task]]:
    """Group tasks by job kind and iteration; groups that others wait for come first."""
    groups: dict[tuple[bool, int, int, str], list[Task]] = {}
    for task in tasks:
        key = (task.stage.is_expendable, task.iteration, task.stage.position, task.pool)
        groups.setdefault(key, []).append(task)
    return [sorted(groups[key]) for key in sorted(groups)]


def _outstanding(run: Run) -> list[Task]:
    """Return the uncommitted tasks of the iteration at hand."""
    if not is_run(run.paths.root):
        return list(run.plan.window(-1, 0, is_ahead=True))
    window = find_frontier(run.plan, run.paths).window(run.plan, is_ahead=True)
    records = Records(run.paths)
    records.refresh(window)
    return [task for task in window if task not in records.known]
