"""Decisions where rollouts go on while an update computes (rollout.staleness)."""

from dataclasses import replace

import pytest

from pipeline.decide import passages
from pipeline.decide.choosing import Chooser, Step, View, choose, is_ahead, urgency
from pipeline.decide.crew import Crew, Worker
from pipeline.decide.places import Need
from pipeline.decide.sharing import Work, targets
from pipeline.decide.situation import Situation, at_hand
from pipeline.decide.staffing import staff
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import Frontier
from pipeline.run.tasks import Stage, Task
from pipeline.workers.beats import Doing
from pipeline.workers.claims import Attempt, Claim
from slurm.nodes import Node

PLAN = Plan(9, 1, 0, staleness=1)
FRONTIER = Frontier(3, 0)


def rollout(iteration: int, shard: int = 0) -> Task:
    return Task(iteration, Stage.ROLLOUT, shard)


def done_up_to(iteration: int) -> set[Task]:
    """Everything up to a policy."""
    return {task for task in PLAN.all_tasks() if task.iteration <= iteration}


# --- which task is next ---


def test_a_worker_of_rollouts_goes_ahead_once_the_iteration_at_hand_is_done_and_then_waits():
    view = View(PLAN, FRONTIER, done_up_to(3), {}, 3)
    worker = Chooser("rollout")
    assert choose(view, worker).task == rollout(4), "the earlier one first"
    view = replace(view, committed={*done_up_to(3), rollout(4)})
    assert choose(view, worker).task == rollout(5), "of policy 3, which is there"
    running = {rollout(5): [Attempt(Claim(rollout(5), 1, "1-aa", "w", 0.0), True)]}
    found = choose(replace(view, attempts=running), worker)
    assert (found.step, found.task, found.awaited) == (Step.WAIT, rollout(6), (frozenset({policy_maker(4)}),))


def test_only_what_is_of_a_later_iteration_than_the_next_update_is_ahead():
    assert not is_ahead(PLAN, FRONTIER, rollout(4))
    assert is_ahead(PLAN, FRONTIER, rollout(5))
    assert not is_ahead(PLAN, FRONTIER, policy_maker(5))
    assert not is_ahead(replace(PLAN, staleness=0), FRONTIER, rollout(5)), "an old look"
    assert not is_ahead(replace(PLAN, start=4), Frontier(-1, 0), rollout(5))


def test_where_slots_are_few_all_of_an_earlier_iteration_goes_first():
    tasks = [policy_maker(4), Task(4, Stage.REWARD), rollout(4), Task(4, Stage.EVALUATE)]
    tasks += [Task(5, Stage.REWARD), rollout(5)]
    order = [urgency(PLAN, FRONTIER, task) for task in tasks]
    assert order == sorted(set(order))


# --- when an input comes ---


def line(iteration: int, **stages: tuple[float, float, float]) -> dict[str, object]:
    keys = ("ready", "started", "ended")
    found = {kind: dict(zip(keys, times, strict=True)) for kind, times in stages.items()}
    return {"iteration": iteration, "stages": found}


def rollouts_behind_each_other(last: int) -> list[dict[str, object]]:
    """Rollouts of 40 s that have their policy long before; a reward takes 5 s, an update 15 s."""
    found = []
    for k in range(1, last + 1):
        end = 40.0 * k
        found.append(
            line(
                k,
                rollout=(max(0.0, end - 60), end - 40, end),
                reward=(end, end, end + 5),
                update=(end + 5, end + 5, end + 20),
            )
        )
    return found


def test_time_behind_the_stage_s_own_earlier_work_is_no_part_of_its_passage():
    seen = passages.passages(rollouts_behind_each_other(4))
    assert [p.last.seconds for p in seen if p.job_kind == "rollout"] == [40.0] * 4
    assert [p.ended for p in seen if p.job_kind == "rollout"] == [40.0, 80.0, 120.0, 160.0]
    assert passages.turnaround(seen, "rollout") == 40.0


