"""Passes that workers ask for, where Slurm does not take what they submit."""

import errno
import os
import sys
from pathlib import Path

import pytest

from pipeline.cli import queue
from pipeline.orchestrate.driver import Outcome, Pass
from pipeline.run.commits import publish
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.identity import RunError
from pipeline.run.pass_requests import is_requested, read_last, request_pass
from pipeline.run.tasks import Stage, Task
from pipeline.workers.looking import FROM_NOW
from slurm.submission import Refused
from tests.support import reportrun


@pytest.fixture
def run(tmp_path, monkeypatch):
    """One whose workers have asked for a pass; the process for it is told to end after that."""
    made = reportrun.make_run(tmp_path / "run", scheduler=reportrun.SLURM)
    request_pass(made.paths)
    with Path(os.devnull).open() as orders:
        monkeypatch.setattr(sys, "stdin", orders)
        yield made


def test_what_slurm_refuses_is_asked_for_again_with_the_next_pass_and_not_at_once(run, monkeypatch, capfd):
    def refuse(run, watcher, max_age):
        raise Refused("sbatch refused it: invalid account")

    monkeypatch.setattr(queue, "make_pass", refuse)
    assert queue.asked_passes(run.paths.root) == 0
    assert "invalid account" in capfd.readouterr().err
    assert not is_requested(run.paths)
    assert read_last(run.paths).number == 1, "nobody who leaves waits for another"


def test_a_pass_that_fails_in_any_other_way_is_wished_for_again(run, monkeypatch, capfd):
    def fail(run, watcher, max_age):
        raise OSError("no space left on device")

    monkeypatch.setattr(queue, "make_pass", fail)
    assert queue.asked_passes(run.paths.root) == 1
    assert "no space left" in capfd.readouterr().err
    assert is_requested(run.paths)
    assert (read_last(run.paths).number, read_last(run.paths).failures) == (0, 1)


@pytest.mark.parametrize(
    ("error", "avoided"),
    [
        (OSError(errno.EROFS, "read-only file system", "locks"), "gpu07"),
        (OSError(errno.EACCES, "permission denied", "locks"), "gpu07"),
        (OSError(errno.ENOSPC, "no space left on device", "locks"), ""),
        (RuntimeError("a mistake"), ""),
    ],
)
def test_a_driver_job_whose_node_may_be_at_fault_asks_for_another(run, monkeypatch, capfd, error, avoided):
    """A disk that is full, and what is a mistake, are so on every node."""

    def fail(run, watcher, max_age):
        raise error

    told = []
    monkeypatch.setattr(queue, "make_pass", fail)
    monkeypatch.setattr(queue, "requeue_elsewhere", lambda job, node: told.append((job, node)))
    monkeypatch.setattr(queue, "log_output", lambda: sys.stderr)
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    assert queue.driver_job(run.paths.root) == 1
    assert told == [("78", avoided)]
    assert "waits in the queue once more" in capfd.readouterr().err


def test_a_workers_pass_says_how_the_run_has_ended(run, monkeypatch, capfd):
    """A driver job that would may not come after it."""
    failure = Failure(Task(1, Stage.ROLLOUT, 0), 1, FailureKind.CONFIG, "the policy has changed")
    for done, said in (
        (Pass(Outcome.COMPLETE), "the run is complete"),
        (Pass(Outcome.FAILED, given_up=(failure,)), "the policy has changed"),
    ):
        request_pass(run.paths)
        monkeypatch.setattr(queue, "make_pass", lambda run, watcher, max_age, done=done: done)
        assert queue.asked_passes(run.paths.root) == 0
        assert said in capfd.readouterr().err


def test_the_last_pass_does_not_rest_before_it_asks(run, monkeypatch):
    """Where much was asked a driver job rests for up to 12 s, so that others may take the same answer."""
    ages = []

    def make_pass(run, watcher, max_age):
        ages.append(max_age)
        return Pass(None)

    monkeypatch.setattr(queue, "make_pass", make_pass)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    last = run.plan.iterations
    for iteration in (last - 1, last):
        queue.driver_job(run.paths.root)
        publish(run.paths, reportrun.record(Task(iteration, Stage.UPDATE)))
        queue.driver_job(run.paths.root)
    assert ages == [*[FROM_NOW] * 3, 0.0]
    monkeypatch.delenv("SLURM_JOB_ID")
    queue.driver_job(run.paths.root)
    assert ages[-1] == 0.0, "a person types it"


def test_where_no_run_is_it_says_so_in_one_line(tmp_path):
    with pytest.raises(RunError, match="is not a run directory"):
        queue.asked_passes(tmp_path)
