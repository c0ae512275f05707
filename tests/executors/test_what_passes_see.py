"""What a pass hands to the rules of workers, of the queue and of what the pass before has decided."""

from dataclasses import replace

import pytest

from pipeline.executors.slurm import worker_jobs
from pipeline.orchestrate.situation import Situation
from pipeline.workers.handover import Handover, Told, tell
from tests.support.toyworkers import WorkerWorld, make_worker_world
from tests.support.toyworld import Luck, pass_over

NOTHING = Told()


@pytest.fixture
def world(tmp_path, monkeypatch, clock) -> WorkerWorld:
    return make_worker_world(tmp_path / "run", monkeypatch, 1, Luck())


def seen_by_a_pass(world: WorkerWorld, monkeypatch, reason: str, told: Told = NOTHING) -> Situation:
    """Return what a pass sees while the run's first elements wait for a reason.

    Args:
        told: what the pass before has told workers.
    """
    found: list[Situation] = []
    world.submit()
    world.look()
    look = world.looks[-1]
    monkeypatch.setattr(
        worker_jobs, "staff", lambda seen, real=worker_jobs.staff: found.append(seen) or real(seen)
    )
    assert "|None|" in look.text
    tell(world.run.paths, told)
    pass_over(world.run, world.story, replace(look, text=look.text.replace("|None|", f"|{reason}|")))
    return found[-1]


@pytest.mark.parametrize(
    ("reason", "lacks_room", "is_limited"),
    [("Resources", True, False), ("QOSMaxJobsPerUserLimit", True, True), ("None", False, False)],
)
def test_whether_an_element_waits_for_room_or_for_a_limit_of_its_user(
    world, monkeypatch, reason, lacks_room, is_limited
):
    pending = seen_by_a_pass(world, monkeypatch, reason).crew.pending
    assert pending
    assert {(one.lacks_room, one.is_limited) for one in pending} == {(lacks_room, is_limited)}


def test_what_the_pass_before_has_promised_counts(world, monkeypatch):
    promised = Handover("7_0r0", "rollout", at=1234.0, job="9_0")
    seen = seen_by_a_pass(world, monkeypatch, "Resources", Told((promised,)))
    assert seen.promised == (promised,)
