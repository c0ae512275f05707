"""Commits without anything behind them."""

from dataclasses import replace

from benchmarks.noop import make_record
from pipeline.run.commits import (
    hash_tree,
    publish,
)
from pipeline.run.directory import Run
from pipeline.run.plan import policy_maker


def commit(run: Run, version: int, attempt: str = "1-ab") -> None:
    task = policy_maker(version)
    files = run.paths.task(task)
    folders = [files.policy(attempt), files.critic(attempt), files.trainer(attempt)]
    for folder in folders:
        (folder / "part").mkdir(parents=True)
        for name in ("weights", "part/more"):
            (folder / name).write_text(f"{name} {version}")
        (folder.parent / f"{version:05d}").symlink_to(folder.name)
    outputs = tuple(entry for folder in folders for entry in hash_tree(run.paths, folder))
    assert publish(run.paths, replace(make_record(task), attempt=attempt, outputs=outputs))
