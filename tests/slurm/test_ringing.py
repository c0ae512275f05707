"""Who is woken after a commit: arrays with a worker that waits for what reads it, and by one command."""

import pytest

from slurm.commands import SlurmError, SlurmMissing
from slurm.ringing import WorkerName, arrays_to_ring, parse_worker, ring
from slurm.submission import end_gently


def test_a_workers_name_has_its_array_element_and_restart():
    assert parse_worker("4711_3r1") == WorkerName("4711", 3, 1)
    assert str(parse_worker("4711_3r1")) == "4711_3r1"
    assert parse_worker("node7-4711") is None


def test_those_are_rung_who_wait_for_a_task_that_reads_what_was_committed():
    waiting = {
        "12_0r0": "3/update/0",
        "9_0r0": "3/rollout/0",
        "9_1r2": "3/rollout/1",
        "10_0r0": "2/evaluate/0",
        "node7-4711": "3/rollout/2",
    }
    readers = {"3/rollout/0", "3/rollout/1", "3/rollout/2", "2/evaluate/0"}
    assert arrays_to_ring(waiting, readers) == ("9", "10")


@pytest.fixture
def commands(monkeypatch):
    """Commands that were run; Slurm answers the next one with ``answer``."""

    class Commands(list):
        answer: Exception | None = None

    seen = Commands()

    def run(arguments, timeout, input=None):
        seen.append(list(arguments))
        if seen.answer:
            raise seen.answer
        return ""

    monkeypatch.setattr("slurm.commands._run_once", run)
    return seen


def test_all_are_rung_by_one_command_that_reaches_their_batch_scripts_alone(commands):
    assert ring(("9", "10")) == ""
    assert ring(()) == ""
    assert commands == [["scancel", "--batch", "--signal=USR1", "9", "10"]]


def test_elements_that_wait_or_have_ended_are_no_error_and_a_missing_client_is_said(commands):
    text = "scancel: error: Kill job error on job id 10: Job is pending execution"
    commands.answer = SlurmError(["scancel"], 1, text)
    assert ring(("10",)) == ""
    end_gently(["10_0"])
    assert commands[-1] == ["scancel", "--batch", "--signal=USR2", "10_0"], "which ends no task"
    commands.answer = SlurmMissing("scancel")
    assert "scancel is not on" in ring(("10",))
    commands.answer = SlurmError(["scancel"], 1, "scancel: error: Access/permission denied")
    assert "denied" in ring(("10",))
