"""The one store of ended attempts: what it keeps, what it makes of spoilt files, and of those of old runs."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.executors.slurm.arrays import stage_submissions
from pipeline.run.directory import Run
from pipeline.run.endings import (
    Ending,
    Evidence,
    element_ending,
    mend_endings,
    move_endings,
    note_endings,
    read_endings,
    retraction,
    spoilt_endings,
)
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import Ledger, State, Submission
from pipeline.run.tasks import Stage, Task
from tests.support.damage import DAMAGES
from tests.support.scripted import imagined_run

TASK = Task(2, Stage.ROLLOUT, 1)
KILLED = Ending(
    *("3-7_1r0", "2/rollout/1", 3, 1, FailureKind.MEMORY, Evidence.SLURM, "too much", "n7", "7_1"), time=5.0
)


@pytest.fixture
def run(tmp_path) -> Run:
    return imagined_run(tmp_path)


def submitted(run: Run, number: int = 3, job: str | None = "7") -> Submission:
    tasks = [Task(2, Stage.ROLLOUT, shard) for shard in (0, 1)]
    (made,) = stage_submissions(run, 1, number, tasks, 1000)
    Ledger(run.paths).begin(made)
    return Ledger(run.paths).note(made, State(job))


# --- what is kept ---


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.builds(
        Ending,
        st.just("2-7_1r0.1"),
        st.just("2/rollout/1"),
        st.integers(0, 9),
        st.integers(0, 9),
        st.none() | st.sampled_from(FailureKind),
        st.none() | st.sampled_from(Evidence),
        *(st.text(), st.text(), st.text()),
        st.none() | st.floats(1.0, 9e9),
        st.floats(0.0, 9e9),
        st.booleans(),
        st.text(),
    )
)
def test_an_ending_comes_back_whatever_it_is(run, ending):
    note_endings(run.paths, [ending])
    assert read_endings(run.paths, [2]) == read_endings(run.paths, [1, 2, 3])
    assert read_endings(run.paths, [2])[ending.attempt] == ending


def test_endings_lie_with_their_iteration_and_each_attempt_has_one(run):
    other = replace(KILLED, attempt="1-7_0r0", task="1/rollout/0")
    note_endings(run.paths, [KILLED, other])
    note_endings(run.paths, [replace(KILLED, kind=FailureKind.TIMEOUT)])
    assert list(read_endings(run.paths, [1])) == ["1-7_0r0"]
    assert read_endings(run.paths, [2])["3-7_1r0"].kind is FailureKind.TIMEOUT
    assert not read_endings(run.paths, [3])
    note_endings(run.paths, [])
    assert not run.paths.endings(3).exists()


def test_a_failure_names_log_job_and_node(run):
    failure = KILLED.failure(run.paths)
    assert (failure.task, failure.attempt, failure.kind) == (TASK, 3, FailureKind.MEMORY)
    assert (failure.job, failure.node, failure.message) == ("7_1", "n7", "too much")
    assert failure.log == str(run.paths.task(TASK).log(3))


def test_a_worker_that_took_no_task_is_named_apart_from_what_workers_claim(run):
    """Its submission's number, and that of a claim of its own later start, may be the same."""
    crew = submitted(run, number=1)
    own = replace(element_ending(run.paths, crew, 1), kind=FailureKind.LOST)
    claimed = replace(KILLED, attempt="1-7_0r0", number=1)
    note_endings(run.paths, [own, claimed])
    endings = read_endings(run.paths, [2])
    assert own.attempt == "7_1r0"
    assert own.failure(run.paths).log.endswith("logs/00002-rollout/worker-1/shard-00001.log")
    assert endings.of_element(crew, 1) == own
    assert endings.of_element(crew, 0) is None, "its worker claimed something"


def test_a_commit_that_was_taken_back_has_no_log_to_read(run):
    failure = Failure(TASK, 0, FailureKind.INPUTS, "its input changed")
    (taken,) = retraction(failure, "3-7_1r0", 1, 5.0)
    assert (taken.attempt, taken.number, taken.time) == ("3-7_1r0", 3, 5.0)
    assert taken.failure(run.paths) == failure
    (unnamed,) = retraction(failure, "", 1, 5.0)
    assert unnamed.attempt.startswith("0-")
    assert retraction(replace(failure, task=Task(2, Stage.STATE)), "3-7_1r0", 1, 5.0) == []


def test_going_back_takes_ends_with_the_history_that_they_are_of(run, tmp_path):
    reward = replace(KILLED, attempt="1-8_1r0", task="2/reward/1")
    note_endings(run.paths, [KILLED, reward])
    move_endings(run.paths, [Task(3, Stage.REWARD, 1), Task(2, Stage.REWARD, 1)], tmp_path / "aside")
    assert list(read_endings(run.paths, [2])) == [KILLED.attempt]
    aside = RunPaths(tmp_path / "aside")
    assert read_endings(aside, [2, 3]).attempts == {reward.attempt: reward}
    assert not aside.endings(3).exists()


# --- two files ---


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["endings.json", "endings.copy.json"])
def test_a_damaged_file_is_read_from_the_other_and_a_pass_writes_it_again(run, name, damage):
    note_endings(run.paths, [KILLED])
    damaged = run.paths.endings(2).with_name(name)
    before = damaged.read_bytes()
    DAMAGES[damage](damaged)
    assert read_endings(run.paths, [2])[KILLED.attempt] == KILLED
    (told,) = mend_endings(run.paths, [1, 2])
    assert str(damaged) in told
    assert damaged.read_bytes() == before
    assert mend_endings(run.paths, [1, 2]) == []


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in ("gone", "link to nothing")])
def test_where_neither_can_be_read_attempts_are_judged_again(run, damage):
    note_endings(run.paths, [KILLED])
    for path in run.paths.endings(2).parent.glob("endings*"):
        DAMAGES[damage](path)
    assert not read_endings(run.paths, [2])
    assert str(run.paths.endings(2)) in spoilt_endings(run.paths, [1, 2])
    assert mend_endings(run.paths, [2]) == []


@pytest.mark.parametrize(
    "content",
    [
        *('{"attempts": []}', '{"attempts": {"1-7_0r0": 3}}', '{"attempts": {"1-7_0r0": {}}}', "[]"),
        '{"attempts": {"1-7_0r0": {"task": "nonsense"}}}',
        '{"attempts": {"1-7_0r0": {"task": "2/rollout/1", "kind": "of a later version"}}}',
    ],
)
def test_what_holds_no_ends_is_spoilt_whatever_it_is(run, content):
    run.paths.endings(2).parent.mkdir(parents=True)
    run.paths.endings(2).write_text(content)
    assert not read_endings(run.paths, [2])
    assert str(run.paths.endings(2)) in spoilt_endings(run.paths, [2])
