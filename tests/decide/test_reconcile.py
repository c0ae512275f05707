"""reconcile: from what is committed and live to what to do next: a table, then a simulated cluster."""

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.decide.reconcile import (
    MANY_NODES,
    MOST_SETUPS,
    MOST_UNSTARTED,
    Lost,
    Observation,
    Retract,
    is_hopeless,
    reason_to_launch,
    reconcile,
)
from pipeline.run.failures import FREE_KINDS, Failure, FailureKind
from pipeline.run.plan import Plan, policy_maker, state_of, unique
from pipeline.run.tasks import PREPARE, Stage, Task, task_key


class Committed(NamedTuple):
    """What reconcile reads of a commit record."""

    fingerprint: str
    inputs: dict[str, str]


PLAN = Plan(iterations=3, num_shards=2, evaluate_every=2)
ROLLOUTS = (Task(1, Stage.ROLLOUT, 0), Task(1, Stage.ROLLOUT, 1))
REWARDS = (Task(1, Stage.REWARD, 0), Task(1, Stage.REWARD, 1))
UPDATE = Task(1, Stage.UPDATE)
EVALUATE = Task(0, Stage.EVALUATE)
SHARDED = (Stage.ROLLOUT, Stage.REWARD)


def committed(*tasks: Task, plan: Plan = PLAN) -> dict[Task, Committed]:
    return {
        task: Committed(f"of {task}", {task_key(i): f"of {i}" for i in plan.inputs(task)}) for task in tasks
    }


def failed(task: Task, *kinds: FailureKind) -> dict[Task, list[Failure]]:
    return {task: [Failure(task, n, kind, "why") for n, kind in enumerate(kinds, 1)]}


def decide(done=(), corrupt=None, live=(), failures=None, updated=0, max_attempts=3):
    known = done if isinstance(done, dict) else committed(*done)
    seen = Observation(PLAN.window(updated, 0), known, corrupt or {}, set(live), failures or {})
    return reconcile(PLAN, seen, max_attempts)


def launched(actions) -> list[Task]:
    return [launch.task for launch in actions.launch]


def test_a_new_run_starts_with_prepare():
    actions = decide(updated=-1)
    assert launched(actions) == [PREPARE]
    assert actions.launch[0].reason == "not committed"


def test_after_prepare_every_rollout_starts_and_then_the_evaluation():
    assert launched(decide([PREPARE])) == [*ROLLOUTS, EVALUATE]


def test_live_tasks_are_waited_for():
    actions = decide([PREPARE], live=[*ROLLOUTS, EVALUATE])
    assert actions == type(actions)()


def test_a_reward_starts_while_other_shards_still_generate():
    actions = decide([PREPARE, EVALUATE, ROLLOUTS[1]], live=[ROLLOUTS[0]])
    assert launched(actions) == [REWARDS[1]]


def test_the_update_waits_for_every_shard():
    done = [PREPARE, EVALUATE, *ROLLOUTS, REWARDS[0]]
    assert launched(decide(done, live=[REWARDS[1]])) == []
    assert launched(decide([*done, REWARDS[1]])) == [UPDATE]


def test_a_dead_attempt_is_tried_again_with_the_reason():
    actions = decide(
        [PREPARE, EVALUATE], live=[ROLLOUTS[0]], failures=failed(ROLLOUTS[1], FailureKind.KILLED)
    )
    assert launched(actions) == [ROLLOUTS[1]]
    assert actions.launch[0].reason == "attempt 1 ended without a commit (killed: why)"


def test_a_commit_counts_whatever_its_attempts_said():
    failures = failed(ROLLOUTS[0], *[FailureKind.ERROR] * 9)
    actions = decide([PREPARE, EVALUATE, *ROLLOUTS], live=REWARDS, failures=failures)
    assert actions == type(actions)()


def test_a_corrupt_commit_is_retracted_and_nothing_of_it_is_read():
    done = committed(PREPARE, EVALUATE, ROLLOUTS[1])
    actions = decide(done, corrupt={ROLLOUTS[0]: "cut"})
    assert actions.retract == (Retract(ROLLOUTS[0], "cut"),)
    assert launched(actions) == [REWARDS[1]]


def test_a_corrupt_policy_outside_the_window_is_retracted():
    actions = decide(committed(PREPARE), corrupt={UPDATE: "cut"}, updated=1)
    assert [retract.task for retract in actions.retract] == [UPDATE]
    assert not any(task.iteration == 2 for task in launched(actions))


