"""Whoever makes a pass waits for nothing while he holds the lease: others could decide nothing meanwhile."""

import time
from collections import Counter
from dataclasses import replace

import pytest

from pipeline.cli.summary import say_how_it_ended
from pipeline.decide.reconcile import MOST_SETUPS
from pipeline.decide.situation import Situation
from pipeline.executors.slurm import exit_reasons, passes
from pipeline.executors.slurm.passes import PASS_SECONDS, TakenOver, make_pass
from pipeline.orchestrate import jobs
from pipeline.orchestrate.driver import Outcome
from pipeline.run import journal
from pipeline.run.control import begin_invocation, take_over
from pipeline.run.lease import holder_of
from pipeline.run.owner import Owner
from pipeline.run.submissions import Ledger, job_kind_of
from pipeline.status.snapshot import read_status
from pipeline.workers.handover import Handover, Instructions, publish_instructions
from slurm import commands
from slurm.commands import SlurmTimeout
from slurm.ended import NoAnswer
from slurm.setup_lines import SETUP_EXIT
from slurm.states import SlurmState
from tests.support.passes import Watcher, pass_over
from tests.support.toyworld import MIN_JOB_AGE, Luck, World, is_driver, make_world


@pytest.fixture
def world(tmp_path, monkeypatch, clock) -> World:
    world = make_world(tmp_path / "run", monkeypatch, 1, Luck())
    begin_invocation(world.run.paths)
    monkeypatch.setattr(passes, "behind", lambda *_: [])  # W&B has no part in it
    return world


