"""A plan on a screen, however long the run is."""

import json
import os
import re
import subprocess
from dataclasses import replace

import pytest

from benchmarks.noop import make_record
from pipeline.config.scheduler import LocalConfig
from pipeline.run import journal
from pipeline.run.directory import Run
from pipeline.run.lease import hold
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.status.plan import describe_plan, every_task
from pipeline.status.snapshot import StatusReader
from pipeline.workers.beats import Doing, process_space
from tests.support import reportrun
from tests.support.beats import beat, write_beats
from tests.support.toyworld import Luck, make_world


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


def test_a_plan_of_a_run_says_what_its_own_iterations_took(tmp_path):
    run = make_run(tmp_path / "run", 2)
    assert not [line for line in describe_plan(run) if "measured" in line]
    journal.rewrite(run.paths.metrics, [reportrun.make_row(i, 1000) for i in range(1, 8)])
    (line,) = [line for line in describe_plan(run) if "measured" in line]
    assert line == "\nmeasured: 1 min 26 s an iteration, median of the newest 5; about 23 h 43 min remain"


def test_what_workers_of_this_machine_do_is_not_due_while_their_driver_and_they_live(tmp_path):
    run = make_run(tmp_path / "run", 4)
    doing = [beat(f"local-1-{shard}r0", task=f"8/rollout/{shard}") for shard in range(3)]
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = {"host": os.uname().nodename, "process_space": process_space()}
    dead = beat("local-1-3r0", task="8/rollout/3", pid=ended.pid, **here)
    write_beats(run.paths, *doing[:2], replace(doing[2], doing=Doing.STARTING), dead)
    with hold(run.paths.locks):
        lines = list(describe_plan(run))
        assert "  iteration 8 rollout: 0 of 4 committed, 3 being done" in lines
        assert "  iteration 8 rollout shard 3: not committed" in lines
        rollouts = next(lane.progress for lane in StatusReader(run).read().lanes)
        assert (rollouts.running, rollouts.waiting, rollouts.failed) == (2, 1, 0)
    assert "  iteration 8 rollout shard 0 to 3: not committed" in list(describe_plan(run))


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
    world = make_world(tmp_path / "run", monkeypatch, 0, Luck())
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
