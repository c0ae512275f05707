"""Who is woken after a commit: elements whose worker waits for what reads it; and how signals are sent."""

import pytest

from slurm.commands import SlurmError, SlurmMissing, SlurmTimeout
from slurm.ringing import WorkerName, elements_to_ring, parse_worker, ring
from slurm.signals import Errands


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
    assert elements_to_ring(waiting, readers) == ("9_0", "9_1", "10_0")


class Answered:
    """A command that runs beside us, and how it ends."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def finish(self) -> None:
        if self.error:
            raise self.error


@pytest.fixture
def commands(monkeypatch):
    """Commands that were begun; Slurm answers the next one with ``answer``."""

    class Commands(list):
        answer: Exception | None = None

    seen = Commands()

    def begin(arguments, timeout, enough=None):
        seen.append(list(arguments))
        if isinstance(seen.answer, SlurmMissing):
            raise seen.answer
        return Answered(seen.answer)

    monkeypatch.setattr("slurm.commands.begin_command", begin)
    return seen


def test_those_who_run_are_rung_by_name_and_by_their_batch_scripts_alone(commands):
    assert ring(("9_0", "10_3")) == ""
    assert ring(()) == ""
    assert commands == [["scancel", "-v", "--batch", "--signal=USR1", "9_0", "10_3"]]


def test_no_call_names_more_elements_than_scancel_has_threads(commands):
    elements = [f"9_{index}" for index in range(64)]
    assert ring(elements) == ""
    named = [command[4:] for command in commands]
    assert [element for of_call in named for element in of_call] == elements
    assert max(map(len, named)) == 10


def test_elements_that_wait_or_have_ended_are_no_error_and_a_missing_client_is_said(commands):
    text = "scancel: error: Kill job error on job id 10_1: Invalid job id specified"
    commands.answer = SlurmError(["scancel"], 1, text)
    assert ring(("10_1",)) == ""
    commands.answer = SlurmMissing("scancel")
    assert "scancel is not on" in ring(("10_1",))
    commands.answer = SlurmError(["scancel"], 1, "scancel: error: Access/permission denied")
    assert "denied" in ring(("10_1",))


def test_a_pass_begins_signals_and_cancellations_and_hears_later_what_was_not_done(commands):
    told: list[str] = []
    errands = Errands(told.append)
    commands.answer = SlurmTimeout(["scancel"], None, "no answer")
    errands.ring(("9_0",))
    errands.end_gently(("10_0",))
    errands.cancel(["11"], only_pending=True)
    errands.cancel([], only_pending=True)
    assert commands[1:] == [
        ["scancel", "-v", "--batch", "--signal=USR2", "10_0"],  # which ends no task
        ["scancel", "--state=PENDING", "11"],
    ]
    assert told == []
    assert errands.finish() == [commands.answer] * 3
    assert [text.partition(":")[0] for text in told] == [
        "workers were not notified",
        "workers were not asked to leave",
        "11 not cancelled",
    ]
    assert errands.finish() == []
    assert len(told) == 3, "each is told once"
    commands.answer = SlurmError(["scancel"], 1, "scancel: error: Invalid job id 11")
    errands.cancel(["11"], only_pending=False)
    errands.finish()
    assert len(told) == 3, "it has ended meanwhile"
    commands.answer = SlurmMissing("scancel")
    errands.ring(("9_0",))
    assert told[3].startswith("workers were not notified: scancel is not on")
