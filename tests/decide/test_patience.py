"""staffing: nobody leaves a place for what is had sooner without it, as a queue may be long."""

from dataclasses import replace

from pipeline.decide.crew import Pending
from pipeline.decide.elements import free_elements
from pipeline.decide.places import Need
from pipeline.decide.situation import Estimate
from pipeline.run.tasks import PREPARE
from pipeline.workers.handover import Handover
from tests.decide.test_staffing import (
    GPUS,
    NEXT_ROLLOUTS,
    ONE_PLACE,
    REWARDED,
    REWARDS,
    ROLLOUTS,
    UPDATE,
    at,
    busy,
    claim,
    hand_over,
    leaving,
    waiting,
)
from tests.decide.test_thrift import EVALUATED, EVALUATION

APART = {"rollout": ("gpu",), "reward": ("small",), "update": ("large",)}
SLOW_TO_COME_BACK = Estimate(None, queue_wait=300.0, startup=20.0, task=4.0)
ROOMY = [replace(GPUS, gpus=8)]
IDLE = at(waiting("7_0r0", ROLLOUTS[0]))
FULL = Pending("9_0", REWARDS[0], since=90.0, lacks_room=True)


def left(pending: Pending, nodes=ROOMY, now: float = 100.0, **more) -> list[tuple[str, float]]:
    """Return who leaves, and when, for a reward that waits where an idle rollout has a place."""
    given = {"estimates": {"rollout": SLOW_TO_COME_BACK}, "wanted": {"rollout": 1, "reward": 1}, "early": ()}
    decided = hand_over(
        [IDLE], [PREPARE, *ROLLOUTS], pending=[pending], nodes=nodes, now=now, **given, **more
    )
    return [(one.worker, one.at) for one in decided.end_idle]


# --- other people's jobs ---


def test_for_a_job_that_others_keep_waiting_one_leaves_after_what_coming_back_would_take():
    """The two have room beside each other: whoever is in the way may be gone sooner than that."""
    assert left(FULL) == [("7_0r0", 100.0 + 320.0)]
    promised = [Handover("7_0r0", "reward", at=420.0, job="9_0")]
    assert left(FULL, now=400.0, promised=promised) == [("7_0r0", 420.0)], "since it was first seen"
    assert left(FULL, now=430.0, promised=promised) == [("7_0r0", 420.0)], "now"
    other = [Handover("7_0r0", "reward", at=420.0, job="11_0")]
    assert left(FULL, now=400.0, promised=other) == [("7_0r0", 400.0 + 320.0)], "that was another job"


def test_where_the_run_s_own_workers_take_turns_one_leaves_at_once():
    assert left(FULL, nodes=[replace(GPUS, gpus=1)]) == [("7_0r0", 0.0)]


def test_an_evaluation_that_would_not_fit_beside_stages_does_not_make_them_take_turns():
    """No place is kept for it: it waits, or workers of rollouts do it besides."""
    wanted = {"rollout": 1, "reward": 1, "evaluate": 1}
    known, places = {"rollout": SLOW_TO_COME_BACK}, {**ONE_PLACE, "evaluate": ("gpu",)}
    given = {"wanted": wanted, "places": places, "estimates": known, "early": (), "pending": [FULL]}
    decided = hand_over([IDLE], [PREPARE, *ROLLOUTS], nodes=[replace(GPUS, gpus=2)], **given)
    assert [one.at for one in decided.end_idle] == [420.0]


def test_for_a_limit_of_the_user_one_leaves_at_once_whatever_node_it_is_on():
    """Somebody else's end is of no use there, and any own one is."""
    limited = replace(FULL, is_limited=True)
    assert left(limited) == [("7_0r0", 0.0)]
    apart = [GPUS, replace(GPUS, name="other", partitions=frozenset(["small"]))]
    assert left(limited, nodes=apart, places=APART) == [("7_0r0", 0.0)]
    assert left(FULL, nodes=apart, places=APART) == [], "its place would be of no use"


def test_at_a_limit_the_one_leaves_that_holds_as_many_gpus():
    small, large = at(waiting("7_0r0", ROLLOUTS[0])), at(waiting("8_0r0", REWARDS[0]))
    asked = {"rollout": 1, "reward": 2, "update": 2}
    needs = {kind: Need(frozenset(["gpu"]), gpus=gpus) for kind, gpus in asked.items()}
    pending = [Pending("9_0", UPDATE, lacks_room=True, is_limited=True)]
    decided = hand_over([small, large], REWARDED, pending=pending, nodes=ROOMY, needs=needs, early=())
    assert leaving(decided) == {"8_0r0": "update"}


