"""How many files a run on Slurm has, with as many shards as large runs have (docs/howto/disk_space.md).

The toy's tasks and workers do all at once what they can, and write the files that the real ones do.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.noop import make_record
from pipeline.run.commits import hash_file
from pipeline.run.plan import state_of
from pipeline.run.records import find_frontier
from pipeline.run.submissions import Ledger, parse_job_name
from pipeline.run.tasks import Stage, Task
from pipeline.status.log_files import parse_choice
from pipeline.status.logs import describe_logs
from pipeline.workers.beats import Doing, Reason
from pipeline.workers.claims import take
from slurm.states import SlurmState
from tests.support.inodes import by_kind
from tests.support.toyslurm import Element
from tests.support.toyworld import Luck, World, is_driver, make_world

SHARDS, ITERATIONS = 64, 3
MOST_RECENT, MOST_PACKED = 300, 20
SETTINGS = {
    "iterations": ITERATIONS,
    "rollout": {"num_shards": SHARDS},
    "data": {"prompts_per_iteration": SHARDS, "heldout": "/heldout"},
    "evaluate": {"every": 1},
    "update": {"keep_shards_last": 2},
}


def lived(root: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that has come to its end, undisturbed."""
    world = make_world(root, monkeypatch, 2, Luck(), settings=SETTINGS)
    world.slurm.max_array_size = 1001
    assert not world.run.plan.pools
    world.submit()
    for _ in range(20 * ITERATIONS):
        if world.outcome is not None:
            break
        in_step(world)
    world.check_is_complete()
    return world


def in_step(world: World) -> None:
    """Everything that can start starts, every task that can be done is done, and a pass sees it."""
    for element in (e for e in free(world) if e.is_free):
        begin_log(world, element)
        world.start(element)
    world.is_driving = True  # no pass after every task
    done = find_frontier(world.run.plan, world.run.paths).updated
    for element in world.slurm.elements(SlurmState.RUNNING):
        work(world, element, done)
    world.is_driving = False
    world.advance("a worker", is_worker=True)


def free(world: World) -> list[Element]:
    return [e for e in world.slurm.elements(SlurmState.PENDING) if e.is_free and not world.is_guard(e)]


def begin_log(world: World, element: Element) -> None:
    """As the batch script does."""
    name = parse_job_name(element.job.name)
    (submission,) = Ledger(world.run.paths).named([element.job.name])
    folder = submission.log_folder(world.run.paths)
    log = folder / f"{name.job_kind}.log"
    if not is_driver(element):
        log = submission.log(world.run.paths, submission.task(element.index))
    write_log(log, f"{element.job.name} starts\n")


def write_log(log: Path, text: str) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(text)


def work(world: World, element: Element, done: int) -> None:
    """A worker does its shard's next task after what is done, or leaves if there will be none."""
    worker, plan = world.workers[element], world.run.plan
    kind, shard = worker.first.job_kind, worker.first.shard
    mine = (t for t in plan.all_tasks() if t.shard == shard and t.job_kind == kind)
    tasks = [t for t in mine if (t.iteration > done or not t.stage.is_sharded) and not world.exists(t)]
    if not tasks:
        world.workers.pop(element)
        world.say(worker, Doing.LEAVING, reason=Reason.DONE)
        world.slurm.end(element, SlurmState.COMPLETED)
    elif world.has_inputs(tasks[0]):
        world.take(worker, tasks[0])
        claim = worker.claim
        assert claim
        take(world.run.paths, claim)
        write_log(world.run.paths.task(claim.task).log(claim.number), f"{claim.task} is done\n")
        world.end_task(element, worker, claim)
        commit_state(world, claim.task)


def commit_state(world: World, task: Task) -> None:
    """An update's attempt commits the trainer's state behind its policy."""
    if task.stage is Stage.UPDATE:
        paths, attempt = world.run.paths, world.record(task).attempt
        state = state_of(task.iteration)
        file = paths.task(state).state(attempt) / "optimizer"
        write_log(file, "")
        record = replace(make_record(state), attempt=attempt, outputs=(hash_file(paths, file),))
        paths.task(state).folder.mkdir(exist_ok=True)
        paths.task(state).record.write_text(json.dumps(record.to_json()))


def test_a_recent_iteration_of_64_shards_has_at_most_300_files_and_a_packed_one_20(
    tmp_path, monkeypatch, clock
):
    world = lived(tmp_path / "run", monkeypatch)
    run, root = world.run, world.run.paths.root
    counts = {iteration: by_kind(root, iteration) for iteration in range(1, ITERATIONS + 1)}
    told = {iteration: (sum(of.values()), dict(of)) for iteration, of in counts.items()}
    assert sum(counts[1].values()) <= MOST_PACKED, told
    assert all(sum(counts[i].values()) <= MOST_RECENT for i in (2, 3)), told
    assert all(counts[i]["data"] > 2 * SHARDS for i in (2, 3)), "shards of recent iterations are files"
    submitted = {job.name for job in world.slurm.jobs.values()}
    assert {s.name for s in Ledger(run.paths).load(range(ITERATIONS + 1))} == submitted
    for iteration in (1, 3):
        said = list(describe_logs(run, parse_choice(f"reward@{iteration}", run.plan), 20))
        assert sum(line.endswith("(packed)") for line in said) == 10, said
        assert any("and 54 more (packed): unzip -p" in line for line in said)
