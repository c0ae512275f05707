"""Where the queue takes few jobs of a user, these are places too: what is needed now comes first."""

from dataclasses import replace

import pytest

from pipeline.decide.crew import Pending
from pipeline.decide.places import Need
from pipeline.decide.sharing import Work, targets_by_group
from pipeline.decide.situation import Estimate, WorkerRequest
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from pipeline.workers.handover import Handover
from tests.decide.test_staffing import (
    NEXT_ROLLOUTS,
    PLAN,
    REWARDS,
    ROLLOUTS,
    UPDATE,
    at,
    busy,
    claim,
    decide,
    leaving,
    waiting,
)

ROLLED_OUT = [PREPARE, *ROLLOUTS]
APART = {"rollout": ("a100",), "reward": ("l40",), "update": ("big",)}
"""No stage may use another's nodes, so that nobody leaves for want of room."""
WANTED = {"rollout": 4, "reward": 4, "update": 1}


def with_slots(slots: int | None, workers=(), committed=ROLLED_OUT, **more):
    ready = [t for t in PLAN.all_tasks() if t not in committed and {*PLAN.inputs(t)} <= {*committed}]
    given = {"wanted": WANTED, "places": APART, "early": (), "ready": ready, **more}
    return decide(workers, committed=committed, slots=slots, **given)


IDLE = [at(waiting(f"7_{i}r0", ROLLOUTS[i])) for i in range(4)]


def test_workers_that_wait_leave_the_queue_to_the_stage_that_they_wait_for():
    """They stay for ten minutes, and hold every place that the queue has for the run."""
    assert with_slots(None, IDLE).end_idle == (), "where the queue takes more"
    decided = with_slots(4, IDLE)
    assert [order.tasks for order in decided.requests] == [tuple(REWARDS)]
    assert leaving(decided) == {worker.name: "reward" for worker in IDLE}
    known = {kind: Estimate(None, 0.0, 5.0, task=5.0) for kind in WANTED}
    assert 0 < len(leaving(with_slots(4, IDLE, estimates=known))) < 4, "they share the places"


def test_no_more_workers_are_submitted_than_a_limit_of_the_user_lets_run():
    submitted = with_slots(None, committed=[PREPARE]).requests
    assert submitted == (WorkerRequest(tuple(ROLLOUTS)),)
    limited = with_slots(9, committed=[PREPARE], most_running=2).requests
    assert limited == (WorkerRequest((ROLLOUTS[2], ROLLOUTS[3])),)


def test_at_a_limit_of_the_user_what_has_nothing_to_do_leaves_the_queue_though_nodes_are_no_others():
    """It would start before the update, as it came first, and have the next worker leave in vain."""
    spare = Pending("8_3", REWARDS[3], lacks_room=True)
    known = {"reward": Estimate(None, 1000.0, 10.0, least_queue_wait=1000.0)}
    given = {"committed": [*ROLLED_OUT, *REWARDS], "estimates": known, "nodes": ()}
    update = Pending("9_0", UPDATE, lacks_room=True)
    assert with_slots(None, pending=[spare, update], **given).cancel_pending == ()
    limited = [replace(one, is_limited=True) for one in (spare, update)]
    assert with_slots(None, pending=limited, **given).cancel_pending == ("8_3",)


def test_as_many_leave_as_the_queue_lacks():
    assert leaving(with_slots(8, IDLE)) == {}
    assert len(leaving(with_slots(6, IDLE))) == 2


def test_nobody_leaves_who_has_something_to_do():
    at_work = [at(busy(f"7_{i}r0", ROLLOUTS[i])) for i in range(4)]
    claims = [claim(ROLLOUTS[i], f"7_{i}r0") for i in range(4)]
    left = [PREPARE, ROLLOUTS[0]]
    decided = with_slots(4, [IDLE[0], *at_work[1:]], left, claims=claims[1:])
    assert leaving(decided) == {"7_0r0": "reward"}


def test_what_waits_in_the_queue_to_start_early_is_withdrawn_for_what_is_due():
    """Nodes have room for it all: it is the queue that takes no more."""
    early = [Pending(f"9_{i}", NEXT_ROLLOUTS[i], begin) for i, begin in enumerate((None, 500.0))]
    assert with_slots(4, pending=early).cancel_pending == ("9_1", "9_0"), "four rewards are due"
    assert with_slots(6, pending=early).cancel_pending == ()
    done = [*ROLLED_OUT, *REWARDS]
    assert with_slots(2, committed=done, pending=early).cancel_pending == ("9_1",), "one update is due"
    assert with_slots(None, pending=early).cancel_pending == ()


