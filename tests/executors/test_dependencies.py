"""Who waits for whom: dependency expressions follow what is committed and who carries what is missing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.scheduler import StreamingDependency
from pipeline.executors.slurm.dependencies import (
    NEVER,
    ArrayElement,
    Waiting,
    dependency_of,
    elements_of,
    ended_before,
    missing_inputs,
    rewire,
    watch_expression,
    watches,
)
from pipeline.run.plan import Plan
from pipeline.run.tasks import PREPARE, Stage, Task

PLAN = Plan(iterations=3, num_shards=3, evaluate_every=0)
CORR, OK = StreamingDependency.AFTERCORR, StreamingDependency.AFTEROK


def rollout(shard: int, iteration: int = 1) -> Task:
    return Task(iteration, Stage.ROLLOUT, shard)


def reward(shard: int, iteration: int = 1) -> Task:
    return Task(iteration, Stage.REWARD, shard)


def carried(array: str, *tasks: Task) -> dict[Task, ArrayElement]:
    return {task: ArrayElement(array, task.shard) for task in tasks}


def none_committed(task: Task) -> bool:
    return False


def test_a_reward_waits_for_its_rollout_and_not_for_what_that_waits_for():
    assert missing_inputs(PLAN, reward(1), none_committed) == [rollout(1)]
    assert missing_inputs(PLAN, reward(1), {PREPARE, rollout(1)}.__contains__) == []


def test_an_update_waits_for_the_rewards_alone():
    update = Task(2, Stage.UPDATE)
    assert missing_inputs(PLAN, update, none_committed) == [reward(s, 2) for s in range(3)]
    # A rollout that has to be repeated although its reward stands is waited for by itself.
    committed = {
        PREPARE,
        Task(1, Stage.UPDATE),
        *(reward(s, 2) for s in range(3)),
        rollout(0, 2),
        rollout(2, 2),
    }
    assert missing_inputs(PLAN, update, committed.__contains__) == [rollout(1, 2)]


def test_a_task_with_an_input_that_nobody_carries_cannot_be_ordered():
    assert elements_of(PLAN, reward(1), none_committed, {}) is None
    carriers = carried("7", rollout(1))
    assert elements_of(PLAN, reward(1), none_committed, carriers) == (ArrayElement("7", 1),)


def elements(tasks, carriers):
    return [(t, t.shard, elements_of(PLAN, t, none_committed, carriers) or ()) for t in tasks]


def test_scoring_follows_generation_shard_by_shard():
    wanted = elements([reward(s) for s in range(3)], carried("7", *(rollout(s) for s in range(3))))
    assert dependency_of(wanted, CORR) == ("aftercorr:7", ("7",))
    assert dependency_of(wanted, OK) == ("afterok:7", ("7",))


def test_rewards_of_rollouts_in_several_arrays_wait_for_all_of_them():
    carriers = carried("7", rollout(0), rollout(2)) | carried("12", rollout(1))
    wanted = elements([reward(s) for s in range(3)], carriers)
    assert dependency_of(wanted, CORR) == ("afterok:7:12", ("7", "12"))


def test_indices_that_do_not_correspond_are_not_said_to():
    wanted = [(reward(1001), 1, (ArrayElement("7", 2),))]
    assert dependency_of(wanted, CORR) == ("afterok:7", ("7",))


def test_what_needs_nothing_waits_for_nothing():
    assert dependency_of([(rollout(0), 0, ())], CORR) == ("", ())


def waiting(task: Task, array: str, reason: str, *waits_for: str) -> Waiting:
    return Waiting(task, ArrayElement(array, task.shard), reason, waits_for)


def test_after_a_failed_rollout_just_its_reward_is_told_to_wait_for_the_new_one():
    carriers = carried("12", rollout(1)) | carried("8", *(reward(s) for s in range(3)))
    committed = {PREPARE, rollout(0), rollout(2)}.__contains__
    items = [waiting(reward(0), "8", "Resources", "7"), waiting(reward(1), "8", NEVER, "7")]
    (change,) = rewire(PLAN, items, committed, carriers, CORR)
    assert change.elements == (ArrayElement("8", 1),)
    assert (change.dependency, change.waits_for) == ("aftercorr:12", ("12",))


def test_a_dead_dependency_whose_work_was_done_elsewhere_is_removed():
    items = [waiting(reward(1), "8", NEVER, "7")]
    (change,) = rewire(PLAN, items, {PREPARE, rollout(1)}.__contains__, {}, CORR)
    assert (change.dependency, change.waits_for) == ("", ())


def test_what_waits_rightly_is_left_alone():
    carriers = carried("7", *(rollout(s) for s in range(3)))
    items = [waiting(reward(s), "8", "Dependency", "7") for s in range(3)]
    assert rewire(PLAN, items, none_committed, carriers, CORR) == []


def test_a_replacement_in_a_new_array_is_noticed_before_the_dependency_breaks():
    items = [waiting(reward(1), "8", "Dependency", "7")]
    (change,) = rewire(PLAN, items, none_committed, carried("12", rollout(1)), CORR)
    assert change.dependency == "aftercorr:12"


def test_an_update_is_not_told_anew_when_only_a_rollout_was_repeated():
    carriers = carried("12", rollout(1)) | carried("8", *(reward(s) for s in range(3)))
    update = Task(1, Stage.UPDATE)
    items = [waiting(update, "9", "Dependency", "8")]
    assert rewire(PLAN, items, {PREPARE, rollout(0), rollout(2)}.__contains__, carriers, CORR) == []


def test_one_driver_watches_a_whole_iteration():
    assert watch_expression(["9"], ["7", "8"]) == "afterany:9?afternotok:7?afternotok:8"


@given(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_whatever_was_lost_one_round_of_rewiring_is_enough(lost, done):
    """After a rewiring, every waiting element's dependency is on jobs that carry its missing input now."""
    plan = Plan(iterations=1, num_shards=6, evaluate_every=0)
    lost -= done
    carriers = {rollout(s): ArrayElement("12" if s in lost else "7", s) for s in range(6) if s not in done}
    committed = {PREPARE, *(rollout(s) for s in done)}.__contains__
    items = [waiting(reward(s), "8", NEVER if s in lost else "Dependency", "7") for s in range(6)]
    changes = rewire(plan, items, committed, carriers, CORR)
    told = {element.index: change.waits_for for change in changes for element in change.elements}
    assert dict.fromkeys(lost, ("12",)) == told
    assert len(changes) <= 1