def test_what_was_made_from_another_result_is_stale():
    done = committed(PREPARE, EVALUATE, *ROLLOUTS, *REWARDS)
    done[ROLLOUTS[0]] = Committed("another result", done[ROLLOUTS[0]].inputs)
    actions = decide(done)
    assert [retract.task for retract in actions.retract] == [REWARDS[0]]
    assert "iteration 1 rollout shard 0 has changed since" in actions.retract[0].reason
    assert launched(actions) == []


def test_three_errors_are_enough():
    failures = failed(ROLLOUTS[0], *[FailureKind.ERROR, FailureKind.KILLED, FailureKind.ERROR])
    actions = decide([PREPARE, EVALUATE], failures=failures)
    assert actions.give_up == (failures[ROLLOUTS[0]][-1],)
    assert actions.launch == ()  # nothing new is begun in a run that stops


@pytest.mark.parametrize("kind", [FailureKind.CONFIG, FailureKind.NUMERICS])
def test_what_would_fail_the_same_way_again_is_not_tried_again(kind):
    assert decide([PREPARE, EVALUATE], failures=failed(ROLLOUTS[0], kind)).give_up != ()


def test_failing_for_ones_inputs_is_free_but_not_for_ever():
    for count in range(15):
        assert not is_hopeless(failed(UPDATE, *[FailureKind.INPUTS] * count)[UPDATE], 3)
    assert is_hopeless(failed(UPDATE, *[FailureKind.INPUTS] * 15)[UPDATE], 3)


def test_what_slurm_could_not_start_spends_no_other_budget():
    """Its waits grow: whoever looks after a day finds the run as it was."""
    kinds = [FailureKind.UNSTARTED] * (MOST_UNSTARTED - 1) + [FailureKind.LOST] * 14 + [FailureKind.ERROR] * 2
    assert not is_hopeless(failed(UPDATE, *kinds)[UPDATE], 8)


def test_a_line_of_setup_that_fails_on_several_nodes_is_soon_given_up_and_that_of_one_node_is_not():
    """One bad node is avoided by the next attempt; a module that no node has is nobody's passing fault."""

    def tried(*nodes: str) -> list[Failure]:
        (one,) = failed(UPDATE, FailureKind.SETUP)[UPDATE]
        return [replace(one, node=node) for node in nodes]

    many = [f"n{index % MANY_NODES}" for index in range(MOST_SETUPS[True])]
    assert is_hopeless(tried(*many), 3)
    assert not is_hopeless(tried(*many[1:]), 3)
    few = [f"n{index % (MANY_NODES - 1)}" for index in range(MOST_SETUPS[False])]
    assert is_hopeless(tried(*few), 3)
    assert not is_hopeless(tried(*few[1:]), 3)


def test_two_errors_between_input_failures_are_two_errors():
    kinds = [FailureKind.INPUTS, FailureKind.ERROR, FailureKind.INPUTS, FailureKind.ERROR]
    assert not is_hopeless(failed(UPDATE, *kinds)[UPDATE], 3)
    assert is_hopeless(failed(UPDATE, *kinds, FailureKind.KILLED)[UPDATE], 3)


def test_what_shortens_the_run_goes_first():
    done = committed(PREPARE, UPDATE, Task(2, Stage.ROLLOUT, 0))
    order = launched(decide(done, updated=1))
    assert order == [Task(2, Stage.REWARD, 0), Task(2, Stage.ROLLOUT, 1), EVALUATE]


def test_a_reason_is_always_given():
    assert reason_to_launch(()) == "not committed"


def test_pauses_are_progress_and_never_spend_a_budget():
    assert not is_hopeless(failed(UPDATE, *[FailureKind.PAUSED] * 1000)[UPDATE], 3)


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - {FailureKind.PAUSED}))
def test_each_kind_of_failure_has_its_budget(kind):
    """Tries that it takes to be hopeless, of three: free kinds have a bound of their own."""
    own = {FailureKind.CONFIG: 1, FailureKind.NUMERICS: 1}
    own |= {FailureKind.UNSTARTED: MOST_UNSTARTED, FailureKind.SETUP: MOST_SETUPS[False]}
    tries = own.get(kind, 15 if kind in FREE_KINDS else 3)
    assert is_hopeless(failed(UPDATE, *[kind] * tries)[UPDATE], 3)
    assert tries == 1 or not is_hopeless(failed(UPDATE, *[kind] * (tries - 1))[UPDATE], 3)


