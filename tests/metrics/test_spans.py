"""Spans: what is known of attempts, from records, failures, submissions and accounting; lines on disk."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.allocation import AllocationConfig, StepConfig
from pipeline.config.evaluate import EvaluateConfig
from pipeline.config.job_kinds import DRIVER
from pipeline.config.scheduler import LocalConfig, LocalUpdateConfig
from pipeline.config.schema import DataConfig
from pipeline.config.update import UpdateConfig
from pipeline.metrics.attempts import Facts, attempts_of, last_written
from pipeline.metrics.catalogue import describe
from pipeline.metrics.costs import costs_of, metrics_of, numbers_of
from pipeline.metrics.spans import (
    IterationSpans,
    Span,
    SpanEnd,
    StageTime,
    from_line,
    iteration_spans,
    parts_of,
    read_lines,
    stage_times,
    stage_totals,
    to_line,
    total,
)
from pipeline.run import journal
from pipeline.run.commits import publish
from pipeline.run.directory import Run
from pipeline.run.endings import Ending, Evidence, note_endings
from pipeline.run.failures import FailureKind
from pipeline.run.plan import policy_maker
from pipeline.run.records import Records
from pipeline.run.submissions import State, Submission
from pipeline.run.tasks import PREPARE, Stage, Task
from slurm.query import Element
from slurm.states import SlurmState
from tests.support import ROOT
from tests.support.beats import beat
from tests.support.jobs import element, submission
from tests.support.reportrun import SLURM, commit_shard, make_run, make_spans, record

ROLLOUT = Task(1, Stage.ROLLOUT)
DATA = ROOT / "tests/golden"


def found(run: Run, facts: Facts | None = None, iteration: int = 1, since: float = 0.0) -> list[Span]:
    return attempts_of(run, iteration, Records(run.paths).readable, facts or Facts(), since)


def failed(run: Run, task: str, attempt: str, time: float, **more: object) -> None:
    given = Ending(attempt, task, int(attempt[0]), 1, FailureKind.KILLED, time=time)
    note_endings(run.paths, [replace(given, **{"message": "killed by signal 9"} | more)])


def commit(run: Run, task: Task, attempt: str, started: float, ended: float, **metrics: float) -> None:
    done = replace(record(task, started=started, ended=ended, **metrics), attempt=attempt, host="node1")
    assert publish(run.paths, done)


@pytest.fixture
def local(tmp_path) -> Run:
    run = make_run(tmp_path / "run")
    commit(run, PREPARE, "1-aa", 0.0, 10.0)
    return run


@pytest.fixture
def slurm(tmp_path) -> Run:
    run = make_run(tmp_path / "run", num_shards=2, scheduler=SLURM)
    commit(run, PREPARE, "1-5_0r0", 0.0, 10.0)
    return run


# --- on this machine -------------------------------------------------------------------------------------


def test_a_commit_waits_from_its_last_input_on(local):
    commit(local, ROLLOUT, "1-ab", 12.0, 20.0, startup_seconds=3.0, compute_seconds=4.0)
    (span,) = found(local)
    assert (span.job_kind, span.lane, span.node, span.attempt) == ("rollout", "rollout", "node1", "1-ab")
    assert (span.ready, span.started, span.computing, span.ended) == (10.0, 12.0, 15.0, 20.0)
    parts = parts_of(span)
    assert (parts.queue, parts.run, parts.startup, parts.compute, parts.idle) == (2.0, 8.0, 3.0, 4.0, 1.0)


def test_attempts_of_this_machine_hold_the_threads_of_their_ranks(tmp_path):
    scheduler = LocalConfig(update=LocalUpdateConfig(ranks=2))
    run = make_run(tmp_path / "run", scheduler=scheduler, update=UpdateConfig(num_threads=3))
    commit(run, PREPARE, "1-aa", 0.0, 10.0)
    commit(run, ROLLOUT, "1-ab", 10.0, 46.0)
    failed(run, "1/update/0", "1-aa", 72.0, started=54.0)
    commit(run, Task(1, Stage.UPDATE), "2-ac", 80.0, 98.0)
    hours = {kind: (time.cpu_hours, time.wasted_cpu_hours) for kind, time in stage_times(found(run)).items()}
    assert hours["rollout"] == (pytest.approx(36 / 3600), 0.0)
    assert hours["update"] == (pytest.approx(6 * 36 / 3600), pytest.approx(6 * 18 / 3600))


def test_attempts_in_an_allocation_hold_their_steps(tmp_path):
    scheduler = AllocationConfig(rollout=StepConfig(cpus_per_task=8, gpus_per_node="a100:2"))
    run = make_run(tmp_path / "run", scheduler=scheduler)
    commit(run, PREPARE, "1-aa", 0.0, 10.0)
    commit(run, ROLLOUT, "1-ab", 10.0, 46.0)
    time = stage_times(found(run))["rollout"]
    assert (time.cpu_hours, time.gpu_hours) == (pytest.approx(0.08), pytest.approx(0.02))


def test_a_failed_attempt_says_when_and_why_and_the_next_waits_for_it(local):
    failed(local, "1/rollout/0", "1-aa", 14.0, started=11.0, message="no luck", node="node7")
    failed(local, "1/rollout/0", "2-aa", 16.0)
    failed(local, "2/rollout/0", "1-ac", 16.0)
    commit(local, ROLLOUT, "3-ab", 17.0, 20.0)
    first, second, third = found(local)
    assert (first.started, first.ended, first.node, first.note) == (11.0, 14.0, "node7", "no luck")
    assert (second.started, second.ended, second.end) == (None, 16.0, SpanEnd.FAILED)
    assert [span.attempt for span in (first, second, third)] == ["1-aa", "2-aa", "3-ab"]
    assert (second.ready, third.ready, third.end) == (14.0, 16.0, SpanEnd.COMMITTED)
    assert parts_of(first).retry == 3.0


def test_only_the_end_of_the_journal_is_read(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    journal.rewrite(path, ({"time": float(i), "event": "x", "text": "y" * 100} for i in range(20_000)))
    rows = journal.read_since(path, 19_990.0)
    assert rows[-1]["time"] == 19_999.0
    assert rows[0]["time"] < 19_990.0
    assert len(rows) < 1000
    assert len(journal.read_since(path, -1.0)) == 20_000
    assert journal.read_since(tmp_path / "absent", 0.0) == []


# --- on Slurm --------------------------------------------------------------------------------------------


def array(job_kind: str, number: int = 1, job: str = "40", **more: object) -> Submission:
    given = {"elements": {"0": (), "1": ()}} | more
    return submission(job_kind, number=number, job=job, **given)


def job(
    of: Submission, index: int, state: SlurmState, started: float | None, elapsed: float, **more
) -> Element:
    given = {"submitted": 5.0, "eligible": 11.0, "started": started, "elapsed": elapsed}
    given |= {"array_id": of.state.job, "name": of.name, "cpus": 4, "gpus": 2}
    return element(index, state, **given | more)


def test_accounting_tells_of_every_start(slurm):
    of = array("rollout")
    commit(slurm, ROLLOUT, "1-40_0r1", 32.0, 49.0, startup_seconds=8.0, compute_seconds=7.0)
    jobs = [
        job(of, 0, SlurmState.PREEMPTED, 15.0, 10.0),
        job(
            of,
            0,
            SlurmState.COMPLETED,
            30.0,
            20.0,
            restarts=1,
            submitted=25.0,
            eligible=26.0,
            partition="low",
        ),
        job(of, 1, SlurmState.RUNNING, 15.0, 30.0),
    ]
    first, running, second = found(slurm, Facts([of], jobs))
    assert (first.end, first.note, first.lane) == (SpanEnd.FAILED, "PREEMPTED", "gpu")
    assert (first.ready, first.started, first.ended, first.job) == (11.0, 15.0, 25.0, "40_0")
    assert (second.end, second.attempt, second.lane, second.node) == (
        SpanEnd.COMMITTED,
        "1-40_0r1",
        "low",
        "gpu07",
    )
    assert (second.ready, second.started, second.computing, second.ended) == (26.0, 30.0, 40.0, 50.0)
    assert (running.shard, running.end) == (1, SpanEnd.OPEN)


def test_rows_report_and_cost_have_the_same_hours_of_jobs_that_fail_are_preempted_and_write_behind(slurm):
    """All of a job's time counts, so an update that writes its state behind its policy has it too."""
    ofs = [array("rollout"), array("update", job="42", elements={"0": ()})]
    commit(slurm, ROLLOUT, "1-40_0r1", 32.0, 49.0, startup_seconds=8.0, compute_seconds=7.0)
    commit(slurm, Task(1, Stage.UPDATE), "1-42_0r0", 60.0, 70.0)
    jobs = [
        job(ofs[0], 0, SlurmState.PREEMPTED, 15.0, 10.0),
        job(ofs[0], 0, SlurmState.COMPLETED, 30.0, 20.0, restarts=1, submitted=25.0, eligible=26.0),
        job(ofs[0], 1, SlurmState.FAILED, 15.0, 30.0),
        job(ofs[1], 0, SlurmState.COMPLETED, 60.0, 90.0, eligible=51.0),
    ]
    stages = iteration_spans(1, found(slurm, Facts(ofs, jobs))).stages
    costs = costs_of(ofs, jobs)
    for stage in ("rollout", "update"):
        assert numbers_of(stages[stage]) == pytest.approx(numbers_of(costs.of_stage(stage)))
    assert stages["rollout"].wasted_gpu_hours == pytest.approx(2 * 40 / 3600)
    row = metrics_of(stages)
    assert row["slurm/gpu_hours/update"] == pytest.approx(2 * 90 / 3600)
    assert row["slurm/startup_share/rollout"] == pytest.approx(10 / 60)
    assert row["slurm/idle_share/rollout"] == pytest.approx(3 / 60)
    assert row["slurm/wasted_share"] == pytest.approx(40 / 150)
    assert [name for name in row if describe(name) is None] == []
    assert metrics_of({}) == {}


