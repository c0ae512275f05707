"""The simulated queue is asked as often as the program would ask squeue, by the program's own rules."""

from dataclasses import replace

import pytest

from pipeline.simulate.clock import SimulatedClock
from pipeline.simulate.cluster import SimulatedCluster, SimulatedJob
from pipeline.simulate.looks import QueueLooks
from pipeline.simulate.plant import PlantNode, PlantPartition, PlantRequest, UserLimits
from pipeline.simulate.simulation import Simulation
from pipeline.workers.looking import FROM_NOW, PASS_AGE
from tests.support.plants import SECONDS, plant_with

TURNS = plant_with(2, 8, shards=4, startup=1.0, queue=0.0, seconds=SECONDS | {"update": 2.0})
"""Three stages that take turns on two places, and are through with an iteration in a quarter of a minute."""


def looks_at(*pending: SimulatedJob, limits: UserLimits = UserLimits()) -> QueueLooks:  # noqa: B008
    cluster = SimulatedCluster((PlantNode("a", 8, 1),), (PlantPartition("all", ("a",)),), limits)
    for job in pending:
        cluster.submit(job)
    return QueueLooks(SimulatedClock(), cluster, [])


def job(name: str, **more) -> SimulatedJob:
    return SimulatedJob(name, PlantRequest(1, 1), ("all",), 0.0, **more)


def test_an_answer_is_kept_for_all_who_want_one_so_young():
    first, second = job("first"), job("second")
    looks = looks_at(first, second)
    looks.cluster.start_in_order(0.0)
    looks.look(PASS_AGE)
    assert looks.lacking == {second: False}
    looks.cluster.end(first)
    looks.cluster.start_in_order(2.0)
    looks.clock.now = 2.0
    looks.look(PASS_AGE)
    assert (looks.questions, set(looks.lacking)) == (1, {second}), "as it was two seconds ago"
    looks.clock.now = 4.0
    looks.look(PASS_AGE)
    assert (looks.questions, looks.lacking) == (2, {})


def test_who_waits_for_a_limit_of_the_user_is_told_from_who_waits_for_room():
    mine = job("second")
    looks = looks_at(job("first", is_mine=False), mine, limits=UserLimits(jobs=0))
    looks.cluster.start_in_order(0.0)
    looks.look(PASS_AGE)
    assert looks.lacking == {mine: True}


def test_who_needs_an_answer_of_now_rests_where_much_has_been_asked():
    looks = looks_at()
    for second in range(9):
        looks.clock.now = float(second)
        looks.look(FROM_NOW, since=second - 0.5)
    assert looks.questions == 9
    assert looks.rest() == 12.0
    looks.clock.now = 100.0
    assert looks.rest() == 0.0


def questions(plants: list) -> tuple[int, float]:
    """Return the most questions within a minute, and the seconds that the runs took."""
    simulation, asked = Simulation(plants), []
    real = QueueLooks._ask

    def ask(looks: QueueLooks) -> None:
        asked.append(looks.clock.now)
        real(looks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QueueLooks, "_ask", ask)
        found = simulation.carry_out()
    assert len(asked) == simulation.looks.questions
    most = max(sum(0 <= now - other < 60 for other in asked) for now in asked)
    return most, max(one.seconds for one in found)


def test_a_run_asks_about_twelve_times_a_minute_and_all_of_a_user_about_thirty():
    alone, _ = questions([TURNS])
    several, _ = questions([replace(TURNS, seed=str(number)) for number in range(4)])
    assert 6 <= alone <= 14
    assert alone < several <= 32


def test_turns_that_are_taken_faster_than_may_be_asked_wait_for_answers(monkeypatch):
    _, slow = questions([TURNS])
    monkeypatch.setattr("pipeline.simulate.looks.resting", lambda *given: 0.0)
    monkeypatch.setattr("pipeline.workers.looking.allowed_age", lambda age, *more: age)
    _, quick = questions([TURNS])
    assert quick < slow
