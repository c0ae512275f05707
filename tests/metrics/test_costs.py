"""What a run cost: from Slurm's records to numbers of a row and a table."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.metrics import costs
from pipeline.metrics.catalogue import describe
from pipeline.metrics.costs import (
    Accountant,
    Costs,
    cost_metrics,
    costs_of,
    describe_costs,
    metrics_of,
    total,
    wasted_share,
    whole_runs,
)
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import State, Submission
from slurm.accounting import Record
from slurm.commands import SlurmTimeout
from slurm.ended import NoAccounting
from slurm.query import Element
from slurm.states import SlurmState

HOUR = 3600.0


def submission(job_kind: str, iteration: int = 1, job: str = "7") -> Submission:
    return Submission(
        name=f"slurm-ppo.run.{job_kind}.iter{iteration}.abc.1.0",
        iteration=iteration,
        job_kind=job_kind,
        number=1,
        chunk=0,
        chunk_size=1,
        invocation=1,
        created=0.0,
        module="stages",
        arguments=(),
        elements={"0": ()},
        max_restarts=20,
        state=State(job),
    )


def record(
    job_kind: str,
    state: SlurmState = SlurmState.COMPLETED,
    hours: float = 1.0,
    gpus: int = 2,
    iteration: int = 1,
) -> Record:
    return Record(
        job_id="7_0",
        name=f"slurm-ppo.run.{job_kind}.iter{iteration}.abc.1.0",
        state=state,
        submitted=0.0,
        eligible=100.0,
        started=160.0,
        elapsed=hours * HOUR,
        cpus=4,
        gpus=gpus,
        nodes="gpu07",
    )


SUBMISSIONS = [submission(job_kind) for job_kind in ("rollout", "update", "driver", "guard")]
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
    assert (rollout.cpu_hours, rollout.queue_seconds, rollout.run_seconds) == (8.0, 120.0, 2 * HOUR)
    assert found.of_stage("update").wasted_gpu_hours == 0.0, "it still runs"
    assert found.of_stage("driver").attempts == 2, "every kind of driver job"
    assert found.stages == ["rollout", "update", "driver"]


def test_a_row_has_each_number_under_a_name_that_is_described():
    row = metrics_of(costs_of(SUBMISSIONS, RECORDS).of_iteration(1))
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
    both = [*SUBMISSIONS, submission("rollout", iteration=2)]
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


def element(index: int = 0, name: str = "slurm-ppo.run.rollout.iter1.abc.1.0", **more: object) -> Element:
    """As the queue shows it."""
    times = {"submitted": 90.0, "started": 160.0, "ended": None, "eligible": 100.0, "elapsed": HOUR}
    given = {"state": SlurmState.RUNNING, "reason": "None", "node": "gpu07", "partition": "gpu"}
    ends = {"exit_code": None, "signal": None, "restarts": 0, "time_limit": None, "cpus": 4, "gpus": 2}
    return Element("7", index, name, **{**given, **times, **ends, **more})


@pytest.fixture
def sacct(monkeypatch) -> list[set[str]]:
    """Ids that each call of sacct was asked for. It knows of an attempt that the queue does not show."""
    asked: list[set[str]] = []

    def answer(jobs, timeout):
        asked.append(set(jobs))
        return [record("rollout"), record("rollout", SlurmState.NODE_FAIL)]

    monkeypatch.setattr(costs, "read_records", answer)
    by_iteration = {1: [submission("rollout")], 2: [submission("rollout", 2, "8")], 3: [], 0: []}
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
    return cost_metrics(accountant.facts_of(iteration), iteration).get("slurm/gpu_hours/rollout")


@pytest.mark.parametrize(
    "error", [NoAccounting("slurmdbd is down"), SlurmTimeout(["sacct"], None, "no answer")]
)
def test_accounting_that_is_away_costs_half_a_minute_one_question_and_no_row(
    monkeypatch, sacct, run, clock, error
):
    answer, notes = costs.read_records, []

    def away(jobs, timeout):
        sacct.append(set(jobs))
        raise error

    monkeypatch.setattr(costs, "read_records", away)
    accountant = Accountant(run, notes.append)
    assert [hours(accountant, iteration) for iteration in (1, 2)] == [None, None]
    assert hours(Accountant(run, notes.append), 1) is None
    assert sacct == [{"7", "8"}], "for all rows that are due"
    assert len(notes) == 1, "every pass would say it otherwise"
    clock[0] += 31.0
    assert hours(Accountant(run, notes.append), 1) is None
    assert (len(sacct), len(notes)) == (2, 1)
    clock[0] += 31.0
    monkeypatch.setattr(costs, "read_records", answer)
    assert hours(Accountant(run, notes.append), 1) == 4.0


def test_a_cluster_without_accounting_is_asked_once_and_its_rows_have_no_costs(
    monkeypatch, sacct, run, clock
):
    def absent(jobs, timeout):
        sacct.append(set(jobs))
        raise NoAccounting("Slurm accounting storage is disabled", is_absent=True)

    monkeypatch.setattr(costs, "read_records", absent)
    for _ in range(5):
        accountant = Accountant(run, lambda text: None, lambda: [element()])
        assert hours(accountant, 1) is None, "whatever the queue shows: a column is there or not"
        clock[0] += 600.0
    assert len(sacct) == 1


def test_rows_that_follow_each_other_take_what_the_queue_shows_of_their_jobs(sacct, run, clock):
    shown: list[Element] = [element()]

    def of_row(iteration: int = 1) -> float | None:
        clock[0] += 5.0
        return hours(Accountant(run, lambda text: None, lambda: shown), iteration)

    assert of_row() == 4.0, "the first asks whether there is accounting"
    assert [of_row() for _ in range(20)] == [2.0] * 20
    assert len(sacct) == 1
    shown[:] = [element(restarts=1)]
    assert of_row() == 4.0, "it ran before, which only accounting knows"
    assert of_row() is None, "and is not asked again so soon"
    shown.clear()
    clock[0] += 30.0
    assert of_row() == 4.0, "it ended long ago"
    assert len(sacct) == 3


def test_rows_that_are_far_apart_ask_accounting(sacct, run, clock):
    for _ in range(3):
        clock[0] += 200.0
        assert hours(Accountant(run, lambda text: None, lambda: [element()]), 1) == 4.0
    assert len(sacct) == 3


def test_the_queue_shows_what_accounting_would():
    (found,) = whole_runs([submission("rollout")], [element(), element(name="another's")])
    assert found == replace(record("rollout", SlurmState.RUNNING), partition="gpu", submitted=90.0)
    pending = element(1, state=SlurmState.PENDING, started=None)
    array = replace(submission("rollout"), elements={"0": (), "1": ()})
    assert whole_runs([array], [element(), pending]) == [found], "what has not started costs nothing"
    assert whole_runs([array], [element()]) is None
    assert whole_runs([submission("driver", 0)], []) == [], "of driver jobs what is there"
