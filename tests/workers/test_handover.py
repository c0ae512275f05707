"""What passes tell workers of places, and what those make of it."""

import pytest

from pipeline.run.paths import RunPaths
from pipeline.workers.handover import (
    Handover,
    Instructions,
    file_of,
    must_leave,
    publish_instructions,
    read_instructions,
)
from tests.support.damage import flip_bit


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    (tmp_path / "slurm").mkdir()
    return RunPaths(tmp_path)


def test_who_is_named_leaves_once_it_is_time(paths):
    assert not must_leave(paths, "7_0r0", 100.0), "nobody has said anything"
    publish_instructions(
        paths, Instructions((Handover("7_0r0", "reward", 90.0), Handover("7_1r0", "reward", 120.0)))
    )
    assert must_leave(paths, "7_0r0", 100.0)
    assert not must_leave(paths, "7_0r1", 100.0), "that start of it has ended"
    assert not must_leave(paths, "7_1r0", 100.0)
    assert must_leave(paths, "7_1r0", 120.0)


def test_the_next_pass_may_take_it_back(paths):
    publish_instructions(paths, Instructions((Handover("7_0r0", "reward"),), is_contended=True))
    assert read_instructions(paths).is_contended
    publish_instructions(paths, Instructions())
    assert not must_leave(paths, "7_0r0", 100.0)
    assert not read_instructions(paths).is_contended


def test_what_was_said_before_is_not_written_again(paths):
    told = Instructions((Handover("7_0r0", "", 90.0, "4711_3"),))
    publish_instructions(paths, told)
    before = file_of(paths).stat().st_ino
    publish_instructions(paths, told)
    assert file_of(paths).stat().st_ino == before


def test_a_spoilt_file_makes_nobody_leave_and_is_replaced(paths):
    told = Instructions((Handover("7_0r0", "reward"),), is_contended=True)
    publish_instructions(paths, told)
    for spoil in (flip_bit, lambda path: path.write_text("{"), lambda path: path.write_text("")):
        spoil(file_of(paths))
        assert read_instructions(paths) == Instructions()
        publish_instructions(paths, told)
        assert read_instructions(paths) == told
