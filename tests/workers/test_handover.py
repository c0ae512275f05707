"""What passes tell workers of places, and what those make of it."""

import pytest

from pipeline.run.paths import RunPaths
from pipeline.workers.handover import Handover, Told, file_of, is_to_leave, read_told, tell
from tests.support.damage import flip_bit


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    (tmp_path / "slurm").mkdir()
    return RunPaths(tmp_path)


def test_who_is_named_leaves_once_it_is_time(paths):
    assert not is_to_leave(paths, "7_0r0", 100.0), "nobody has said anything"
    tell(paths, Told((Handover("7_0r0", "reward", 90.0), Handover("7_1r0", "reward", 120.0))))
    assert is_to_leave(paths, "7_0r0", 100.0)
    assert not is_to_leave(paths, "7_0r1", 100.0), "that start of it has ended"
    assert not is_to_leave(paths, "7_1r0", 100.0)
    assert is_to_leave(paths, "7_1r0", 120.0)


def test_the_next_pass_may_take_it_back(paths):
    tell(paths, Told((Handover("7_0r0", "reward"),), is_contended=True))
    assert read_told(paths).is_contended
    tell(paths, Told())
    assert not is_to_leave(paths, "7_0r0", 100.0)
    assert not read_told(paths).is_contended


def test_what_was_said_before_is_not_written_again(paths):
    told = Told((Handover("7_0r0", "", 90.0, "4711_3"),))
    tell(paths, told)
    before = file_of(paths).stat().st_ino
    tell(paths, told)
    assert file_of(paths).stat().st_ino == before


def test_a_spoilt_file_makes_nobody_leave_and_is_replaced(paths):
    told = Told((Handover("7_0r0", "reward"),), is_contended=True)
    tell(paths, told)
    for spoil in (flip_bit, lambda path: path.write_text("{"), lambda path: path.write_text("")):
        spoil(file_of(paths))
        assert read_told(paths) == Told()
        tell(paths, told)
        assert read_told(paths) == told
