"""A reference that follows the policy (algorithm.kl.sync_every): which version it is, and what stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.compose import from_mapping
from pipeline.orchestrate.rewind import check_can_start_from
from pipeline.run.directory import Run, create_run
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.retention import Thinned, is_kept, references_read, remove_folders, thin
from pipeline.run.tasks import PREPARE, Stage, Task
from tests.support.committed import commit

plans = st.builds(
    lambda start, more, staleness, every, averages: Plan(
        start + more, 2, 0, start, staleness=staleness, sync_every=every, averages=averages
    ),
    st.integers(0, 5),
    st.integers(1, 12),
    st.integers(0, 2),
    st.integers(1, 4),
    st.booleans(),
)


@pytest.mark.parametrize(
    ("every", "start", "staleness", "versions"),
    [
        (0, 0, 0, [0, 0, 0, 0, 0, 0]),
        (1, 0, 0, [0, 1, 2, 3, 4, 5]),
        (2, 0, 0, [0, 0, 2, 2, 4, 4]),
        (2, 0, 1, [0, 0, 0, 2, 2, 4]),
        (4, 3, 0, [0, 4, 4, 4, 4, 8]),
        (2, 3, 0, [3, 4, 4, 6, 6, 8]),
    ],
)
def test_the_reference_is_the_policy_of_the_newest_sync(every, start, staleness, versions):
    """A fork has no older policy than its first."""
    plan = Plan(start + 6, 2, 0, start, staleness=staleness, sync_every=every)
    iterations = range(start + 1, start + 7)
    assert [plan.reference_of(iteration) for iteration in iterations] == versions
    for iteration, version in zip(iterations, versions, strict=True):
        assert (policy_maker(version) in plan.inputs(Task(iteration, Stage.REWARD, 1))) or not every


@given(plans, st.data())
def test_no_task_waits_for_a_reference_longer_than_for_its_rollout(plan, data):
    iteration = data.draw(st.integers(plan.start + 1, plan.iterations))
    assert plan.reference_of(iteration) <= plan.policy_of(iteration)
    makers = {task for task in plan.inputs(Task(iteration, Stage.REWARD)) if task.stage is Stage.UPDATE}
    assert makers <= {policy_maker(plan.reference_of(iteration)), PREPARE}


@given(plans, st.data())
def test_an_average_is_of_the_policy_and_the_average_before_it(plan, data):
    iteration = data.draw(st.integers(plan.start + 1, plan.iterations))
    before = plan.averaged_with(iteration)
    assert (before is not None) is (plan.averages and iteration % plan.sync_every == 0)
    if before is not None:
        assert iteration - before == plan.sync_every or before == plan.start or before == 0
        assert policy_maker(before) in plan.inputs(Task(iteration, Stage.UPDATE))


@given(plans, st.integers(2, 4), st.data())
def test_whatever_may_be_computed_again_finds_its_reference(plan, keep_last, data):
    updated = data.draw(st.integers(plan.start, plan.iterations))
    keep_last = max(keep_last, plan.least_kept)
    oldest = updated - keep_last + 1
    staying = references_read(plan, oldest, updated)
    for iteration in range(max(oldest, plan.start) + 1, min(updated + 1, plan.iterations) + 1):
        for version in plan.references_of(iteration):
            assert version in staying or version == 0 or is_kept(version, updated, keep_last, None)


def make_run(root, commits: int, **kl: object) -> Run:
    config = {
        "run_dir": str(root),
        "iterations": 60,
        "model": {"policy": "/policy"},
        "data": {"prompts": "/prompts", "prompts_per_iteration": 4},
        "reward": {"components": {"r": {"kind": "rule", "function": "a:b"}}},
        "update": {"keep_last": 2},
        "algorithm": {"kl": kl},
    }
    run = create_run(from_mapping(config))
    for version in range(1, commits + 1):
        commit(run, version)
    return run


def test_the_reference_stays_beyond_keep_last_without_its_state_and_goes_with_the_next_sync(tmp_path):
    run = make_run(tmp_path / "run", 8, sync_every=5)
    assert list(thin(run, 8)) == []
    there = {path.parent.name + "/" + path.name[:5] for path in tmp_path.glob("run/*/0000?.*")}
    assert {name for name in there if name.endswith("5")} == {"policy/00005"}
    assert {name for name in there if name.startswith("policy/")} == {f"policy/0000{v}" for v in (5, 7, 8)}
    for version in range(9, 13):
        commit(run, version)
    assert list(thin(run, 12)) == []
    assert sorted(path.name[:5] for path in (tmp_path / "run/policy").glob("0*.*")) == [
        "00010",
        "00011",
        "00012",
    ]


def test_going_back_to_where_the_reference_is_gone_is_refused_with_its_version(tmp_path):
    run = make_run(tmp_path / "run", 8, sync_every=5)
    remove_folders(run.paths, 5, ["policy/00005.1-ab"])
    with pytest.raises(Thinned, match=r"iteration 8 reads policy 5 as reference \(algorithm.kl.sync_every\)"):
        check_can_start_from(run, Stage.REWARD, 8, 8)
    check_can_start_from(run, Stage.REWARD, 5, 8)
