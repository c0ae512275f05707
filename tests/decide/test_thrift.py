"""staffing: what is not started, not queued any more, and not taken from others."""

from dataclasses import replace

from pipeline.decide.crew import Pending
from pipeline.decide.places import Need
from pipeline.decide.sharing import Work, is_worthwhile
from pipeline.decide.situation import Estimate
from pipeline.run.plan import Plan
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from slurm.nodes import Node
from tests.decide.test_staffing import (
    GPUS,
    NEXT_ROLLOUTS,
    ONE_PLACE,
    REWARDS,
    ROLLOUTS,
    UPDATE,
    at,
    busy,
    claim,
    decide,
    hand_over,
    leaving,
    waiting,
)

APART = {"rollout": ("gpu",), "reward": ("small",), "update": ("large",)}


def sent_for_rollouts(expected: Estimate, number: int = 3, done=(), **more) -> tuple[str, ...]:
    """Return who is withdrawn of those who were sent for rollouts of which one worker has done, or does, the
    first ones."""
    live = at(busy("6_0r0", ROLLOUTS[0]))
    given = {"places": APART, "wanted": {"rollout": 4}, "nodes": [replace(GPUS, gpus=64)], "early": ()}
    claims = [claim(ROLLOUTS[0], "6_0r0")]
    return hand_over(
        [live],
        [PREPARE, *done],
        claims,
        pending=[Pending(f"7_{s}", ROLLOUTS[s]) for s in range(1, 1 + number)],
        estimates={"rollout": expected},
        **given,
        **more,
    ).cancel_pending


def test_who_would_find_its_task_done_leaves_the_queue_if_it_can_be_there_in_time_again():
    quick = Estimate(next_input=500.0, queue_wait=90.0, startup=10.0, task=4.0, least_queue_wait=2.0)
    assert sent_for_rollouts(quick) == ("7_2", "7_3"), "one of three tasks is left once it has started up"
    assert sent_for_rollouts(replace(quick, task=60.0)) == ()
    assert sent_for_rollouts(replace(quick, next_input=108.0)) == (), "the next would be as soon"
    unknown = replace(quick, next_input=None)
    assert sent_for_rollouts(unknown) == ("7_2", "7_3"), "whenever that is: the queue is short"
    assert sent_for_rollouts(replace(unknown, least_queue_wait=20.0)) == (), "nobody knows when that is"
    assert sent_for_rollouts(replace(quick, least_queue_wait=600.0)) == (), (
        "its time in the queue is worth more"
    )


def test_who_was_sent_for_what_is_still_to_come_keeps_its_place_in_the_queue():
    """It would not be sent early again."""
    early = [Pending(f"7_{task.shard}", task) for task in NEXT_ROLLOUTS]
    far = Estimate(next_input=500.0, queue_wait=3.0, startup=10.0, task=4.0)
    given = {"pending": early, "estimates": {"rollout": far}, "places": APART, "wanted": 4}
    assert decide(committed=[PREPARE, *ROLLOUTS], **given).cancel_pending == ()


def test_at_the_end_of_a_run_nobody_starts_up_for_what_others_do():
    last = [Task(2, Stage.ROLLOUT, shard) for shard in range(4)]
    done = [PREPARE, *ROLLOUTS, *REWARDS, UPDATE, *last[:3]]
    at_work = at(busy("6_0r0", last[3]))
    decided = decide(
        [at_work],
        [Pending("7_1", last[1])],
        [claim(last[3], "6_0r0")],
        done,
        estimates={"rollout": Estimate(None, 2.0, 10.0, 4.0)},
        places=APART,
        early=(),
    )
    assert decided.cancel_pending == ("7_1",)


def work(seconds: float | None) -> Work:
    return Work(Need(frozenset({"gpu"})), 4, 4, seconds, None)


def test_seconds_matter_by_the_length_of_an_iteration():
    works, most = {"rollout": work(400.0), "reward": work(100.0)}, {"rollout": 4, "reward": 1}
    assert is_worthwhile(3.1, works, most), "of 200, and so for each of two kinds"
    assert not is_worthwhile(2.9, works, most)
    assert is_worthwhile(None, works, most)
    assert is_worthwhile(0.1, {**works, "update": work(None)}, most), "nobody knows how long it is"


def test_nobody_starts_early_for_a_few_seconds_of_a_long_iteration():
    def requests(startup: float):
        expected = {kind: Estimate(500.0, 1.0, startup, 200.0) for kind in ("rollout", "reward", "update")}
        given = {"places": APART, "wanted": dict.fromkeys(APART, 1), "nodes": [replace(GPUS, gpus=64)]}
        return hand_over([], [PREPARE, *ROLLOUTS], estimates=expected, early=["rollout"], **given).requests

    assert [order.tasks[0].job_kind for order in requests(60.0)] == ["reward", "rollout"]
    assert [order.tasks[0].job_kind for order in requests(6.0)] == ["reward"]


def test_of_those_who_start_early_as_many_as_keep_up_are_there_for_the_first_input():
    """With rollouts of 60 s each, two at once, one reward of 30 s keeps up, or four of 120 s."""

    def begins(seconds: float) -> list[tuple[int, float | None]]:
        reward = Estimate(300.0, 5.0, 15.0, seconds, last_input=420.0)
        expected = {"rollout": Estimate(None, 5.0, 15.0, 60.0), "reward": reward}
        at_work = [at(busy(f"7_{i}r0", ROLLOUTS[i])) for i in range(2)]
        claims = [claim(ROLLOUTS[i], f"7_{i}r0") for i in range(2)]
        given = {"places": APART, "wanted": {"rollout": 2, "reward": 4}, "early": ["reward"]}
        nodes = [replace(GPUS, gpus=2), Node("small", frozenset(["small"]), 64, 8, 64_000)]
        requests = hand_over(at_work, [PREPARE], claims, nodes=nodes, estimates=expected, **given).requests
        assert {order.tasks[0].job_kind for order in requests} <= {"reward"}
        return [(len(order.tasks), order.begin) for order in requests]

    assert begins(30.0) == [(1, 280.0), (1, 400.0)]
    assert begins(120.0) == [(4, 280.0)]
    assert begins(20.0) == [(1, 280.0), (1, 400.0)]


