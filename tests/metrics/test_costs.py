"""What a run cost: from Slurm's records to numbers of a row and a table."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.metrics import costs
from pipeline.metrics.catalogue import describe
from pipeline.metrics.costs import (
    Accountant,
    Costs,
    costs_of,
    describe_costs,
    metrics_of,
    wasted_share,
    whole_runs,
)
from pipeline.metrics.spans import total
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import Submission
from slurm.commands import SlurmTimeout
from slurm.ended import NoAccounting
from slurm.query import Element
from slurm.states import SlurmState
from tests.support.beats import beat, write_beats
from tests.support.jobs import element, name_of, submission

HOUR = 3600.0


def of(job_kind: str, iteration: int = 1, job: str = "7") -> Submission:
    return submission(job_kind, iteration, job=job, created=0.0, elements={"0": ()})


def record(
    job_kind: str,
    state: SlurmState = SlurmState.COMPLETED,
    hours: float = 1.0,
    gpus: int = 2,
    iteration: int = 1,
) -> Element:
    times = {"submitted": 0.0, "eligible": 100.0, "started": 160.0, "elapsed": hours * HOUR}
    return element(0, state, name=name_of(job_kind, iteration), cpus=4, gpus=gpus, **times)


SUBMISSIONS = [of(job_kind) for job_kind in ("rollout", "update", "driver", "guard")]
RECORDS = [
    record("rollout"),
    record("rollout", SlurmState.NODE_FAIL),
    record("update", SlurmState.RUNNING),
    record("driver", gpus=0, hours=0.5),
    record("guard", gpus=0, hours=0.5),
    record("somebody else's job that was given the same id"),
]


def test_every_attempt_counts_and_only_what_left_nothing_is_wasted():
    found = costs_of(SUBMISSIONS, RECORDS)
    rollout = found.of_stage("rollout")
    assert (rollout.attempts, rollout.gpu_hours, rollout.wasted_gpu_hours) == (2, 4.0, 2.0)
    assert (rollout.cpu_hours, rollout.queue, rollout.run) == (8.0, 120.0, 2 * HOUR)
    assert found.of_stage("update").wasted_gpu_hours == 0.0, "it still runs"
    assert found.of_stage("driver").attempts == 2, "every kind of driver job"
    assert found.stages == ["rollout", "update", "driver"]


def test_a_row_has_each_number_under_a_name_that_is_described():
    found = costs_of(SUBMISSIONS, RECORDS)
    row = metrics_of({stage: found.of_stage(stage) for stage in found.stages})
    assert row["slurm/gpu_hours/rollout"] == 4.0
    assert row["slurm/attempts/driver"] == 2
    assert row["slurm/wasted_share"] == pytest.approx(2 / 6)
    assert [name for name in row if describe(name) is None] == []
    assert metrics_of({}) == {}


def test_where_there_are_no_gpus_cpus_tell_what_was_wasted():
    found = costs_of(
        SUBMISSIONS, [record("update", SlurmState.TIMEOUT, gpus=0), record("driver", gpus=0, hours=3)]
    )
    assert wasted_share(total(found.usage.values())) == 0.25
    assert wasted_share(total([])) == 0.0


def test_json_has_stages_iterations_and_a_total():
    both = [*SUBMISSIONS, of("rollout", iteration=2)]
    found = costs_of(both, [*RECORDS, record("rollout", iteration=2)]).to_json()
    assert list(found) == ["stages", "iterations", "total", "workers"]
    assert found["iterations"]["2"]["rollout"]["gpu_hours"] == 2.0
    assert found["stages"]["rollout"]["gpu_hours"] == 6.0
    assert found["total"]["attempts"] == 6


TABLE = """\
stage      attempts GPU hours CPU hours        waited           ran  wasted
rollout           2      4.00      8.00   2 min 0 s     2 h 0 min  50.0 %
update            1      2.00      4.00   1 min 0 s     1 h 0 min   0.0 %
driver            2      0.00      4.00   2 min 0 s     1 h 0 min   0.0 %
total             5      6.00     16.00   5 min 0 s     4 h 0 min  33.3 %
waited and ran: sums over all attempts; wasted: share of attempts without a result"""


def test_the_table():
    assert describe_costs(costs_of(SUBMISSIONS, RECORDS)).split() == TABLE.split()
    assert max(map(len, describe_costs(costs_of(SUBMISSIONS, RECORDS)).splitlines()[:-1])) <= 80
    assert describe_costs(Costs({})) == "accounting knows no job of this run"


def queued(index: int = 0, **more: object) -> Element:
    """As the queue shows it."""
    times = {"submitted": 90.0, "started": 160.0, "eligible": 100.0, "elapsed": HOUR}
    return element(index, **{"reason": "None", "restarts": 0, "cpus": 4, "gpus": 2, **times, **more})


@pytest.fixture
def sacct(monkeypatch) -> list[set[str]]:
    """Ids that each call of sacct was asked for. It knows of an attempt that the queue does not show."""
    asked: list[set[str]] = []

    def answer(jobs, timeout):
        asked.append(set(jobs))
        return [record("rollout"), record("rollout", SlurmState.NODE_FAIL)]

    monkeypatch.setattr(costs, "read_runs", answer)
    by_iteration = {1: [of("rollout")], 2: [of("rollout", 2, "8")], 3: [], 0: []}
    monkeypatch.setattr(
        costs.Ledger, "load", lambda ledger, wanted: [s for i in sorted(wanted) for s in by_iteration[i]]
    )
    return asked


@pytest.fixture
def run(tmp_path) -> SimpleNamespace:
    paths = RunPaths(tmp_path)
    for iteration in (1, 2):
        paths.submissions(iteration).mkdir(parents=True)
    return SimpleNamespace(paths=paths)


def hours(accountant: Accountant, iteration: int) -> float | None:
    found = costs_of([of("rollout", iteration)], accountant.facts_of(iteration).jobs)
    return found.of_stage("rollout").gpu_hours or None


@pytest.mark.parametrize(
    "error", [NoAccounting("slurmdbd is down"), SlurmTimeout(["sacct"], None, "no answer")]
)
def test_accounting_that_is_away_costs_half_a_minute_one_question_and_no_row(
    monkeypatch, sacct, run, clock, error
):
    answer, notes = costs.read_runs, []

    def away(jobs, timeout):
        sacct.append(set(jobs))
        raise error

    monkeypatch.setattr(costs, "read_runs", away)
    accountant = Accountant(run, notes.append)
    assert [hours(accountant, iteration) for iteration in (1, 2)] == [None, None]
    assert hours(Accountant(run, notes.append), 1) is None
    assert sacct == [{"7", "8"}], "for all rows that are due"
    assert len(notes) == 1, "every pass would say it otherwise"
    clock[0] += 31.0
    assert hours(Accountant(run, notes.append), 1) is None
    assert (len(sacct), len(notes)) == (2, 1)
    clock[0] += 31.0
    monkeypatch.setattr(costs, "read_runs", answer)
    assert hours(Accountant(run, notes.append), 1) == 4.0


def test_a_cluster_without_accounting_is_asked_once_and_its_rows_have_no_costs(
    monkeypatch, sacct, run, clock
):
    def absent(jobs, timeout):
        sacct.append(set(jobs))
        raise NoAccounting("Slurm accounting storage is disabled", is_absent=True)

    monkeypatch.setattr(costs, "read_runs", absent)
    for _ in range(5):
        accountant = Accountant(run, lambda text: None, lambda: [queued()])
        assert hours(accountant, 1) is None, "whatever the queue shows: a column is there or not"
        clock[0] += 600.0
    assert len(sacct) == 1


def test_rows_that_follow_each_other_take_what_the_queue_shows_of_their_jobs(sacct, run, clock):
    shown: list[Element] = [queued()]

    def of_row(iteration: int = 1) -> float | None:
        clock[0] += 5.0
        return hours(Accountant(run, lambda text: None, lambda: shown), iteration)

    assert of_row() == 4.0, "the first asks whether there is accounting"
    assert [of_row() for _ in range(20)] == [2.0] * 20
    assert len(sacct) == 1
    shown[:] = [queued(restarts=1)]
    assert of_row() == 4.0, "it ran before, which only accounting knows"
    assert of_row() is None, "and is not asked again so soon"
    shown.clear()
    clock[0] += 30.0
    assert of_row() == 4.0, "it ended long ago"
    assert len(sacct) == 3


def test_rows_that_are_far_apart_ask_accounting(sacct, run, clock):
    for _ in range(3):
        clock[0] += 200.0
        assert hours(Accountant(run, lambda text: None, lambda: [queued()]), 1) == 4.0
    assert len(sacct) == 3


def test_a_worker_that_stays_counts_in_every_iteration_that_it_works_on(sacct, run, clock):
    write_beats(run.paths, beat("7_0r0", iterations=(1, 2)))
    facts = Accountant(run, lambda text: None).facts_of(2)
    assert sacct == [{"7", "8"}]
    assert {job.run_id for job in facts.jobs} == {"7_0r0"}, "though it was submitted for iteration 1"


def test_the_queue_shows_what_accounting_would():
    (found,) = whole_runs([of("rollout")], [queued(), queued(name="another's")])
    assert (found.run_id, found.elapsed, found.gpus) == ("7_0r0", HOUR, 2)
    pending = queued(1, state=SlurmState.PENDING, started=None)
    array = replace(of("rollout"), elements={"0": (), "1": ()})
    assert whole_runs([array], [queued(), pending]) == [found], "what has not started costs nothing"
    assert whole_runs([array], [queued()]) is None
    assert whole_runs([of("driver", 0)], []) == [], "of driver jobs what is there"
    worker = queued(4, name="slurm-ppo.run.rollout.iter0.abc.1.0", restarts=1)
    assert whole_runs([of("rollout")], [queued(), worker], {"7_4r1"}) == [found, worker]
    assert whole_runs([of("rollout")], [queued(), worker], {"7_4r0"}) is None
