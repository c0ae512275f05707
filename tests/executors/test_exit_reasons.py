"""Why an array element ended without a commit: Slurm's word, the task's own, and which of them counts."""

from dataclasses import replace

import pytest

from pipeline.executors.slurm.arrays import stage_submissions
from pipeline.executors.slurm.crew import split_unclaimed
from pipeline.executors.slurm.exit_reasons import (
    Accounts,
    Gone,
    Unanswered,
    as_seen,
    evidence_of,
    explain,
    verdict_of,
)
from pipeline.run.control import Control
from pipeline.run.failures import DISK_EXIT, FREE_KINDS, Failure, FailureKind
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import State, Submission
from pipeline.run.tasks import Stage, Task
from pipeline.workers.beats import Doing, Reason
from slurm.ended import NoAccounting, NoAnswer
from slurm.query import Element
from slurm.states import Phase, SlurmState, phase_of
from tests.support.beats import beat
from tests.support.scripted import imagined_run

RUN = imagined_run()
TASK = Task(2, Stage.ROLLOUT, 1)

KINDS = {
    SlurmState.BOOT_FAIL: FailureKind.UNSTARTED,
    SlurmState.CANCELLED: FailureKind.KILLED,
    SlurmState.COMPLETED: FailureKind.KILLED,
    SlurmState.DEADLINE: FailureKind.TIMEOUT,
    SlurmState.FAILED: FailureKind.KILLED,
    SlurmState.LAUNCH_FAILED: FailureKind.UNSTARTED,
    SlurmState.NODE_FAIL: FailureKind.LOST,
    SlurmState.OUT_OF_MEMORY: FailureKind.MEMORY,
    SlurmState.PREEMPTED: FailureKind.PREEMPTED,
    SlurmState.RECONFIG_FAIL: FailureKind.LOST,
    SlurmState.REVOKED: FailureKind.LOST,
    SlurmState.TIMEOUT: FailureKind.TIMEOUT,
}


def submitted(job: str | None = "7") -> Submission:
    (submission,) = stage_submissions(RUN, 1, 3, [TASK], 1000)
    return submission if job is None else replaced(submission, job)


def replaced(submission: Submission, job: str) -> Submission:
    return replace(submission, state=State(job))


def gone(job: str | None = "7") -> Gone:
    return Gone.of(submitted(job), 1)


def claimed(restart: int = 0, is_of_used: bool = False) -> Gone:
    """An attempt that a worker claimed."""
    return Gone(TASK, 3, "7", 1, restart, is_of_used)


def element(state: SlurmState, exit_code: int = 1, index: int = 1, array: str = "7") -> Element:
    times = dict.fromkeys(("submitted", "started", "ended", "restarts", "time_limit"))
    return Element(array, index, "name", state, "", "n7", "p", exit_code=exit_code, signal=0, **times)


def failure(kind: FailureKind) -> Failure:
    return Failure(TASK, 3, kind, f"says {kind}")


def test_a_task_that_a_full_disk_kept_from_saying_so_says_it_by_its_exit_code():
    seen = as_seen(RUN.paths, gone(), element(SlurmState.FAILED, exit_code=DISK_EXIT))
    assert (seen.kind, seen.message) == (
        FailureKind.DISK,
        "the shared filesystem was full, read-only or away",
    )


@pytest.mark.parametrize("state", [state for state in SlurmState if phase_of(state) is Phase.ENDED])
def test_every_way_to_end_has_a_kind(state):
    seen = as_seen(RUN.paths, gone(), element(state))
    assert seen.kind is KINDS[state]
    assert (seen.task, seen.attempt, seen.job, seen.node) == (TASK, 3, "7_1", "n7")
    assert seen.log == "/runs/r1/logs/00002-rollout/attempt-3/shard-00001.log"
    assert seen.message


def test_what_slurm_says_is_told_in_words():
    assert as_seen(RUN.paths, gone(), element(SlurmState.FAILED, 137)).message.startswith(
        "killed by signal 9"
    )
    assert "nothing was committed" in as_seen(RUN.paths, gone(), element(SlurmState.COMPLETED, 0)).message


def test_a_job_that_is_missing_everywhere_is_unknown_and_not_done():
    seen = as_seen(RUN.paths, gone(), None)
    assert (seen.kind, seen.node) == (FailureKind.KILLED, "")
    assert "no longer knows" in seen.message
    assert seen.kind not in FREE_KINDS


def test_a_job_that_never_arrived_is_lost_at_nobodys_cost():
    seen = as_seen(RUN.paths, gone(None), None)
    assert (seen.kind, seen.job) == (FailureKind.LOST, "")
    assert seen.kind in FREE_KINDS


# --- jobs that Slurm could not start ---


