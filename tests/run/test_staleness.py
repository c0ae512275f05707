"""Responses of older policies (rollout.staleness): what is read, what waits, what stays. By plan alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.decide.choosing import Chooser, candidates
from pipeline.decide.situation import at_hand
from pipeline.orchestrate.rewind import Point, superseded
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import Frontier, find_frontier
from pipeline.run.retention import is_kept
from pipeline.run.tasks import Stage, Task

plans = st.builds(
    lambda start, more, shards, every, pools, staleness: Plan(
        start + more, shards, every, start, pools, staleness=staleness
    ),
    st.integers(0, 4),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from([(), ("big", "b_2")]),
    st.integers(0, 2),
)


@pytest.mark.parametrize(
    ("staleness", "start", "versions"),
    [
        (0, 0, [0, 1, 2, 3, 4, 5]),
        (1, 0, [0, 0, 1, 2, 3, 4]),
        (2, 0, [0, 0, 0, 1, 2, 3]),
        (1, 3, [3, 3, 4, 5, 6, 7]),
        (2, 3, [3, 3, 3, 4, 5, 6]),
    ],
)
def test_responses_are_of_the_policy_that_the_plan_names(staleness, start, versions):
    plan = Plan(start + 6, 2, 0, start, staleness=staleness)
    iterations = range(start + 1, start + 7)
    assert [plan.policy_of(iteration) for iteration in iterations] == versions
    read = [plan.inputs(Task(iteration, Stage.ROLLOUT, 1))[-1] for iteration in iterations]
    assert read == [policy_maker(version) for version in versions]
    assert [plan.lag_of(i) for i in iterations] == [
        i - 1 - v for i, v in zip(iterations, versions, strict=True)
    ]


@given(plans, st.integers(-1, 12))
def test_the_window_has_responses_of_further_iterations_and_one_update(plan, updated):
    updated = min(updated, plan.iterations)
    window = plan.window(updated, 0)
    done = max(updated, plan.start)
    last = min(done + 1 + plan.staleness, plan.iterations)
    assert [task.iteration for task in window if task.stage is Stage.UPDATE] == (
        [done + 1] if updated >= 0 and done < plan.iterations else []
    )
    sharded = {task.iteration for task in window if task.stage.is_sharded}
    assert sharded == (set(range(done + 1, last + 1)) if updated >= 0 else set())
    assert len(set(window)) == len(window)
    seen = {*window, policy_maker(plan.start), *(t for t in plan.all_tasks() if t.iteration <= done)}
    for task in window:
        assert seen.issuperset(plan.inputs(task)), "all that is read is done, or in it too"


@given(plans, st.data())
def test_without_staleness_window_and_what_is_at_hand_are_as_they_were(plan, data):
    plan = replace(plan, staleness=0)
    updated = data.draw(st.integers(plan.start, plan.iterations))
    window = plan.window(updated, 0)
    newest = max((plan.start, *(task.iteration for task in window)))
    after = plan.tasks(newest + 1) if window and newest < plan.iterations else ()
    assert at_hand(plan, window) == tuple(sorted((*window, *after), key=lambda task: task.iteration))


@given(plans, st.data())
def test_workers_and_passes_see_what_comes_into_the_window_next(plan, data):
    updated = data.draw(st.integers(plan.start, plan.iterations - 1))
    seen = at_hand(plan, plan.window(updated, 0))
    following = plan.window(updated + 1, 0)
    assert {t for t in following if t.stage is not Stage.EVALUATE} <= set(seen)
    assert len(set(seen)) == len(seen)
    assert [task.iteration for task in seen] == sorted(task.iteration for task in seen)
    for kind in plan.job_kinds:
        found = candidates(plan, Frontier(updated, 0), Chooser(kind))
        assert set(found) == {task for task in seen if task.job_kind == kind}
        assert [task.iteration for task in found] == sorted(task.iteration for task in found)


@given(plans)
def test_what_comes_before_is_what_is_made_from_it(plan):
    tasks = [task for task in plan.all_tasks() if task.iteration == 0 or task.iteration > plan.start]
    before: dict[tuple[int, Stage], set[tuple[int, Stage]]] = {}
    for task in tasks:
        found = before.setdefault((task.iteration, task.stage), set())
        for source in plan.inputs(task):
            found |= {(source.iteration, source.stage), *before.get((source.iteration, source.stage), ())}
    chain = [t for t in tasks if t.stage not in (Stage.EVALUATE, Stage.BENCHMARK, Stage.PREPARE)]
    for other in tasks:
        if other.stage is not Stage.PREPARE:
            found = {(one.iteration, one.stage) for one in chain if plan.comes_before(one, other)}
            earlier = {one for one in before[other.iteration, other.stage] if one[1] is not Stage.PREPARE}
            wanted = {one for one in earlier if one[0] > plan.start and one[1] is not Stage.EVALUATE}
            if not plan.pools:  # nothing reads scores of another pool's
                assert found == wanted
            assert found >= wanted


@given(plans, st.integers(2, 4), st.sampled_from([None, 1, 2, 5]), st.data())
def test_whatever_can_still_run_finds_what_it_reads_and_so_does_its_repetition(
    plan, keep_last, keep_every, data
):
    updated = data.draw(st.integers(max(plan.start, 1), plan.iterations))
    needed = {source for task in plan.window(updated, 99) for source in plan.inputs(task)}
    versions = {task.iteration for task in needed if task.stage is Stage.UPDATE}
    versions |= {version - 1 for version in versions if version > max(plan.start, 1)}
    keep_last = max(keep_last, plan.least_kept)
    assert all(is_kept(version, updated, keep_last, keep_every) for version in versions)


@given(plans, st.data())
def test_going_back_takes_back_a_stage_from_there_on_and_what_is_made_from_it(plan, data):
    stage = data.draw(st.sampled_from([Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE]))
    at_hand = data.draw(st.integers(plan.start + 1, plan.iterations))
    iteration = data.draw(st.integers(plan.start + 1, at_hand))
    taken = set()
    for task in plan.all_tasks():
        is_of_stage = task.stage is stage and task.iteration >= iteration
        if task.iteration <= at_hand and (is_of_stage or taken.intersection(plan.inputs(task))):
            taken.add(task)
    found = superseded(plan, Point(stage, iteration), at_hand)
    assert {task for task in found if task.stage is not Stage.STATE} == taken
    if not plan.staleness:
        assert {task for task in plan.all_tasks() if iteration < task.iteration <= at_hand} <= taken


def test_going_back_to_an_update_leaves_the_responses_of_older_policies():
    plan = Plan(6, 1, 0, staleness=1)
    found = [str(task) for task in superseded(plan, Point(Stage.UPDATE, 4), 5)]
    assert "iteration 4 update" in found
    assert "iteration 5 update" in found
    assert not [text for text in found if "rollout" in text or "reward" in text], "5 is of policy 3"
    found = [str(task) for task in superseded(plan, Point(Stage.UPDATE, 4), 6)]
    assert "iteration 6 rollout shard 0" in found, "of policy 4"
    assert "iteration 5 rollout shard 0" not in found


def record(paths: RunPaths, task: Task) -> None:
    path = paths.task(task).record
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_policy_that_is_gone_and_that_responses_are_still_to_be_of_is_made_again(tmp_path, staleness):
    plan, paths = Plan(9, 2, 0, staleness=staleness), RunPaths(tmp_path)
    for task in plan.all_tasks():
        if task.iteration <= 5:
            record(paths, task)
    paths.metrics.write_text('{"iteration": 5}\n')
    lost = 5 - staleness
    paths.task(policy_maker(lost)).record.unlink()
    assert find_frontier(plan, paths).updated == lost - 1, "the next responses are to be of it"
    assert find_frontier(replace(plan, staleness=0), paths).updated == 5, "nothing reads it"
    assert find_frontier(replace(plan, iterations=5), paths).updated == 5, "nothing follows"
    record(paths, policy_maker(lost))
    assert find_frontier(plan, paths).updated == 5
    paths.task(policy_maker(lost - 1)).record.unlink()
    assert find_frontier(plan, paths).updated == 5, "older: purged, and read by nothing"
