"""A plan on a screen, however long the run is."""

import json
import re

import pytest

from benchmarks.noop import make_record
from pipeline.config.scheduler import LocalConfig
from pipeline.run.directory import Run
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.status.plan import describe_plan, every_task
from tests.support import reportrun
from tests.support.toyworkers import make_worker_world
from tests.support.toyworld import Luck


def make_run(root, shards: int, scheduler=None) -> Run:
    """A run of 1,000 iterations, of which 7 are done."""
    run = reportrun.make_run(root, shards, iterations=1000, scheduler=scheduler or LocalConfig())
    commit(run, PREPARE, *(Task(i, Stage.UPDATE) for i in range(1, 8)))
    return run


def commit(run: Run, *tasks: Task) -> None:
    for task in tasks:
        path = run.paths.task(task).record
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(make_record(task).to_json()))


def test_a_plan_says_on_a_screen_what_is_done_at_hand_and_due(tmp_path):
    run = make_run(tmp_path / "run", 300)
    commit(run, *(Task(8, Stage.ROLLOUT, shard) for shard in (*range(3), *range(5, 300))))
    lines = list(describe_plan(run))
    assert len(lines) < 30
    assert re.fullmatch(r"rollout +297602 +2398", lines[2])
    assert re.fullmatch(r"update +993 +7", lines[4])
    assert "iterations 1 to 7 are trained; at hand:" in lines
    assert "  iteration 8 rollout: 298 of 300 committed" in lines
    due = lines[lines.index("\ndue now:") + 1 :]
    assert due[:2] == [
        "  iteration 8 reward shard 0 to 2, 5 to 299: not committed",
        "  iteration 8 rollout shard 3, 4: not committed",
    ]


def test_on_slurm_where_the_queue_is_not_known_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    run = make_run(tmp_path / "run", 4, reportrun.SLURM)
    lines = list(describe_plan(run))
    assert any("what is in the queue is not known, Slurm does not answer: " in line for line in lines)
    assert "  iteration 8 rollout shard 0 to 3: not committed" in lines


def test_what_does_not_stand_is_to_be_made_again_and_of_many_some_are_named(tmp_path):
    run = make_run(tmp_path / "run", 40)
    for shard in range(40):
        path = run.paths.task(Task(8, Stage.ROLLOUT, shard)).record
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{")
    lines = list(describe_plan(run))
    assert sum("cannot be read" in line for line in lines) == 10
    assert "  and 30 more" in lines
    assert re.fullmatch(r"rollout +39720 +280", lines[2])


def test_what_is_in_the_queue_is_not_due(tmp_path, monkeypatch, clock):
    world = make_worker_world(tmp_path / "run", monkeypatch, 0, Luck())
    world.submit()
    lines = list(describe_plan(world.run))
    assert "  prepare: 0 of 1 committed, 1 in the queue" in lines
    assert "\ndue now:" not in lines


@pytest.mark.parametrize("shards", [64, 10_000])
def test_every_task_comes_one_iteration_at_a_time(tmp_path, shards):
    """Of a run with 20 million tasks the first lines are there at once."""
    run = reportrun.make_run(tmp_path / "run", shards, iterations=1000, scheduler=LocalConfig())
    lines = every_task(run)
    assert next(lines) == "prepare: not committed"
    assert next(lines) == "iteration 1 rollout shard 0: not committed"
