"""Workers that leave for long gaps and whose successors start early, in simulated time."""

from collections import Counter

import pytest

from pipeline.run.plan import Plan
from pipeline.run.tasks import Stage, Task
from pipeline.workers.beats import Reason
from tests.support.simulated import Simulation

STARTUP, QUEUE = 10.0, 2.0
SECONDS = {Stage.PREPARE: 1.0, Stage.ROLLOUT: 5.0, Stage.REWARD: 5.0, Stage.UPDATE: 30.0}
"""Rollouts and rewards wait for more than half a minute between their tasks, updates for ten seconds."""
KNOWN = 3
"""First iteration of which is known beforehand how long stages take, and starts, and the queue."""
NEVER = 86_400


def run(linger: int | str, iterations: int, seconds: dict[Stage, float] = SECONDS) -> Simulation:
    def take(task: Task) -> float:
        return seconds[task.stage]

    most = float(linger) if isinstance(linger, int) and linger else 600.0
    return Simulation(Plan(iterations, 2, 0), take, STARTUP, QUEUE, linger, most).carry_out()


@pytest.fixture(scope="module")
def staying() -> Simulation:
    return run(NEVER, 8)


@pytest.fixture(scope="module")
def leaving() -> Simulation:
    return run("auto", 8)


def test_for_long_gaps_workers_leave_and_their_successors_are_there_in_time(staying, leaving):
    left = Counter(job.reason for job in leaving.jobs)
    assert left[Reason.FAR] >= 4 * (8 - KNOWN), left
    assert set(Counter(job.reason for job in staying.jobs)) == {Reason.DONE}
    assert sum(leaving.iterations(KNOWN)) <= 1.1 * sum(staying.iterations(KNOWN))


def test_what_is_held_is_little_more_than_what_is_needed(leaving):
    longer = run("auto", 16)
    more = {what: longer.spent(what) - leaving.spent(what) for what in ("busy", "startup", "waiting")}
    assert more["waiting"] <= 0.2 * (more["busy"] + more["startup"]), more


def test_without_lingering_successors_start_early_all_the_same(staying):
    """The price of coming back is paid while others compute."""
    assert sum(run(0, 8).iterations(KNOWN)) <= 1.1 * sum(staying.iterations(KNOWN))


def test_for_short_gaps_nobody_leaves():
    short = dict.fromkeys(SECONDS, 1.0)
    found = run("auto", 8, short)
    assert {job.reason for job in found.jobs} == {Reason.DONE}
    assert found.iterations(KNOWN) == pytest.approx(run(NEVER, 8, short).iterations(KNOWN))
