"""Workers that leave for long gaps and whose successors start early, in simulated time."""

from dataclasses import replace

import pytest

from pipeline.config.types import Linger
from pipeline.simulate.plants import never_leave
from pipeline.simulate.results import SimulationResult
from pipeline.simulate.simulation import simulate
from pipeline.workers.beats import Reason
from tests.support.plants import SECONDS, plant_with

KNOWN = 3
"""First iteration of which is known beforehand how long stages take, and starts, and the queue."""
PLACES = 8
"""Room for all. Rollouts and rewards wait for more than half a minute between their tasks, updates for ten
seconds."""


def run(linger: Linger, iterations: int, seconds=SECONDS) -> SimulationResult:
    return simulate(plant_with(PLACES, iterations, seconds=seconds, linger=linger))


@pytest.fixture(scope="module")
def staying() -> SimulationResult:
    return simulate(never_leave(plant_with(PLACES, 8)))


@pytest.fixture(scope="module")
def leaving() -> SimulationResult:
    return run("auto", 8)


def later(found: SimulationResult) -> list[float]:
    return found.iterations[KNOWN - 1 :]


def test_for_long_gaps_workers_leave_and_their_successors_are_there_in_time(staying, leaving):
    assert leaving.reasons[Reason.FAR] >= 4 * (8 - KNOWN), leaving.reasons
    assert set(staying.reasons) == {Reason.DONE}
    assert sum(later(leaving)) <= 1.1 * sum(later(staying))


def test_what_is_held_is_little_more_than_what_is_needed(leaving):
    longer = run("auto", 16)
    more = {what: longer.spent(what) - leaving.spent(what) for what in ("busy", "startup", "waiting")}
    assert more["waiting"] <= 0.2 * (more["busy"] + more["startup"]), more


def test_without_lingering_successors_start_early_all_the_same(staying):
    """The price of coming back is paid while others compute."""
    assert sum(later(run(0, 8))) <= 1.15 * sum(later(staying))


def test_for_short_gaps_nobody_leaves():
    short = dict.fromkeys(SECONDS, 1.0)
    found = run("auto", 8, short)
    kept = simulate(never_leave(plant_with(PLACES, 8, seconds=short)))
    assert set(found.reasons) == {Reason.DONE, Reason.ONE}
    assert later(found) == pytest.approx(later(kept))


def test_who_is_not_allowed_to_start_early_is_waited_for(leaving):
    plant = plant_with(PLACES, 8, linger=0)
    late = {name: replace(kind, start_early=False) for name, kind in plant.kinds.items()}
    assert sum(later(simulate(replace(plant, kinds=late)))) >= 1.3 * sum(later(leaving))
