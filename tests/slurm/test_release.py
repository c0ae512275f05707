"""A task that has committed releases those who wait for it, while its own job goes on."""

import os

import pytest

from slurm.commands import SlurmError
from slurm.release import dependency_without, early_release, release
from slurm.sealing import sealed
from slurm.tasklist import BELL, COMMITTED, RELEASED

JOB = "100"


@pytest.fixture
def waiting(tmp_path):
    """Rollouts of the next iteration, of which 101 and 103 wait for our job, and who else does."""
    states = {
        "rollout-1-0": {"job": "101", "waits_for": [JOB]},
        "rollout-1-1": {"job": "102", "waits_for": ["99"]},
        "rollout-2-0": {"job": "103", "waits_for": [JOB]},
        "rollout-3-0": {"job": "104", "waits_for": [JOB], "is_withdrawn": True},
        "rollout-4-0": {"job": None, "waits_for": []},
        "reward-1-0": {"job": "105", "waits_for": [JOB]},
        "evaluate-1-0": {"job": "106", "waits_for": ["98", JOB]},
        "driver-1-0": {"job": "107", "waits_for": [JOB, "97"]},
    }
    for name, state in states.items():
        (tmp_path / f"{name}.state.json").write_text(sealed(state))
    (tmp_path / "rollout-5-0.state.json").write_text("cut")
    return ((str(tmp_path / "rollout-*.state.json"),),)


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What Slurm was told. Asked what the evaluation and the driver job wait for, it says that."""
    commands = []
    shown = {
        "106": "afterok:98_*(unfulfilled),afterok:100_*(unfulfilled)|\n",
        "107": "afterany:100_*(unfulfilled)?afternotok:97_*(unfulfilled)|\n",
    }

    def run(arguments, timeout=0, input=None):
        if arguments[0] == "squeue":
            return next(shown[job] for job in shown if f"--jobs={job}" in arguments)
        commands.append(" ".join(arguments))
        return ""

    monkeypatch.setattr("slurm.commands._run_once", run)
    return commands


def ring(environment: dict[str, str], what: bytes) -> None:
    os.write(int(environment[BELL]), what)


def test_those_who_wait_for_this_job_need_not_wait_any_longer(waiting, told, capsys):
    environment: dict[str, str] = {}
    with early_release(waiting, JOB, environment):
        ring(environment, COMMITTED)
        ring(environment, RELEASED)
    assert told == [f"scontrol update jobid={job} dependency=" for job in ("101", "103")]
    assert "job 101 need not wait any longer" in capsys.readouterr().out


@pytest.mark.parametrize("what", [b"", RELEASED])
def test_nobody_is_released_for_a_task_that_has_not_committed(waiting, told, what):
    environment: dict[str, str] = {}
    with early_release(waiting, JOB, environment):
        ring(environment, what)
    assert told == []


def test_of_several_ranks_the_first_has_the_bell(waiting, told):
    environment = {"SLURM_PROCID": "1"}
    with early_release(waiting, JOB, environment):
        assert BELL not in environment


def test_what_slurm_refuses_is_said_and_the_others_are_released(waiting, told, monkeypatch, capsys):
    def refuse(arguments, timeout=0, input=None):
        told.append(arguments[2])
        raise SlurmError(arguments, 1, "Job is no longer pending execution")

    monkeypatch.setattr("slurm.commands._run_once", refuse)
    release(waiting, JOB)
    assert told == ["jobid=101", "jobid=103"]
    assert "job 103 was not released early" in capsys.readouterr().out


def test_nobody_listens_for_a_run_whose_folder_is_gone(tmp_path, told):
    release([[str(tmp_path / "gone" / "rollout-*.state.json")]], JOB)
    assert told == []


def test_an_evaluation_goes_on_waiting_for_the_one_before(waiting, told, tmp_path, capsys):
    release([*waiting, (str(tmp_path / "evaluate-*.state.json"),)], JOB)
    assert told[-1] == "scontrol update jobid=106 dependency=afterok:98"
    assert "it still waits: afterok:98" in capsys.readouterr().out


def test_where_no_rollout_waits_the_driver_job_may_submit_some(waiting, told, tmp_path):
    (rollouts,), drivers = waiting[0], str(tmp_path / "driver-*.state.json")
    release([(rollouts, drivers)], JOB)
    assert not any("jobid=107" in command for command in told)
    told.clear()
    release([(str(tmp_path / "none-*.state.json"), drivers)], JOB)
    assert told == ["scontrol update jobid=107 dependency="]


@pytest.mark.parametrize(
    ("shown", "left"),
    [
        ("afterok:100_*(unfulfilled)|", ""),
        ("(null)|", ""),
        ("aftercorr:12_*(unfulfilled),afterany:100_*(unfulfilled)|", "aftercorr:12"),
        ("afterok:1000_*(unfulfilled)|\nafterok:100_*(unfulfilled)|\n", "afterok:1000"),
        ("afterok:12_3(failed),afterok:100(unfulfilled)|", "afterok:12"),
    ],
)
def test_what_an_array_still_waits_for(shown, left):
    assert dependency_without(shown, JOB) == left
