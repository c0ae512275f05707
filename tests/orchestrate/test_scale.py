"""Very many shards: a pass and status look at each folder and record once, not once for each shard."""

from collections import Counter

import pytest

from benchmarks import scale
from pipeline.run import records as observe
from pipeline.run.control import begin_invocation
from pipeline.run.directory import Run
from pipeline.run.plan import Plan
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.status.snapshot import read_status
from slurm.states import SlurmState
from tests.support.passes import pass_over
from tests.support.toyslurm import ToySlurm
from tests.support.toyworld import is_driver, task_of

SHARDS = 120


@pytest.fixture
def slurm(monkeypatch) -> ToySlurm:
    slurm = ToySlurm(has_accounting=False)
    slurm.take_the_place(monkeypatch)
    monkeypatch.setattr("submitit.SlurmExecutor.affinity", lambda: 2)
    return slurm


@pytest.fixture
def run(tmp_path, slurm, monkeypatch) -> Run:
    """Of 120 rollouts that were submitted 90 are committed and 30 have failed."""
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", lambda descriptor: None)
        run = scale.make_run(tmp_path / "run", 2, SHARDS)
        begin_invocation(run.paths)
        scale.commit(run, PREPARE)
        pass_over(run, [])
        for element in [e for e in slurm.elements() if not is_driver(e)]:
            task = task_of(run, element)
            if task.stage is Stage.ROLLOUT:
                fails = task.shard % 4 == 0
                slurm.end(element, SlurmState.FAILED if fails else SlurmState.COMPLETED, int(fails))
                if not fails:
                    scale.commit(run, task)
    return run


def counted(monkeypatch, name: str) -> Counter:
    """How often a function of observe is called, by its last argument."""
    calls, real = Counter(), getattr(observe, name)

    def count(*arguments):
        calls[arguments[-1]] += 1
        return real(*arguments)

    monkeypatch.setattr(observe, name, count)
    return calls


def test_a_pass_lists_a_folder_a_few_times_however_many_shards_have_failed(run, monkeypatch):
    listed = counted(monkeypatch, "names_in")
    read = counted(monkeypatch, "read_record")
    pass_over(run, [])
    assert 0 < max(listed.values()) <= 8
    assert set(read.values()) == {1}
    assert read_status(run).slurm.stages[0].done == 90


def test_status_reads_each_record_once(run, slurm, monkeypatch):
    pass_over(run, [])
    read = counted(monkeypatch, "read_record")
    status = read_status(run)
    rollouts = status.slurm.stages[0]
    assert (rollouts.done, rollouts.waiting, rollouts.total) == (90, 30, 120)
    assert set(read.values()) == {1}
    assert len(read) == 91


def test_what_failed_is_counted_by_the_last_submission_of_each_shard(run, slurm, monkeypatch):
    run.config.scheduler.__dict__["max_attempts"] = 1
    pass_over(run, [])
    assert read_status(run).slurm.stages[0].failed == 30


def test_the_inputs_of_an_update_are_made_once():
    plan = Plan(3, 50, 0)
    update = Task(2, Stage.UPDATE)
    assert plan.inputs(update) is plan.inputs(update)
    assert plan.inputs(update) != Plan(3, 51, 0).inputs(update)
