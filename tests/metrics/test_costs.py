"""What a run cost: from Slurm's records to numbers of a row and a table."""

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
)
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import State, Submission
from slurm.accounting import Record
from slurm.commands import SlurmTimeout
from slurm.query import NoAccounting
from slurm.states import SlurmState

HOUR = 3600.0


def submission(job_kind: str, iteration: int = 1, job: str = "7") -> Submission:
    return Submission(
        name=f"run.abc.{iteration}.{job_kind}.1.0",
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
        name=f"run.abc.{iteration}.{job_kind}.1.0",
        state=state,
        submitted=0.0,
        eligible=100.0,
        started=160.0,
        elapsed=hours * HOUR,
        cpus=4,
        gpus=gpus,
        nodes="gpu07",
    )


SUBMISSIONS = [submission(job_kind) for job_kind in ("rollout", "update", "driver", "evaldriver")]
RECORDS = [
    record("rollout"),
    record("rollout", SlurmState.NODE_FAIL),
    record("update", SlurmState.RUNNING),
    record("driver", gpus=0, hours=0.5),
    record("evaldriver", gpus=0, hours=0.5),
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


@pytest.mark.parametrize(
    "error", [NoAccounting("slurmdbd is down"), SlurmTimeout(["sacct"], None, "no answer")]
)
def test_accounting_that_is_away_costs_a_pass_one_question_and_no_row(monkeypatch, tmp_path, error):
    asked, notes = [], []

    def away(jobs, timeout):
        asked.append((jobs, timeout))
        raise error

    monkeypatch.setattr(costs, "read_records", away)
    monkeypatch.setattr(costs.Ledger, "load", lambda ledger, iterations: SUBMISSIONS)
    run = SimpleNamespace(paths=RunPaths(tmp_path))
    accountant = Accountant(run, notes.append)
    found = [accountant.facts_of(1), accountant.facts_of(2)]
    assert [cost_metrics(facts, 1) for facts in found] == [{}, {}]
    assert found[0].submissions == SUBMISSIONS
    assert asked == [({"7"}, 10.0)]
    assert len(notes) == 1
    assert cost_metrics(Accountant(run, notes.append).facts_of(3), 3) == {}
    assert len(notes) == 1, "every pass would say it otherwise"
