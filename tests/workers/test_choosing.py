"""Which task is next: rules, and crews of workers that come, die and fail as chance has it."""

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.run.failures import FailureKind
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import Frontier
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.choosing import (
    LEFT_TO_PASSES,
    Choice,
    Step,
    View,
    Worker,
    candidates,
    choose,
    is_free,
    is_left_to_passes,
    is_slow,
)
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
    assert choose(view(seen), Worker("rollout", 2)) == Choice(Step.TAKE, rollout(1, 2))
    seen |= {rollout(1, 2)}
    assert choose(view(seen), Worker("rollout", 2)).task == rollout(1, 3)
    busy = {rollout(1, shard): [attempt(rollout(1, shard), is_running=True)] for shard in (0, 1, 3)}
    waits = choose(view(seen, busy), Worker("rollout", 2))
    assert (waits.step, waits.task) == (Step.WAIT, rollout(2, 2))
    assert waits.awaited[0] == {policy_maker(1)}
    assert waits.is_due({policy_maker(1)})


def test_what_has_failed_comes_after_what_nobody_has_tried():
    """Its second failure may stop the run; then the other shards are there already."""
    seen = {PREPARE}
    failed = {rollout(1, 2): [attempt(rollout(1, 2), failure=FailureKind.ERROR)]}
    assert choose(view(seen, failed), Worker("rollout", 2)).task == rollout(1, 3)
    given = Worker("rollout", 2, rollout(1, 2), known=1, element="w")
    assert choose(view(seen, failed), given).task == rollout(1, 3)
    seen |= {rollout(1, shard) for shard in (0, 1, 3)}
    assert choose(view(seen, failed), given).task == rollout(1, 2)
    paused = {rollout(1, 2): [attempt(rollout(1, 2), failure=FailureKind.PAUSED)]}
    assert choose(view({PREPARE}, paused), Worker("rollout", 2)).task == rollout(1, 2)


def test_an_update_waits_for_every_shard_and_a_reward_for_any():
    seen = {PREPARE, *(rollout(1, shard) for shard in range(4))}
    rewards = {Task(1, Stage.REWARD, shard) for shard in range(4)}
    waits = choose(view(seen), Worker("update"))
    assert waits.awaited == (rewards,)
    assert not waits.is_due(set(list(rewards)[:3]))
    waits = choose(view({PREPARE}), Worker("reward", 1))
    assert [set(group) for group in waits.awaited] == [{rollout(1, shard)} for shard in (1, 2, 3, 0)]
    assert waits.is_due({rollout(1, 3)})


def test_an_update_waits_until_the_attempt_before_has_written_its_state():
    seen = {PREPARE, *PLAN.tasks(1), *PLAN.tasks(2)} - {policy_maker(2)}
    still = {policy_maker(1): [attempt(policy_maker(1), is_running=True)]}
    assert choose(view(seen, still), Worker("update")).step is Step.WAIT
    gone = {policy_maker(1): [attempt(policy_maker(1))]}
    assert choose(view(seen, gone), Worker("update")) == Choice(Step.TAKE, policy_maker(2))


def test_who_has_nothing_left_to_do_is_done():
    seen = {PREPARE, *PLAN.tasks(1), *PLAN.tasks(2), *(rollout(3, shard) for shard in range(3))}
    last = {rollout(3, 3): [attempt(rollout(3, 3), is_running=True)]}
    assert choose(view(seen, last), Worker("rollout")).step is Step.DONE
    assert choose(view(seen | {rollout(3, 3)}), Worker("update")).step is Step.WAIT


def test_evaluations_one_after_the_other():
    plan = Plan(4, 1, 2)
    seen = {PREPARE, *plan.tasks(1), *plan.tasks(2)}
    assert choose(view(seen - set(plan.evaluation_tasks()), plan=plan), Worker("evaluate")).task == Task(
        0, Stage.EVALUATE
    )
    waits = choose(view(seen | {Task(0, Stage.EVALUATE)}, plan=plan), Worker("evaluate"))
    assert (waits.step, waits.task) == (Step.WAIT, Task(4, Stage.EVALUATE))


