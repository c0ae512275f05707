"""What people asked of a run is kept twice: whatever happens to one file, the other is read and fixes it."""

import pytest

from pipeline.run.control import (
    Control,
    SpoiltControl,
    mend_control,
    read_control,
    spoilt_control,
    write_control,
)
from pipeline.run.paths import RunPaths
from tests.support.damage import DAMAGES, restore

CONTROL = Control(3, cancelled=True, emptied=2)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["control.json", "control.copy.json"])
def test_a_damaged_file_is_read_from_the_other_told_of_and_written_again(tmp_path, name, damage):
    paths = RunPaths(tmp_path)
    write_control(paths, CONTROL)
    damaged = paths.control.with_name(name)
    before = damaged.read_bytes()
    DAMAGES[damage](damaged)
    assert read_control(paths) == CONTROL
    assert str(damaged) in spoilt_control(paths)
    assert str(damaged) in mend_control(paths)
    assert damaged.read_bytes() == before
    assert mend_control(paths) is None


def test_a_copy_that_a_crash_left_behind_is_written_again(tmp_path):
    paths = RunPaths(tmp_path)
    write_control(paths, CONTROL)
    older = paths.control.read_bytes()
    write_control(paths, Control(4))
    restore(paths.control.with_suffix(".copy.json"), older)
    assert "is older than what it is a copy of" in mend_control(paths)
    paths.control.unlink()
    assert read_control(paths) == Control(4)


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in ("gone", "link to nothing")])
def test_where_neither_can_be_read_one_line_says_what_to_do(tmp_path, damage):
    paths = RunPaths(tmp_path)
    write_control(paths, CONTROL)
    for path in (paths.control, paths.control.with_suffix(".copy.json")):
        DAMAGES[damage](path)
    with pytest.raises(SpoiltControl, match=r"cannot be read .*nor can its copy.*slurm-ppo submit"):
        read_control(paths)


def test_a_run_that_was_never_submitted_has_nothing_to_mend(tmp_path):
    assert mend_control(RunPaths(tmp_path)) is None
    assert not RunPaths(tmp_path).control.exists()
