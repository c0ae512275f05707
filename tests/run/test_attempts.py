"""Ids of attempts: those of Slurm's jobs, of processes of this machine and of forks."""

import pytest

from pipeline.run.attempts import AttemptId, new_attempt
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
