"""Whose a run on Slurm is: recorded when it is submitted, changed by a take-over, asked for by jobs."""

import os

import pytest

from pipeline.run.control import Control, begin_invocation, read_control, take_over, write_control
from pipeline.run.owner import Owner, owner_of_job
from pipeline.run.paths import RunPaths
from pipeline.run.standpoint import owner_of, standpoint
from stages.attempts.runner import is_taken_over, main
from stages.logs import log

ADA, BEN = Owner("ada", 61001, "gold"), Owner("ben", 61002, "gold")
SILVER, BRONZE = (Owner("ada", 61001, name) for name in ("silver", "bronze"))


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    return RunPaths(tmp_path)


def test_who_submits_last_is_the_owner_and_a_cluster_that_is_away_stays_what_it_was(paths):
    begin_invocation(paths, ADA)
    begin_invocation(paths, Owner("ada", 61001))
    assert read_control(paths).owner == ADA
    begin_invocation(paths)
    assert owner_of(paths) == ADA


def test_a_take_over_is_kept_with_whom_it_was_taken_from_whatever_is_submitted_later(paths):
    begin_invocation(paths, ADA)
    take_over(paths, BEN, ADA)
    begin_invocation(paths, BEN)
    control = read_control(paths)
    assert (control.owner, control.former) == (BEN, (ADA,))
    assert (control.invocation, control.emptied) == (2, 1), "how jobs of before end is no failure"


def test_of_a_run_that_an_earlier_version_submitted_the_file_says_whose_it_is(paths):
    assert owner_of(paths) is None, "nobody has submitted it"
    write_control(paths, Control(1))
    assert owner_of(paths).uid == paths.control.stat().st_uid == os.getuid()
    assert standpoint(paths, lambda: pytest.fail("nobody needs to be asked")) is None


@pytest.mark.parametrize(
    ("owner", "former", "own", "is_over"),
    [
        (ADA, (), ADA, False),
        (ADA, (), BEN, False),  # nobody took it over: a container may say anything
        (BEN, (ADA,), ADA, True),
        (BEN, (ADA,), BEN, False),
        (BEN, (ADA,), None, False),
        (ADA, (ADA, BEN), ADA, False),  # she took it back
        (ADA, (ADA, BEN), BEN, True),
        (SILVER, (ADA,), ADA, True),
        (SILVER, (ADA,), BRONZE, False),  # a sibling of a federation
        (SILVER, (ADA,), Owner("ada", 61001), False),
        (BEN, (ADA,), SILVER, True),
    ],
)
def test_whose_jobs_do_nothing_more(owner, former, own, is_over):
    assert Control(1, owner=owner, former=former).is_taken_over_from(own) is is_over


def test_a_task_s_own_job_that_starts_after_a_take_over_does_nothing(paths, monkeypatch):
    begin_invocation(paths, ADA)
    monkeypatch.setenv("SLURM_JOB_UID", str(ADA.uid))
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "gold")
    assert not is_taken_over(paths.root)
    take_over(paths, BEN, ADA)
    assert is_taken_over(paths.root)
    monkeypatch.setattr(log, "handlers", log.handlers)  # main() sets them, and that nobody else has the lines
    monkeypatch.setattr(log, "propagate", log.propagate)
    assert main(["rollout", "--run-dir", str(paths.root), "--iteration", "1"]) == 0
    assert not paths.iterations.exists()


def test_a_job_knows_its_user_by_slurm_whatever_number_a_container_gives_him():
    given = {"SLURM_JOB_UID": "61001", "SLURM_JOB_USER": "ada", "SLURM_CLUSTER_NAME": "gold"}
    assert owner_of_job(given) == ADA
    assert owner_of_job({}) is None
