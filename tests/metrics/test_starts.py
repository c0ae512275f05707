"""What starts of workers cost: who did no task, who made place, and which key would change that."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.scheduler import key_of
from pipeline.metrics.advice import advise
from pipeline.metrics.advice_input import MIN_ROWS, AdviceInput, Rule, Severity
from pipeline.metrics.starts import costs_much, key_to_change, starts_in_words
from pipeline.workers.beats import KEPT, Beat, Doing, Reason
from pipeline.workers.summary import WorkersOf, workers_of
from tests.support import scripted
from tests.support.beats import beat

NOW = 1100.0
ROWS = [{"iteration": i, "reward/mean": 0.1 * i} for i in range(1, MIN_ROWS + 1)]
CONFIG = scripted.imagined_run(iterations=100, scheduler={"pools": {"big": {}}}).config


def gone(
    count: int, reason: Reason | None, tasks: int = 0, kind: str = "rollout", name: int = 1
) -> list[Beat]:
    """Workers that started up for 10 s, did so many tasks of 2 s, and left."""
    made = beat("", kind, Doing.LEAVING, reason=reason, tasks=tasks, busy_seconds=2.0 * tasks)
    return [replace(made, worker=f"{name}_{i}r0") for i in range(count)]


def one(*beats: Beat, running: set[str] | None = None) -> WorkersOf:
    (found,) = workers_of(beats, NOW, running)
    return found


# --- counting ---


def test_a_start_that_goes_on_is_not_yet_one_without_a_task():
    starting = beat("1_0r0", doing=Doing.STARTING, startup_seconds=0.0)
    waiting = beat("1_1r0", doing=Doing.WAITING, task="8/rollout/1")
    found = one(starting, waiting)
    assert (found.starts, found.without_task) == (2, 0)
    left = [replace(b, doing=Doing.LEAVING, reason=Reason.NEEDED) for b in (starting, waiting)]
    found = one(*left)
    assert (found.starts, found.without_task, found.evicted) == (2, 2, 2)
    assert found.without_task_reasons == {"needed": 2}


def test_a_start_that_was_killed_before_its_first_task_did_none():
    starting = beat("1_0r0", doing=Doing.STARTING)
    assert one(starting, running={"1_0r0"}).without_task == 0
    assert one(starting, running=set()).without_task == 1, "Slurm no longer has it"
    silent = replace(starting, beat=NOW - 400)
    assert one(silent).without_task == 1, "nobody asked Slurm, but it has been silent for long"


def test_who_failed_at_a_task_or_was_killed_at_one_is_not_counted_and_who_lost_a_claim_is():
    failed = beat("1_0r0", doing=Doing.LEAVING, reason=Reason.FAILED, busy_seconds=40.0)
    killed = beat("1_1r0", doing=Doing.BUSY, attempt="a")
    beaten = beat("1_2r0", doing=Doing.LEAVING, reason=Reason.DONE, busy_seconds=0.02, iterations=(3, 3))
    assert one(failed, killed, running=set()).without_task == 0
    assert one(beaten).without_task == 1


@given(
    st.lists(
        st.builds(
            lambda doing, tasks, busy: {"doing": doing, "tasks": tasks, "busy_seconds": busy},
            st.sampled_from(list(Doing)),
            st.integers(0, 2),
            st.sampled_from([0.0, 0.5, 30.0]),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sets(st.integers(0, 11)) | st.none(),
)
def test_starts_are_at_work_left_or_silent_and_those_without_a_task_are_among_the_last_two(said, running):
    beats = [beat(f"1_{i}r0", **more) for i, more in enumerate(said)]
    found = one(*beats, running=None if running is None else {f"1_{i}r0" for i in running})
    assert found.starts == len(beats)
    assert found.without_task <= found.left + found.silent
    assert sum(found.without_task_reasons.values()) == found.without_task
    assert found.spent.busy >= sum(b.busy_seconds for b in beats)
    json.dumps(asdict(found))


# --- words ---


def test_a_line_says_how_many_starts_did_no_task_and_what_to_change():
    found = one(*gone(38, Reason.NEEDED), *gone(22, Reason.NEEDED, tasks=3, name=2))
    told = "rollout: 38 of 60 starts did no task, 60 evicted; start-up 10 min 0 s, work 2 min 12 s"
    assert starts_in_words(found) == told
    assert key_to_change(found) == "scheduler.rollout.array_parallelism"


def test_a_stage_of_one_task_cannot_ask_for_fewer_places():
    assert key_to_change(one(*gone(9, Reason.NEEDED, kind="evaluate"))) == "scheduler.evaluate.partition"
    assert key_to_change(one(*gone(9, Reason.DONE, kind="update"))) == "scheduler.update.start_early"


def test_the_words_of_the_oldest_workers_are_not_kept_and_a_line_says_so():
    found = one(*gone(KEPT, Reason.NEEDED, tasks=1))
    assert starts_in_words(found).startswith(f"rollout: 0 of the last {KEPT} starts did no task, ")
    assert "the last" not in starts_in_words(one(*gone(KEPT - 1, Reason.NEEDED, tasks=1)))


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        (Reason.NEEDED, "array_parallelism"),
        (Reason.DONE, "array_parallelism"),
        (Reason.FAR, "start_early"),
        (Reason.LONG, "linger"),
        (Reason.TIME, "time"),
        (Reason.WARNED, "partition"),
    ],
)
def test_the_key_is_that_of_the_reason_for_which_most_left(reason, key):
    found = one(*gone(6, reason, kind="score-big"), *gone(5, None, kind="score-big", name=2))
    assert key_to_change(found) == f"scheduler.pools.big.{key}"


def test_few_starts_without_a_task_are_nobody_s_fault():
    assert key_to_change(one(*gone(4, Reason.NEEDED))) is None
    assert key_to_change(one(*gone(5, Reason.NEEDED, tasks=0), *gone(45, Reason.DONE, 30, name=2))) is None
    assert key_to_change(one(*gone(6, Reason.NEEDED, tasks=0), *gone(45, Reason.DONE, 30, name=2)))


# --- advice ---


def advice(*beats: Beat, rows: int = MIN_ROWS) -> list:
    return advise(AdviceInput(ROWS[:rows], CONFIG, workers=workers_of(beats, NOW)))


def test_a_crowd_that_evicts_itself_is_told_what_to_change():
    crowd = gone(38, Reason.NEEDED), gone(22, Reason.NEEDED, tasks=30, name=2)
    (found,) = advice(*crowd[0], *crowd[1])
    assert (found.rule, found.severity) == (Rule.EMPTY_STARTS, Severity.WARNING)
    assert found.title == "many starts of rollout did no task"
    assert "38 of 60 starts" in found.what
    assert "lower scheduler.rollout.array_parallelism" in found.remedy
    assert advice(*crowd[0], *crowd[1], rows=MIN_ROWS - 1) == []
    assert advice(*crowd[1]) == [], "each of these did much"


def test_workers_that_were_killed_before_they_said_anything_are_looked_for_in_the_logs():
    (found,) = advice(*gone(20, None, kind="reward"))
    assert "slurm-ppo logs RUN --failed" in found.remedy


@pytest.mark.parametrize(
    ("reason", "key"),
    [(Reason.NEEDED, "scheduler.update.partition"), (Reason.LONG, "scheduler.update.linger")],
)
def test_stages_that_take_turns_more_than_they_work_are_told_so(reason, key):
    (found,) = advice(*gone(12, reason, tasks=1, kind="update"))
    assert (found.rule, found.severity) == (Rule.MANY_STARTS, Severity.WARNING)
    assert "0 of 12 starts did no task" in found.what
    assert key in found.remedy
    assert advice(*gone(12, Reason.DONE, tasks=1, kind="update")) == [], "one start each is the fewest"


@given(
    st.lists(st.tuples(st.sampled_from([*Reason, None]), st.integers(0, 3), st.integers(1, 30)), max_size=4)
)
def test_every_finding_names_a_key_of_the_stage_or_the_logs(crowds):
    beats = [b for name, (why, tasks, n) in enumerate(crowds) for b in gone(n, why, tasks, name=name)]
    for found in advice(*beats):
        assert key_of("rollout") in found.remedy or "logs" in found.remedy
        assert "RUN" not in found.what


def test_what_is_worth_a_line():
    assert not costs_much(one(*gone(3, Reason.DONE, tasks=1))), "half a minute of start-ups, once"
    assert costs_much(one(*gone(7, Reason.DONE, tasks=1)))
    assert costs_much(one(*gone(1, Reason.NEEDED, tasks=100)))
    assert costs_much(one(*gone(1, Reason.DONE), *gone(3, Reason.DONE, tasks=100, name=2)))
    assert not costs_much(one(*gone(50, Reason.DONE, tasks=100)))
