"""Evaluations that workers of rollouts do besides: nothing is submitted for these, and for others it is."""

from dataclasses import replace

import pytest

from pipeline.decide.crew import Crew, Pending, Worker, held_tasks
from pipeline.decide.places import Need
from pipeline.decide.situation import Estimate, Situation, at_hand
from pipeline.decide.staffing import Staffing, staff
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from pipeline.workers.claims import Claim
from slurm.nodes import Node

PLAN = Plan(iterations=6, num_shards=4, evaluate_every=1)
GENERATING, LEARNING = (Node(name, frozenset([name]), cpus=32, gpus=2, memory=64_000) for name in "gl")
ROOMY = (replace(GENERATING, gpus=3), LEARNING)
"""Nodes with a place for evaluations beside two workers of rollouts."""
PARTITIONS = {"rollout": "g", "evaluate": "g", "reward": "l", "update": "l"}
NEEDS = {kind: Need(frozenset([name]), gpus=1) for kind, name in PARTITIONS.items()}
WANTED = {"rollout": 2, "reward": 1, "update": 1, "evaluate": 1}
TOOK = {"rollout": 4.0, "reward": 1.0, "update": 5.0}
ESTIMATES = {kind: Estimate(None, 0.0, 10.0, task=seconds) for kind, seconds in TOOK.items()}
FIRST, SECOND, *_ = PLAN.evaluation_tasks()
WORKERS = tuple(Worker(f"1_{n}r0", Task(1, Stage.ROLLOUT, n), Doing.WAITING, nodes=("g",)) for n in range(2))


def done_before(iteration: int) -> set[Task]:
    """All that comes before the update of an iteration."""
    chain = [t for t in PLAN.all_tasks() if t.stage is not Stage.EVALUATE and t.iteration <= iteration]
    return set(chain) - {policy_maker(iteration)}


def decide(
    committed: set[Task], workers=WORKERS, claims=(), pending=(), wanted=WANTED, **more: object
) -> Staffing:
    crew = Crew(workers, pending)
    held = held_tasks(claims, crew, committed)
    updated = max((t.iteration for t in committed if t.stage is Stage.UPDATE), default=0)
    tasks = at_hand(PLAN, PLAN.window(updated, sum(t in committed for t in PLAN.evaluation_tasks())))
    ready = [t for t in tasks if t not in committed and t not in held and {*PLAN.inputs(t)} <= committed]
    given = {"needs": NEEDS, "nodes": (GENERATING, LEARNING), "estimates": ESTIMATES, "measures": True}
    tried = {claim.task for claim in claims}
    return staff(
        Situation(
            *(PLAN, tasks, crew, held, committed, ready, wanted, 1000.0), **given | {"tried": tried} | more
        )
    )


def submitted(decided: Staffing) -> set[Task]:
    return {t for order in decided.requests for t in order.tasks if t.stage is Stage.EVALUATE}


def test_for_what_workers_of_rollouts_measure_nobody_is_submitted():
    decided = decide(done_before(1))
    assert decided.measures
    assert submitted(decided) == set()
    assert submitted(decide(done_before(1), measures=False)) == {FIRST}


def test_before_they_are_there_they_are_counted_on():
    decided = decide({PREPARE}, workers=())
    assert {task.stage for order in decided.requests for task in order.tasks} == {Stage.ROLLOUT}


@pytest.mark.parametrize(
    ("seconds", "nodes", "expected"),
    [
        (None, ROOMY, True),
        (6.0, ROOMY, True),
        (6.1, ROOMY, False),
        (6.1, (GENERATING, LEARNING), True),  # the worker of its own would wait for a place
    ],
)
def test_what_takes_longer_than_the_rest_of_an_iteration_has_a_worker_where_there_is_a_place(
    seconds, nodes, expected
):
    """A reward of 1 s and an update of 5 s come after the rollouts."""
    known = ESTIMATES | {"evaluate": Estimate(None, 0.0, 10.0, task=seconds)}
    decided = decide(done_before(1), estimates=known, nodes=nodes)
    assert decided.measures is expected
    assert (submitted(decided) == set()) is expected


def test_where_nobody_knows_what_it_takes_the_only_worker_of_rollouts_does_not_try():
    """One of its own tells; where that has no place the other does it at last."""
    given = {"workers": WORKERS[:1], "wanted": WANTED | {"rollout": 1}}
    known = ESTIMATES | {"evaluate": Estimate(task=2.0)}
    assert submitted(decide(done_before(1), **given, nodes=ROOMY)) == {FIRST}
    assert submitted(decide(done_before(1), **given, nodes=ROOMY, estimates=known)) == set()
    one = (replace(GENERATING, gpus=1), LEARNING)
    assert submitted(decide(done_before(1), **given, nodes=one)) == set()


@pytest.mark.parametrize(
    "more",
    [
        {"nodes": ()},  # nobody knows whether all have places
        {"nodes": [GENERATING, replace(LEARNING, gpus=1)]},  # rewards and updates share one
        {"slots": 2},
    ],
)
def test_where_stages_take_turns_nobody_keeps_a_place_by_measuring(more):
    assert not decide(done_before(1), **more).measures


def test_what_was_tried_in_vain_or_piles_up_has_a_worker_of_its_own():
    gone = [Claim(FIRST, 1, "1-5_0r0", "5_0r0", 10.0)]
    assert submitted(decide(done_before(1), claims=gone)) == {FIRST}
    assert submitted(decide(done_before(2), nodes=ROOMY)) == {FIRST}, "two policies wait"
    assert submitted(decide(done_before(3))) == set(), "it would wait for a place itself"
    assert submitted(decide(done_before(4))) == {FIRST}, "that gets in line once four wait"
    assert submitted(decide(done_before(2) | {FIRST})) == set()


def test_at_the_end_one_is_submitted_only_where_no_worker_of_rollouts_is_left():
    rest = done_before(6) | {FIRST}
    assert submitted(decide(rest)) == set(), "however many policies wait"
    left = [replace(worker, doing=Doing.LEAVING) for worker in WORKERS]
    assert submitted(decide(rest, left)) == {SECOND}
    assert submitted(decide(rest, ())) == {SECOND}


def test_an_element_leaves_the_queue_once_workers_of_rollouts_are_there():
    waits = [Pending("9_0", FIRST, lacks_room=True)]
    assert decide(done_before(1), pending=waits).cancel_pending == ("9_0",)
    assert decide(done_before(1), pending=waits, measures=False).cancel_pending == ()
    at_it = [replace(WORKERS[0], doing=Doing.BUSY, task=FIRST, since=10.0), WORKERS[1]]
    claims = [Claim(FIRST, 1, "1-1_0r0", "1_0r0", 10.0)]
    assert decide(done_before(1), at_it, claims, waits).cancel_pending == ("9_0",)
    gone = [Claim(FIRST, 1, "1-5_0r0", "5_0r0", 10.0)]
    assert decide(done_before(1), claims=gone, pending=waits).cancel_pending == ()


def test_nothing_starts_early_for_what_is_measured_besides():
    soon = ESTIMATES | {"evaluate": Estimate(1100.0, 0.0, 10.0, task=2.0)}
    given = {"estimates": soon, "early": ("evaluate",), "nodes": ROOMY}
    assert submitted(decide(done_before(1) | {FIRST}, **given)) == set()
    assert submitted(decide(done_before(1) | {FIRST}, **given, measures=False))
