"""Where a run on Slurm stands: from facts to numbers, and from numbers to text."""

import json
import re
from dataclasses import replace

import pytest

from pipeline.config.update import UpdateConfig
from pipeline.executors.slurm.queue import RunQueue
from pipeline.run.commits import Record
from pipeline.run.control import ByHand, Control
from pipeline.run.tasks import Stage, Task
from pipeline.status.journal_end import how_it_stopped, machine_state, slurm_state
from pipeline.status.lanes import Lane, StageProgress, TaskState, lanes_of
from pipeline.status.slurm import DriverJob, SlurmStatus, drivers_of, match
from pipeline.status.snapshot import finish_of, read_status
from pipeline.status.state import Status
from pipeline.status.text import describe, describe_lanes, job_details, said, to_json
from pipeline.status.trainer_state import Missing, Writer, in_words, missing_state
from slurm.query import Element
from slurm.states import SlurmState
from tests.support.committed import commit
from tests.support.jobs import element as some_element
from tests.support.jobs import submission
from tests.support.reportrun import make_run

NOW = 1000.0


def element(index: int, state: SlurmState, job: str = "36", **more: object) -> Element:
    started = 970.0 if state is SlurmState.RUNNING else None
    given = {"reason": "Priority", "submitted": 900.0, "started": started, "restarts": 0}
    return some_element(index, state, array_id=job, **given | more)


def record(shard: int, attempt: str = "1-36_0r0", started: float = 940.0, ended: float = 960.0) -> Record:
    task = Task(2, Stage.ROLLOUT, shard)
    return Record(task, attempt, (), {}, 1, 0, 2, "s", started, ended, "gpu07", 1, "36")


def state(shard: int, **more: object) -> TaskState:
    return TaskState(Task(2, Stage.ROLLOUT, shard), **({"attempts": 1} | more))


def progress(states: list[TaskState]) -> StageProgress:
    (lane,) = lanes_of(states, NOW)
    return lane.progress


def test_a_stage_counts_what_is_done_runs_waits_and_failed():
    running, pending = element(1, SlurmState.RUNNING), element(2, SlurmState.PENDING)
    states = [
        state(0, record=record(0), attempts=3, started=940.0, waited=30.0),
        state(1, element=running, is_running=True, started=970.0, waited=60.0),
        state(2, element=pending, is_waiting=True, waited=90.0),
        state(3, has_failed=True),
    ]
    found = progress(states)
    assert (found.total, found.done, found.running, found.waiting, found.failed) == (4, 1, 1, 1, 1)
    assert (found.resubmitted, found.attempts) == (2, 6)
    assert (found.jobs, found.nodes) == (("36",), ("gpu07",))
    assert found.reason == "other jobs have a higher priority"
    assert found.queue_seconds == 90.0  # shard 2 still waits: its input was there at 910
    assert found.run_seconds == 60.0  # from 940 until now


@pytest.mark.parametrize(
    ("reasons", "shown"),
    [
        (["Resources", "Priority", "Priority"], "waiting for free resources"),
        (["Priority", "Priority"], "other jobs have a higher priority"),
        (["Resources", "Dependency", "Dependency"], "waiting for the jobs it depends on"),
        (
            ["Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"]
            + ["Priority"] * 2,
            "nodes that it needs are down, drained or reserved",
        ),
    ],
)
def test_the_reason_is_that_of_those_in_front(reasons, shown):
    """Slurm says Priority of those behind them."""
    pending = [element(i, SlurmState.PENDING, reason=why) for i, why in enumerate(reasons)]
    states = [state(i, element=one, is_waiting=True) for i, one in enumerate(pending)]
    assert progress(states).reason == shown


def test_of_two_elements_of_a_task_the_live_one_counts():
    old, new = submission(iteration=2, job="36"), submission(iteration=2, number=2, job="40")
    queue = RunQueue(
        [element(0, SlurmState.RUNNING, "40", name=new.name), element(0, SlurmState.FAILED, submitted=2000.0)]
    )
    assert match([old, new], queue)[Task(2, Stage.ROLLOUT, 0)].array_id == "40"


def test_driver_jobs_are_told_apart_from_stages():
    driver = submission("driver", 2, job="46", elements={"0": ()})
    queue = RunQueue([element(0, SlurmState.PENDING, "46", name=driver.name, reason="Dependency")])
    assert list(drivers_of([driver, submission(iteration=2, job="36")], queue)) == [
        DriverJob("46", False, "waiting for the jobs it depends on", is_timed=False)
    ]


def test_stages_come_in_the_order_of_the_plan():
    reward = TaskState(Task(2, Stage.REWARD, 0))
    assert [lane.key[1] for lane in lanes_of([state(0), state(1), reward], NOW)] == [
        Stage.ROLLOUT,
        Stage.REWARD,
    ]


