"""Attempts: their ids, and what failed ones left of themselves, also when a disk has spoilt that."""

import json

import pytest

from pipeline.run.attempts import AttemptId, new_attempt
from pipeline.run.failures import FailureKind, last_attempt_number, read_said
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage, Task
from slurm.tasklist import attempt_id


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (attempt_id(2, "4711", "3", 1), AttemptId(2, "4711", 1)),
        (attempt_id(2, "4711", "3", 0, position=5), AttemptId(2, "4711", 0)),
        ("12", AttemptId(12)),
        ("3-9f3a00r1", AttemptId(3)),
        ("parent", AttemptId(0)),
    ],
)
def test_an_id_is_read_whoever_made_it(text, found):
    assert AttemptId.parse(text) == found


def test_ids_of_one_machine_differ_and_begin_with_the_number():
    made = {new_attempt(7) for _ in range(100)}
    assert len(made) == 100
    assert {AttemptId.parse(text).number for text in made} == {7}


def test_no_two_tasks_of_an_array_share_an_id():
    ids = [attempt_id(1, "5", index, 0, position) for index in ("0", "1", "11") for position in range(3)]
    assert len(set(ids)) == len(ids)


# --- what failed ones left ---


TASK = Task(3, Stage.REWARD, 2)
SAID = {"kind": "inputs", "message": "a shard is corrupt", "suspect": "3/rollout/2"}


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    found = RunPaths(tmp_path)
    found.task(TASK).attempt_logs(1).mkdir(parents=True)
    return found


def test_an_attempt_that_says_why_it_failed_is_believed(paths):
    assert read_said(paths, TASK, 1) is None, "it left no file"
    paths.task(TASK).failure(1).write_text(json.dumps(SAID))
    said = read_said(paths, TASK, 1)
    assert (said.kind, said.message) == (FailureKind.INPUTS, "a shard is corrupt")
    assert said.suspected == Task(3, Stage.ROLLOUT, 2)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b'{"kind": "err', b"\xff\xfe\x00", b"null", b'["error"]', b'{"message": "a"}'),
        json.dumps({**SAID, "kind": "of a later version"}).encode(),
        json.dumps({**SAID, "message": None}).encode(),
        json.dumps({**SAID, "suspect": "rollout"}).encode(),
    ],
)
def test_a_spoilt_failure_file_says_nothing_and_stops_no_pass(paths, content):
    paths.task(TASK).failure(1).write_bytes(content)
    assert read_said(paths, TASK, 1) is None


def test_a_copy_that_a_person_made_among_the_logs_is_no_attempt(paths):
    for folder in ("attempt-1", "attempt-1-copy", "attempt-old"):
        log = paths.logs(TASK) / folder / f"{TASK.file_stem}.log"
        log.parent.mkdir(exist_ok=True)
        log.touch()
    assert last_attempt_number(paths, TASK) == 1
