"""Whoever cancels all jobs of a run with Slurm's own commands ends them: the run pauses, and says so.

The driver is the real one, on a toy Slurm.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeline.cli.queue import cancel_run
from pipeline.cli.summary import say_how_it_ended
from pipeline.executors.slurm.by_hand import find_by_hand
from pipeline.orchestrate.driver import Outcome, Pass, tell_of_pass
from pipeline.run import journal
from pipeline.run.control import ByHand, read_control
from pipeline.run.endings import read_endings
from pipeline.status.snapshot import read_status
from pipeline.status.text import describe
from slurm.query import Element
from slurm.states import SlurmState
from tests.support.toyslurm import Element as ToyElement
from tests.support.toyworkers import make_worker_world
from tests.support.toyworld import Luck, World, is_driver


@pytest.fixture
def world(tmp_path, monkeypatch, clock) -> World:
    """A run that is at work."""
    found = make_worker_world(tmp_path / "run", monkeypatch, 3, Luck())
    found.submit()
    for _ in range(6):
        found.happen()
    assert found.outcome is None
    return found


def scancel(world: World, is_meant: Callable[[ToyElement], bool] = lambda element: True) -> int:
    """End jobs as scancel does. Returns how many."""
    live = [e for e in world.slurm.elements() if not e.has_ended and is_meant(e)]
    for element in live:
        world.slurm.end(element, SlurmState.CANCELLED)
    return len(live)


def live(world: World) -> list[ToyElement]:
    return [element for element in world.slurm.elements() if not element.has_ended]


def test_a_run_whose_jobs_are_all_cancelled_by_hand_pauses_until_somebody_resumes_it(world, capsys):
    count = scancel(world)
    world.advance("a pass of a worker that is about to end")
    assert world.outcome is Outcome.PAUSED, world.told()
    assert live(world) == [], "nothing is submitted again"
    told = [e for e in journal.read(world.run.paths.events) if e["event"] == "paused"]
    assert [(e["cancelled"], e["jobs"]) for e in told] == [(count, count)]
    world.advance("a guard")
    assert live(world) == []
    words = f"{count} of {count} jobs of the run were cancelled by hand (scancel)"
    assert say_how_it_ended(world.run, Pass(Outcome.PAUSED)) == 3
    said = capsys.readouterr().err
    assert words in said
    assert f"slurm-ppo resume {world.run.paths.root}" in said
    assert f"slurm-ppo cancel {world.run.paths.root}" in said
    status = read_status(world.run)
    assert (status.state, status.paused) == ("paused", words)
    shown = " ".join(describe(status).split())
    assert words in shown
    assert f"next: slurm-ppo resume {world.run.paths.root}" in shown

    world.submit()
    world.live_on()
    world.check_is_complete()
    endings = read_endings(world.run.paths, range(world.run.plan.iterations + 1)).values()
    assert not any(ending.is_failure for ending in endings), "what people end has not failed"


def test_people_are_notified_once_of_a_pause_which_may_be_another_s_deed(world, monkeypatch):
    count, told = scancel(world), []
    world.advance("a pass")
    monkeypatch.setattr("pipeline.orchestrate.driver.tell", lambda run, event, note: told.append(event))
    for _ in range(2):
        tell_of_pass(world.run, Pass(Outcome.PAUSED), 7.0, print)
    assert len({event.key for event in told}) == 1
    assert f"{count} of {count} jobs" in told[0].message
    assert "pauses until somebody resumes it" in told[0].message


def test_a_paused_run_may_be_ended_for_good(world):
    scancel(world)
    world.advance("a pass")
    cancel_run(world.run)
    control = read_control(world.run.paths)
    assert control.cancelled
    assert control.paused is None
    assert read_status(world.run).state == "cancelled"


def test_where_no_pass_has_seen_it_status_says_it_all_the_same(world):
    count = scancel(world)
    status = read_status(world.run)
    assert status.state == "stopped"
    assert status.paused.startswith(f"{count} of {count} jobs")


def test_single_jobs_that_are_cancelled_are_submitted_again_and_say_so(world):
    scancel(world, lambda element: not is_driver(element))
    world.live_on()
    world.check_is_complete()
    failed = [e["message"] for e in journal.read(world.run.paths.events) if e["event"] == "failed"]
    assert any("cancelled by hand" in message for message in failed) or failed == []
    assert not [e for e in journal.read(world.run.paths.events) if e["event"] == "paused"]


def test_jobs_that_slurm_ppo_cancelled_pause_nothing(world):
    cancel_run(world.run)
    world.submit()
    assert world.outcome is None
    world.live_on()
    world.check_is_complete()


def test_what_a_pass_cancels_at_the_end_of_a_run_is_no_act_for_the_next(world):
    """A foreground run, and a worker or a driver job: the second to see that the run is complete."""
    world.live_on()
    world.check_is_complete()
    world.advance("who follows the run in the foreground")
    assert world.outcome is Outcome.COMPLETE
    world.advance("a guard that had started")
    assert not [e for e in journal.read(world.run.paths.events) if e["event"] == "paused"]
    assert read_status(world.run).state == "complete"


# --- what counts ---

NAMES = {kind: f"slurm-ppo.run.{kind}.iter1.abc.1.0" for kind in ("rollout", "update", "guard", "driver")}


def element(kind: str, index: int, state: SlurmState, **more: object) -> Element:
    given = Element(
        array_id=str(10 + list(NAMES).index(kind)),
        index=index,
        name=NAMES[kind],
        state=state,
        reason="",
        node="",
        partition="",
        submitted=100.0,
        started=None,
        ended=None,
        exit_code=None,
        signal=None,
        restarts=0,
        time_limit=None,
    )
    return replace(given, **more)


def gone(kind: str, index: int = 0, ended: float = 200.0) -> Element:
    return element(kind, index, SlurmState.CANCELLED, ended=ended)


ROLLOUTS = [gone("rollout", index) for index in range(8)]
ENDING = [element("rollout", index, SlurmState.COMPLETING) for index in range(8)]
GUARD = element("guard", 0, SlurmState.PENDING)


@pytest.mark.parametrize(
    ("elements", "found"),
    [
        ([*ROLLOUTS, gone("guard")], ByHand(9, 9)),
        ([*ROLLOUTS, GUARD], None),
        ([gone("guard"), gone("driver"), *ENDING], ByHand(10, 10)),
        ([GUARD, *ROLLOUTS[:1], *ENDING], None),
        ([gone("guard"), *ENDING], None),
        ([*ROLLOUTS, gone("guard"), element("update", 0, SlurmState.RUNNING)], ByHand(9, 10)),
        ([*ROLLOUTS[:2], gone("guard"), element("update", 0, SlurmState.RUNNING)], None),
        ([*ROLLOUTS, gone("guard"), element("update", 0, SlurmState.PENDING, submitted=201.0)], ByHand(9, 9)),
        ([*ROLLOUTS, replace(GUARD, submitted=205.0)], ByHand(8, 8)),
        ([*ROLLOUTS, element("driver", 0, SlurmState.RUNNING)], ByHand(8, 8)),
        ([gone("update", ended=100.0), *ROLLOUTS[:1]], None),
        ([*(replace(one, state=SlurmState.PREEMPTED) for one in ROLLOUTS)], None),
        ([*(replace(one, state=SlurmState.NODE_FAIL) for one in ROLLOUTS), gone("guard")], None),
        ([], None),
    ],
    ids=[
        "everything",
        "a guard was left alone",
        "those that run are about to end, and Slurm does not say why",
        "whatever else ends",
        "one guard alone is no act",
        "nearly everything",
        "a part, and nobody is left to watch",
        "what was submitted again since does not count",
        "nor does a guard",
        "whoever looks is a driver job itself",
        "one by one is not at once",
        "preempted",
        "nodes lost",
        "nothing",
    ],
)
def test_nearly_all_at_once_and_the_guards_too(elements, found):
    assert find_by_hand(elements, lambda element: True) == found
    assert find_by_hand(elements, lambda element: False) is None
