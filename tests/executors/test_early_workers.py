"""Passes over workers that start early or beat by a clock of their own, on a toy Slurm."""

import re
import time

import pytest

from pipeline.decide.situation import WorkerRequest
from pipeline.executors.slurm.array_workers import ArrayWorkers
from pipeline.executors.slurm.arrays import Submitter
from pipeline.executors.slurm.job_table import QueueReader
from pipeline.executors.slurm.launcher import Launcher
from pipeline.executors.slurm.passes import longest_time
from pipeline.executors.slurm.silence import LOOK_AGAIN_SECONDS
from pipeline.run import journal
from pipeline.run.control import begin_invocation
from pipeline.run.directory import slurm_settings
from pipeline.run.failures import FailureKind
from pipeline.run.pass_requests import is_requested
from pipeline.run.submissions import read_limits_of
from pipeline.run.tasks import PREPARE, Stage, Task
from slurm.signals import Errands
from slurm.states import SlurmState
from tests.support.passes import take_turn
from tests.support.toyslurm import Job
from tests.support.toyworld import Luck, World, make_world


@pytest.fixture
def world(tmp_path, monkeypatch, clock) -> World:
    """A run of several shards that nobody has submitted."""
    made = (make_world(tmp_path / f"{seed}", monkeypatch, seed, Luck()) for seed in range(200))
    plans = ((w, w.run.plan) for w in made)
    return next(w for w, p in plans if p.num_shards > 2 < w.slurm.max_array_size and p.iterations > 3)


def submit_early(world: World, tasks: tuple[Task, ...]) -> Job:
    """An array that starts in an hour, when its input is expected."""
    submitter = Submitter(world.run, slurm_settings(world.run), longest_time, lambda: None)
    limits, note = read_limits_of(world.run.paths), world.story.append
    workers = ArrayWorkers(submitter, limits, note, Errands(note), QueueReader(world.run))
    workers.look()
    launcher = Launcher(submitter, limits, workers.table, {}, note)
    launcher.submit_workers([WorkerRequest(tasks, time.time() + 3600.0)], time.time(), {})
    return next(job for job in world.slurm.jobs.values() if job.begin and len(job.elements) == len(tasks))


@pytest.mark.parametrize(("passed", "excluded"), [(3000.0, ["n7"]), (4000.0, [])])
def test_an_iteration_that_knows_nothing_of_a_broken_node_keeps_away_from_it_for_an_hour(
    world, clock, passed, excluded
):
    begin_invocation(world.run.paths)
    world.commit(PREPARE, "1-a")
    told = {"task": "1/rollout/0", "attempt": 1, "kind": FailureKind.DEVICE, "message": "", "node": "n7"}
    journal.event(world.run.paths.events, "failed", **told)
    clock[0] += passed
    submit_early(world, (Task(3, Stage.ROLLOUT, 0), Task(3, Stage.ROLLOUT, 1)))
    (script,) = world.run.paths.slurm.rglob("*rollout*.sh")
    assert re.findall(r"^#SBATCH --exclude=(.*)$", script.read_text(), re.MULTILINE) == excluded


def test_of_early_workers_each_is_told_to_start_when_its_own_input_has_come(world, monkeypatch):
    plan, run_command, told = world.run.plan, world.slurm.run, []

    def listen(words, *more, **others):
        if "starttime=now" in words:
            told.append(words[2])
        return run_command(words, *more, **others)

    monkeypatch.setattr("slurm.commands._run_once", listen)
    begin_invocation(world.run.paths)
    world.commit(PREPARE, "1-a")
    job = submit_early(world, tuple(Task(1, Stage.REWARD, shard) for shard in range(plan.num_shards)))
    expected = []
    for shard in range(plan.num_shards):
        scores = [task for task in plan.inputs(Task(1, Stage.REWARD, shard)) if task.stage is Stage.SCORE]
        for task in (Task(1, Stage.ROLLOUT, shard), *scores):
            world.commit(task, "1-a")
        for _ in range(2):
            world.advance("a pass")
        expected.append(f"jobid={job.id}_[{shard}]")
        assert told == expected, world.told()


def test_a_worker_whose_clock_is_minutes_behind_is_not_cancelled_while_it_beats(world, monkeypatch, clock):
    world.submit()
    element = next(e for e in world.slurm.elements(SlurmState.PENDING) if not world.is_guard(e))
    world.start(element)
    (worker,) = world.workers.values()
    monkeypatch.setattr(world, "now", lambda: time.time() - 3600.0)
    world.say(worker, worker.beat.doing)
    for _ in range(2):
        world.advance("a pass")
        assert element.state is SlurmState.RUNNING, world.told()
        clock[0] += LOOK_AGAIN_SECONDS
        world.say(worker, worker.beat.doing)
    world.advance("a pass")
    clock[0] += LOOK_AGAIN_SECONDS
    world.advance("a pass")
    assert element.state is SlurmState.CANCELLED, "it has said nothing between two looks"


def commit_with_inputs(world: World, task: Task) -> None:
    if not world.record(task):
        for source in world.run.plan.inputs(task):
            commit_with_inputs(world, source)
        world.commit(task, "1-a")


def test_who_starts_early_is_decided_again_once_the_first_rows_say_how_long_things_take(world):
    plan, paths = world.run.plan, world.run.paths
    begin_invocation(paths)
    world.commit(PREPARE, "1-a")
    asked = []
    for iteration in range(1, plan.iterations):
        for task in plan.tasks(iteration):
            commit_with_inputs(world, task)
        world.advance("a pass")
        assert [row["iteration"] for row in journal.read(paths.metrics)] == list(range(1, iteration + 1))
        asked.append(is_requested(paths))
        take_turn(paths, lambda: None)
    assert asked == [iteration <= 2 for iteration in range(1, plan.iterations)], world.told()
    assert len(asked) > 2
