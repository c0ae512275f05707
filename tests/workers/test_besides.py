"""Workers of rollouts that measure policies, as processes of this machine: to the same bytes as any other."""

import pytest

from pipeline.run.commits import read_record
from pipeline.run.control import begin_invocation
from pipeline.run.directory import Run
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import Stage, Task
from pipeline.workers.beats import Doing, Reason
from pipeline.workers.handover import Handover, Instructions, publish_instructions
from tests.support import processes
from tests.support.measured import RULED, fingerprints, measured_apart
from tests.support.pulling import beat_of, crew, join, wait_until
from tests.support.waiting import wait_for

SHAPE = ("iterations=2", "rollout.num_shards=2", "evaluate.every=1", "scheduler=slurm")
ROLLOUTS, REWARDS = ([Task(1, stage, shard) for shard in (0, 1)] for stage in (Stage.ROLLOUT, Stage.REWARD))
UPDATE = policy_maker(1)


@pytest.fixture
def run(inputs, tmp_path) -> Run:
    """One of which only prepare is done, and whose last pass has said that workers of rollouts measure."""
    heldout = f"data.heldout={inputs / 'heldout.jsonl'}"
    made = processes.make_run(inputs, tmp_path / "run", *SHAPE, *RULED, heldout)
    begin_invocation(made.paths)
    assert processes.stage(made, "prepare").code == 0
    made.paths.slurm.mkdir(exist_ok=True)
    publish_instructions(made.paths, Instructions(measures=True))
    return made


def test_policies_are_measured_to_the_same_bytes_by_those_who_wait_and_one_stays_for_the_last(run, tmp_path):
    with crew(run, *ROLLOUTS, *REWARDS, UPDATE) as workers:
        assert join(*workers) == [0] * 5
    assert fingerprints(run) == measured_apart(run.paths.root, tmp_path / "apart")
    beats = [beat_of(run.paths, worker) for worker in workers]
    assert {beat.reason for beat in beats} == {Reason.DONE}
    assert sum(beat.measured for beat in beats[:2]) == 3
    assert sum(beat.tasks for beat in beats[:2]) == 3 + 4
    assert all(beat.measuring_seconds <= beat.busy_seconds for beat in beats)
    last = read_record(run.paths, run.plan.evaluation_tasks()[-1])
    assert last.pid in {worker.pid for worker in workers[:2]}
    others = max(beat.since for beat in beats[:2] if beat.pid != last.pid)
    assert others < read_record(run.paths, policy_maker(2)).ended, "only one waited for the last policy"


def test_nobody_measures_who_makes_place_or_whom_no_pass_has_told_to(run):
    publish_instructions(run.paths, Instructions())
    with crew(run, *ROLLOUTS) as workers:
        for worker in workers:
            wait_until(run, worker, Doing.WAITING, Task(2, Stage.ROLLOUT, workers.index(worker)))
        assert fingerprints(run) == {}
        names = [beat_of(run.paths, worker).worker for worker in workers]
        publish_instructions(run.paths, Instructions((Handover(names[0], "reward"),), measures=True))
        wait_for(lambda: beat_of(run.paths, workers[0]).reason is Reason.NEEDED, "one leaves")
        assert beat_of(run.paths, workers[0]).measured == 0
