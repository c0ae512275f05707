"""Lanes of a run with workers: they show what jobs are at, which is not what they were submitted for."""

from dataclasses import replace

import pytest

from benchmarks.noop import make_record
from pipeline.executors.slurm.queue import RunQueue, look_at_queue
from pipeline.run.endings import Ending, Endings
from pipeline.run.failures import FailureKind
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.status.lanes import ShardState, lanes_of, local_task_states
from pipeline.status.plan import look_ahead
from pipeline.status.slurm import JobsShown, task_states, writer_of
from pipeline.status.snapshot import StatusReader
from pipeline.workers.beats import Beat, Doing
from slurm.query import Element
from slurm.states import SlurmState
from tests.support.beats import beat
from tests.support.jobs import element as some_element
from tests.support.jobs import submission
from tests.support.scripted import imagined_run
from tests.support.tables import LONG
from tests.support.toyworld import Luck, make_world

NOW = 1000.0
PLAN = imagined_run(scheduler={}).plan
ROLLOUTS = [Task(2, Stage.ROLLOUT, shard) for shard in range(PLAN.num_shards)]
DONE = {task: replace(make_record(task), ended=800.0) for task in (PREPARE, Task(1, Stage.UPDATE))}
"""What the rollouts of the second iteration read."""


def element(index: int, state: SlurmState = SlurmState.RUNNING, **more: object) -> Element:
    """Of an array that was submitted for the first iteration, unless ``name`` says otherwise."""
    return some_element(index, state, **{"array_id": "47", "reason": "Resources", "started": 700.0} | more)


FIRST = submission(job="47", created=600.0)


def busy(worker: str, task: str, number: int = 1) -> Beat:
    return beat(worker, doing=Doing.BUSY, task=task, attempt=f"{number}-{worker}.5")


def lane(crew: JobsShown, records=DONE):
    (found,) = lanes_of(task_states(PLAN, ROLLOUTS, crew, records, NOW), NOW)
    return found


def test_a_lane_counts_what_workers_do_and_not_those_who_wait():
    jobs = RunQueue([element(0), element(1), element(2), element(3)])
    beats = [
        busy("47_0r0", "2/rollout/2"),
        beat("47_1r0", doing=Doing.WAITING, task="2/rollout/1"),
        busy("47_2r0", "2/rollout/3", number=2),
        busy("46_0r0", "2/rollout/0"),  # its job has ended
    ]
    found = lane(JobsShown([FIRST], jobs, beats))
    idle, running = ShardState.IDLE, ShardState.RUNNING
    assert found.shards == (idle, idle, running, running), "a second claim alone says of no failure"
    progress = found.progress
    assert (progress.running, progress.waiting, progress.failed, progress.resubmitted) == (2, 0, 0, 0)
    assert (progress.queue_seconds, progress.run_seconds) == (100.0, 100.0), "of tasks, not of jobs"
    assert (progress.jobs, progress.nodes) == (("47",), ("gpu07",))


def test_a_worker_of_rollouts_that_measures_a_policy_is_in_the_lane_of_that():
    plan, first, second = replace(PLAN, evaluate_every=1), Task(0, Stage.EVALUATE), Task(1, Stage.EVALUATE)
    crew = JobsShown([FIRST], RunQueue([element(0), element(1)]), [busy("47_0r0", "1/evaluate/0")])
    records = DONE | {first: replace(make_record(first), ended=850.0)}
    (found,) = lanes_of(task_states(plan, [second], crew, records, NOW), NOW)
    assert found.shards == (ShardState.RUNNING,)
    assert (found.progress.jobs, found.progress.nodes) == (("47",), ("gpu07",))
    assert lane(crew).progress.running == 0


def test_a_job_that_starts_early_is_at_nothing_until_its_input_is_there():
    second = submission(iteration=2, job="47", created=600.0, begins=900.0)
    early = {"name": second.name, "reason": "BeginTime"}
    jobs = RunQueue([element(0, **early), element(1, SlurmState.PENDING, **early)])
    crew = JobsShown([second], jobs, [beat("47_0r0", doing=Doing.STARTING)])
    before = lane(crew, {PREPARE: DONE[PREPARE]})
    assert before.shards[:2] == (ShardState.IDLE, ShardState.WAITING)
    assert (before.progress.queue_seconds, before.progress.run_seconds) == (None, None)
    assert "shortly before its input is expected" in before.progress.reason
    assert lane(crew).shards[:2] == (ShardState.RUNNING, ShardState.WAITING)
    assert crew.live == set(ROLLOUTS[:2])