def test_what_is_nobodys_fault_is_free():
    kinds = [FailureKind.INPUTS, FailureKind.LOST, FailureKind.PREEMPTED, FailureKind.PAUSED]
    kinds += [FailureKind.DISK, FailureKind.UNSTARTED, FailureKind.SETUP, FailureKind.CANCELLED]
    assert set(kinds) == FREE_KINDS
    assert not is_hopeless(failed(UPDATE, *kinds, FailureKind.TIMEOUT, FailureKind.MEMORY)[UPDATE], 3)


# --- a state is written behind its policy ---

SECOND = [PREPARE, EVALUATE, UPDATE, *(Task(2, stage, s) for stage in SHARDED for s in (0, 1))]


def test_while_an_update_writes_its_state_rollouts_start_and_the_next_update_does_not():
    rollouts = [Task(2, Stage.ROLLOUT, shard) for shard in (0, 1)]
    assert launched(decide([PREPARE, EVALUATE, UPDATE], live=[UPDATE], updated=1)) == rollouts
    assert launched(decide(SECOND, live=[UPDATE], updated=1)) == []
    assert launched(decide(SECOND, updated=1)) == [Task(2, Stage.UPDATE)]


def test_a_state_that_does_not_verify_is_taken_back_and_nothing_is_counted():
    actions = decide(SECOND, corrupt={state_of(1): "cut"}, updated=1, max_attempts=1)
    assert actions.retract == (Retract(state_of(1), "cut"),)
    assert launched(actions) == [Task(2, Stage.UPDATE)], "which learns again what the state held"


def test_a_state_of_another_policy_than_there_is_is_taken_back():
    done = committed(*SECOND) | {state_of(1): Committed("s", {task_key(UPDATE): "another policy"})}
    assert [retract.task for retract in decide(done, updated=1).retract] == [state_of(1)]


@pytest.mark.parametrize("is_of_all", [False, True])
def test_where_weights_are_gone_all_updates_since_are_taken_back_or_the_run_ends(is_of_all):
    updates = [policy_maker(version) for version in (3, 2)]
    actions = reconcile(PLAN, Observation((), {}, {}, (), {}, Lost(updates, "why", is_of_all)), 3)
    assert not actions.launch
    assert [one.task for one in actions.retract] == ([] if is_of_all else updates)
    assert [one.task for one in actions.give_up] == (updates[:1] if is_of_all else [])


def test_a_state_that_nothing_begins_with_any_more_stays_as_it_is():
    done = [task for i in (1, 2, 3) for task in PLAN.tasks(i)]
    assert decide([PREPARE, *done], corrupt={state_of(3): "cut"}, updated=3).retract == ()


def test_the_state_that_a_fork_began_with_is_given_up_since_nothing_makes_it_again():
    plan = Plan(4, 1, 0, 2)
    known = committed(PREPARE, policy_maker(2), plan=plan)
    seen = Observation(plan.window(2, 0), known, {state_of(2): "cut"}, set(), {})
    actions = reconcile(plan, seen, 3)
    assert [item.task for item in actions.give_up] == [state_of(2)]
    assert actions.retract == ()


# --- a simulated cluster ---

MAX_ATTEMPTS = 3


