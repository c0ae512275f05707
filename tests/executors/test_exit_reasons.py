"""Why an array element ended without a commit: Slurm's word, the task's own, and which of them counts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.decide.ended import split_unclaimed
from pipeline.decide.judging import Gone, Judgement, Signs, ending_of, judge
from pipeline.executors.slurm.arrays import stage_submissions
from pipeline.executors.slurm.exit_reasons import Accounts, Unanswered, evidence_of, explain
from pipeline.run.control import Control
from pipeline.run.endings import Evidence
from pipeline.run.failures import DISK_EXIT, FREE_KINDS, FailureKind, Said
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import State, Submission
from pipeline.run.tasks import Stage, Task
from pipeline.workers.beats import Doing, Reason
from slurm.ended import NoAccounting, NoAnswer
from slurm.query import Element
from slurm.setup_lines import SETUP_EXIT
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
    return Gone(TASK, 3, "7", 1, "3-7_1r0", restart, is_of_used)


def element(state: SlurmState, exit_code: int = 1, index: int = 1, array: str = "7") -> Element:
    times = dict.fromkeys(("submitted", "started", "ended", "restarts", "time_limit"))
    return Element(array, index, "name", state, "", "n7", "p", exit_code=exit_code, signal=0, **times)


def seen(gone: Gone, element: Element | None) -> Judgement:
    """The judgement on an attempt that said nothing."""
    return judge(Signs(gone, element, slurm_log="/runs/r1/logs/slurm.log"))


def said(kind: FailureKind) -> Said:
    return Said(kind, f"says {kind}")


def own_word(kind: FailureKind) -> Judgement:
    return Judgement(kind, f"says {kind}", Evidence.FAILURE_FILE)


def test_a_task_that_a_full_disk_kept_from_saying_so_says_it_by_its_exit_code():
    assert seen(gone(), element(SlurmState.FAILED, exit_code=DISK_EXIT)) == (
        FailureKind.DISK,
        "the shared filesystem was full, read-only or away",
        Evidence.EXIT_CODE,
    )


@pytest.mark.parametrize("state", [state for state in SlurmState if phase_of(state) is Phase.ENDED])
def test_every_way_to_end_has_a_kind(state):
    verdict = seen(gone(), element(state))
    assert verdict.kind is KINDS[state]
    assert verdict.evidence is (Evidence.EXIT_CODE if state is SlurmState.FAILED else Evidence.SLURM)
    assert verdict.message
    failure = ending_of(Signs(gone(), element(state)), verdict, 5.0).failure(RUN.paths)
    assert (failure.task, failure.attempt, failure.job, failure.node) == (TASK, 3, "7_1", "n7")
    assert (failure.kind, failure.message) == verdict[:2]
    assert failure.log == "/runs/r1/logs/00002-rollout/attempt-3/shard-00001.log"


@pytest.mark.parametrize(
    ("nodes", "node", "shown"),
    [
        ("n[1-2]", "n2", "n2"),
        ("n[1-2]", "n7", "n[1-2]"),
        ("n[1-2]", "", "n[1-2]"),
        ("n1", "n1", "n1"),
        ("", "n1", ""),
    ],
)
def test_of_several_nodes_the_one_whose_gpu_failed_is_at_fault(nodes, node, shown):
    signs = Signs(gone(), replace(element(SlurmState.FAILED), node=nodes))
    signs = replace(signs, said=replace(said(FailureKind.DEVICE), node=node, host="h"))
    assert ending_of(signs, judge(signs), 5.0).node == shown
    others = (None, replace(said(FailureKind.ERROR), node=node))  # one that only misses another is no fault
    assert all(ending_of(replace(signs, said=one), judge(signs), 5.0).node == nodes for one in others)
    assert ending_of(replace(signs, element=None), judge(signs), 5.0).node == "h"


def test_what_slurm_says_is_told_in_words():
    assert seen(gone(), element(SlurmState.FAILED, 137)).message.startswith("killed by signal 9")
    assert "nothing was committed" in seen(gone(), element(SlurmState.COMPLETED, 0)).message


def test_a_job_that_is_missing_everywhere_is_unknown_and_not_done():
    kind, message, evidence = seen(gone(), None)
    assert (kind, evidence) == (FailureKind.KILLED, Evidence.MISSING)
    assert "no longer knows" in message
    assert kind not in FREE_KINDS


def test_a_job_that_never_arrived_is_lost_at_nobodys_cost():
    verdict = seen(gone(None), None)
    assert (verdict.kind, verdict.evidence) == (FailureKind.LOST, Evidence.MISSING)
    assert ending_of(Signs(gone(None)), verdict, 5.0).job == ""
    assert verdict.kind in FREE_KINDS


# --- jobs that Slurm could not start ---


def test_a_job_whose_output_could_not_be_opened_was_never_started():
    not_opened = replace(element(SlurmState.FAILED, 0), signal=53)
    verdict = seen(gone(), not_opened)
    assert (verdict.kind, verdict.evidence) == (FailureKind.UNSTARTED, Evidence.EXIT_CODE)
    assert verdict.message.startswith("its node could not open /runs/r1/logs/slurm.log (exit code 0:53): ")
    assert seen(gone(), replace(not_opened, signal=9)).kind is FailureKind.KILLED


def test_a_container_that_did_not_start_is_not_the_tasks_fault():
    """Of a worker that nothing was heard of; a task's own error has another code, or was heard of."""
    mute = replace(gone(), is_mute=True)
    failed = element(SlurmState.FAILED, exit_code=255)
    assert seen(mute, failed).kind is FailureKind.UNSTARTED
    assert seen(gone(), failed).kind is FailureKind.KILLED
    assert seen(mute, element(SlurmState.FAILED, 1)).kind is FailureKind.KILLED
    assert seen(mute, element(SlurmState.TIMEOUT)).kind is FailureKind.TIMEOUT


