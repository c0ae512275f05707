"""What cancel says: of a run that goes on, and of one that is complete."""

from pipeline.cli.queue import cancel_run
from pipeline.run.control import read_control
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
