"""What came of learning iterations again is said once: in journal, watch and status, and aloud if need be."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.noop import make_record
from pipeline.metrics.row import Clock, iteration_row
from pipeline.orchestrate.lost_states import note_replay
from pipeline.run import journal, replays
from pipeline.run.commits import Record
from pipeline.run.plan import policy_maker
from pipeline.status.trainer_state import doubtful_replay
from pipeline.watch.event_lines import event_lines
from tests.support import processes


def update(iterations: int, difference: float = 0.0, unexpected: int = 0, given_up: int = 0) -> Record:
    """The record of update 7, which learned iterations before it again."""
    told = {
        replays.REPLAYED: iterations,
        replays.DIFFERENCE: difference,
        replays.UNEXPECTED: unexpected,
        replays.GIVEN_UP: given_up,
    }
    record = make_record(policy_maker(7))
    return replace(record, metrics={**record.metrics, **{name: float(value) for name, value in told.items()}})


@pytest.fixture
def run(inputs, tmp_path: Path):
    return processes.make_run(inputs, tmp_path / "run")


@pytest.mark.parametrize(
    ("record", "level", "said"),
    [
        (update(2), "info", "again over 2 iterations, which differ from the committed policies by 0.0e+00"),
        (update(1, 0.009), "info", "again over 1 iteration, which differ"),
        (update(3, 0.02), "warning", "by 2.0e-02 of what they changed, more than 0.01"),
        (update(3, 1e-9, unexpected=1), "error", "the same machine and versions should give no difference"),
        (update(0, given_up=1), "warning", "could not be learned again, and learning goes on"),
    ],
)
def test_a_replay_is_an_event_and_a_doubtful_one_is_said_aloud(run, record, level, said):
    notes: list[str] = []
    for _ in range(2):  # a driver that was killed before it wrote the row comes to it again
        note_replay(run, record, notes.append)
    (event,) = journal.read_events(run.paths.events)
    assert (event["event"], event["iteration"], event["level"]) == ("learned_again", 7, level)
    assert event["difference"] == record.metrics[replays.DIFFERENCE]
    assert said in event["message"]
    assert len(notes) == (level != "info")
    (line,) = event_lines([event], [], 0.0, 9)
    assert said in str(line)
    assert line.is_bad is (level != "info")
    assert (doubtful_replay([event]) is not None) is (level != "info")


def test_an_update_that_learned_nothing_again_is_no_event(run):
    for record in (None, make_record(policy_maker(7))):
        note_replay(run, record, pytest.fail)
    assert not run.paths.events.exists()


def test_status_shows_the_newest_replay_only(run):
    for record in (update(3, 0.02), replace(update(1), attempt="2-bb")):
        note_replay(run, record, lambda text: None)
    assert doubtful_replay(journal.read_events(run.paths.events)) is None


def test_a_row_has_no_numbers_of_a_replay(run):
    row = iteration_row(7, {"update": [update(3, 0.02)]}, Clock(0.0, 0.0, 9, []))
    assert not [name for name in row if name.startswith("replay")]
