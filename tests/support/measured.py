"""Evaluations of a run, and the same by processes of their own."""

import shutil
from pathlib import Path

from pipeline.run.commits import read_record
from pipeline.run.directory import Run, load_run
from pipeline.run.tasks import Task
from tests.support import processes

RULED = ("reward=rule", "reward.components.rule.function=repetition_penalty")
"""Words of a light run that scores by a rule: beside a light engine no other one stays."""


def measured_apart(root: Path, folder: Path) -> dict[Task, str]:
    """Fingerprints of evaluations by processes of their own, in a copy of a run."""
    shutil.copytree(root, folder)
    copied = load_run(folder)
    for task in copied.plan.evaluation_tasks():
        copied.paths.task(task).record.unlink()
    for task in copied.plan.evaluation_tasks():
        done = processes.stage(copied, "evaluate", task.iteration)
        assert done.code == 0, done.log
    return fingerprints(copied)


def fingerprints(run: Run) -> dict[Task, str]:
    """Fingerprints of the evaluations that are committed."""
    records = {task: read_record(run.paths, task) for task in run.plan.evaluation_tasks()}
    return {task: record.fingerprint for task, record in records.items() if record is not None}