# --- further workers of a kind ---


def further(estimates) -> tuple[Handover, ...]:
    """Return who leaves for a second reward where one is at work, and an idle rollout has the other place."""
    at_work = at(busy("8_0r0", REWARDS[0]))
    given = {"estimates": estimates, "pending": [Pending("8_1", REWARDS[3])], "early": ()}
    return hand_over([IDLE, at_work], [PREPARE, *ROLLOUTS], [claim(REWARDS[0], "8_0r0")], **given).end_idle


def test_nobody_leaves_for_a_second_worker_whose_first_has_done_all_before_one_were_back():
    quick = {"rollout": SLOW_TO_COME_BACK, "reward": Estimate(None, 2.0, 10.0, task=60.0)}
    assert further(quick) == (), "three minutes are left, and it would be in the queue for five"
    slow = {**quick, "reward": replace(quick["reward"], task=600.0)}
    assert [one.worker for one in further(slow)] == ["7_0r0"]
    at_hand = {**quick, "rollout": Estimate(None, 0.0, 1.0, task=4.0)}
    assert [one.worker for one in further(at_hand)] == ["7_0r0"], "it would be back at once"


def test_while_nobody_knows_how_long_a_stage_takes_its_further_workers_wait_for_places():
    """But the first gets one at once: without it nothing goes on."""
    unknown = {"rollout": SLOW_TO_COME_BACK}
    assert [(one.worker, one.at) for one in further(unknown)] == [("7_0r0", 420.0)]
    idle = [at(waiting(f"7_{i}r0", ROLLOUTS[i])) for i in range(2)]
    pending = [Pending(f"8_{i}", REWARDS[i]) for i in (2, 3)]
    decided = hand_over(idle, [PREPARE, *ROLLOUTS], pending=pending, estimates=unknown, early=())
    assert [(one.job, one.at) for one in decided.end_idle] == [("8_2", 0.0), ("8_3", 420.0)]


# --- who stands before whom in the queue ---


def test_what_measures_policies_queues_up_again_behind_what_it_keeps_waiting(monkeypatch):
    """Slurm keeps nodes for the first that lacks room, be it for hours."""
    monkeypatch.setattr("tests.decide.test_staffing.PLAN", EVALUATED)
    places = {**ONE_PLACE, "evaluate": ("gpu",)}
    wanted = {"rollout": 1, "reward": 1, "update": 1, "evaluate": 1}

    def out(since: float, nodes=(GPUS,), **more) -> tuple[str, ...]:
        before = replace(Pending("8_0", EVALUATION, since=since, lacks_room=True), **more)
        given = {"pending": [before, FULL], "places": places, "wanted": wanted, "nodes": nodes, "early": ()}
        return hand_over([IDLE], [PREPARE, *ROLLOUTS], **given).cancel_pending

    assert out(80.0) == ("8_0",)
    assert out(95.0) == (), "it stands behind"
    assert out(80.0, lacks_room=False) == (), "it has not been tried yet"
    assert out(80.0, nodes=[replace(GPUS, gpus=1)]) == (), "a worker has the place, and leaves"


# --- a long queue ---


def test_where_the_queue_is_long_who_has_left_gets_in_line_before_it_is_known_when_it_is_wanted():
    """In the first iteration: by then its turn in the queue is near."""
    at_work = at(busy("8_0r0", REWARDS[0]))
    given = {"places": APART, "wanted": {"rollout": 2, "reward": 4}, "early": ["rollout"], "nodes": ()}

    def sent(expected: Estimate) -> list[tuple]:
        decided = hand_over(
            *([at_work], [PREPARE, *ROLLOUTS], [claim(REWARDS[0], "8_0r0")]),
            estimates={"rollout": expected},
            **given,
        )
        return [order.tasks for order in decided.requests if order.tasks[0].job_kind == "rollout"]

    long = Estimate(None, queue_wait=900.0, startup=20.0, task=4.0, least_queue_wait=600.0)
    assert sent(long) == [tuple(NEXT_ROLLOUTS[2:])]
    assert sent(replace(long, least_queue_wait=50.0)) == []
    assert sent(replace(long, task=None)) == [], "nobody of it has been there yet"


def test_of_what_a_user_may_submit_some_jobs_are_kept_for_drivers():
    assert free_elements(100, None, of_stages=30, of_drivers=9) == 70
    assert free_elements(100, 40, of_stages=30, of_drivers=0) == 6
    assert free_elements(100, 40, of_stages=30, of_drivers=9) == 1
    assert free_elements(100, 40, of_stages=60, of_drivers=0) == 0