# --- pools ---

POOLED = Plan(iterations=3, num_shards=3, evaluate_every=0, pools=("big", "b_2"))


def score(shard: int, pool: str) -> Task:
    return Task(1, Stage.SCORE, shard, pool)


def scores_carried(big: str, small: str) -> dict[Task, ArrayElement]:
    found = {}
    for array, pool in ((big, "big"), (small, "b_2")):
        found |= carried(array, *(score(s, pool) for s in range(3)))
    return found


def pooled_elements(tasks, is_committed, carriers):
    return [(t, t.shard, elements_of(POOLED, t, is_committed, carriers) or ()) for t in tasks]


def test_a_reward_follows_every_pool_shard_by_shard_and_each_pool_the_rollout():
    carriers = scores_carried("8", "9") | carried("7", *(rollout(s) for s in range(3)))
    for pool in POOLED.pools:
        wanted = pooled_elements([score(s, pool) for s in range(3)], none_committed, carriers)
        assert dependency_of(wanted, CORR) == ("aftercorr:7", ("7",))
    wanted = pooled_elements([reward(s) for s in range(3)], none_committed, carriers)
    assert dependency_of(wanted, CORR) == ("aftercorr:8:9", ("8", "9"))
    assert dependency_of(wanted, OK) == ("afterok:8:9", ("8", "9"))


def test_where_one_shard_waits_for_fewer_pools_than_another_all_wait_for_whole_arrays():
    """aftercorr means an element of each array, and a repeated array lacks those that were committed."""
    carriers = scores_carried("8", "9")
    committed = {PREPARE, *(rollout(s) for s in range(3)), score(1, "b_2")}.__contains__
    wanted = pooled_elements([reward(s) for s in range(3)], committed, carriers)
    assert dependency_of(wanted, CORR) == ("afterok:8:9", ("8", "9"))


def test_after_a_failed_score_just_its_reward_is_told_to_wait_for_the_new_one():
    carriers = scores_carried("8", "9") | carried("12", score(1, "big"))
    carriers |= carried("10", *(reward(s) for s in range(3)))
    committed = {PREPARE, *(rollout(s) for s in range(3))}.__contains__
    items = [waiting(reward(s), "10", NEVER if s == 1 else "Dependency", "8", "9") for s in range(3)]
    (change,) = rewire(POOLED, items, committed, carriers, CORR)
    assert change.elements == (ArrayElement("10", 1),)
    assert (change.dependency, change.waits_for) == ("aftercorr:9:12", ("9", "12"))


