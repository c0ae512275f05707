"""Workers in what a run cost and in its spans: what was held, what of it was work, what was lost."""

import pytest

from pipeline.metrics.attempts import WorkerSpans, worker_spans
from pipeline.metrics.catalogue import describe
from pipeline.metrics.costs import describe_workers, idle_shares, worker_hours
from pipeline.metrics.spans import Span, SpanEnd, from_line, iteration_spans, stage_times, to_line
from pipeline.run.commits import Record
from pipeline.run.plan import Plan
from pipeline.run.tasks import Stage, Task
from pipeline.workers.beats import Doing
from slurm.query import Element
from slurm.states import SlurmState
from tests.support.beats import beat
from tests.support.jobs import element

HOUR = 3600.0
LEFT = beat(
    "7_0r0",
    doing=Doing.LEAVING,
    since=HOUR,
    beat=HOUR,
    startup_seconds=0.1 * HOUR,
    busy_seconds=0.6 * HOUR,
    waiting_seconds=0.3 * HOUR,
    iterations=(1, 5),
)


def job(job_id: str = "7_0", elapsed: float = HOUR, gpus: int = 2, restarts: int = 0) -> Element:
    array, _, index = job_id.partition("_")
    times = {"submitted": 0.0, "eligible": 0.0, "started": 0.0, "elapsed": elapsed}
    held = {"cpus": 4, "gpus": gpus, "restarts": restarts}
    return element(int(index), SlurmState.COMPLETED, array_id=array, **times, **held)


def test_what_was_held_is_work_start_up_waiting_or_lost():
    killed = beat("7_1r0", since=0.5 * HOUR, beat=0.5 * HOUR, startup_seconds=0.5 * HOUR)
    found = worker_hours([LEFT, killed], [job(), job("7_1")])["rollout"]
    assert (found.held_gpu_hours, found.waiting_gpu_hours) == (4.0, pytest.approx(0.6))
    assert found.lost_gpu_hours == pytest.approx(1.0), "what the killed one did after its last word"
    parts = found.busy_gpu_hours + found.startup_gpu_hours + found.waiting_gpu_hours + found.lost_gpu_hours
    assert parts == pytest.approx(found.held_gpu_hours)


def test_a_worker_that_was_requeued_is_matched_with_that_run_of_its_job():
    runs = [job(elapsed=100.0), job(elapsed=HOUR, restarts=1)]
    again = worker_hours([beat("7_0r1", beat=HOUR, since=HOUR, busy_seconds=HOUR)], runs)["rollout"]
    assert again.held_gpu_hours == 2.0
    assert worker_hours([beat("99_0r0")], runs) == {}


def test_a_worker_that_was_killed_before_its_first_word_is_lost():
    kinds = {job().name: "rollout"}
    found = worker_hours([LEFT], [job(), job("7_1"), job("6_0")], kinds)["rollout"]
    assert (found.held_gpu_hours, found.lost_gpu_hours) == (6.0, pytest.approx(4.0))
    assert found.held_cpu_hours == 12.0
    assert worker_hours([LEFT], [job(), job("7_1")], {"another": "rollout"})["rollout"].lost_gpu_hours == 0


def test_the_table_of_costs_has_a_line_for_each_stage_that_stayed():
    lines = describe_workers(worker_hours([LEFT], [job()]))
    assert lines[1].split() == ["workers", "GPU", "hours", "busy", "start-up", "waiting", "lost"]
    assert lines[2].split() == ["rollout", "2.00", "1.20", "0.20", "0.60", "0.00"]
    assert max(map(len, lines)) <= 80
    (without,) = describe_workers(worker_hours([LEFT], [job(gpus=0)]))
    assert "30.0 % of their CPU hours" in without
    assert describe_workers({}) == []


def test_a_row_has_the_share_of_waiting_of_the_iteration_s_workers():
    row = idle_shares([LEFT, beat("8_0r0", iterations=(6, 9))], 3)
    assert row == {"slurm/worker_idle_share/rollout": pytest.approx(0.3)}
    assert all(describe(name) for name in row)
    assert idle_shares([LEFT], 6) == {}


# --- spans ---


def commit(task: Task, started: float, pid: int, seconds: float = 20.0) -> Record:
    metrics = {"startup_seconds": 1.0, "compute_seconds": 15.0}
    end = started + seconds
    return Record(task, "1-7_0r0", (), {}, 0, 0, 1, "x/1", started, end, "gpu07", pid, "7", metrics)


def test_tasks_of_a_worker_have_their_own_times_and_its_waiting_is_shown_apart():
    plan = Plan(iterations=2, num_shards=1, evaluate_every=0)
    first, second = (Task(i, Stage.ROLLOUT) for i in (1, 2))
    update = Task(1, Stage.UPDATE)
    records = {
        first: commit(first, 100.0, 40),
        update: commit(update, 130.0, 99),
        second: commit(second, 151.0, 40),
    }
    staying = WorkerSpans.of([LEFT], [job()])
    ((task, span),) = worker_spans(plan, 2, records.get, staying, lambda kind: "gpu")
    assert task == second
    assert (span.held, span.ready, span.started, span.ended) == (120.0, 150.0, 151.0, 171.0)
    assert (span.job, span.gpus) == ("7_0", 2)
    stage = stage_times([span])["rollout"]
    assert (stage.waiting, stage.run, stage.queue) == (31.0, 20.0, 1.0)
    assert list(worker_spans(plan, 2, records.get, WorkerSpans.of([], [job()]), str)) == []


def test_lines_of_spans_keep_the_waiting_and_older_ones_have_none():
    span = Span("rollout", 0, "1-7_0r0", SpanEnd.COMMITTED, started=10.0, ended=20.0, held=4.0)
    line = to_line(iteration_spans(3, [span]))
    assert from_line(line).attempts == (span,)
    assert from_line(line).stages["rollout"].waiting == 6.0
    del line["attempts"]["held"], line["stages"]["rollout"]["waiting"]
    assert from_line(line).attempts[0].held is None
    assert from_line(line).stages["rollout"].waiting == 0.0