def test_hours_of_workers_add_up_over_iterations_and_stages_to_what_their_jobs_held(tmp_path):
    """One worker of rollouts evaluates as well, starts up and waits; another is preempted at its task. No
    iteration has what came after the last task."""
    data = DataConfig(prompts="prompts.jsonl", heldout="heldout.jsonl")
    run = make_run(tmp_path / "run", scheduler=SLURM, evaluate=EvaluateConfig(every=2), data=data)
    commit(run, PREPARE, "1-5_0r0", 0.0, 5.0)
    done = [(Task(1, Stage.ROLLOUT), 40.0), (Task(2, Stage.ROLLOUT), 80.0), (Task(2, Stage.EVALUATE), 120.0)]
    for number, (task, ended) in enumerate([*done, (Task(6, Stage.EVALUATE), 200.0)]):
        commit(run, task, f"1-40_0r0.{number}", ended - 15.0, ended)
    failed(run, "2/reward/0", "1-40_1r0", 70.0, started=50.0)
    of = array("rollout")
    jobs = [job(of, 0, SlurmState.COMPLETED, 10.0, 200.0), job(of, 1, SlurmState.PREEMPTED, 50.0, 10.0)]
    stayed = beat("40_0r0", host="node1", pid=1, started=12.0, iterations=(1, 6), startup_seconds=10.0)
    killed = beat("40_1r0", "reward", host="node2", started=50.0, iterations=(2, 2))
    facts = Facts([of], jobs, [stayed, killed])
    lines = [iteration_spans(i, found(run, facts, i)).stages for i in range(1, 7)]
    hours = total(stage for line in lines for stage in line.values())
    costs = total(costs_of([of], jobs).usage.values())
    after = 2 * 10.0 / 3600
    assert hours.gpu_hours == pytest.approx(costs.gpu_hours - after)
    assert hours.wasted_gpu_hours == costs.wasted_gpu_hours == pytest.approx(2 * 10 / 3600)
    first, evaluated = lines[0]["rollout"], lines[5]["evaluate"]
    assert first.gpu_hours == pytest.approx(2 * 30 / 3600), "start-up is its first task's"
    assert (evaluated.waiting, evaluated.run) == (65.0, 15.0)


