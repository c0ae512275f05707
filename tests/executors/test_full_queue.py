"""Runs with workers where the queue takes few jobs: no stage waits for idle workers of its own run.

On the toy Slurm a worker leaves by itself only by chance; here none does.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from pipeline.executors.slurm.fullness import QUEUE_FULL, note_full, shown_to_fit, standing_refusal
from pipeline.run import journal
from pipeline.status.snapshot import read_status
from pipeline.workers.beats import Reason
from tests.support.tables import sample
from tests.support.toyslurm import Element
from tests.support.toyworld import Luck, World, live_to_the_end, make_world, trials


@pytest.fixture
def worlds(tmp_path, monkeypatch, clock):
    """Runs whose workers stay until they are asked to leave, or nothing is left for them."""

    def make(number: int, luck: Luck, **scheduler: object) -> Iterator[World]:
        for seed in range(number):
            world = make_world(tmp_path / f"seed-{seed}", monkeypatch, seed, luck, **scheduler)
            monkeypatch.setattr(world, "leave", partial(stay, world, world.leave))
            yield world

    return make


def stay(world: World, leave: Callable, element: Element, reason: Reason) -> None:
    """Instead of leaving while its input is far away a worker asks for a pass, as those who wait do."""
    worker = world.workers[element]
    if reason is not Reason.LONG or world.is_done(worker):
        leave(element, reason)
    elif not world.is_driving:
        world.advance(f"{worker.name} waits, and a pass", is_worker=True)


@pytest.mark.parametrize("most", sample((1, 2, 3, 5), 0.25))
def test_a_run_that_may_have_few_jobs_ends_though_its_workers_never_leave_by_themselves(worlds, most):
    for world in worlds(trials(1), Luck(may_need_guard=True), max_submitted=most):
        live_to_the_end(world)
        assert world.guards <= 2 * world.run.plan.iterations + 2, "guards are not what keeps it going"
        assert sum(world.most.values()) > 0


def test_a_limit_that_only_sbatch_knows_is_learned_from_its_refusals(worlds):
    """Arrays are made smaller until they fit, and who waits leaves for what does not."""
    for world in worlds(trials(1), Luck(may_need_guard=True)):
        world.slurm.most_queued = 7
        live_to_the_end(world)


def test_what_sbatch_refused_counts_for_a_minute(tmp_path, monkeypatch, clock):
    world = make_world(tmp_path / "run", monkeypatch, 1, Luck())
    paths = world.run.paths
    assert shown_to_fit(paths, time.time()) is None
    note_full(paths, 3, "QOSMaxSubmitJobPerUserLimit")
    assert shown_to_fit(paths, time.time()) == 3
    assert standing_refusal(journal.read_events(paths.events))["message"] == "QOSMaxSubmitJobPerUserLimit"
    assert shown_to_fit(paths, time.time() + 61) is None
    journal.event(paths.events, "submitted", job="7", array="slurm-ppo.run.rollout.iter1.abc.1.0", elements=1)
    assert standing_refusal(journal.read_events(paths.events)) is None
    assert shown_to_fit(paths, time.time()) == 3, "it took one as another had ended"


def test_status_names_what_holds_a_stage_back(worlds):
    (world,) = worlds(1, Luck(may_need_guard=True), max_submitted=1)
    world.submit()
    for _ in range(30):
        world.happen()
        time.sleep(60)
        found = read_status(world.run).held_back
        if found:
            break
    assert found
    assert "cannot be submitted: the run may have 1 jobs of stages in the queue" in found[0]
    assert "scheduler.max_submitted" in found[0]
    assert "now there: " in found[0]
    journal.event(world.run.paths.events, QUEUE_FULL, elements=1, message="sbatch refused: job submit limit")
    assert "sbatch refused: job submit limit" in read_status(world.run).held_back[0]
