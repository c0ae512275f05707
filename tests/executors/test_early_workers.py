"""Passes over workers that start early or beat by a clock of their own, on a toy Slurm."""

import time

import pytest

from pipeline.executors.slurm.launcher import Launcher
from pipeline.executors.slurm.passes import longest_time
from pipeline.executors.slurm.queue_reader import QueueReader
from pipeline.executors.slurm.silence import LOOK_AGAIN_SECONDS
from pipeline.executors.slurm.submitter import Submitter
from pipeline.executors.slurm.worker_jobs import WorkerJobs
from pipeline.orchestrate.situation import Order
from pipeline.run import journal
from pipeline.run.bookkeeping import is_wanted
from pipeline.run.control import begin_invocation
from pipeline.run.directory import slurm_settings
from pipeline.run.submissions import read_limits_of
from pipeline.run.tasks import PREPARE, Stage, Task
from slurm.signals import Errands
from slurm.states import SlurmState
from tests.support.passes import take_turn
from tests.support.toyslurm import Job
from tests.support.toyworkers import WorkerWorld, make_worker_world
from tests.support.toyworld import Luck


@pytest.fixture
def world(tmp_path, monkeypatch, clock) -> WorkerWorld:
    """A run of several shards that nobody has submitted."""
    made = (make_worker_world(tmp_path / f"{seed}", monkeypatch, seed, Luck()) for seed in range(200))
    plans = ((w, w.run.plan) for w in made)
    return next(w for w, p in plans if p.num_shards > 2 < w.slurm.max_array_size and p.iterations > 3)


def submit_early(world: WorkerWorld, tasks: tuple[Task, ...]) -> Job:
    """An array that starts in an hour, when its input is expected."""
    submitter = Submitter(world.run, slurm_settings(world.run), longest_time, lambda: None)
    limits, note = read_limits_of(world.run.paths), world.story.append
    jobs = WorkerJobs(submitter, limits, note, Errands(note), QueueReader(world.run))
    jobs.query()
    launcher = Launcher(submitter, jobs.limits, jobs.table, {}, jobs.note)
    launcher.submit_workers([Order(tasks, time.time() + 3600.0)], time.time(), {})
    return next(job for job in world.slurm.jobs.values() if job.begin and len(job.elements) == len(tasks))


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


def commit_with_inputs(world: WorkerWorld, task: Task) -> None:
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
        asked.append(is_wanted(paths))
        take_turn(paths, lambda: None)
    assert asked == [iteration <= 2 for iteration in range(1, plan.iterations)], world.told()
    assert len(asked) > 2