def test_without_accounting_submissions_and_endings_give_what_they_can(slurm):
    ofs = [array("rollout"), array("rollout", 2, "41", created=21.0)]
    failed(slurm, "1/rollout/0", "1-40_0r0", 20.0, job="40_0", node="gpu03", message="gone")
    commit(slurm, ROLLOUT, "2-41_0r0", 25.0, 30.0)
    first, second, waits_one, waits_two = found(slurm, Facts(ofs))
    assert (first.job, first.node, first.end, first.started, first.ended) == (
        "40_0",
        "gpu03",
        SpanEnd.FAILED,
        None,
        20.0,
    )
    assert (second.job, second.ready, second.started) == ("41_0", 21.0, 25.0)
    assert (first.lane, second.lane) == ("gpu", "gpu")
    assert {waits_one.shard, waits_two.shard} == {1}
    assert waits_one.end is waits_two.end is SpanEnd.OPEN


def test_a_driver_job_is_in_the_first_line_after_its_end(slurm):
    of = array("driver", job="50", elements={"0": ()})
    jobs = [job(of, 0, SlurmState.COMPLETED, 100.0, 5.0, gpus=0, partition="cpu")]
    (span,) = found(slurm, Facts([of], jobs), since=104.0)
    assert (span.job_kind, span.attempt, span.lane, span.end) == (DRIVER, "driver-1-1", "cpu", SpanEnd.ENDED)
    assert parts_of(span).retry == 0.0
    assert found(slurm, Facts([of], jobs), since=105.0) == []
    assert found(slurm, Facts([of], [replace(jobs[0], state=SlurmState.RUNNING)]), since=0.0) == []


