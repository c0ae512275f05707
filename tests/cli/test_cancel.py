"""What cancel says: of a run that goes on, and of one that is complete; and that it acts at once."""

import os
import time

import pytest

from pipeline.cli.queue import UnfinishedError, cancel_run
from pipeline.run.control import read_control
from slurm.commands import SlurmTimeout
from tests.support.toyworld import Luck, make_world


def test_cancel_of_a_complete_run_does_not_advise_to_resume_it(tmp_path, monkeypatch, clock):
    world = make_world(tmp_path / "run", monkeypatch, 0, Luck())
    world.submit()
    assert "to continue: slurm-ppo resume" in cancel_run(world.run)
    assert read_control(world.run.paths).cancelled
    world.submit()
    world.live_on()
    said = cancel_run(world.run)
    assert said.startswith("the run is complete; ")
    assert "resume" not in said
    assert f"slurm-ppo report {world.run.paths.root}" in said


def test_jobs_end_at_once_also_where_nobody_knows_who_holds_the_lease(tmp_path, monkeypatch, clock):
    """A lease that cannot be read is free only once nobody has renewed it for two minutes."""
    world = make_world(tmp_path / "run", monkeypatch, 0, Luck())
    world.submit()
    (lease,) = world.run.paths.locks.glob("*.json")
    lease.write_text("{")
    os.utime(lease, (clock[0], clock[0]))
    waits, sleep = [], time.sleep

    def wait(seconds):
        waits.append([element for element in world.slurm.elements() if not element.has_ended])
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", wait)
    said = cancel_run(world.run)
    assert said.startswith("cancelled ")
    assert not said.startswith("cancelled 0 ")
    assert waits
    assert not any(waits)


def test_what_slurm_does_not_hear_of_is_said_as_it_is(tmp_path, monkeypatch, clock):
    """Nothing is submitted from then on, though the controller is away: it is not "ask again later"."""
    world = make_world(tmp_path / "run", monkeypatch, 0, Luck())
    world.submit()

    def is_away(program):
        raise SlurmTimeout([program], None, "Unable to contact slurm controller")

    before, world.slurm.before = world.slurm.before, is_away
    with pytest.raises(UnfinishedError) as told:
        cancel_run(world.run)
    assert "the run is cancelled" in str(told.value)
    assert f"slurm-ppo cancel {world.run.paths.root}" in str(told.value)
    assert read_control(world.run.paths).cancelled
    world.slurm.before = before
    assert cancel_run(world.run).startswith("cancelled ")
