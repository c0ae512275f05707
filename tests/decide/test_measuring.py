"""Workers of rollouts that measure policies while they have nothing else to do: which, and when."""

from dataclasses import replace

import pytest

from pipeline.config.compose import from_mapping
from pipeline.config.scheduler import LocalConfig
from pipeline.decide import estimates
from pipeline.decide.choosing import Chooser, Chosen, Measuring, Step, View, choose
from pipeline.decide.measuring import Helper, is_manned, measures_policies, others_of, stays_for_last
from pipeline.run.failures import FailureKind
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import Frontier
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from pipeline.workers.claims import Attempt, Claim
from tests.support.beats import beat

PLAN = Plan(2, 4, 1)
"""Two iterations of four shards; policies 0, 1 and 2 are measured."""
ROLLED_OUT = {PREPARE, *(Task(1, Stage.ROLLOUT, shard) for shard in range(4))}
FIRST, SECOND, LAST = PLAN.evaluation_tasks()
WAITS = Task(2, Stage.ROLLOUT, 1)
NOW = 1000.0
KNOWN = Measuring(seconds=10.0, own_seconds=5.0, input_at=NOW + 30, others=1, ready_at={FIRST: NOW - 20})


def attempt(task: Task, **what: object) -> Attempt:
    return Attempt(Claim(task, 1, "1-aa", "w", 0.0), **{"is_running": False, **what})


def view(committed: set[Task], measuring: Measuring | None = KNOWN, plan: Plan = PLAN, **attempts) -> View:
    updated = max((t.iteration for t in committed if t.stage is Stage.UPDATE), default=0)
    frontier = Frontier(updated, sum(task in committed for task in plan.evaluation_tasks()))
    return View(plan, frontier, committed, attempts.get("attempts", {}), 3, NOW, 5.0, measuring)


def choice(*given, **more) -> Chosen:
    return choose(view(*given, **more), Chooser("rollout", 1))


def measures(measuring: Measuring | None, plan: Plan = PLAN) -> bool:
    found = choice(ROLLED_OUT, measuring, plan=plan)
    assert found.task in (FIRST, WAITS)
    assert (found.step is Step.TAKE) is (found.task == FIRST)
    return found.step is Step.TAKE


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),  # it is over in time
        ({"seconds": 30.0}, True),
        ({"seconds": 31.0}, False),
        ({"input_at": NOW - 1.0}, False),
        ({"seconds": None}, True),  # not known, but another is there for what comes
        ({"seconds": None, "others": 0}, False),
        ({"input_at": None}, True),
        ({"input_at": None, "others": 0}, False),
        ({"seconds": 31.0, "ready_at": {FIRST: NOW - 310}}, True),  # it has waited for ten times as long
        ({"seconds": 31.0, "ready_at": {FIRST: NOW - 309}}, False),
        (
            {"seconds": None, "others": 0, "ready_at": {FIRST: NOW - 50}},
            True,
        ),  # as if it took what a rollout does
        ({"seconds": None, "others": 0, "own_seconds": None, "ready_at": {FIRST: 0.0}}, False),
        ({"seconds": 31.0, "ready_at": {}}, False),
    ],
)
def test_who_would_wait_measures_a_policy_if_no_rollout_waits_for_that(changes, expected):
    assert measures(replace(KNOWN, **changes)) is expected


@pytest.mark.parametrize(
    ("shards", "others", "expected"), [(4, 1, False), (5, 3, True), (4, 3, False), (4, 0, False)]
)
def test_what_takes_longer_is_measured_where_the_others_need_no_more_rounds(shards, others, expected):
    known = replace(KNOWN, seconds=31.0, others=others)
    done = {PREPARE, *(Task(1, Stage.ROLLOUT, shard) for shard in range(shards))}
    found = choice(done, known, plan=Plan(2, shards, 1))
    assert (found.step is Step.TAKE) is expected


def test_its_own_tasks_come_first_and_what_is_not_there_is_not_measured():
    assert choice({PREPARE}).task == Task(1, Stage.ROLLOUT, 1)
    assert choice(ROLLED_OUT | {FIRST}) == choice(ROLLED_OUT | {FIRST}, None)
    assert choice(ROLLED_OUT, None).task == WAITS


@pytest.mark.parametrize("said", [{"is_running": True}, {"failure": FailureKind.ERROR}, {"failure": None}])
def test_what_somebody_is_at_or_was_tried_in_vain_is_for_others(said):
    """Each try in a worker that has done other tasks before might end it, and count for nothing."""
    tried = {FIRST: [attempt(FIRST, **said)]}
    assert choice(ROLLED_OUT, attempts=tried).task == WAITS
    over = {PREPARE, *(t for i in (1, 2) for t in PLAN.tasks(i) if t.stage is Stage.ROLLOUT)}
    assert choice(over | {policy_maker(1)}, attempts=tried) == Chosen(Step.DONE)