def test_a_task_whose_attempts_failed_is_shown_as_failed_until_somebody_takes_it():
    ending = Ending("1-47_1r0", "2/rollout/1", 1, 1, FailureKind.ERROR, message="boom")
    endings = Endings({ending.attempt: ending})
    crew = JobsShown([FIRST], RunQueue([element(0)]), [], endings)
    assert lane(crew).shards[1] is ShardState.FAILED
    crew = JobsShown([FIRST], RunQueue([element(0)]), [busy("47_0r0", "2/rollout/1", number=2)], endings)
    assert lane(crew).shards[1] is ShardState.AGAIN
    for kind in (None, FailureKind.CANCELLED):
        ours = Endings({ending.attempt: replace(ending, kind=kind)})
        assert lane(JobsShown([FIRST], RunQueue([element(0)]), [], ours)).shards[1] is ShardState.IDLE


@pytest.mark.parametrize(
    ("at", "asked", "is_at_work"),
    [("1-47_0r0.1", NOW, True), ("2-47_0r0.9", NOW, False), ("", NOW, False), ("", None, None)],
    ids=["writes it", "repeats it", "has gone on", "not asked"],
)
def test_a_state_is_written_by_the_worker_that_committed_the_policy(at, asked, is_at_work):
    update = replace(make_record(Task(2, Stage.UPDATE)), attempt="1-47_0r0.1", ended=900.0)
    doing = {"task": "2/update/0", "attempt": at} if at else {"doing": Doing.WAITING, "task": "3/update/0"}
    crew = JobsShown([], RunQueue([element(0)]), [beat("47_0r0", "update", **doing)])
    assert writer_of(update, crew, asked).is_at_work is is_at_work


@LONG
def test_whatever_happens_a_view_shows_as_running_what_somebody_computes(tmp_path, monkeypatch, clock):
    """On the toy Slurm, at every step of some runs."""
    seen = 0
    for seed in range(3):
        world = make_world(tmp_path / str(seed), monkeypatch, seed, Luck(mishaps=4, disturbances=4))
        world.submit()
        reader = StatusReader(world.run)
        while world.outcome is None and world.happen():
            workers = [w for e, w in world.workers.items() if e.state is SlurmState.RUNNING and w.claim]
            computed = {w.claim.task for w in workers if not world.exists(w.claim.task)}
            lanes = {lane.key: lane for lane in reader.read(look_at_queue(world.run, max_age=0.0)).lanes}
            for task in (task for task in computed if (task.iteration, task.job_kind) in lanes):
                state = lanes[task.iteration, task.job_kind].shards[task.shard]
                assert state in (ShardState.RUNNING, ShardState.AGAIN), world.told()
                seen += 1
            assert computed.isdisjoint(launch.task for launch in look_ahead(world.run).actions.launch)
        world.check_is_complete()
    assert seen > 10


def test_of_a_run_of_this_machine_who_works_waits_or_has_failed_is_shown():
    four = [Task(1, Stage.ROLLOUT, shard) for shard in range(4)]
    first = Beat("local-1-00001r0", "rollout", "here", 7, 5.0, Doing.BUSY, since=6.0, task="1/rollout/0")
    beats = [first, replace(first, doing=Doing.STARTING, task="1/rollout/1")]
    failed = [
        Ending(f"1-{shard}", f"1/rollout/{shard}", 1, 1, FailureKind.KILLED, time=4.0) for shard in (0, 2)
    ]
    states = list(local_task_states(four, {}, beats, Endings().adding(failed)))
    found = [(state.shard_state, state.attempts, state.started) for state in states]
    assert found == [
        (ShardState.AGAIN, 2, 6.0),
        (ShardState.WAITING, 1, None),
        (ShardState.FAILED, 1, 4.0),
        (ShardState.IDLE, 0, None),
    ]
