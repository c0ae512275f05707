"""What a run would do: its tasks, and the batch scripts that ``submit`` would submit. Runs nothing.

Job ids are names such as JOB-1-rollout.
"""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipeline.arrays import array_of, driver_submission, in_order, stage_submissions
from pipeline.config import Config
from pipeline.observe import Records, find_frontier
from pipeline.paths import RunPaths
from pipeline.plan import Plan
from pipeline.reconcile import Launch, stale_because
from pipeline.resources import Lessons
from pipeline.runs import Identity, Run, is_run, version
from pipeline.schedulerconfig import SlurmConfig
from pipeline.slurmjobs import GUARDS
from pipeline.submissions import GUARD, Ledger, Submission
from pipeline.tasks import Task
from pipeline.wiring import Carrier, carriers_of, dependency_of, watch_expression, watches
from slurm.submission import render

_CHUNK_SIZE = 1000
"""Of Slurm's default MaxArraySize; a real submission asks the cluster."""


def imagined_run(config: Config) -> Run:
    """A run as it would be made, with zeros for its id."""
    identity = Identity("0" * 12, config.name, time.time(), "", version(), str(Path.cwd()))
    return Run(RunPaths(Path(config.run_dir)), config, identity)


def describe_plan_of(run: Run) -> str:
    """What is left to do, and on Slurm the scripts that would be submitted now."""
    text = describe_plan(run.plan, run.paths if is_run(run.paths.root) else None)
    return f"{scripts(run)}\n\n{text}" if isinstance(run.config.scheduler, SlurmConfig) else text


def describe_plan(plan: Plan, paths: RunPaths | None) -> str:
    """Every task that would run and why, after counts per stage. ``paths`` of an existing run, or None."""
    reasons = outstanding(plan, paths)
    counts = Counter(task.purpose for task in reasons)
    total = Counter(task.purpose for task in plan.all_tasks())
    lines = [f"{'stage':<10}{'to run':>8}{'done':>8}"]
    lines += [f"{stage:<10}{counts[stage]:>8}{total[stage] - counts[stage]:>8}" for stage in total]
    lines += ["", *(f"{task}: {reason}" for task, reason in reasons.items())]
    if not reasons:
        lines.append("nothing to do: every task is committed")
    lines.append("This was a plan: nothing was run.")
    return "\n".join(lines)


def outstanding(plan: Plan, paths: RunPaths | None) -> dict[Task, str]:
    """Tasks without a commit that stands, with the reason."""
    if paths is None:
        return dict.fromkeys(plan.all_tasks(), "not committed")
    records = Records(paths)
    records.refresh(plan.all_tasks())
    committed = records.committed()
    reasons: dict[Task, str] = {}
    for task in plan.all_tasks():
        if task in records.corrupt:
            reasons[task] = records.corrupt[task]
        elif task not in committed:
            reasons[task] = "not committed"
        elif why := stale_because(task, plan.inputs(task), committed):
            reasons[task] = why
    return reasons


def scripts(run: Run) -> str:
    """Every script of the next submission, each under its file's name."""
    ledger = Ledger(run.paths)
    parts = [f"### {ledger.script(s)}\n{text}" for s, text in _rendered(run, ledger)]
    return "\n".join([*parts, "This was a dry run: nothing was submitted."])


def _rendered(run: Run, ledger: Ledger) -> Iterator[tuple[Submission, str]]:
    config = run.config.scheduler
    assert isinstance(config, SlurmConfig)
    tasks, committed = _outstanding(run)
    carriers: dict[Task, Carrier] = {}
    for group in in_order([Launch(task, "") for task in tasks]):
        number = ledger.next_number(group[0].iteration, group[0].purpose)
        for submission in stage_submissions(run, 1, number, group, _CHUNK_SIZE):
            waits = [
                (task, index, carriers_of(run.plan, task, committed.__contains__, carriers) or ())
                for index, task in submission.tasks()
            ]
            dependency, _ = dependency_of(waits, config.dependency)
            yield (
                submission,
                render(array_of(run, config, submission, Lessons(), None, dependency)),
            )
            job = f"JOB-{submission.iteration}-{submission.purpose}"
            carriers |= {task: Carrier(job, index) for index, task in submission.tasks()}
    for watch in watches((task, carrier.array) for task, carrier in carriers.items()):
        expression = watch_expression(watch.last, watch.earlier)
        number = ledger.next_number(watch.iteration, watch.purpose)
        driver = driver_submission(run, 1, watch.iteration, watch.purpose, number)
        yield _driver(run, config, driver, expression, "")
    for waiting in range(GUARDS):
        guard = driver_submission(run, 1, 0, GUARD, ledger.next_number(0, GUARD) + waiting)
        yield _driver(run, config, guard, "", f"now+{60 * config.check_minutes * (waiting + 1)}")


def _driver(
    run: Run, config: SlurmConfig, submission: Submission, dependency: str, begin: str
) -> tuple[Submission, str]:
    array = array_of(run, config, submission, Lessons(), None, dependency, begin)
    return submission, render(array)


def _outstanding(run: Run) -> tuple[list[Task], set[Task]]:
    """Tasks of the window that are not committed, and those that are."""
    config = run.config.scheduler
    assert isinstance(config, SlurmConfig)
    if not is_run(run.paths.root):
        return list(run.plan.window(-1, 0, config.horizon)), set()
    frontier = find_frontier(run.plan, run.paths)
    window = run.plan.window(frontier.updated, frontier.evaluated, config.horizon)
    records = Records(run.paths)
    records.refresh([*window, *(source for task in window for source in run.plan.inputs(task))])
    return [task for task in window if task not in records.known], set(records.known)
