"""The plan: what a run consists of, as a pure function of four numbers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.run.plan import Plan, policy_maker
from pipeline.run.tasks import PREPARE, Stage, Task, parse_task, task_key

POOLS = ("big", "b_2")
plans = st.builds(
    Plan,
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 11),
    pools=st.sampled_from([(), POOLS[:1], POOLS]),
)
measured_plans = st.builds(
    Plan, st.integers(1, 9), st.integers(1, 3), st.integers(0, 4), benchmark_every=st.integers(1, 11)
)
everything = st.builds(Task, st.integers(0, 10**6), st.sampled_from(Stage), st.integers(0, 10**5)).map(
    lambda task: task._replace(pool="big" if task.stage is Stage.SCORE else "")
)


def test_one_iteration_of_two_shards_reads_like_the_diagram():
    plan = Plan(iterations=1, num_shards=2, evaluate_every=0)
    assert [str(task) for task in plan.all_tasks()] == [
        "prepare",
        "iteration 1 rollout shard 0",
        "iteration 1 rollout shard 1",
        "iteration 1 reward shard 0",
        "iteration 1 reward shard 1",
        "iteration 1 update",
    ]


def test_with_pools_each_has_a_task_per_shard_between_rollout_and_reward():
    plan = Plan(iterations=1, num_shards=2, evaluate_every=0, pools=POOLS)
    assert [str(task) for task in plan.tasks(1)] == [
        "iteration 1 rollout shard 0",
        "iteration 1 rollout shard 1",
        "iteration 1 score-big shard 0",
        "iteration 1 score-big shard 1",
        "iteration 1 score-b_2 shard 0",
        "iteration 1 score-b_2 shard 1",
        "iteration 1 reward shard 0",
        "iteration 1 reward shard 1",
        "iteration 1 update",
    ]
    rollout, *scores = Task(1, Stage.ROLLOUT, 1), *(Task(1, Stage.SCORE, 1, pool) for pool in POOLS)
    assert [plan.inputs(task) for task in scores] == [(PREPARE, rollout)] * 2
    assert plan.inputs(Task(1, Stage.REWARD, 1)) == (PREPARE, rollout, *scores)


@given(plans)
def test_the_job_kinds_of_a_plan_are_those_of_its_tasks_in_their_order(plan):
    found = dict.fromkeys(task.job_kind for task in plan.tasks(1) if task.stage is not Stage.EVALUATE)
    assert tuple(found) == plan.job_kinds


def test_a_reward_task_reads_its_own_rollout_shard_only():
    plan = Plan(iterations=3, num_shards=4, evaluate_every=0)
    assert plan.inputs(Task(2, Stage.REWARD, 3)) == (PREPARE, Task(2, Stage.ROLLOUT, 3))


def test_a_rollout_reads_the_policy_before_it():
    plan = Plan(iterations=3, num_shards=4, evaluate_every=0)
    assert plan.inputs(Task(3, Stage.ROLLOUT, 1)) == (PREPARE, Task(2, Stage.UPDATE))
    assert plan.inputs(Task(1, Stage.ROLLOUT, 1)) == (PREPARE,)


def test_an_update_reads_the_last_update_and_every_shard():
    plan = Plan(iterations=3, num_shards=2, evaluate_every=0)
    shards = [Task(2, stage, i) for stage in (Stage.ROLLOUT, Stage.REWARD) for i in (0, 1)]
    assert plan.inputs(Task(2, Stage.UPDATE)) == (PREPARE, Task(1, Stage.UPDATE), *shards)


@pytest.mark.parametrize(
    ("iterations", "every", "expected"),
    [
        (5, 0, ()),
        (5, 1, (0, 1, 2, 3, 4, 5)),
        (5, 2, (0, 2, 4, 5)),
        (4, 2, (0, 2, 4)),
        (5, 5, (0, 5)),
        (5, 9, (0, 5)),
    ],
)
def test_policy_zero_every_nth_and_the_last_are_evaluated(iterations, every, expected):
    plan = Plan(iterations, 1, every)
    assert plan.evaluations() == expected
    assert tuple(t.iteration for t in plan.all_tasks() if t.stage is Stage.EVALUATE) == expected


@given(plans)
def test_inputs_come_before_what_reads_them_and_are_part_of_the_plan(plan):
    seen = set()
    for task in plan.all_tasks():
        assert set(plan.inputs(task)) <= seen
        assert len(set(plan.inputs(task))) == len(plan.inputs(task))
        assert task not in seen
        seen.add(task)


@given(plans)
def test_each_evaluation_waits_for_the_one_before(plan):
    tasks = plan.evaluation_tasks()
    for earlier, later in itertools.pairwise(tasks):
        assert earlier in plan.inputs(later)


@given(plans, st.data())
def test_the_window_holds_exactly_what_can_be_worked_on(plan, data):
    updated = data.draw(st.integers(-1, plan.iterations))
    done = sum(iteration <= updated for iteration in plan.evaluations())
    evaluated = data.draw(st.integers(0, done))
    window = plan.window(updated, evaluated)
    committed = {
        task for i in range(updated + 1) for task in plan.tasks(i) if task.stage is not Stage.EVALUATE
    }
    committed |= set(plan.evaluation_tasks()[:evaluated])
    assert not committed & set(window)
    missing = [task for task in plan.all_tasks() if task not in committed]
    ready = {task for task in missing if set(plan.inputs(task)) <= committed}
    assert ready <= set(window)
    assert bool(window) is bool(missing)
    for number, task in enumerate(window):  # an input that is in the window comes first
        assert not set(plan.inputs(task)) & set(window[number + 1 :])


@given(measured_plans, st.data())
def test_benchmarks_wait_for_a_policy_and_the_one_before_and_nothing_waits_for_them(plan, data):
    tasks = plan.benchmark_tasks()
    assert {task.iteration for task in tasks} == {
        i for i in range(plan.iterations + 1) if i % plan.benchmark_every == 0 or i in (0, plan.iterations)
    }
    for before, task in zip((None, *tasks), tasks, strict=False):
        expected = {PREPARE, policy_maker(task.iteration), *([before] if before else [])}
        assert set(plan.inputs(task)) == expected
        assert plan.benchmark_of(task.iteration) == (task,)
    others = [task for task in plan.all_tasks() if task.stage is not Stage.BENCHMARK]
    assert not any(set(plan.inputs(task)) & set(tasks) for task in others)
    updated = data.draw(st.integers(0, plan.iterations))
    measured = data.draw(st.integers(0, sum(task.iteration <= updated for task in tasks)))
    window = plan.window(updated, 0, benchmarked=measured)
    assert [t for t in window if t.stage is Stage.BENCHMARK] == [
        task for task in tasks[measured : measured + 2] if task.iteration <= updated
    ]
    assert [t for t in window if t.stage is not Stage.BENCHMARK] == list(
        Plan(plan.iterations, plan.num_shards, plan.evaluate_every).window(updated, 0)
    )


@given(plans, st.data())
def test_what_waits_for_the_window_is_shown_with_it(plan, data):
    updated = data.draw(st.integers(-1, plan.iterations))
    evaluated = data.draw(st.integers(0, sum(iteration <= updated for iteration in plan.evaluations())))
    window = plan.window(updated, evaluated, is_ahead=True)
    newest = min(max(updated, 0) + 1, plan.iterations)
    expected = [PREPARE] if updated < 0 else []
    for iteration in range(max(updated, 0) + 1, newest + 1):
        expected += [task for task in plan.tasks(iteration) if task.stage is not Stage.EVALUATE]
    expected += [task for task in plan.evaluation_tasks()[evaluated:] if task.iteration <= newest]
    assert sorted(window) == sorted(expected)
    assert set(plan.window(updated, evaluated)) <= set(window)
    for number, task in enumerate(window):  # an input that is in the window comes first
        assert not set(plan.inputs(task)) & set(window[number + 1 :])


@given(plans)
def test_a_policy_is_made_by_its_update_and_policy_zero_by_nobody_of_ours(plan):
    assert policy_maker(0) == PREPARE
    assert policy_maker(plan.iterations) in set(plan.all_tasks())


@given(everything)
def test_task_keys_come_back(task):
    assert parse_task(task_key(task)) == task


@pytest.mark.parametrize(
    "text", ["", "7", "7/rollout", "7/rollout/3/4", "x/rollout/3", "7/roll/3", "7/score/3", "7/reward-big/3"]
)
def test_what_is_no_task_key_is_refused(text):
    with pytest.raises(ValueError, match="is not a task key such as '7/rollout/3'"):
        parse_task(text)