class Cluster(RuleBasedStateMachine):
    """Attempts succeed, die or find inputs gone; commits rot. reconcile must bring the run to an end."""

    @initialize(
        iterations=st.integers(1, 3),
        shards=st.integers(1, 3),
        every=st.integers(0, 3),
        pools=st.sampled_from([(), ("big",), ("big", "b_2")]),
        luck=st.randoms(),
    )
    def begin(self, iterations, shards, every, pools, luck):
        self.plan = Plan(iterations, shards, every, pools=pools)
        self.luck = luck
        self.records: dict[Task, Committed] = {}
        self.corrupt: dict[Task, str] = {}
        self.live: set[Task] = set()
        self.failures: dict[Task, list[Failure]] = {}
        self.given_up: tuple[Failure, ...] = ()
        self.rot_left = 6
        self.rotted: set[Task] = set()
        self.change_left = 4

    # what the disk looks like

    def exists(self, task: Task) -> bool:
        return task in self.records or task in self.corrupt

    def frontier(self) -> tuple[int, int]:
        """As find_frontier: records that exist, contiguous from the start."""
        if not self.exists(PREPARE):
            return -1, 0
        updated = 0
        while updated < self.plan.iterations and self.exists(Task(updated + 1, Stage.UPDATE)):
            updated += 1
        evaluated = 0
        evaluations = self.plan.evaluation_tasks()
        while evaluated < len(evaluations) and self.exists(evaluations[evaluated]):
            evaluated += 1
        return updated, evaluated

    def observe(self) -> Observation:
        tasks = self.plan.window(*self.frontier())
        around = set(unique(*tasks, *(source for task in tasks for source in self.plan.inputs(task))))
        around |= {task for task in self.corrupt if task.stage is Stage.STATE}
        return Observation(
            tasks,
            {task: record for task, record in self.records.items() if task in around},
            {task: why for task, why in self.corrupt.items() if task in around},
            set(self.live),
            self.failures,
        )

    def is_over(self) -> bool:
        return bool(self.given_up) or not self.observe().tasks

    # what happens

    @rule()
    def advance(self):
        if self.given_up:
            return
        seen = self.observe()
        actions = reconcile(self.plan, seen, MAX_ATTEMPTS)
        assert reconcile(self.plan, seen, MAX_ATTEMPTS) == actions
        if actions.give_up:
            assert actions.launch == ()
            assert all(self.failures[item.task][-1] == item for item in actions.give_up)
            self.given_up = actions.give_up
        for retract in actions.retract:
            assert self.exists(retract.task)
            self.records.pop(retract.task, None)
            self.corrupt.pop(retract.task, None)
        for task in [launch.task for launch in actions.launch]:
            assert task not in self.live
            assert not self.exists(task)
            assert all(source in self.records for source in self.plan.inputs(task))
            is_second = any(other.stage is Stage.UPDATE for other in self.live)
            assert task.stage is not Stage.UPDATE or not is_second
            self.live.add(task)

    def fail(self, task: Task, kind: FailureKind) -> None:
        self.live.discard(task)
        if task not in self.records:
            earlier = self.failures.setdefault(task, [])
            earlier.append(Failure(task, len(earlier) + 1, kind, "simulated"))

    def finish(self, task: Task, result: str = "") -> None:
        inputs = self.plan.inputs(task)
        if any(source not in self.records for source in inputs):
            return self.fail(task, FailureKind.INPUTS)
        read = {task_key(source): self.records[source].fingerprint for source in inputs}
        self.live.discard(task)
        if not self.exists(task):  # published once
            self.records[task] = Committed(f"{task}{result}", read)

    @precondition(lambda self: self.live)
    @rule()
    def an_attempt_succeeds(self):
        self.finish(self.luck.choice(sorted(self.live)))

    @precondition(lambda self: self.live)
    @rule()
    def an_update_commits_and_goes_on_to_write_its_state(self):
        for task in [task for task in sorted(self.live) if task.stage is Stage.UPDATE][:1]:
            self.finish(task)
            self.live |= {task} & self.records.keys()

    @precondition(lambda self: self.records)
    @rule()
    def a_state_is_found_spoilt(self):
        updates = [task for task in sorted(self.records) if task.stage is Stage.UPDATE]
        for task in updates[-1:]:
            self.corrupt[state_of(task.iteration)] = "rotten"

    @precondition(lambda self: self.live and self.change_left)
    @rule()
    def an_attempt_succeeds_with_other_bytes(self):
        """Another machine type, say: the same task, another result."""
        self.change_left -= 1
        self.finish(self.luck.choice(sorted(self.live)), f" {self.change_left}")

    @precondition(lambda self: self.live)
    @rule(
        kind=st.sampled_from([k for k in FailureKind if k not in (FailureKind.CONFIG, FailureKind.NUMERICS)])
    )
    def an_attempt_dies(self, kind):
        self.fail(self.luck.choice(sorted(self.live)), kind)

    @precondition(lambda self: self.records and self.rot_left)
    @rule()
    def the_disk_rots(self):
        self.rot_left -= 1
        task = self.luck.choice(sorted(self.records))
        del self.records[task]
        self.corrupt[task] = "rotten"
        self.rotted.add(task)

    @invariant()
    def what_is_committed_names_what_it_read(self):
        for task, record in getattr(self, "records", {}).items():
            assert set(record.inputs) == {task_key(source) for source in self.plan.inputs(task)}

    def teardown(self):
        """From any state, without further bad luck, the run ends: complete, or given up with a reason."""
        if not hasattr(self, "plan"):
            return
        for _ in range(400):
            if self.is_over():
                break
            self.advance()
            for task in sorted(self.live):
                self.finish(task)
        if not self.given_up:
            missing = {task for task in self.plan.all_tasks() if not self.exists(task)}
            # What rotted and was taken back is not made again once nothing reads it any more.
            assert missing <= self.rotted
            assert {task.stage for task in missing} <= {Stage.ROLLOUT, Stage.SCORE, Stage.REWARD}
            assert self.exists(policy_maker(self.plan.iterations))
        else:
            assert all(is_hopeless(self.failures[item.task], MAX_ATTEMPTS) for item in self.given_up)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=150, stateful_step_count=60)


