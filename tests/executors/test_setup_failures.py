"""A line of setup that no node passes: the run gives up after a few tries, with the line and the way out.

The driver is the real one, on a toy Slurm.
"""

from pipeline.cli.summary import say_how_it_ended
from pipeline.orchestrate.driver import Outcome
from pipeline.orchestrate.reconcile import MOST_SETUPS
from pipeline.run import journal
from pipeline.status.snapshot import read_status
from slurm.setup_lines import SETUP_EXIT
from slurm.states import SlurmState
from tests.support.toyworkers import make_worker_world
from tests.support.toyworld import Luck, is_driver, pass_over

_MOST = 20


def test_a_run_whose_setup_fails_wherever_it_is_tried_fails_and_says_what_to_mend(
    tmp_path, monkeypatch, clock, capsys
):
    world = make_worker_world(tmp_path / "run", monkeypatch, 3, Luck())
    world.submit()
    tries, done = 0, None
    while (done is None or done.outcome is None) and tries < _MOST:
        tries += 1
        for element in world.slurm.elements(SlurmState.PENDING):
            if element.is_free and not is_driver(element):
                world.slurm.start(element)
                world.slurm.end(element, SlurmState.FAILED, SETUP_EXIT)
        done = pass_over(world.run, world.story)
    assert (done.outcome, tries) == (Outcome.FAILED, MOST_SETUPS[False])
    failed = [event for event in journal.read(world.run.paths.events) if event["event"] == "failed"]
    assert {event["kind"] for event in failed} == {"setup"}
    assert say_how_it_ended(world.run, done) == 2
    said = capsys.readouterr().err
    assert "a line of setup failed on node node" in said
    assert "mend the settings and type the same command again" in said
    assert read_status(world.run).state == "failed"
