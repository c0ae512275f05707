"""Which task is next: the rules. Crews that come, die and fail are in tests/executors/test_worker_jobs.py."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pipeline.decide.choosing import (
    ONLY_BY_PASS,
    Chooser,
    Chosen,
    Step,
    View,
    candidates,
    choose,
    is_free,
    is_only_by_pass,
    is_slow,
)
from pipeline.run.failures import FailureKind
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import Frontier
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.claims import Attempt, Claim

PLAN = Plan(3, 4, 0)


def attempt(task: Task, number: int = 1, *, is_running: bool = False, **others) -> Attempt:
    claim = Claim(task, number, f"{number}-aa", "w", others.pop("time", 0.0))
    return Attempt(claim, is_running, **others)


def view(committed: set[Task], attempts: dict[Task, list[Attempt]] | None = None, plan=PLAN, **more) -> View:
    updated = max((t.iteration for t in committed if t.stage is Stage.UPDATE), default=plan.start)
    frontier = Frontier(updated if PREPARE in committed else -1, evaluated_of(plan, committed))
    return View(plan, frontier, committed, attempts or {}, 3, **more)


def evaluated_of(plan: Plan, committed: set[Task]) -> int:
    return sum(task in committed for task in plan.evaluation_tasks())


def rollout(iteration: int, shard: int) -> Task:
    return Task(iteration, Stage.ROLLOUT, shard)


def test_its_own_shard_first_then_any_other_that_is_free():
    seen = {PREPARE}
    assert choose(view(seen), Chooser("rollout", 2)) == Chosen(Step.TAKE, rollout(1, 2))
    seen |= {rollout(1, 2)}
    assert choose(view(seen), Chooser("rollout", 2)).task == rollout(1, 3)
    busy = {rollout(1, shard): [attempt(rollout(1, shard), is_running=True)] for shard in (0, 1, 3)}
    waits = choose(view(seen, busy), Chooser("rollout", 2))
    assert (waits.step, waits.task) == (Step.WAIT, rollout(2, 2))
    assert waits.awaited[0] == {policy_maker(1)}
    assert waits.is_due({policy_maker(1)})


def test_what_has_failed_comes_after_what_nobody_has_tried():
    """Its second failure may stop the run; then the other shards are there already."""
    seen = {PREPARE}
    failed = {rollout(1, 2): [attempt(rollout(1, 2), failure=FailureKind.ERROR)]}
    assert choose(view(seen, failed), Chooser("rollout", 2)).task == rollout(1, 3)
    given = Chooser("rollout", 2, rollout(1, 2), known=1, element="w")
    assert choose(view(seen, failed), given).task == rollout(1, 3)
    seen |= {rollout(1, shard) for shard in (0, 1, 3)}
    assert choose(view(seen, failed), given).task == rollout(1, 2)
    paused = {rollout(1, 2): [attempt(rollout(1, 2), failure=FailureKind.PAUSED)]}
    assert choose(view({PREPARE}, paused), Chooser("rollout", 2)).task == rollout(1, 2)


def test_an_update_waits_for_every_shard_and_a_reward_for_any():
    seen = {PREPARE, *(rollout(1, shard) for shard in range(4))}
    rewards = {Task(1, Stage.REWARD, shard) for shard in range(4)}
    waits = choose(view(seen), Chooser("update"))
    assert waits.awaited == (rewards,)
    assert not waits.is_due(set(list(rewards)[:3]))
    waits = choose(view({PREPARE}), Chooser("reward", 1))
    assert [set(group) for group in waits.awaited] == [{rollout(1, shard)} for shard in (1, 2, 3, 0)]
    assert waits.is_due({rollout(1, 3)})


def test_an_update_waits_until_the_attempt_before_has_written_its_state():
    seen = {PREPARE, *PLAN.tasks(1), *PLAN.tasks(2)} - {policy_maker(2)}
    still = {policy_maker(1): [attempt(policy_maker(1), is_running=True)]}
    assert choose(view(seen, still), Chooser("update")).step is Step.WAIT
    gone = {policy_maker(1): [attempt(policy_maker(1))]}
    assert choose(view(seen, gone), Chooser("update")) == Chosen(Step.TAKE, policy_maker(2))


def test_who_has_nothing_left_to_do_is_done():
    seen = {PREPARE, *PLAN.tasks(1), *PLAN.tasks(2), *(rollout(3, shard) for shard in range(3))}
    last = {rollout(3, 3): [attempt(rollout(3, 3), is_running=True)]}
    assert choose(view(seen, last), Chooser("rollout")).step is Step.DONE
    assert choose(view(seen | {rollout(3, 3)}), Chooser("update")).step is Step.WAIT


def test_evaluations_one_after_the_other():
    plan = Plan(4, 1, 2)
    seen = {PREPARE, *plan.tasks(1), *plan.tasks(2)}
    assert choose(view(seen - set(plan.evaluation_tasks()), plan=plan), Chooser("evaluate")).task == Task(
        0, Stage.EVALUATE
    )
    waits = choose(view(seen | {Task(0, Stage.EVALUATE)}, plan=plan), Chooser("evaluate"))
    assert (waits.step, waits.task) == (Step.WAIT, Task(4, Stage.EVALUATE))


@given(st.lists(st.sampled_from([None, *FailureKind]), max_size=6), st.integers(1, 4))
def test_what_a_pass_has_given_is_free_and_else_the_budget_counts(kinds, most):
    attempts = [attempt(PREPARE, number, failure=kind) for number, kind in enumerate(kinds, 1)]
    is_left = len(kinds) >= most or bool(ONLY_BY_PASS.intersection(kinds))
    assert is_only_by_pass(kinds, most) == is_left
    assert is_free(attempts, most) == (not is_left)
    assert is_free(attempts, most, is_given=True)
    running = [*attempts, attempt(PREPARE, 9, is_running=True)]
    assert not is_free(running, most, is_given=True)


def test_what_a_pass_has_given_is_so_until_another_tries_it():
    task = rollout(1, 0)
    done = {PREPARE, rollout(1, 2), rollout(1, 3)}
    busy = {rollout(1, 1): [attempt(rollout(1, 1), is_running=True)]}
    failed = [attempt(task, number, time=float(number), failure=FailureKind.ERROR) for number in (1, 2, 3)]
    seen = view(done, busy | {task: failed})
    assert choose(seen, Chooser("rollout", 0, task, known=3)).task == task
    overtaken = Chooser("rollout", 0, task, known=2, element="7_0")
    assert choose(seen, overtaken).step is Step.WAIT
    own = [replace(one, claim=replace(one.claim, worker="7_0r1")) for one in failed]
    again = view(done, busy | {task: own})
    assert choose(again, overtaken).task == task


@given(st.floats(0, 100), st.floats(0, 100), st.integers(1, 2))
def test_a_slow_task_is_taken_over_by_one_other_at_most(age, silence, running):
    task = rollout(1, 0)
    at = [attempt(task, n, is_running=True, saved=100.0 - silence, time=100.0 - age) for n in range(running)]
    seen = view({PREPARE}, {task: at}, now=100.0, median_seconds=10.0)
    assert is_slow(seen, task) == (running == 1 and age > 20 and silence > 10)
    others = {
        rollout(1, shard): [attempt(rollout(1, shard), is_running=True, time=99.0)] for shard in (1, 2, 3)
    }
    seen = view({PREPARE}, {**others, task: at}, now=100.0, median_seconds=10.0)
    choice = choose(seen, Chooser("rollout", 1, takes_over=True))
    assert (choice.step is Step.TAKE) == is_slow(seen, task)
    assert choose(seen, Chooser("rollout", 1)).step is Step.WAIT


@given(st.integers(1, 5), st.integers(0, 4), st.integers(-1, 5))
def test_a_worker_looks_at_two_iterations_however_long_the_run(shards, shard, updated):
    plan = Plan(5, shards, 0)
    tasks = candidates(plan, Frontier(updated, 0), Chooser("rollout", shard % shards))
    assert len(tasks) == shards * max(0, min(2, 5 - max(updated, 0)))
    assert [task.shard for task in tasks[:1]] in ([], [shard % shards])