@pytest.mark.parametrize(
    ("is_complete", "control", "unanswered", "live", "expected"),
    [
        (True, Control(cancelled=True), None, 0, "complete"),
        (False, Control(cancelled=True, has_failed=True), None, 3, "cancelled"),
        (False, Control(cancelled=True, paused=ByHand(8, 8)), None, 0, "paused"),
        (False, Control(has_failed=True), "timed out", 0, "failed"),
        (False, Control(), "timed out", 0, "unknown"),
        (False, Control(), None, 3, "running"),
        (False, Control(), None, 0, "stopped"),
    ],
)
def test_the_state_of_a_run(is_complete, control, unanswered, live, expected):
    queue = RunQueue([element(index, SlurmState.PENDING) for index in range(live)], unanswered)
    assert slurm_state(is_complete, control, queue.has_jobs) == expected


def test_the_end_is_expected_by_the_last_rows_pace():
    row = {"seconds/elapsed": 100.0, "seconds/remaining": 300.0}
    lost = {"iteration": 1, "records_lost": 3}
    assert finish_of(created=0.0, rows=[row]) == finish_of(0.0, [row, lost]) == 400.0
    assert finish_of(0.0, []) is None
    assert finish_of(0.0, [lost]) is None


# --- text ---

STAGES = (
    StageProgress(
        2,
        Stage.ROLLOUT,
        16,
        9,
        4,
        2,
        1,
        "waiting for free resources",
        4000.0,
        90061.0,
        20,
        4,
        ("36", "41"),
        ("gpu07", "gpu08"),
    ),
    StageProgress(
        2, Stage.REWARD, 16, 0, 0, 16, 0, "waiting for the jobs it depends on", None, None, 16, 0, ("37",), ()
    ),
    StageProgress(2, Stage.UPDATE, 1, 0, 0, 0, 0, None, None, None, 0, 0, (), ()),
)
DRIVERS = (DriverJob("46", False, "x", is_timed=False), DriverJob("61", True, None))
RUNNING = SlurmStatus(None, 5, 20, STAGES, DRIVERS, None)

TEXT = """\
/runs/a b: running, 1/3 iterations
in the queue: 5 running, 20 waiting
estimated finish: known once an iteration is done
driver jobs: 46 when jobs end, 61 running

iter  stage    done  running  waiting  failed     waited      ran  again
   2  rollout  9/16        4        2       1  1 h 6 min  1 d 1 h      4
      job 36, 41 on gpu07, gpu08; waiting for free resources; 20 attempts, 4
      retries
   2  reward   0/16        -       16       -          -        -      -
      job 37; waiting for the jobs it depends on
   2  update    0/1        -        -       -          -        -      -

last failure: 1970-01-01 00:00:00 iteration 2 reward shard 3, attempt 3 (job 37_3 on gpu9): boom
next: slurm-ppo logs '/runs/a b' --follow"""


def test_a_status_as_text_fits_80_columns(utc):
    assert describe(status("running", RUNNING)) == TEXT
    assert max(map(len, describe_lanes(status("running", RUNNING).lanes))) <= 80


@pytest.mark.parametrize(
    ("finish", "words"),
    [
        (4e9, r"estimated finish: 2096-10-0\d \d\d:\d\d, in \d+ d \d+ h"),
        (-4e8, r"estimated finish: 1957-04-\d\d \d\d:\d\d, \d+ d \d+ h ago: it is late"),
    ],
)
def test_an_estimate_names_day_and_time_left_or_says_that_it_is_late(finish, words):
    (line,) = (one.text for one in said(status("running", RUNNING, finish=finish)) if one.about == "finish")
    assert re.fullmatch(words, line)


def test_a_run_that_nobody_advances_says_so():
    text = describe(status("running", replace(RUNNING, drivers=())))
    assert "no driver job is in the queue: what is queued will run, and nothing after it" in text


def status(state: str, slurm: SlurmStatus, **more: object) -> Status:
    failure = {
        "time": 0.0,
        "task": "2/reward/3",
        "attempt": 3,
        "message": "boom",
        "job": "37_3",
        "node": "gpu9",
    }
    return Status(
        run="/runs/a b",
        state=state,
        iterations_done=1,
        iterations=3,
        evaluations_done=0,
        evaluations=0,
        last_failure=failure,
        slurm=slurm,
        lanes=tuple(Lane(stage, ()) for stage in STAGES),
        **more,
    )


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("complete", "next: slurm-ppo report '/runs/a b'"),
        ("running", "next: slurm-ppo logs '/runs/a b' --follow"),
        ("failed", "next: slurm-ppo resume '/runs/a b'"),
        ("cancelled", "next: slurm-ppo resume '/runs/a b'"),
        ("paused", "next: slurm-ppo resume '/runs/a b'"),
        ("stopped", "next: slurm-ppo resume '/runs/a b'"),
        ("unknown", "next: slurm-ppo status '/runs/a b'"),
    ],
)
def test_status_ends_in_the_next_command(state, said):
    text = describe(status(state, RUNNING))
    assert text.splitlines()[0] == f"/runs/a b: {state}, 1/3 iterations"
    assert text.splitlines()[-1] == said
    assert ("(job 37_3 on gpu9): boom" in text) == (state != "complete")


