"""Commits without anything behind them."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks.noop import make_record
from pipeline.run.commits import FileEntry, hash_tree, publish
from pipeline.run.directory import Run
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.tasks import Task, task_key


def commit(run: Run, version: int, attempt: str = "1-ab") -> None:
    """An update whose trainer commits policy, critic and state at once."""
    files = run.paths.task(policy_maker(version))
    folders = [files.policy(attempt), files.critic(attempt), files.trainer(attempt)]
    _publish(run, policy_maker(version), attempt, _write(run, version, folders))


def commit_in_two(
    run: Run, version: int, attempt: str = "1-ab", is_lost: bool = False, is_due: bool = True
) -> None:
    """An update whose trainer commits its state behind the policy; or meant to, and the state was lost; or
    did not mean to."""
    task, files = policy_maker(version), run.paths.task(policy_maker(version))
    policy = _write(run, version, [files.policy(attempt)])
    _publish(run, task, attempt, policy, promises_state=is_due, skips_state=not is_due)
    if is_due and not is_lost:
        outputs = _write(run, version, [files.state(attempt)])
        _publish(run, state_of(version), attempt, outputs, inputs={task_key(task): "of it"})


def _write(run: Run, version: int, folders: Iterable[Path]) -> tuple[FileEntry, ...]:
    found = []
    for folder in folders:
        (folder / "part").mkdir(parents=True)
        for name in ("weights", "part/more"):
            (folder / name).write_text(f"{name} {version}")
        (folder.parent / f"{version:05d}").symlink_to(folder.name)
        found += hash_tree(run.paths, folder)
    return tuple(found)


def _publish(run: Run, task: Task, attempt: str, outputs: tuple[FileEntry, ...], **content: object) -> None:
    record = replace(make_record(task), attempt=attempt, outputs=outputs, **content)
    assert publish(run.paths, record)