@pytest.fixture
def waits(world, monkeypatch, clock) -> list[str | None]:
    """Who held the lease at each wait."""
    found = []

    def sleep(seconds: float) -> None:
        found.append(holder_of(world.run.paths.locks))
        clock[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    return found


def advance(world: World) -> None:
    make_pass(world.run, Watcher(world.story))


def lose_answers(world: World, program: str, times: int) -> None:
    left = iter(range(times))

    def lose(called: str) -> None:
        if called == program and next(left, None) is not None:
            raise SlurmTimeout([program], None, "no answer in 7 s")

    world.slurm.before = lose


def test_a_driver_job_of_who_had_the_run_before_does_nothing_more(world, monkeypatch):
    """Whoever took it over has jobs of his own, which it would take for lost."""
    ada, ben = Owner("ada", 61001, "gold"), Owner("ben", 61002, "gold")
    monkeypatch.setenv("SLURM_JOB_UID", str(ada.uid))
    monkeypatch.setenv("SLURM_JOB_USER", ada.user)
    advance(world)
    take_over(world.run.paths, ben, ada)
    count, asked = len(world.slurm.jobs), []
    world.slurm.before = asked.append
    with pytest.raises(TakenOver, match="was taken over by ben on cluster gold: jobs of ada do no more"):
        advance(world)
    assert not asked
    monkeypatch.setenv("SLURM_JOB_UID", str(ben.uid))
    advance(world)
    assert len(world.slurm.jobs) >= count
    assert asked


@pytest.mark.parametrize("program", ["sbatch", "squeue"])
def test_a_command_that_does_not_answer_is_asked_again_once_the_lease_was_free(world, waits, program):
    lose_answers(world, program, 3)
    advance(world)
    assert waits, "it had to wait"
    assert set(waits) == {None}
    assert {job_kind_of(element.job.name) for element in world.slurm.elements()} >= {"guard", "prepare"}
    assert not [e for e in journal.read(world.run.paths.events) if e["event"] == "failed"]


def test_commands_share_the_seconds_for_which_the_lease_is_held(world, monkeypatch, clock):
    given = []
    real = world.slurm.run

    def note(arguments, timeout, input=None):
        if holder_of(world.run.paths.locks) is not None:
            given.append(timeout)
        return real(arguments, timeout, input)

    monkeypatch.setattr(commands, "_run_once", note)
    advance(world)
    given.clear()
    world.slurm.end(next(e for e in world.slurm.elements() if is_driver(e)), SlurmState.CANCELLED)
    clock[0] += 60.0
    advance(world)
    assert given, "a guard is submitted again"
    assert max(given) <= PASS_SECONDS


def test_signals_and_cancellations_are_looked_after_once_the_lease_is_free(world, monkeypatch):
    advance(world)
    begun, finished = [], []

    class Begun:
        def finish(self) -> None:
            finished.append(holder_of(world.run.paths.locks))
            if len(finished) == 1:
                raise SlurmTimeout(["scancel"], None, "no answer")

    monkeypatch.setattr(commands, "begin_command", lambda command, _: begun.append(tuple(command)) or Begun())
    for task in world.run.plan.all_tasks():
        world.commit(task, "1-a")
    advance(world)
    assert set(Counter(begun).values()) == {2}, "what waits when a run is over is cancelled until it is"
    assert set(finished) == {None}


def test_accounting_that_is_slow_is_asked_while_the_lease_is_free(world, monkeypatch, clock):
    advance(world)
    asked = []

    def slow(ids, timeout: float = 60.0):
        asked.append((timeout < PASS_SECONDS, holder_of(world.run.paths.locks) is None))
        if timeout < PASS_SECONDS:
            raise NoAnswer("no answer")
        return {}

    monkeypatch.setattr(exit_reasons, "read_ended", slow)
    (prepare,) = (e for e in world.slurm.elements() if job_kind_of(e.job.name) == "prepare")
    world.slurm.end(prepare, SlurmState.FAILED, 1)
    time.sleep(MIN_JOB_AGE)
    world.slurm.forget_ended()
    advance(world)
    assert asked == [(True, False), (False, True)]
    failed = [e["task"] for e in journal.read(world.run.paths.events) if e["event"] == "failed"]
    assert failed == ["0/prepare/0"]


def test_slurm_opens_what_is_as_old_as_the_run(world):
    """So no job fails to start as a node does not see a new folder yet, or as a disk is full; for driver jobs
    it opens nothing. Runs that an earlier version made get the file with the next submission."""
    output = world.run.paths.slurm_log
    assert output.read_text() == "", "made with the run"
    output.unlink()
    advance(world)
    ledger = Ledger(world.run.paths)
    scripts = {
        submission.is_of_stage: ledger.script(submission).read_text() for submission in ledger.load({0})
    }
    assert f"#SBATCH --output={output}\n" in scripts[True]
    assert "#SBATCH --output=/dev/null\n" in scripts[False]
    assert output.read_text() == ""


# --- what a pass hands to the rules ---


NOTHING = Instructions()


def seen_by_a_pass(world: World, monkeypatch, reason: str, told: Instructions = NOTHING) -> Situation:
    """Return what a pass sees while the run's first elements wait for a reason.

    Args:
        told: what the pass before has told workers.
    """
    found: list[Situation] = []
    world.submit()
    world.look()
    look = world.looks[-1]
    monkeypatch.setattr(jobs, "staff", lambda seen, real=jobs.staff: found.append(seen) or real(seen))
    assert "|None|" in look.text
    publish_instructions(world.run.paths, told)
    pass_over(world.run, world.story, replace(look, text=look.text.replace("|None|", f"|{reason}|")))
    return found[-1]


@pytest.mark.parametrize(
    ("reason", "lacks_room", "is_limited"),
    [("Resources", True, False), ("QOSMaxJobsPerUserLimit", True, True), ("None", False, False)],
)
def test_whether_an_element_waits_for_room_or_for_a_limit_of_its_user(
    world, monkeypatch, reason, lacks_room, is_limited
):
    pending = seen_by_a_pass(world, monkeypatch, reason).crew.pending
    assert pending
    assert {(one.lacks_room, one.is_limited) for one in pending} == {(lacks_room, is_limited)}


def test_what_the_pass_before_has_promised_counts(world, monkeypatch):
    promised = Handover("7_0r0", "rollout", at=1234.0, job="9_0")
    seen = seen_by_a_pass(world, monkeypatch, "Resources", Instructions((promised,)))
    assert seen.promised == (promised,)


# --- a line of setup that no node passes ---


_MOST = 20


def test_a_run_whose_setup_fails_wherever_it_is_tried_fails_and_says_what_to_mend(
    tmp_path, monkeypatch, clock, capsys
):
    world = make_world(tmp_path / "run", monkeypatch, 3, Luck())
    world.submit()
    tries, done = 0, None
    while (done is None or done.outcome is None) and tries < _MOST:
        tries += 1
        for element in world.slurm.elements(SlurmState.PENDING):
            if element.is_free and not is_driver(element):
                world.slurm.start(element)
                world.slurm.end(element, SlurmState.FAILED, SETUP_EXIT)
        done = pass_over(world.run, world.story)
    assert (done.outcome, tries) == (Outcome.FAILED, MOST_SETUPS[False])
    failed = [event for event in journal.read(world.run.paths.events) if event["event"] == "failed"]
    assert {event["kind"] for event in failed} == {"setup"}
    assert say_how_it_ended(world.run, done) == 2
    said = capsys.readouterr().err
    assert "a line of setup failed on node node" in said
    assert "fix the settings and run the same command again" in said
    assert read_status(world.run).state == "failed"
