"""Slurm's commands are waited for as long as there is time for them, and ended with all that they started."""

import re
import time
from pathlib import Path

import pytest

from slurm.commands import SlurmError, SlurmMissing, SlurmTimeout, begin_command, calls, run_command, within
from tests.support.waiting import eventually


@pytest.fixture
def command(tmp_path):
    """Make a command of a few lines of shell. It is known by its path."""

    def make(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_commands_share_the_seconds_of_a_block_and_none_is_started_once_they_are_spent(command):
    quick, slow = command("quick", "echo fine"), command("slow", "sleep 100")
    with within(0.6) as patience:
        assert run_command([quick]) == "fine\n"
        assert 0 < patience.left < 0.6
        with pytest.raises(SlurmTimeout, match="no answer in 0"):
            run_command([slow], timeout=60.0)
        before = calls[quick]
        with pytest.raises(SlurmTimeout, match="waited for long enough"):
            run_command([quick])
        assert calls[quick] == before
        with within(30.0):
            assert run_command([quick]) == "fine\n", "the innermost block counts"
    assert run_command([quick]) == "fine\n"


def test_a_command_is_not_asked_again_where_that_has_to_be_waited_for(command, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    away = command("away", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmTimeout, match="Unable to contact"):
        run_command([away], retries=2)
    assert calls[away] == 3
    with within(60.0), pytest.raises(SlurmTimeout, match="Unable to contact"):
        run_command([away], retries=2)
    assert calls[away] == 4, "once"


def test_what_a_site_has_in_front_of_a_command_ends_with_it(command, tmp_path):
    """Else sbatch would submit minutes later what nobody expects any more."""
    wrapper = command("wrapper", f"sleep 100 & echo $! > {tmp_path}/child; wait; touch {tmp_path}/late")
    with pytest.raises(SlurmTimeout):
        run_command([wrapper], timeout=1.0)
    child = int((tmp_path / "child").read_text())
    assert eventually(lambda: not is_alive(child))
    assert not (tmp_path / "late").exists()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_beside_us_says_how_it_ended(command):
    begin_command([command("fine", "exit 0")], 60.0).finish()
    with pytest.raises(SlurmError, match="no such job"):
        begin_command([command("refuses", "echo 'error: no such job' >&2; exit 1")], 60.0).finish()
    with pytest.raises(SlurmMissing):
        begin_command(["/nowhere/scancel"], 60.0)


def test_one_that_has_done_all_it_will_is_not_waited_for_and_one_that_hangs_is_ended(command, tmp_path):
    tries = command("tries", f"echo $$ > {tmp_path}/pid; echo 'scancel: retrying' >&2; sleep 100")
    begin_command([tries], 60.0, re.compile(b"retrying")).finish()
    assert not is_alive(int((tmp_path / "pid").read_text()))
    with pytest.raises(SlurmTimeout, match="no longer"):
        begin_command([command("hangs", "sleep 100")], 0.5, re.compile(b"retrying")).finish()


def test_one_that_says_a_lot_is_not_held_up(command):
    loud = command(
        "loud",
        "i=0; while [ $i -lt 4000 ]; do echo 'a line of some forty letters, as they say' >&2; "
        "i=$((i+1)); done; echo done >&2; exit 3",
    )
    begun = begin_command([loud], 60.0)
    assert begun.process.wait(60) == 3, "although nobody has read any of it"
    with pytest.raises(SlurmError):
        begun.finish()