# --- a task that the run can do without ---

MEASURED = Plan(iterations=3, num_shards=2, evaluate_every=0, benchmark_every=1)
BENCHMARKS = MEASURED.benchmark_tasks()
ALL_BUT_BENCHMARKS = [PREPARE, *(task for i in (1, 2, 3) for task in MEASURED.tasks(i))]


def decide_measured(done, corrupt=None, live=(), failures=None, benchmarked=0, attempts=2):
    known = committed(*done, plan=MEASURED)
    updated = max(task.iteration for task in done)
    tasks = MEASURED.window(updated, 0, benchmarked=benchmarked)
    seen = Observation(tasks, known, corrupt or {}, set(live), failures or {})
    return reconcile(MEASURED, seen, 3, command_attempts=attempts)


@given(st.lists(st.sampled_from(FailureKind), max_size=20), st.integers(1, 4))
def test_whatever_becomes_of_a_benchmark_the_run_is_not_given_up_and_training_is_launched(kinds, attempts):
    done = [PREPARE, *MEASURED.tasks(1)]
    actions = decide_measured(done, failures=failed(BENCHMARKS[0], *kinds), attempts=attempts)
    assert actions.give_up == ()
    assert set(launched(actions)) >= {Task(2, Stage.ROLLOUT, 0), Task(2, Stage.ROLLOUT, 1)}
    is_spent = is_hopeless(failed(BENCHMARKS[0], *kinds)[BENCHMARKS[0]], attempts)
    assert [failure.task for failure in actions.leave_out] == [BENCHMARKS[0]] * is_spent
    assert (BENCHMARKS[0] in launched(actions)) is not is_spent


def test_the_next_benchmark_follows_one_that_was_left_out():
    done = [*ALL_BUT_BENCHMARKS, BENCHMARKS[0]]
    assert launched(decide_measured(done, benchmarked=1)) == [BENCHMARKS[1]]


def test_a_policy_that_only_a_benchmark_reads_is_not_made_again():
    """It would take back what was trained since."""
    done = [task for task in ALL_BUT_BENCHMARKS if task != UPDATE]
    actions = decide_measured([*done, BENCHMARKS[0]], corrupt={UPDATE: "cut"}, benchmarked=1)
    assert (actions.retract, actions.launch) == ((), ())
    assert [(failure.task, failure.message) for failure in actions.leave_out] == [(BENCHMARKS[1], "cut")]


def test_a_policy_that_training_reads_too_is_made_again_and_its_benchmark_waits():
    done = [PREPARE, *(task for task in MEASURED.tasks(1) if task != UPDATE), BENCHMARKS[0]]
    known = committed(*done, plan=MEASURED)
    tasks = MEASURED.window(1, 0, benchmarked=1)
    actions = reconcile(MEASURED, Observation(tasks, known, {UPDATE: "cut"}, set(), {}), 3)
    assert [retract.task for retract in actions.retract] == [UPDATE]
    assert actions.leave_out == ()


def test_ten_thousand_shards_are_decided_in_one_pass():
    plan = Plan(iterations=2, num_shards=10_000, evaluate_every=1)
    first = Task(0, Stage.EVALUATE)
    done = committed(PREPARE, first, *(Task(1, Stage.ROLLOUT, i) for i in range(10_000)), plan=plan)
    live = {Task(1, Stage.REWARD, i) for i in range(5_000)}
    actions = reconcile(plan, Observation(plan.window(0, 1), done, {}, live, {}), 3)
    assert launched(actions) == [Task(1, Stage.REWARD, i) for i in range(5_000, 10_000)]