def test_a_driver_that_watches_an_iteration_is_woken_by_every_pools_failure():
    live = [(rollout(0), "7"), (score(0, "big"), "8"), (score(0, "b_2"), "9"), (reward(0), "10")]
    (watch,) = watches([*live, (Task(1, Stage.UPDATE), "11")])
    assert (watch.last, watch.earlier) == (("11",), ("7", "8", "9", "10"))


@pytest.mark.parametrize("stage", [Stage.ROLLOUT, Stage.UPDATE])
def test_only_scoring_streams(stage):
    task = Task(1, stage, 0)
    assert dependency_of([(task, 0, (ArrayElement("7", 0),))], CORR)[0] == "afterok:7"


# --- an update's job writes the trainer's state when its policy is committed ---

SECOND = Task(2, Stage.UPDATE)
OF_SECOND = [reward(shard, 2) for shard in range(3)]


def committed_but(*missing: Task):
    return lambda task: task not in missing


def test_an_update_waits_for_its_rewards_and_for_the_end_of_the_one_before():
    carriers = carried("9", *OF_SECOND) | carried("7", Task(1, Stage.UPDATE))
    needed = elements_of(PLAN, SECOND, committed_but(*OF_SECOND), carriers)
    ended = ended_before(PLAN, SECOND, carriers)
    assert dependency_of([(SECOND, 0, needed)], CORR, ended) == ("afterok:9,afterany:7", ("9", "7"))
    assert dependency_of([(SECOND, 0, ())], CORR, ended) == ("afterany:7", ("7",))


def test_only_an_update_waits_for_an_end_and_none_for_one_that_is_over():
    carriers = carried("7", Task(1, Stage.UPDATE))
    tasks = [task for iteration in range(4) for task in PLAN.tasks(iteration) if task != SECOND]
    assert {ended_before(PLAN, task, carriers) for task in tasks} == {()}
    assert ended_before(PLAN, SECOND, {}) == ()


def test_where_the_update_before_is_submitted_again_the_next_waits_for_that_one():
    carriers = carried("9", *OF_SECOND) | carried("12", Task(1, Stage.UPDATE)) | carried("10", SECOND)
    waiting = Waiting(SECOND, ArrayElement("10", 0), "Dependency", ("9", "7"))
    unchanged = replace(waiting, waits_for=("9", "7", "12"))
    rollouts = [rollout(shard, 2) for shard in range(3)]
    is_committed = committed_but(*OF_SECOND, *rollouts, Task(1, Stage.UPDATE))
    (change,) = rewire(PLAN, [waiting], is_committed, carriers, CORR)
    assert (change.dependency, change.waits_for) == ("afterok:9,afterany:12", ("9", "12"))
    assert rewire(PLAN, [unchanged], is_committed, carriers, CORR) == []


def test_a_rollout_that_was_not_released_is_by_the_next_pass():
    """The node of the update's job may lack Slurm's commands."""
    carriers = carried("8", rollout(0, 2)) | carried("7", Task(1, Stage.UPDATE))
    held = Waiting(rollout(0, 2), ArrayElement("8", 0), "Dependency", ("7",))
    (change,) = rewire(PLAN, [held], committed_but(rollout(0, 2)), carriers, CORR)
    assert (change.dependency, change.waits_for) == ("", ())
    released = replace(held, reason="Priority")
    assert rewire(PLAN, [released], committed_but(rollout(0, 2)), carriers, CORR) == []
    is_over = carried("8", rollout(0, 2))
    assert rewire(PLAN, [held], committed_but(rollout(0, 2)), is_over, CORR) == [], "Slurm sees it itself"
    assert rewire(PLAN, [held], committed_but(rollout(0, 2), Task(1, Stage.UPDATE)), carriers, CORR) == []


def test_an_evaluation_that_was_not_released_waits_for_the_one_before_alone():
    plan = replace(PLAN, evaluate_every=1)
    first, second, update = Task(0, Stage.EVALUATE), Task(1, Stage.EVALUATE), Task(1, Stage.UPDATE)
    carriers = carried("6", first) | carried("8", second) | carried("7", update)
    held = Waiting(second, ArrayElement("8", 0), "Dependency", ("6", "7"))
    (change,) = rewire(plan, [held], committed_but(first, second), carriers, CORR)
    assert (change.dependency, change.waits_for) == ("afterok:6", ("6",))
    assert rewire(plan, [held], committed_but(first, second, update), carriers, CORR) == []