def test_a_line_of_setup_that_failed_is_the_sites_fault_and_named_with_its_node(tmp_path):
    """The task is tried again, on another node; what the log says is what people are told."""
    run = imagined_run(tmp_path / "run")
    log = run.paths.task(TASK).log(3)
    log.parent.mkdir(parents=True)
    said = "slurm-ppo: line 2 of setup failed on node n7 (exit code 127): module load cuda"
    log.write_text(f"module: command not found\n{said}\n")
    failed = element(SlurmState.FAILED, SETUP_EXIT)
    control, accounts = Control(invocation=1), Accounts()
    (ended,) = explain(run.paths, [gone()], {("7", 1): failed}, control, accounts)
    assert ended.failure.kind is FailureKind.SETUP
    assert ended.failure.kind in FREE_KINDS
    assert ended.failure.message.startswith(said.removeprefix("slurm-ppo: "))
    assert ended.failure.message.endswith("A line that may fail ends with || true")
    assert ended.ending.evidence is Evidence.EXIT_CODE
    log.unlink()
    (ended,) = explain(run.paths, [gone()], {("7", 1): failed}, control, accounts)
    assert ended.failure.message.startswith("a line of setup failed on node n7")


# --- workers ---


@pytest.mark.parametrize("state", [SlurmState.TIMEOUT, SlurmState.OUT_OF_MEMORY])
def test_what_a_used_worker_ran_out_of_says_nothing_about_its_task(state):
    """Tasks before it took their part of the time, and left what they left in memory."""
    assert seen(claimed(), element(state)).kind is KINDS[state]
    of_used = seen(claimed(is_of_used=True), element(state))
    assert of_used.kind in FREE_KINDS
    assert "other tasks before" in of_used.message


def test_a_worker_that_was_put_back_into_the_queue_was_preempted():
    for state in (SlurmState.PENDING, SlurmState.RUNNING):
        again = replace(element(state), restarts=1)
        assert seen(claimed(), again).kind is FailureKind.PREEMPTED


def test_a_worker_that_went_on_after_a_failure_is_no_end_of_its_job():
    assert seen(claimed(), replace(element(SlurmState.RUNNING), restarts=0)) == (
        FailureKind.KILLED,
        "its worker went on without a commit",
        Evidence.BEAT,
    )


# --- the task's own word ---


@pytest.mark.parametrize("kind", FailureKind)
def test_a_task_knows_best_why_it_failed(kind):
    assert judge(Signs(gone(), element(SlurmState.FAILED), said(kind))) == own_word(kind)


@pytest.mark.parametrize("kind", FailureKind)
def test_but_not_that_it_used_too_much_memory(kind):
    beyond = element(SlurmState.OUT_OF_MEMORY)
    assert judge(Signs(gone(), beyond, said(kind))) == seen(gone(), beyond)


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
    assert judge(Signs(gone(), element(state), said(FailureKind.TIMEOUT))).kind is kind


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
    ending = replace(element(SlurmState.COMPLETING), restarts=0, elapsed=elapsed, time_limit=limit)
    assert judge(Signs(claimed(), ending, said(FailureKind.TIMEOUT))).kind is kind
    assert judge(Signs(claimed(), ending, said(FailureKind.ERROR))).kind is FailureKind.ERROR


def test_what_was_saved_before_a_preemption_is_not_forgotten():
    preempted = Signs(gone(), element(SlurmState.PREEMPTED), said(FailureKind.PAUSED))
    assert judge(preempted) == own_word(FailureKind.PAUSED)


def test_without_slurms_word_the_tasks_own_counts():
    assert judge(Signs(gone(), said=said(FailureKind.TIMEOUT))) == own_word(FailureKind.TIMEOUT)