def test_a_job_whose_output_could_not_be_opened_was_never_started():
    not_opened = replace(element(SlurmState.FAILED, 0), signal=53)
    seen = as_seen(RUN.paths, gone(), not_opened)
    assert (seen.kind, seen.node) == (FailureKind.UNSTARTED, "n7")
    assert seen.message.startswith("its node could not open /runs/r1/logs/slurm.log (exit code 0:53): ")
    assert as_seen(RUN.paths, gone(), replace(not_opened, signal=9)).kind is FailureKind.KILLED


def test_a_container_that_did_not_start_is_not_the_tasks_fault():
    """Of a worker that nothing was heard of; a task's own error has another code, or was heard of."""
    mute = replace(gone(), is_mute=True)
    failed = element(SlurmState.FAILED, exit_code=255)
    assert as_seen(RUN.paths, mute, failed).kind is FailureKind.UNSTARTED
    assert as_seen(RUN.paths, gone(), failed).kind is FailureKind.KILLED
    assert as_seen(RUN.paths, mute, element(SlurmState.FAILED, 1)).kind is FailureKind.KILLED
    assert as_seen(RUN.paths, mute, element(SlurmState.TIMEOUT)).kind is FailureKind.TIMEOUT


# --- workers ---


@pytest.mark.parametrize("state", [SlurmState.TIMEOUT, SlurmState.OUT_OF_MEMORY])
def test_what_a_used_worker_ran_out_of_says_nothing_about_its_task(state):
    """Tasks before it took their part of the time, and left what they left in memory."""
    assert as_seen(RUN.paths, claimed(), element(state)).kind is KINDS[state]
    of_used = as_seen(RUN.paths, claimed(is_of_used=True), element(state))
    assert of_used.kind in FREE_KINDS
    assert "other tasks before" in of_used.message


def test_a_worker_that_was_put_back_into_the_queue_was_preempted():
    for state in (SlurmState.PENDING, SlurmState.RUNNING):
        again = replace(element(state), restarts=1)
        assert as_seen(RUN.paths, claimed(), again).kind is FailureKind.PREEMPTED


def test_a_worker_that_went_on_after_a_failure_is_no_end_of_its_job():
    seen = as_seen(RUN.paths, claimed(), replace(element(SlurmState.RUNNING), restarts=0))
    assert (seen.kind, seen.message) == (FailureKind.KILLED, "its worker went on without a commit")


# --- the task's own word ---


@pytest.mark.parametrize("said", FailureKind)
def test_a_task_knows_best_why_it_failed(said):
    outside = as_seen(RUN.paths, gone(), element(SlurmState.FAILED))
    assert verdict_of(outside, failure(said), element(SlurmState.FAILED)) == failure(said)


@pytest.mark.parametrize("said", FailureKind)
def test_but_not_that_it_used_too_much_memory(said):
    outside = as_seen(RUN.paths, gone(), element(SlurmState.OUT_OF_MEMORY))
    assert verdict_of(outside, failure(said), element(SlurmState.OUT_OF_MEMORY)) == outside


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (SlurmState.PREEMPTED, FailureKind.PREEMPTED),
        (SlurmState.NODE_FAIL, FailureKind.LOST),
        (SlurmState.CANCELLED, FailureKind.KILLED),
        (SlurmState.TIMEOUT, FailureKind.TIMEOUT),
        (SlurmState.FAILED, FailureKind.TIMEOUT),  # it heard the warning and ended before its time was up
    ],
)
def test_nor_what_it_was_warned_of(state, kind):
    """A task that could save nothing before it was ended asks for more time only if that was the reason."""
    outside = as_seen(RUN.paths, gone(), element(state))
    assert verdict_of(outside, failure(FailureKind.TIMEOUT), element(state)).kind is kind


@pytest.mark.parametrize(
    ("elapsed", "limit", "kind"),
    [
        (60.0, 7200.0, FailureKind.PREEMPTED),
        (60.0, None, FailureKind.PREEMPTED),
        (7100.0, 7200.0, FailureKind.TIMEOUT),
        (None, 7200.0, FailureKind.TIMEOUT),  # how long it ran is not known
    ],
)
def test_before_slurm_says_why_its_time_tells_what_it_was_warned_of(elapsed, limit, kind):
    """While an element is cleaned up, squeue shows neither its preemption nor that it was cancelled."""
    seen = replace(element(SlurmState.COMPLETING), restarts=0, elapsed=elapsed, time_limit=limit)
    outside = as_seen(RUN.paths, claimed(), seen)
    assert verdict_of(outside, failure(FailureKind.TIMEOUT), seen).kind is kind
    assert verdict_of(outside, failure(FailureKind.ERROR), seen).kind is FailureKind.ERROR


def test_what_was_saved_before_a_preemption_is_not_forgotten():
    outside = as_seen(RUN.paths, gone(), element(SlurmState.PREEMPTED))
    said = failure(FailureKind.PAUSED)
    assert verdict_of(outside, said, element(SlurmState.PREEMPTED)) == said