@pytest.mark.parametrize("knows_rows", [True, False])
def test_a_worker_of_rewards_expects_its_input_when_rollouts_will_be_done(knows_rows):
    """Not at any moment, as their policy has been there for long."""
    seen = passages.passages(rollouts_behind_each_other(4 if knows_rows else 3))
    times = dict.fromkeys(done_up_to(3), 140.0) | {rollout(4): 160.0, Task(4, Stage.REWARD): 165.0}
    expected = passages.expected_ready(PLAN, Task(5, Stage.REWARD), times.get, seen, 170.0)
    assert expected == 200.0
    following = passages.expected_ready(PLAN, Task(6, Stage.REWARD), times.get, seen, 170.0)
    assert following == 240.0


def test_what_an_iteration_took_is_known_before_its_row_is_written():
    """Rewards of 100 s are on their way since the last ones were done: the update is not due at once."""
    lines = [
        line(
            k,
            rollout=(100.0 * k - 60, 100.0 * k - 60, 100.0 * k - 50),
            reward=(100.0 * k, 100.0 * k, 100.0 * k + 100),
            update=(100.0 * k + 100, 100.0 * k + 100, 100.0 * k + 110),
        )
        for k in (1, 2, 3)
    ]
    times = dict.fromkeys(done_up_to(4), 400.0) | {rollout(4): 350.0, Task(4, Stage.REWARD): 500.0}
    times |= {policy_maker(4): 510.0, rollout(5): 450.0}
    expected = passages.expected_ready(PLAN, policy_maker(5), times.get, passages.passages(lines), 511.0)
    assert expected == 600.0


# --- places ---


ONE = Need(frozenset({"all"}), gpus=1)


def seen_with(*workers: Worker, committed: set[Task], ready: list[Task], gpus: int = 1) -> Situation:
    window = PLAN.window(3, 0)
    kinds = ("rollout", "reward", "update")
    return Situation(
        plan=PLAN,
        tasks=at_hand(PLAN, window),
        crew=Crew(workers),
        held={w.task: w.name for w in workers if w.task},
        committed=committed,
        ready=ready,
        wanted=dict.fromkeys(kinds, 1),
        now=100.0,
        needs=dict.fromkeys(kinds, ONE),
        nodes=[Node("a", frozenset({"all"}), 8, gpus, 1000)],
    )


def test_a_worker_that_goes_ahead_makes_place_for_the_update_before_its_next_task():
    ahead = replace(PLAN, num_shards=2)
    scored = {task for task in ahead.all_tasks() if task.iteration <= 3}
    scored |= {Task(4, stage, shard) for stage in (Stage.ROLLOUT, Stage.REWARD) for shard in (0, 1)}
    busy = Worker("7_0r0", rollout(4), Doing.BUSY, rollout(5), 90.0, ("a",), True)
    seen = seen_with(busy, committed=scored, ready=[policy_maker(4)])
    seen = replace(seen, plan=ahead, tasks=at_hand(ahead, ahead.window(3, 0)))
    assert seen.is_ahead_of("rollout", "update"), "the other shard of iteration 5 is its next"
    assert [(one.worker, one.whom) for one in staff(seen).end_idle] == [("7_0r0", "update")]
    assert not seen.is_ahead_of("update", "rollout")
    in_step = replace(seen, plan=replace(ahead, staleness=0))
    assert not in_step.is_ahead_of("rollout", "update")


def test_kinds_that_take_turns_start_up_once_for_several_iterations():
    room = {f"n{i}": Node(f"n{i}", frozenset({"all"}), 8, 1, 1000) for i in range(3)}
    works = {
        "rollout": Work(ONE, 4, 4, 240.0, 16.0),
        "reward": Work(ONE, 4, 4, 20.0, 16.0),
        "update": Work(ONE, 1, 1, 60.0, 16.0),
    }
    ahead = {kind: replace(work, ahead=2) for kind, work in works.items()}
    assert targets(ahead, room)["rollout"] == 3, "240 s a rollout of one place, against 190 and a third of 48"
    many = {f"n{i}": Node(f"n{i}", frozenset({"all"}), 8, 1, 1000) for i in range(6)}
    shared = targets({kind: replace(work, tasks=work.tasks, ahead=1) for kind, work in works.items()}, many)
    assert shared == {"rollout": 4, "reward": 1, "update": 1}, "what takes longest gets the places"