@given(st.lists(st.sampled_from([None, *FailureKind]), max_size=6), st.integers(1, 4))
def test_what_a_pass_has_given_is_free_and_else_the_budget_counts(kinds, most):
    attempts = [attempt(PREPARE, number, failure=kind) for number, kind in enumerate(kinds, 1)]
    is_left = len(kinds) >= most or bool(LEFT_TO_PASSES.intersection(kinds))
    assert is_left_to_passes(kinds, most) == is_left
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
    assert choose(seen, Worker("rollout", 0, task, known=3)).task == task
    overtaken = Worker("rollout", 0, task, known=2, element="7_0")
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
    choice = choose(seen, Worker("rollout", 1, takes_over=True))
    assert (choice.step is Step.TAKE) == is_slow(seen, task)
    assert choose(seen, Worker("rollout", 1)).step is Step.WAIT


# --- a crew ---


@dataclass
class World:
    """Workers by name, each with the attempt that it is at."""

    plan: Plan
    committed: set[Task] = field(default_factory=set)
    claims: dict[Task, list[tuple[str, FailureKind | None]]] = field(default_factory=dict)
    at: dict[str, Task | None] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)

    def hire(self, first: Task) -> None:
        name = f"w{len(self.at)}"
        self.workers[name], self.at[name] = Worker(first.job_kind, first.shard, first), None

    def seen(self) -> View:
        return view(self.committed, {task: self.attempts(task) for task in self.claims}, self.plan)

    def attempts(self, task: Task) -> list[Attempt]:
        found = []
        for number, (name, kind) in enumerate(self.claims[task], 1):
            is_last = name not in [other for other, _ in self.claims[task][number:]]
            runs = is_last and name in self.workers and self.at[name] == task
            found.append(attempt(task, number, is_running=runs, failure=kind))
        return found

    def step(self, name: str, mishap: str) -> bool:
        """Let a worker do something. False if it only waits."""
        task = self.at[name]
        if task is not None:
            if mishap == "dies":
                del self.workers[name]
            elif mishap:
                self.claims[task][-1] = (name, FailureKind(mishap))
            else:
                assert task not in self.committed
                assert set(self.plan.inputs(task)) <= self.committed
                self.committed.add(task)
            self.at[name] = None
            return True
        choice = choose(self.seen(), self.workers[name])
        if choice.step is Step.DONE:
            del self.workers[name]
        if choice.step is Step.TAKE and choice.task:
            self.claims.setdefault(choice.task, []).append((name, None))
            self.workers[name], self.at[name] = (
                Worker(choice.task.job_kind, self.workers[name].shard),
                choice.task,
            )
        return choice.step is not Step.WAIT

    def pass_by(self) -> None:
        """A pass: an element for each task that is ready and that no live worker will take."""
        seen = self.seen()
        ready = [t for t in self.plan.all_tasks() if t not in self.committed]
        for task in [t for t in ready if set(self.plan.inputs(t)) <= self.committed]:
            mine = [n for n, w in self.workers.items() if w.job_kind == task.job_kind]
            ended = [a.failure for a in seen.attempts.get(task, ()) if not a.is_running]
            is_left = is_left_to_passes(ended, seen.max_attempts)
            if not any(self.at[n] == task for n in mine) and (not mine or is_left):
                self.hire(task)


@settings(max_examples=60)
@given(st.data())
def test_a_crew_brings_every_run_to_its_end_whatever_happens_to_it(data):
    """No task is done twice at once, none before its inputs, and none is left to nobody."""
    evaluations, pools = data.draw(st.sampled_from([(0, ()), (2, ("big",)), (1, ())]))
    world = World(Plan(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), evaluations, pools=pools))
    luck = iter(
        data.draw(st.lists(st.sampled_from(["", "", "dies", "error", "inputs", "paused"]), max_size=25))
    )
    for _ in range(2000):
        if set(world.plan.all_tasks()) <= world.committed:
            return
        active = [name for name in [*world.workers] if world.step(name, next(luck, ""))]
        if not active:
            world.pass_by()
    raise AssertionError(f"it goes on for ever: {set(world.plan.all_tasks()) - world.committed}")


@given(st.integers(1, 5), st.integers(0, 4), st.integers(-1, 5))
def test_a_worker_looks_at_two_iterations_however_long_the_run(shards, shard, updated):
    plan = Plan(5, shards, 0)
    tasks = candidates(plan, Frontier(updated, 0), Worker("rollout", shard % shards))
    assert len(tasks) == shards * max(0, min(2, 5 - max(updated, 0)))
    assert [task.shard for task in tasks[:1]] in ([], [shard % shards])