def test_what_was_cancelled_before_it_began_is_no_attempt(slurm):
    of = array("rollout", state=State("40", is_withdrawn=True))
    jobs = [job(of, index, SlurmState.CANCELLED, None, 0.0, cpus=0) for index in (0, 1)]
    assert found(slurm, Facts([of], jobs)) == []


def test_what_was_cancelled_with_all_jobs_of_the_run_is_no_failed_attempt_of_its_timeline(slurm):
    """As a pass has judged it. What somebody else cancelled is one, and says why."""
    of = array("rollout")
    jobs = [job(of, index, SlurmState.CANCELLED, 12.0, 5.0) for index in (0, 1)]
    ours = {"kind": FailureKind.CANCELLED, "evidence": Evidence.CANCELLATION}
    failed(slurm, "1/rollout/0", "40_0r0", 17.0, number=1, **ours)
    failed(slurm, "1/rollout/1", "40_1r0", 17.0, number=1, message="cancelled (CANCELLED)")
    first, second = found(slurm, Facts([of], jobs))
    assert (first.end, first.note) == (SpanEnd.ENDED, "")
    assert (second.end, second.note) == (SpanEnd.FAILED, "cancelled (CANCELLED)")
    withdrawn = replace(of, state=State("40", is_withdrawn=True))
    assert [span.end for span in found(slurm, Facts([withdrawn], jobs))] == [SpanEnd.ENDED] * 2
    (without_accounting,) = found(slurm, Facts([of]))
    assert (without_accounting.shard, without_accounting.end) == (1, SpanEnd.FAILED)


# --- lines -----------------------------------------------------------------------------------------------

moments = st.none() | st.integers(1_700_000_000, 1_800_000_000).map(float)
texts = st.text(max_size=8)
spans = st.builds(
    Span,
    job_kind=st.sampled_from(["rollout", "score-big", "update", DRIVER]),
    shard=st.integers(0, 99),
    attempt=texts,
    end=st.sampled_from(SpanEnd),
    ready=moments,
    started=moments,
    computing=moments,
    ended=moments,
    compute=st.integers(0, 1000).map(float),
    node=texts,
    lane=texts,
    job=texts,
    note=texts,
    cpus=st.integers(0, 8),
    gpus=st.integers(0, 8),
)