def test_when_no_rollout_is_left_one_stays_for_the_last_evaluation():
    over = {PREPARE, FIRST, SECOND, policy_maker(1)}
    over |= {t for i in (1, 2) for t in PLAN.tasks(i) if t.stage is Stage.ROLLOUT}
    late = replace(KNOWN, seconds=1000.0, others=0)
    assert choice(over, late) == Chosen(Step.DONE)
    waits = choice(over, replace(late, is_last=True))
    assert waits == Chosen(Step.WAIT, LAST, (frozenset({policy_maker(2)}),))
    assert waits.is_due({policy_maker(2)})
    assert choice(over | {policy_maker(2)}, late) == Chosen(Step.TAKE, LAST)
    assert choice(over | {policy_maker(2), LAST}, late) == Chosen(Step.DONE)


def test_who_stays_for_the_last_is_one_and_nobody_beside_one_that_measures():
    live = [beat(f"7_{n}r0", doing=Doing.WAITING) for n in range(3)]
    first, second, third = helpers = [Helper(one.worker) for one in live]
    assert [stays_for_last(one, others_of(one.name, live)) for one in helpers] == [True, False, False]
    live[2] = replace(live[2], measured=1)
    assert not stays_for_last(first, others_of(first.name, live))
    assert stays_for_last(replace(third, measured=1), others_of(third.name, live))
    at_it = [live[0], replace(live[1], doing=Doing.BUSY, task="2/evaluate/0"), live[2]]
    assert not any(stays_for_last(one, others_of(one.name, at_it)) for one in (first, third))
    assert stays_for_last(replace(second, is_measuring=True), others_of(second.name, live)), (
        "it has just done one"
    )
    assert not is_manned(live)
    assert is_manned([*live, beat("9_0r0", job_kind="evaluate")])
    others = others_of("7_0r0", [*live, beat("8_0r0", job_kind="reward")])
    assert [one.name for one in others] == ["7_1r0", "7_2r0"]


def test_what_a_task_takes_is_told_apart_by_its_kind():
    both = beat("7_0r0", tasks=5, busy_seconds=70.0, measured=2, measuring_seconds=40.0)
    assert estimates.task_seconds([both], "rollout") == 10.0
    assert estimates.task_seconds([both], "evaluate") == 20.0
    assert estimates.task_seconds([both], "reward") is None
    own = beat("9_0r0", job_kind="evaluate", tasks=1, busy_seconds=30.0)
    assert estimates.task_seconds([both, own], "evaluate") == 25.0


def config(**changes):
    """A run on Slurm whose rollouts and evaluations ask for the same, with changes by section."""
    given = {
        "run_dir": "/run",
        "model": {"policy": "/policy"},
        "data": {"prompts": "/prompts", "heldout": "/heldout"},
        "rollout": {},
        "reward": {"components": {"r": {"kind": "rule", "function": "a:b"}}},
        "evaluate": {"every": 1},
        "scheduler": {"kind": "slurm", "python": "/py"},
    }
    for name, more in changes.items():
        given[name] = given[name] | more
    return from_mapping(given)


GPUS = {"rollout": {"gpus_per_node": 1}, "evaluate": {"gpus_per_node": 1}}
MODEL = {"components": {"rm": {"kind": "model", "path": "/model"}}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"scheduler": {"evaluate": {"time": "1:00:00", "linger": 0, "start_early": True}}}, True),
        ({"scheduler": {"rollout": {"array_parallelism": 2}}}, True),
        ({"scheduler": GPUS}, True),
        ({"scheduler": {"rollout": {"gpus_per_node": 1}}}, False),
        ({"scheduler": {"evaluate": {"partition": "gpu"}}}, False),
        ({"scheduler": {"evaluate": {"mem": "64G"}}}, False),
        ({"scheduler": {"evaluate": {"environment": {"A": "1"}}}}, False),
        ({"scheduler": {"evaluate": {"container": "run image"}}}, False),
        ({"scheduler": {"rollout": {"linger": 0}}}, False),
        ({"evaluate": {"num_threads": 2}}, False),
        ({"evaluate": {"num_threads": 2}, "rollout": {"num_threads": 2}}, True),
        ({"reward": MODEL}, True),
        ({"reward": MODEL, "rollout": {"engine": "vllm"}, "scheduler": GPUS}, False),
        ({"rollout": {"engine": "vllm"}, "scheduler": GPUS}, True),
        ({"reward": MODEL, "rollout": {"engine": "mine:make"}, "scheduler": GPUS}, False),
        ({"reward": MODEL, "rollout": {"engine": "mine:make"}}, True),
        ({"reward": MODEL | {"engine": "mine:make"}, "rollout": {"engine": "mine:make"}}, False),
    ],
)
def test_workers_of_rollouts_measure_where_their_job_and_engine_are_what_an_evaluation_needs(
    changes, expected
):
    assert measures_policies(config(**changes)) is expected
    assert not measures_policies(replace(config(**changes), scheduler=LocalConfig()))