def test_what_has_nothing_to_do_is_withdrawn_first():
    spare = Pending("7_3", ROLLOUTS[3])
    early = Pending("9_0", Task(2, Stage.ROLLOUT, 0))
    done = [*ROLLED_OUT, *REWARDS]
    unknown = {"rollout": Estimate(None, 1000.0, 10.0, least_queue_wait=1000.0)}
    decided = with_slots(2, committed=done, pending=[spare, early], estimates=unknown)
    assert decided.cancel_pending[:1] == ("7_3",)
    assert "9_0" not in decided.cancel_pending


def test_what_is_due_is_not_withdrawn_for_something_later():
    rewards = [Pending(f"8_{i}", REWARDS[i]) for i in range(2)]
    decided = with_slots(2, pending=rewards)
    assert decided.cancel_pending == ()


def test_who_leaves_already_makes_way_for_one_and_no_second_leaves_for_that():
    gone = replace(IDLE[0], doing=Doing.LEAVING)
    one_left = [*ROLLED_OUT, *REWARDS[:3]]
    assert leaving(with_slots(2, [gone, IDLE[1]], one_left)) == {}


def test_no_early_start_takes_the_place_of_a_stage_that_has_work_before():
    """The update's input is expected soon, but rewards have no worker yet."""
    soon = {kind: Estimate(110.0, 0.0, 5.0) for kind in WANTED}
    done = [PREPARE, *ROLLOUTS[:3]]
    at_work, claims = [at(busy("7_3r0", ROLLOUTS[3]))], [claim(ROLLOUTS[3], "7_3r0")]
    decided = with_slots(2, at_work, done, claims=claims, estimates=soon, early=("reward", "update"))
    assert {task.job_kind for order in decided.requests for task in order.tasks} == {"reward"}


def test_one_place_is_for_what_measures_policies_where_every_stage_can_have_one_all_the_same():
    plan_kinds = {**WANTED, "evaluate": 1}
    crowd = [*IDLE[:3], at(waiting("8_0r0", REWARDS[0]))]
    measuring = Task(1, Stage.EVALUATE)
    busy_one = at(busy("9_0r0", measuring))
    known = {kind: Estimate(None, 0.0, 5.0, task=5.0) for kind in WANTED}
    given = {"wanted": plan_kinds, "places": {**APART, "evaluate": ("l40",)}, "estimates": known}
    tight = with_slots(5, [*crowd, busy_one], [*ROLLED_OUT, *REWARDS], **given)
    assert sum(leaving(tight).values() == "update" for _ in (0,)) <= 1
    assert {order.tasks for order in tight.requests} == {(UPDATE,)}


def test_a_promise_to_leave_later_is_kept_though_what_it_is_for_is_in_no_queue():
    """Nobody knows yet how long rewards take: a second one waits as long as coming back would take."""
    slow = {"rollout": Estimate(None, 0.0, 50.0), "reward": Estimate(None, 0.0, 50.0)}
    crowd = [*IDLE[:3], at(busy("8_0r0", REWARDS[0]))]
    claims = [claim(REWARDS[0], "8_0r0")]
    first = with_slots(4, crowd, claims=claims, estimates=slow)
    later = {one.at for one in first.end_idle}
    assert later == {150.0}
    again = with_slots(4, crowd, claims=claims, estimates=slow, now=120.0, promised=first.end_idle)
    assert {one.at for one in again.end_idle} == later
    assert all(isinstance(one, Handover) for one in again.end_idle)


@pytest.mark.parametrize(
    ("slots", "numbers"), [(9, (4, 4, 1)), (6, (4, 4, 1)), (4, (2, 1, 1)), (2, (2, 2, 1))]
)
def test_stages_share_what_the_queue_takes_or_take_turns(slots, numbers):
    """Tasks of a second share, but two places are too few for three stages."""
    works = {
        kind: Work(Need(frozenset({kind})), wanted, wanted, wanted * 30.0, 1000.0)
        for kind, wanted in WANTED.items()
    }
    found = targets_by_group(works, {}, slots)
    total = sum(found.values())
    assert total <= slots or all(number <= slots for number in found.values())
    if slots in (9, 2):
        assert tuple(found.values()) == numbers
    if slots in (4, 6):
        assert total == slots
        assert min(found.values()) == 1


def test_orders_name_what_is_due_first():
    soon = {kind: Estimate(100.0, 0.0, 5.0, task=5.0) for kind in WANTED}
    decided = with_slots(3, committed=[PREPARE, *ROLLOUTS], estimates=soon, early=("rollout", "update"))
    assert decided.requests[0] == WorkerRequest(decided.requests[0].tasks)
    assert decided.requests[0].tasks[0].job_kind == "reward"
