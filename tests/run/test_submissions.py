"""What was submitted, on disk: one driver gets a number, nothing is lost, calls have budgets of their own."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config.job_kinds import DRIVER
from pipeline.config.schema import Config
from pipeline.decide.escalating import Escalation
from pipeline.executors.slurm.arrays import Submitter, driver_submission, stage_submissions
from pipeline.run import submissions
from pipeline.run.control import Control, SpoiltControl, begin_invocation, read_control, write_control
from pipeline.run.directory import Run
from pipeline.run.endings import element_ending, note_endings
from pipeline.run.failures import FailureKind
from pipeline.run.submissions import Ledger, State, Submission, read_limits_of
from pipeline.run.tasks import Stage, Task
from slurm.limits import ClusterLimits
from slurm.signals import Errands
from slurm.submission import QueueFull, Refused
from tests.support import ROOT
from tests.support.damage import flip_bit
from tests.support.scripted import imagined_run


@pytest.fixture
def run(tmp_path) -> Run:
    return imagined_run(tmp_path)


def submission(run: Run, iteration: int = 1, number: int = 1, stage: Stage = Stage.ROLLOUT) -> Submission:
    (made,) = stage_submissions(run, 1, number, [Task(iteration, stage, shard) for shard in (0, 1)], 1000)
    return made


# --- the ledger ---


def test_what_was_noted_is_read_back(run):
    ledger, made = Ledger(run.paths), submission(run)
    assert ledger.begin(made)
    assert ledger.load([1]) == [made]
    noted = ledger.note(made, State("7", ("5", "6"), withdrawn=(2,)))
    assert noted.state.job == "7"
    assert ledger.load([1]) == [noted]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.none() | st.from_regex(r"\A[0-9]{1,8}\Z"),
    st.lists(st.from_regex(r"\A[0-9]{1,8}\Z"), max_size=3),
    st.lists(st.integers(0, 9), max_size=3),
)
def test_a_state_comes_back_whatever_it_is(run, job, waits_for, withdrawn):
    ledger, state = Ledger(run.paths), State(job, tuple(waits_for), withdrawn=tuple(withdrawn))
    ledger.begin(submission(run))
    ledger.note(submission(run), state)
    (found,) = ledger.load([1])
    assert found.state == state


def test_a_second_driver_does_not_get_the_number(run):
    ledger = Ledger(run.paths)
    assert ledger.begin(submission(run))
    assert not ledger.begin(replace(submission(run), created=1.0))
    assert ledger.load([1])[0].created != 1.0
    assert not Ledger(run.paths).begin(submission(run)), "nor one that says the same, at the same time"


RACE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.support.scripted import imagined_run
from pipeline.executors.slurm.arrays import stage_submissions
from pipeline.run.submissions import Ledger
from pipeline.run.tasks import Stage, Task
run = imagined_run(Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    made = stage_submissions(run, 1, int(line), [Task(1, Stage.ROLLOUT)], 1000)
    print(int(Ledger(run.paths).begin(made[0])), flush=True)
"""


