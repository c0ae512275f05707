"""Where a run of this machine stands, from its events: whatever stands in them."""

import pytest

from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage, Task
from pipeline.status.local import task_states

ROLLOUT = Task(1, Stage.ROLLOUT)


def states(tmp_path, *events: dict) -> list:
    given = [{"time": 5.0, **event} for event in events]
    return list(task_states(RunPaths(tmp_path), [ROLLOUT], {}, given, is_driven=True))


@pytest.mark.parametrize(
    "spoilt",
    [
        {"event": "launched", "task": "1/rolmout/0", "attempt": "1-a"},
        {"event": "launched", "attempt": "1-a"},
        {"event": "failed", "task": 7, "attempt": None},
        {"event": "launched", "task": ["1/rollout/0"], "attempt": "1-a"},
    ],
)
def test_an_event_that_tells_of_no_task_is_skipped(tmp_path, spoilt):
    launched = {"event": "launched", "task": "1/rollout/0", "attempt": "2-9f3a"}
    (state,) = states(tmp_path, launched, spoilt)
    assert (state.attempts, state.is_waiting) == (2, True)


def test_an_attempt_without_a_number_is_shown(tmp_path):
    (state,) = states(tmp_path, {"event": "failed", "task": "1/rollout/0"})
    assert (state.attempts, state.has_failed) == (0, True)


def test_what_an_earlier_driver_launched_died_with_it(tmp_path):
    launched = {"event": "launched", "task": "1/rollout/0", "attempt": "2-9f3a"}
    (state,) = states(tmp_path, launched, {"event": "driver_started"})
    assert (state.attempts, state.is_waiting, state.has_failed) == (0, False, False)
