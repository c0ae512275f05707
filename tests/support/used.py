"""Processes that stay: task after task in one, and policies that no update has made.

Used by one process and by processes of their own, the same run has to have the same bytes.
"""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.noop import make_record
from pipeline.run.commits import hash_tree, publish, read_record
from pipeline.run.directory import Run, load_run
from pipeline.run.paths import ADAPTER, BASE
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import Stage, Task
from tests.support import processes, tiny


def commit_policy(run: Run, version: int, seed: int, attempt: str = "1-ab", is_adapter: bool = False) -> None:
    """Commit a policy of random numbers."""
    task = policy_maker(version)
    folder = run.paths.task(task).policy(attempt)
    if is_adapter:
        from tests.support.adapters import make_adapter

        make_adapter(Path(run.config.model.policy), folder / ADAPTER, seed=seed)
        (folder / BASE).write_text("{}")
    else:
        tiny.make_policy(folder, seed)
    record = replace(make_record(task), attempt=attempt, outputs=hash_tree(run.paths, folder))
    assert publish(run.paths, record)


def take_back(run: Run, version: int) -> None:
    """Take a policy back, as a run that goes back does."""
    files = run.paths.task(policy_maker(version))
    record = read_record(run.paths, policy_maker(version))
    assert record is not None
    shutil.rmtree(files.policy(record.attempt))
    files.record.unlink()


def task_of(text: str) -> Task:
    """``rollout 2 1``: stage, iteration, shard, pool."""
    stage, iteration, *more = text.split()
    shard = int(more[0]) if more else 0
    return Task(int(iteration), Stage(stage), shard, more[1] if len(more) > 1 else "")


def work(root: str, steps: list[str], said: str, environment: dict[str, str] | None = None) -> None:
    """Do tasks in this process, which stays; write what happened into the file ``said``.

    A step is a task, ``loads TASK`` for loading ahead what one needs, ``breaks TASK`` for one that fails
    when it has computed, ``only TASK`` for one whose result goes, ``besides TASK`` for an evaluation by a
    worker of rollouts, or ``policy VERSION SEED ATTEMPT`` for another policy in place of the one that is
    there.
    """
    os.environ.update(environment or {})
    from stages.engines import release_all

    loads = _counted_loads()
    happened: dict[str, Any] = {"loads": [], "bytes": []}
    for step in steps:
        _do(Path(root), step)
        happened["loads"].append(len(loads))
        happened["bytes"].append(settled_bytes())
    release_all()
    Path(said).write_text(json.dumps(happened))


def _do(root: Path, step: str) -> None:
    from stages.engines import release_all

    word, _, rest = step.partition(" ")
    if word == "policy":
        version, seed, attempt = rest.split()
        take_back(load_run(root), int(version))
        commit_policy(load_run(root), int(version), int(seed), attempt)
    elif word == "breaks":
        try:
            _execute(root, task_of(rest), breaks=True)
        except ArithmeticError:
            release_all()
    elif word == "loads":
        from stages.attempts.arguments import Arguments
        from stages.attempts.execution import load

        load(Arguments(task_of(rest), root, "1-ahead", None, stays=True, loads=True))
    elif word == "besides":
        from stages.workers.measuring import release_scorer

        _execute(root, task_of(rest))
        release_scorer()
    elif word == "only":
        _execute(root, task_of(rest))
        load_run(root).paths.task(task_of(rest)).record.unlink()
    else:
        _execute(root, task_of(step))


def _execute(root: Path, task: Task, breaks: bool = False) -> None:
    from stages.attempts import execution
    from stages.attempts.arguments import Arguments

    attempt = f"1-{os.urandom(4).hex()}"
    commit = execution.commit
    if breaks:
        execution.commit = _broken  # type: ignore[assignment]
    try:
        execution.execute(Arguments(task, root, attempt, None, stays=True), time.time())
    finally:
        execution.commit = commit


def _broken(*given: object) -> None:
    raise ArithmeticError("the disk is full, say")


def _counted_loads() -> list[str]:
    """A list that gets the directory of every model that is loaded."""
    from stages.models import loading

    loads: list[str] = []
    load = loading._loaded

    def counted(kind: Any, directory: Any, arguments: Any) -> Any:
        loads.append(str(directory))
        return load(kind, directory, arguments)

    loading._loaded = counted  # type: ignore[assignment]
    return loads


def settled_bytes() -> int:
    """Bytes of this process's own memory: not those of files that it has mapped."""
    fields = dict(
        line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return int(fields["RssAnon"].split()[0]) * 1024


def outputs(root: Path, tasks: list[str]) -> dict[str, str]:
    """Fingerprints of what tasks committed."""
    paths = load_run(root).paths
    found = {text: read_record(paths, task_of(text)) for text in tasks}
    return {text: record.fingerprint for text, record in found.items() if record is not None}


def done_by_one(root: Path, steps: list[str]) -> dict[str, list[int]]:
    """Do all steps in one process. Returns what it says: models loaded and memory, after each step."""
    said = root.parent / f"{root.name}-said.json"
    assert processes.in_process_of_its_own(work, str(root), steps, str(said)) == 0
    found: dict[str, list[int]] = json.loads(said.read_text())
    return found


def done_by_each(root: Path, tasks: list[str]) -> None:
    """Do each task in a process of its own."""
    for text in tasks:
        task = task_of(text)
        more = ["--pool", task.pool] if task.pool else []
        done = processes.stage(load_run(root), str(task.stage), task.iteration, task.shard, more=more)
        assert done.code == 0, done.log