def test_of_drivers_that_race_for_a_number_exactly_one_gets_it(tmp_path):
    command = [sys.executable, "-c", RACE, str(tmp_path), str(ROOT)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    racers = [subprocess.Popen(command, text=True, cwd=ROOT, **pipes) for _ in range(3)]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 3
    for number in range(1, 60):
        for racer in racers:
            racer.stdin.write(f"{number}\n")
            racer.stdin.flush()
        assert sorted(racer.stdout.readline() for racer in racers) == ["0\n", "0\n", "1\n"]
    for racer in racers:
        racer.communicate()


def test_numbers_go_up_for_each_stage_of_each_iteration(run):
    ledger = Ledger(run.paths)
    assert ledger.next_number(1, Stage.ROLLOUT) == 1
    for number in (1, 2, 11):
        ledger.begin(submission(run, number=number))
    ledger.begin(submission(run, number=5, stage=Stage.REWARD))
    assert ledger.next_number(1, Stage.ROLLOUT) == 12
    assert ledger.next_number(1, Stage.REWARD) == 6
    assert ledger.next_number(2, Stage.ROLLOUT) == 1


def test_only_the_iterations_at_hand_are_read(run):
    ledger = Ledger(run.paths)
    for iteration in (1, 2, 3):
        ledger.begin(submission(run, iteration))
    run.paths.submissions(3).joinpath("rollout-1-0.json").write_text("{")
    assert [s.iteration for s in ledger.load([2, 1, 2])] == [1, 2]
    assert ledger.load([9]) == []


def test_other_files_of_the_folder_are_no_submissions(run):
    ledger, made = Ledger(run.paths), submission(run)
    ledger.begin(made)
    ledger.note(made, State("7"))
    for name in ("rollout-1-0.sh", "rollout-1-0.0-7r0.rendezvous", ".rollout-2-0.json.123", "notes.txt"):
        run.paths.submissions(1).joinpath(name).write_text("")
    assert len(ledger.load([1])) == 1


def test_what_slurm_refused_leaves_nothing(run):
    ledger, made = Ledger(run.paths), submission(run)
    ledger.begin(made)
    ledger.script(made).write_text("")
    ledger.note(made, State("7"))
    ledger.forget(made)
    assert list(run.paths.submissions(1).iterdir()) == []
    assert ledger.begin(made)


@pytest.mark.parametrize("refusal", [Refused, QueueFull])
def test_a_submission_that_slurm_refuses_is_forgotten(run, monkeypatch, refusal):
    """Else every pass would look for its job."""

    def refuse(*_: object) -> str:
        raise refusal("no")

    monkeypatch.setattr("pipeline.executors.slurm.arrays.submit_once", refuse)
    submitter = Submitter(run, run.config.scheduler, lambda partitions: None, lambda: None)
    with pytest.raises(refusal):
        submitter.submit(submission(run), Escalation(), "", ())
    assert Ledger(run.paths).load([1]) == []


def test_what_earlier_failures_ask_for_is_left_out_where_slurm_refuses_it(run, monkeypatch):
    scripts = []

    def submit(script: Path, *_: object) -> str:
        scripts.append(script.read_text())
        if "--exclude=" in scripts[-1]:
            raise Refused("no node is left")
        return "7"

    monkeypatch.setattr("pipeline.executors.slurm.arrays.submit_once", submit)
    submitter = Submitter(run, run.config.scheduler, lambda partitions: None, lambda: None)
    noted = submitter.submit(submission(run), Escalation(exclude=("n7",)), "", ())
    assert (noted.state.job, len(scripts)) == ("7", 2)
    assert Ledger(run.paths).load([1]) == [noted]


def test_a_driver_job_carries_no_task(run):
    made = driver_submission(run, 1, DRIVER, 1)
    assert not made.is_of_stage
    assert list(made.tasks()) == []
    assert (made.module, made.arguments) == ("pipeline", ("advance", str(run.paths.root)))


# --- what people asked for ---


def test_each_call_begins_afresh(run):
    assert read_control(run.paths) == Control()
    assert begin_invocation(run.paths) == Control(1)
    write_control(run.paths, Control(1, cancelled=True, has_failed=True))
    assert read_control(run.paths).has_failed
    assert begin_invocation(run.paths) == Control(2)
    assert read_control(run.paths) == Control(2)


def test_the_cluster_is_asked_once_in_each_call(run, monkeypatch):
    asked = []
    limits = ClusterLimits((24, 11), 1001, 10_000, 300.0, None)
    monkeypatch.setattr("pipeline.run.submissions.read_limits", lambda qos: asked.append(1) or limits)
    begin_invocation(run.paths)
    assert [read_limits_of(run.paths) for _ in range(3)] == [limits] * 3
    assert len(asked) == 1
    begin_invocation(run.paths)
    assert read_limits_of(run.paths) == limits
    assert len(asked) == 2


def test_failures_of_earlier_calls_do_not_count(run, monkeypatch):
    from pipeline.executors.slurm.array_workers import ArrayWorkers
    from pipeline.executors.slurm.arrays import Submitter
    from pipeline.executors.slurm.job_table import QueueReader
    from pipeline.orchestrate.jobs import Jobs

    ledger = Ledger(run.paths)
    for call in (1, 2):
        made = replace(submission(run, number=call), invocation=call)
        ledger.begin(made)
        made = ledger.note(made, State(str(call)))
        ending = element_ending(run.paths, made, 0)
        note_endings(run.paths, [replace(ending, kind=FailureKind.ERROR, message=f"in call {call}")])
    begin_invocation(run.paths)
    begin_invocation(run.paths)
    monkeypatch.setattr("pipeline.workers.looking.ask_queue", lambda timeout: "")
    monkeypatch.setattr("pipeline.executors.slurm.exit_reasons.read_ended", lambda *_: {})
    config, limits = run.config.scheduler, ClusterLimits((24, 11), 1001, 10_000, 300.0, None)
    submitter = Submitter(run, config, lambda partitions: None, lambda: None)
    workers = ArrayWorkers(submitter, limits, print, Errands(print), QueueReader(run))
    jobs = Jobs(run, workers, print)
    jobs.query()
    jobs.collect_ended([Task(1, Stage.ROLLOUT)], lambda tasks: ())
    of_first = [(f.attempt, f.message) for f in jobs.failures[Task(1, Stage.ROLLOUT, 0)]]
    assert of_first == [(2, "in call 2")]
    assert isinstance(run.config, Config)


def test_a_task_list_is_plain_json_for_the_element(run):
    ledger, made = Ledger(run.paths), submission(run)
    ledger.begin(made)
    content = json.loads(ledger.file(made).read_text())
    assert set(content) >= {"module", "arguments", "elements", "number", "max_restarts"}
    assert content["elements"]["1"][:2] == ["--shard", "1"]


# --- a bit that flips ---


def test_what_people_asked_for_outlives_a_spoilt_file(run):
    asked = Control(invocation=3, cancelled=True, emptied=2)
    write_control(run.paths, asked)
    flip_bit(run.paths.control)
    assert read_control(run.paths) == asked
    write_control(run.paths, asked)
    run.paths.control.unlink()
    assert read_control(run.paths) == asked


def test_where_nobody_knows_what_was_asked_for_that_is_said(run):
    write_control(run.paths, Control(invocation=3))
    for path in (run.paths.control, run.paths.slurm / "control.copy.json"):
        flip_bit(path)
    with pytest.raises(SpoiltControl, match=r"nor can its copy.*remove both, and then: slurm-ppo submit"):
        read_control(run.paths)


def test_what_cannot_be_read_of_the_cluster_is_asked_for_again(run, monkeypatch):
    asked = []

    def ask(qos: object) -> ClusterLimits:
        asked.append(1)
        return ClusterLimits((24, 5), 1001, 10, 300.0, None)

    monkeypatch.setattr(submissions, "read_limits", ask)
    first = read_limits_of(run.paths)
    assert read_limits_of(run.paths) == first
    flip_bit(run.paths.slurm / "cluster.json")
    assert read_limits_of(run.paths) == first
    assert len(asked) == 2


def test_a_spoilt_submission_is_as_if_it_had_never_been_and_its_number_is_not_used_again(run):
    ledger, made = Ledger(run.paths), submission(run)
    ledger.begin(made)
    ledger.note(made, State("7"))
    flip_bit(ledger.file(made).with_suffix(".state.json"))
    assert ledger.load([1]) == [made], "its job is then looked for by its name"
    flip_bit(ledger.file(made))
    assert ledger.load([1]) == []
    assert ledger.next_number(1, "rollout") == 2