@given(st.lists(spans, max_size=12))
def test_a_line_holds_what_it_was_made_from(attempts):
    made = iteration_spans(3, attempts, 17.0)
    back = from_line(json.loads(json.dumps(to_line(made))))
    assert back.attempts == made.attempts
    assert (back.iteration, back.left_out, back.written) == (3, 0, 17.0)
    for job_kind, stage in made.stages.items():
        assert back.stages[job_kind].run == pytest.approx(stage.run, abs=1e-3)
        assert back.stages[job_kind].attempts == stage.attempts


def test_a_line_names_everything():
    line = to_line(iteration_spans(1, make_spans(1, 2)))
    assert line.keys() == IterationSpans.__dataclass_fields__.keys()
    assert line["stages"]["rollout"].keys() == StageTime.__dataclass_fields__.keys()
    assert line["attempts"].keys() == Span.__dataclass_fields__.keys()
    assert line["attempts"]["attempt"][:2] == ["1-1001r0", "1-1001r0"]
    assert {len(values) for values in line["attempts"].values()} == {7}


@given(st.lists(spans, max_size=12))
def test_parts_of_a_stage_add_up_to_its_run(attempts):
    for job_kind, stage in stage_times(attempts).items():
        parts = stage.startup + stage.compute + stage.idle + stage.retry
        assert job_kind == DRIVER or parts == pytest.approx(stage.run)
        assert min(stage.queue, stage.startup, stage.compute, stage.idle, stage.retry) >= 0


def test_of_thousands_of_attempts_some_are_kept_and_all_are_counted():
    many = make_spans(1, 3000)
    made = iteration_spans(1, many)
    assert made.stages["rollout"].attempts == 3001
    kept = [span for span in made.attempts if span.job_kind == "rollout"]
    assert len(kept) <= 400
    assert sum(span.end is SpanEnd.FAILED for span in kept) == 1
    assert max(span.ended for span in kept) == made.stages["rollout"].ended
    assert len(made.attempts) + made.left_out == len(many)
    assert len(json.dumps(to_line(made))) < 130_000


def test_the_last_line_of_an_iteration_counts_and_broken_ones_do_not():
    lines = [
        to_line(iteration_spans(i, make_spans(i, shards))) for i, shards in ((1, 1), (2, 1), (2, 4), (3, 1))
    ]
    read = read_lines([*lines, {"iteration": 1, "stages": 3}, {"event": "?"}], newest=2, detailed=1)
    assert list(read) == [2]
    assert read[2].stages["rollout"].attempts == 5
    read = read_lines(lines, newest=3, detailed=1)
    assert [len(found.attempts) > 0 for found in read.values()] == [False, False, True]
    assert stage_totals(read.values())["rollout"].attempts == 2 + 5 + 2


# --- a whole run -----------------------------------------------------------------------------------------


def test_a_run_leaves_a_line_for_each_iteration(complete_run):
    lines = journal.read(complete_run / "spans.jsonl")
    assert [line["iteration"] for line in lines] == [1, 2]
    last = from_line(lines[1])
    assert {p: stage.attempts for p, stage in last.stages.items()} == {
        "rollout": 2,
        "reward": 2,
        "update": 1,
        "evaluate": 1,
    }
    for stage in last.stages.values():
        assert 0 < stage.startup < stage.run
        assert stage.compute > 0
    (row,) = (row for row in journal.read(complete_run / "metrics.jsonl") if row["iteration"] == 2)
    update = last.stages["update"]
    assert update.ended - update.started == pytest.approx(row["seconds/update"], abs=0.01)
    assert update.compute == pytest.approx(row["seconds/compute/update"], abs=0.01)


def test_the_line_before_says_since_when_driver_jobs_are_new(local):
    assert last_written(local, 1) == local.identity.created
    journal.append(local.paths.spans, to_line(iteration_spans(1, [], 123.0)))
    assert last_written(local, 2) == 123.0
    assert policy_maker(0) == PREPARE
    commit_shard(local, 1, 0, responses=["a"], rewards=[1.0])
    assert [span.job_kind for span in found(local)] == ["rollout", "reward"]