def test_those_who_start_together_are_sent_as_early_as_that_takes():
    alone = Estimate(500.0, 30.0, 20.0)
    given = {"committed": [PREPARE, *ROLLOUTS]}
    assert decide(estimates={"rollout": alone}, **given).requests[0].begin == 450.0
    together = replace(alone, startup_together=150.0)
    assert decide(estimates={"rollout": together}, **given).requests[0].begin == 320.0


def test_an_early_start_takes_no_place_that_something_wants_now_and_cannot_have_yet():
    """A worker at its last task gives its place to the reward that waits, not to the update after it."""
    at_work = at(busy("7_3r0", ROLLOUTS[3]))
    expected = {
        "rollout": Estimate(900.0, 1.0, 20.0, 50.0),
        "reward": Estimate(190.0, 1.0, 20.0, 5.0),
        "update": Estimate(200.0, 1.0, 20.0, 5.0),
    }
    one_gpu = {"nodes": [replace(GPUS, gpus=1)], "wanted": dict.fromkeys(ONE_PLACE, 1)}
    decided = hand_over(
        [at_work], [PREPARE, *ROLLOUTS[:2]], [claim(ROLLOUTS[3], "7_3r0")], estimates=expected, **one_gpu
    )
    assert [order.tasks[0].job_kind for order in decided.requests] == ["reward"]


EVALUATED = Plan(iterations=3, num_shards=4, evaluate_every=1)
EVALUATION = Task(0, Stage.EVALUATE)


def test_an_evaluation_has_time_until_it_costs_a_tenth_of_it(monkeypatch):
    """Nothing waits for it: two workers that go on in a moment keep their places."""
    monkeypatch.setattr("tests.decide.test_staffing.PLAN", EVALUATED)
    workers = [at(waiting("7_0r0", ROLLOUTS[0])), at(waiting("9_0r0", UPDATE))]
    soon = Estimate(130.0, 1.0, 20.0, 5.0)
    expected = {**dict.fromkeys(ONE_PLACE, soon), "evaluate": Estimate(None, 1.0, 10.0, 5.0)}
    given = {
        "places": {**ONE_PLACE, "evaluate": ("gpu",)},
        "wanted": {**dict.fromkeys(ONE_PLACE, 1), "evaluate": 1},
        "early": (),
    }

    def who_leaves(estimates, now=100.0):
        pending = [Pending("11_0", EVALUATION, since=100.0, lacks_room=True)]
        done = [PREPARE, *ROLLOUTS, *REWARDS[:3]]
        at_work = replace(waiting("8_0r0", REWARDS[3]), doing=Doing.BUSY, task=REWARDS[3], nodes=("other",))
        decided = hand_over(
            [*workers, at_work],
            done,
            [claim(REWARDS[3], "8_0r0")],
            pending=pending,
            estimates=estimates,
            now=now,
            **given,
        )
        return leaving(decided)

    assert who_leaves(expected) == {}
    assert who_leaves({**expected, "rollout": replace(soon, next_input=None)}) == {}, "nobody knows when"
    assert who_leaves({**expected, "rollout": replace(soon, next_input=900.0)}) == {"7_0r0": "evaluate"}
    assert who_leaves(expected, now=100.0 + 9 * 51) == {}
    late = {kind: replace(e, next_input=e.next_input and 620.0) for kind, e in expected.items()}
    assert list(who_leaves(late, now=100.0 + 10 * 51).values()) == ["evaluate"]


# --- early starts where there are fewer places than workers ---

AT_WORK = [at(busy(f"8_{i}r0", REWARDS[i])) for i in range(2)]
THEIR_CLAIMS = [claim(REWARDS[i], f"8_{i}r0") for i in range(2)]


def sent_early(pending=(), nodes=(GPUS,), at_work=AT_WORK, claims=THEIR_CLAIMS, **known) -> dict[str, float]:
    """Return when workers enter the queue that start early, by job kind."""
    done = [PREPARE, *ROLLOUTS, *REWARDS[2:]]
    given = {"nodes": nodes, "pending": pending, "wanted": {"rollout": 2, "reward": 2, "update": 1}}
    decided = hand_over(at_work, done, claims, estimates=known, **given)
    return {order.tasks[0].job_kind: order.begin for order in decided.requests}


def test_an_early_start_goes_behind_an_earlier_stage_s_that_waits_for_the_same_places():
    """Rollouts take long to start up and updates a moment: in the order of their begin times they would have
    the update's place, and leave it for that."""
    known = {
        "reward": Estimate(None, 0.0, 10.0, task=300.0),
        "update": Estimate(400.0, 0.0, 20.0, task=10.0),
        "rollout": Estimate(420.0, 0.0, 80.0, task=300.0),
    }
    update = Pending("9_0", UPDATE, begin=380.0)
    roomy = [replace(GPUS, gpus=5)]
    assert sent_early([update], roomy, **known) == {"rollout": 340.0}, "there is room for all"
    assert sent_early([update], [replace(GPUS, gpus=3)], **known) == {"rollout": 380.0}