def test_without_slurms_word_the_tasks_own_counts():
    outside = as_seen(RUN.paths, gone(), None)
    assert verdict_of(outside, failure(FailureKind.TIMEOUT), None).kind is FailureKind.TIMEOUT


# --- where evidence comes from ---


def test_accounting_is_asked_once_and_only_for_what_the_queue_forgot(monkeypatch, tmp_path):
    asked = []
    told = {("8", 0): element(SlurmState.FAILED, array="8", index=0)}
    monkeypatch.setattr(
        "pipeline.executors.slurm.exit_reasons.read_ended", lambda ids, _: asked.append(ids) or told
    )
    seen = {("7", 1): element(SlurmState.TIMEOUT)}
    attempts = [Gone(TASK, 3, job, index) for job, index in (("7", 1), ("8", 0), ("8", 1), ("9", 1))]
    paths = RunPaths(tmp_path)
    assert evidence_of(attempts, seen, Accounts(), paths) == told | seen
    assert asked == [{"8", "9"}]
    assert evidence_of(attempts[:1], seen, Accounts(), paths) == seen
    assert len(asked) == 1


@pytest.mark.parametrize("is_absent", [False, True])
def test_where_accounting_is_silent_the_reason_stays_unknown_and_where_there_is_none_it_is_asked_once(
    monkeypatch, tmp_path, is_absent
):
    asked = []

    def silent(ids, timeout):
        asked.append(ids)
        raise NoAccounting("slurmdbd is down", is_absent)

    monkeypatch.setattr("pipeline.executors.slurm.exit_reasons.read_ended", silent)
    paths = RunPaths(tmp_path)
    assert [evidence_of([gone()], {}, Accounts(), paths) for _ in range(3)] == [{}] * 3
    assert len(asked) == (1 if is_absent else 3)


def test_accounting_that_is_slow_is_waited_for_between_two_passes_and_once(monkeypatch, tmp_path):
    told, asked = {("8", 0): element(SlurmState.FAILED, array="8", index=0)}, []

    def slow(ids, timeout=60.0):
        asked.append((ids, timeout < 5))
        if timeout < 5:
            raise NoAnswer("no answer in 3 s")
        return told

    monkeypatch.setattr("pipeline.executors.slurm.exit_reasons.read_ended", slow)
    accounts, gone_from_queue = Accounts(), [Gone(TASK, 3, "8", 0), Gone(TASK, 3, "9", 0)]
    paths = RunPaths(tmp_path)
    with pytest.raises(Unanswered, match="no answer"):
        evidence_of(gone_from_queue, {}, accounts, paths)
    accounts.ask()
    assert evidence_of(gone_from_queue, {}, accounts, paths) == told, "of the other nothing is known"
    assert asked == [({"8", "9"}, True), ({"8", "9"}, False)]
    silent = Accounts(unanswered={"8"})
    monkeypatch.setattr("pipeline.executors.slurm.exit_reasons.read_ended", lambda ids: slow(ids, 3.0))
    silent.ask()
    assert evidence_of(gone_from_queue[:1], {}, silent, paths) == {}, "the pass goes on without"


def test_a_job_that_never_arrived_is_not_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "pipeline.executors.slurm.exit_reasons.read_ended", lambda *_: pytest.fail("asked for nothing")
    )
    assert evidence_of([gone(None)], {}, Accounts(), RunPaths(tmp_path)) == {}


@pytest.mark.parametrize(
    ("reason", "is_failure"), [(Reason.TIME, False), (Reason.FAILED, True), (None, True)]
)
def test_an_element_that_left_for_want_of_time_before_any_task_is_no_failure_of_its_task(reason, is_failure):
    ended = [(submitted(), 1)]
    beats = {"7_1r0": beat("7_1r0", doing=Doing.LEAVING if reason else Doing.STARTING, reason=reason)}
    assert split_unclaimed(ended, [], beats) == ((ended, []) if is_failure else ([], ended))


@pytest.mark.parametrize("state", [SlurmState.CANCELLED, SlurmState.TIMEOUT, SlurmState.FAILED])
def test_what_was_cancelled_with_all_jobs_of_the_run_did_not_fail(state, tmp_path):
    """By `cancel`, or before the run went back. What an attempt said of itself stays."""
    paths, attempt = RunPaths(tmp_path), replace(gone(), invocation=2)

    def kind(control: Control) -> FailureKind:
        (ended,) = explain(paths, [attempt], {("7", 1): element(state)}, control, Accounts())
        return ended.failure.kind

    assert kind(Control(3, emptied=2)) is FailureKind.CANCELLED
    assert kind(Control(3, emptied=1)) is kind(Control(3)) is KINDS[state]
    file = paths.task(TASK).failure(attempt.number)
    file.parent.mkdir(parents=True)
    file.write_text('{"kind": "error", "message": "a bug"}')
    assert kind(Control(3, emptied=2)) is FailureKind.ERROR