# --- what slurm-ppo has done itself ---


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize("state", [SlurmState.CANCELLED, SlurmState.TIMEOUT, SlurmState.FAILED])
def test_only_what_a_cancellation_looks_like_is_taken_for_ours(state, kind):
    """Of an invocation of which all jobs were cancelled. An error of a task's own stays one."""
    ours = judge(Signs(gone(), element(state), said(kind), is_emptied=True))
    own = judge(Signs(gone(), element(state), said(kind)))
    assert ours == own or (ours.kind, ours.evidence) == (FailureKind.CANCELLED, Evidence.CANCELLATION)
    if kind in (FailureKind.ERROR, FailureKind.CONFIG, FailureKind.NUMERICS):
        assert ours == own


def test_a_worker_that_was_cancelled_for_its_silence_is_told_from_one_that_somebody_cancelled():
    cancelled = element(SlurmState.CANCELLED)
    kind, message, evidence = judge(Signs(claimed(), cancelled, is_silenced=True))
    assert (kind, evidence) == (FailureKind.KILLED, Evidence.SILENCE)
    assert message == "its worker sent no heartbeat for minutes, and was cancelled"
    assert seen(claimed(), cancelled).evidence is Evidence.SLURM
    assert judge(Signs(claimed(), element(SlurmState.NODE_FAIL), is_silenced=True)).kind is FailureKind.LOST


def test_a_job_whose_commit_was_taken_back_did_what_it_could():
    done = Signs(gone(), element(SlurmState.COMPLETED), is_taken_back=True)
    assert judge(done)[::2] == (FailureKind.INPUTS, Evidence.RETRACTION)
    assert judge(replace(done, element=element(SlurmState.NODE_FAIL))).kind is FailureKind.LOST


@given(st.sampled_from(SlurmState), st.none() | st.builds(said, st.sampled_from(FailureKind)), st.booleans())
def test_whatever_is_known_of_an_attempt_the_judgement_names_its_evidence(state, own, is_emptied):
    """By a failure file only what a failure file says; and the same signs give the same judgement."""
    signs = Signs(gone(), element(state), own, is_emptied=is_emptied)
    verdict = judge(signs)
    assert verdict == judge(signs)
    if verdict.evidence is Evidence.FAILURE_FILE:
        assert own is not None
        assert verdict[:2] == (own.kind, own.message)
    assert verdict.message
    assert (verdict.kind is FailureKind.CANCELLED and own != said(FailureKind.CANCELLED)) <= is_emptied


# --- where evidence comes from ---


def test_accounting_is_asked_once_and_only_for_what_the_queue_forgot(monkeypatch, tmp_path):
    asked = []
    told = {("8", 0): element(SlurmState.FAILED, array="8", index=0)}
    monkeypatch.setattr(
        "pipeline.executors.slurm.exit_reasons.read_ended", lambda ids, _: asked.append(ids) or told
    )
    shown = {("7", 1): element(SlurmState.TIMEOUT)}
    attempts = [Gone(TASK, 3, job, index, "") for job, index in (("7", 1), ("8", 0), ("8", 1), ("9", 1))]
    paths = RunPaths(tmp_path)
    assert evidence_of(attempts, shown, Accounts(), paths) == told | shown
    assert asked == [{"8", "9"}]
    assert evidence_of(attempts[:1], shown, Accounts(), paths) == shown
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
    accounts, gone_from_queue = Accounts(), [Gone(TASK, 3, "8", 0, ""), Gone(TASK, 3, "9", 0, "")]
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
    assert kind(Control(3, withdrawn=1)) is kind(Control(3, emptied=1)) is kind(Control(3)) is KINDS[state]
    file = paths.task(TASK).failure(attempt.number)
    file.parent.mkdir(parents=True)
    file.write_text('{"kind": "error", "message": "a bug"}')
    assert kind(Control(3, emptied=2)) is FailureKind.ERROR


@pytest.mark.parametrize("seen", [{}, {("7", 1): element(SlurmState.CANCELLED)}])
def test_what_waited_at_the_end_of_the_run_and_was_cancelled_did_not_fail(seen, tmp_path, monkeypatch):
    """Slurm may have forgotten it since. What ran, and ended otherwise, is judged as ever."""
    monkeypatch.setattr("pipeline.executors.slurm.exit_reasons.read_ended", lambda *_: {})
    paths, attempt = RunPaths(tmp_path), replace(gone(), invocation=2)

    def kind(seen: dict, control: Control) -> FailureKind:
        return explain(paths, [attempt], seen, control, Accounts())[0].failure.kind

    assert kind(seen, Control(2, withdrawn=2)) is FailureKind.CANCELLED
    assert kind(seen, Control(2, withdrawn=1)) is FailureKind.KILLED
    assert kind({("7", 1): element(SlurmState.FAILED)}, Control(2, withdrawn=2)) is FailureKind.KILLED
