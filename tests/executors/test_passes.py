"""Whoever makes a pass waits for nothing while he holds the lease: others could decide nothing meanwhile."""

import time

import pytest

from pipeline.executors.slurm import exit_reasons, passes
from pipeline.executors.slurm.passes import PASS_SECONDS, TakenOver, make_pass
from pipeline.run import journal
from pipeline.run.control import begin_invocation, take_over
from pipeline.run.lease import holder_of
from pipeline.run.owner import Owner
from pipeline.run.submissions import Ledger, job_kind_of
from slurm import commands
from slurm.commands import SlurmTimeout
from slurm.ended import NoAnswer
from slurm.states import SlurmState
from tests.support.toyworkers import WorkerWorld, make_worker_world
from tests.support.toyworld import MIN_JOB_AGE, Luck, Watcher, is_driver


@pytest.fixture
def world(tmp_path, monkeypatch, clock) -> WorkerWorld:
    world = make_worker_world(tmp_path / "run", monkeypatch, 1, Luck())
    begin_invocation(world.run.paths)
    monkeypatch.setattr(passes, "is_behind", lambda *_: False)  # W&B has no part in it
    return world


@pytest.fixture
def waits(world, monkeypatch, clock) -> list[str | None]:
    """Who held the lease at each wait."""
    found = []

    def sleep(seconds: float) -> None:
        found.append(holder_of(world.run.paths.locks))
        clock[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    return found


def advance(world: WorkerWorld) -> None:
    make_pass(world.run, Watcher(world.story))


def lose_answers(world: WorkerWorld, program: str, times: int) -> None:
    left = iter(range(times))

    def lose(called: str) -> None:
        if called == program and next(left, None) is not None:
            raise SlurmTimeout([program], None, "no answer in 7 s")

    world.slurm.before = lose


def test_a_driver_job_of_who_had_the_run_before_does_nothing_more(world, monkeypatch):
    """Whoever took it over has jobs of his own, which it would take for lost."""
    ada, ben = Owner("ada", 61001, "gold"), Owner("ben", 61002, "gold")
    monkeypatch.setenv("SLURM_JOB_UID", str(ada.uid))
    monkeypatch.setenv("SLURM_JOB_USER", ada.user)
    advance(world)
    take_over(world.run.paths, ben, ada)
    count, asked = len(world.slurm.jobs), []
    world.slurm.before = asked.append
    with pytest.raises(TakenOver, match="was taken over by ben on cluster gold: jobs of ada do no more"):
        advance(world)
    assert not asked
    monkeypatch.setenv("SLURM_JOB_UID", str(ben.uid))
    advance(world)
    assert len(world.slurm.jobs) >= count
    assert asked


@pytest.mark.parametrize("program", ["sbatch", "squeue"])
def test_a_command_that_does_not_answer_is_asked_again_once_the_lease_was_free(world, waits, program):
    lose_answers(world, program, 3)
    advance(world)
    assert waits, "it had to wait"
    assert set(waits) == {None}
    assert {job_kind_of(element.job.name) for element in world.slurm.elements()} >= {"guard", "prepare"}
    assert not [e for e in journal.read(world.run.paths.events) if e["event"] == "failed"]


def test_commands_share_the_seconds_for_which_the_lease_is_held(world, monkeypatch, clock):
    given = []
    real = world.slurm.run

    def note(arguments, timeout, input=None):
        if holder_of(world.run.paths.locks) is not None:
            given.append(timeout)
        return real(arguments, timeout, input)

    monkeypatch.setattr(commands, "_run_once", note)
    advance(world)
    given.clear()
    world.slurm.end(next(e for e in world.slurm.elements() if is_driver(e)), SlurmState.CANCELLED)
    clock[0] += 60.0
    advance(world)
    assert given, "a guard is submitted again"
    assert max(given) <= PASS_SECONDS


def test_signals_and_cancellations_are_looked_after_once_the_lease_is_free(world, monkeypatch):
    advance(world)
    finished = []

    class Begun:
        def finish(self) -> None:
            finished.append(holder_of(world.run.paths.locks))
            if len(finished) == 1:
                raise SlurmTimeout(["scancel"], None, "no answer")

    monkeypatch.setattr(commands, "begin_command", lambda *_: Begun())
    for task in world.run.plan.all_tasks():
        world.commit(task, "1-a")
    advance(world)
    assert len(finished) == 2, "what waits in the queue of a run that is over is cancelled until it is"
    assert set(finished) == {None}


def test_accounting_that_is_slow_is_asked_while_the_lease_is_free(world, monkeypatch, clock):
    advance(world)
    asked = []

    def slow(ids, timeout: float = 60.0):
        asked.append((timeout < PASS_SECONDS, holder_of(world.run.paths.locks) is None))
        if timeout < PASS_SECONDS:
            raise NoAnswer("no answer")
        return {}

    monkeypatch.setattr(exit_reasons, "read_ended", slow)
    (prepare,) = (e for e in world.slurm.elements() if job_kind_of(e.job.name) == "prepare")
    world.slurm.end(prepare, SlurmState.FAILED, 1)
    time.sleep(MIN_JOB_AGE)
    world.slurm.forget_ended()
    advance(world)
    assert asked == [(True, False), (False, True)]
    failed = [e["task"] for e in journal.read(world.run.paths.events) if e["event"] == "failed"]
    assert failed == ["0/prepare/0"]


def test_slurm_opens_what_is_as_old_as_the_run(world):
    """So no job fails to start as a node does not see a new folder yet, or as a disk is full; for driver jobs
    it opens nothing. Runs that an earlier version made get the file with the next submission."""
    output = world.run.paths.slurm_log
    assert output.read_text() == "", "made with the run"
    output.unlink()
    advance(world)
    ledger = Ledger(world.run.paths)
    scripts = {
        submission.is_of_stage: ledger.script(submission).read_text() for submission in ledger.load({0})
    }
    assert f"#SBATCH --output={output}\n" in scripts[True]
    assert "#SBATCH --output=/dev/null\n" in scripts[False]
    assert output.read_text() == ""
