"""Signs of life of somebody else's run, by clocks of its nodes."""

from pipeline.run.owner import Owner
from pipeline.run.standpoint import Elsewhere
from pipeline.run.tasks import Stage, Task
from pipeline.status.whose import Whose, whose
from tests.support.beats import beat
from tests.support.reportrun import record

NOW = 1_000_000.0
FROM = Elsewhere(Owner("ada", 1001, "gold"), Owner("ben", 1002, "gold"))


def seen(*ages: float, committed: float = 7200.0) -> Whose:
    """What is known where workers were last heard of so many seconds ago by their own clocks."""
    beats = [beat(f"7_{index}r0", beat=NOW - age) for index, age in enumerate(ages)]
    return whose(FROM, True, [record(Task(1, Stage.ROLLOUT), ended=NOW - committed)], beats, NOW)


def test_a_run_is_not_alive_for_as_long_as_a_nodes_clock_was_ahead():
    assert seen(3.0).lives(NOW)
    assert not seen(7000.0).lives(NOW)
    assert not seen(7000.0, -86_400.0).lives(NOW)
    assert not seen(7000.0, committed=-86_400.0).lives(NOW)
    assert seen(7000.0, committed=8.0).lives(NOW)


def test_a_clock_that_is_ahead_hides_no_other_sign():
    of = seen(3.0, -86_400.0)
    assert of.lives(NOW)
    assert of.last_word == NOW - 3
    assert seen(-60.0).lives(NOW), "clocks differ by seconds"
