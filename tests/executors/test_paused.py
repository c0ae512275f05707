"""Whoever cancels all jobs of a run with Slurm's own commands ends them: the run pauses, and says so.

The driver is the real one, on a toy Slurm.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeline.cli.queue import cancel_run
from pipeline.cli.summary import say_how_it_ended
from pipeline.executors.slurm.by_hand import find_by_hand, look_for_act
from pipeline.executors.slurm.silence import Silence, note_silences
from pipeline.orchestrate.driver import Outcome, Pass, tell_of_pass
from pipeline.run import journal
from pipeline.run.control import ByHand, begin_invocation, read_control, write_control
from pipeline.run.endings import read_endings
from pipeline.run.submissions import Ledger
from pipeline.status.snapshot import read_status
from pipeline.status.text import describe
from slurm.query import QUEUE_FORMAT, Element, parse_queue
from slurm.states import SlurmState
from tests.support import jobs
from tests.support.toyslurm import Element as ToyElement
from tests.support.toyworld import Luck, World, is_driver, make_world


@pytest.fixture
def world(tmp_path, monkeypatch, clock) -> World:
    """A run that is at work."""
    found = make_world(tmp_path / "run", monkeypatch, 3, Luck())
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
    assert "pauses until it is resumed or cancelled" in told[0].message


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


# --- by when each was submitted, started and ended ---


@pytest.fixture
def timed(world) -> World:
    """A run whose jobs were submitted a while ago, and a Slurm that says when."""
    world.slurm.shows_times = True
    time.sleep(5)
    return world


def pauses_of(world: World) -> list[dict]:
    return [event for event in journal.read(world.run.paths.events) if event["event"] == "paused"]


def test_jobs_of_invocations_before_the_newest_are_the_runs_too(timed):
    """Who types submit or resume of a run at work adds an invocation, and few jobs or none."""
    timed.submit()
    time.sleep(5)
    count = scancel(timed)
    time.sleep(1)
    timed.advance("a pass of a worker that is about to end")
    assert timed.outcome is Outcome.PAUSED, timed.told()
    assert pauses_of(timed)[0]["cancelled"] == count
    assert live(timed) == []


@pytest.mark.parametrize("has_seen", [True, False], ids=["a pass has seen it", "nobody has seen it"])
def test_a_run_that_is_resumed_at_once_does_not_pause_for_what_was_cancelled_before(timed, has_seen):
    """Slurm shows those jobs for minutes."""
    scancel(timed)
    time.sleep(1)
    if has_seen:
        timed.advance("a pass")
    timed.submit()
    assert timed.outcome is None
    timed.live_on()
    timed.check_is_complete()
    assert len(pauses_of(timed)) == has_seen


def test_what_failed_and_is_resumed_at_once_does_not_pause_for_what_its_passes_cancelled(timed):
    control = read_control(timed.run.paths)
    write_control(timed.run.paths, replace(control, has_failed=True, withdrawn=control.invocation))
    begin_invocation(timed.run.paths)
    scancel(timed)  # as an order that a pass has given, which is carried out late
    time.sleep(1)
    timed.advance("a pass")
    assert timed.outcome is None, timed.told()


def test_a_part_that_was_submitted_again_does_not_pause_the_run_minutes_later(timed):
    """The guards that were left alone have been replaced by then."""
    while sum(not is_driver(element) for element in live(timed)) < 2:
        assert timed.happen()
    before = time.time() + 1
    time.sleep(1)
    scancel(timed, lambda element: not is_driver(element))
    time.sleep(1)
    timed.advance("a pass")
    waited = [e for e in timed.slurm.elements(SlurmState.PENDING) if is_driver(e) and e.submitted < before]
    for driver in waited:
        time.sleep(60)
        if driver.is_free:
            timed.start(driver)
    assert timed.outcome is None, timed.told()
    assert not pauses_of(timed)


def test_what_a_pass_cancels_that_slurm_could_not_start_or_that_hangs_is_no_act(timed):
    scancel(timed)
    paths = timed.run.paths
    shown = parse_queue(timed.slurm.run_quietly(["squeue", f"--Format={QUEUE_FORMAT}"]))
    assert look_for_act(Ledger(paths), shown, read_control(paths))
    note_silences(paths, {f"{e.array_id}_{e.index}": Silence(1.0, is_cancelled=True) for e in shown})
    assert look_for_act(Ledger(paths), shown, read_control(paths)) is None
    note_silences(paths, {})
    for reason in ("launch failed requeued held", "JobHoldMaxRequeue"):
        held = [replace(one, reason=reason) for one in shown]
        assert look_for_act(Ledger(paths), held, read_control(paths)) is None


# --- what counts ---

KINDS = ("rollout", "update", "guard", "driver")


def element(kind: str, index: int, state: SlurmState, **more: object) -> Element:
    given = {"array_id": str(10 + KINDS.index(kind)), "submitted": 100.0, "restarts": 0}
    return jobs.element(index, state, kind, **given | more)


def gone(kind: str, index: int = 0, ended: float = 200.0) -> Element:
    return element(kind, index, SlurmState.CANCELLED, ended=ended)


ROLLOUTS = [gone("rollout", index) for index in range(8)]
ENDING = [element("rollout", index, SlurmState.COMPLETING) for index in range(8)]
GUARD = element("guard", 0, SlurmState.PENDING)
FINISHED = [element("rollout", index, SlurmState.COMPLETED, ended=300.0) for index in range(8)]


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
        ([*ROLLOUTS, element("guard", 0, SlurmState.RUNNING, started=260.0, submitted=150.0)], None),
        ([*ROLLOUTS, element("driver", 0, SlurmState.COMPLETED, started=200.0, ended=201.0)], None),
        ([*ROLLOUTS, element("driver", 0, SlurmState.COMPLETED, started=150.0, ended=201.0)], ByHand(8, 8)),
        ([*ROLLOUTS, element("guard", 0, SlurmState.PENDING, submitted=260.0, restarts=1)], None),
        ([gone("guard"), gone("driver"), *FINISHED], None),
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
        "a guard that was left alone has started since",
        "a driver job started as its jobs ended, and was left alone",
        "whoever has looked is over",
        "a guard was left alone, and has put itself back into the queue",
        "guards alone, and what ran then has ended since",
        "preempted",
        "nodes lost",
        "nothing",
    ],
)
def test_nearly_all_at_once_and_the_guards_too(elements, found):
    assert find_by_hand(elements, lambda element: True) == found
    assert find_by_hand(elements, lambda element: False) is None