@pytest.mark.parametrize(("best", "said"), [(None, ""), (2, ", and the best policy (2)")])
def test_a_best_policy_is_told_of_only_where_there_is_one(tmp_path, best, said):
    """None was evaluated in a run without evaluation."""
    run = make_run(tmp_path / "run", update=UpdateConfig(keep_last=3))
    for version in (1, 2, 3, 4, 5):
        commit(run, version)
    if best is not None:
        run.paths.best.write_text(
            json.dumps({"iteration": best, "reward": 0.5, "policy": "policy/00002.1-ab"})
        )
    kept = [line for line in describe(read_status(run)).splitlines() if line.startswith("kept: ")]
    assert kept == [f"kept: iteration 1 to 5{said}"]


def test_a_stopped_run_and_a_silent_slurm_say_so():
    assert "nothing of this run is in Slurm's queue, and it is not complete" in describe(
        status("stopped", replace(RUNNING, jobs_running=0, jobs_waiting=0))
    )
    text = describe(status("unknown", replace(RUNNING, unanswered="squeue failed: timed out")))
    assert "Slurm does not answer, so this is from files alone: squeue failed: timed out" in " ".join(
        text.split("\n")
    )


def test_held_shards_name_the_command_that_lets_them_start():
    held = element(0, SlurmState.PENDING, reason="JobHeldUser")
    (lane,) = lanes_of([TaskState(Task(2, Stage.ROLLOUT, 0), is_waiting=True, element=held)], NOW)
    told = "; ".join(job_details(lane.progress, is_cut=False))
    assert "held by its user" in told
    assert f"to let it start: scontrol release {held.array_id}" in told


def test_a_command_that_helps_is_one_line_however_long_and_none_that_would_fail_is_next():
    command = f"slurm-ppo resume /runs/{'x' * 80} scheduler.account=lab"
    lines = describe(status("running", RUNNING, ways_on=(f"go on with another account: {command}",)))
    assert f"go on with another account: {command}" in lines.splitlines()
    lines = describe(status("failed", RUNNING, remedy=f"with more time: {command}"))
    assert f"go on with more time: {command}" in lines.splitlines()
    assert "next: " not in lines


def test_the_keys_of_json_are_an_interface():
    found = to_json(status("running", RUNNING))
    assert found["said"][1] == {"about": "queue", "text": "in the queue: 5 running, 20 waiting"}
    assert list(found["slurm"]) == [
        "unanswered",
        "jobs_running",
        "jobs_waiting",
        "stages",
        "drivers",
        "finish",
        "whose",
    ]
    assert list(found["slurm"]["stages"][0]) == list(StageProgress.__dataclass_fields__)


def test_a_run_of_this_machine_that_gave_up_has_failed():
    def event(name: str, **more: str) -> dict:
        return {"time": 0.0, "event": name, **more}

    started, failed = event("driver_started"), event("driver_ended", outcome="failed")
    assert machine_state(False, None, [started, failed, event("notified")]) == "failed"
    assert machine_state(False, None, [started, failed, started]) == "incomplete"
    assert machine_state(False, None, [started, failed, event("went_back")]) == "incomplete"
    assert machine_state(False, None, [started, event("driver_ended", outcome="interrupted")]) == "incomplete"
    assert machine_state(False, "host h, process 1", [started, failed]) == "running"
    assert machine_state(True, None, [started, failed]) == "complete"
    assert how_it_stopped([started, failed, event("notified")]).startswith("failed ")


# --- the trainer's state behind the newest policy ---


def test_what_is_not_known_of_a_state_is_not_said():
    update = replace(record(0), task=Task(2, Stage.UPDATE))
    assert missing_state(update, Writer(None), is_said_lost=False) is None
    assert missing_state(update, Writer(None), is_said_lost=True) == Missing(2, is_lost=True)


def test_a_state_that_is_missing_takes_one_line():
    written = Missing(2, is_lost=False, writer="job 36_0 on gpu07")
    assert in_words(written, 9) == "the trainer's state of iteration 2 is being written (job 36_0 on gpu07)"
    lost = Missing(2, is_lost=True)
    assert in_words(lost, 9).endswith("was lost; the next update learns it again")
    assert in_words(lost, 2).endswith("was lost; no update follows that needs it")
