"""How an attempt ended is judged once, by a pass: whoever asks is told the same."""

import json
import sys
from dataclasses import replace

import pytest

from pipeline.checks.health import check_attempts
from pipeline.cli.app import main
from pipeline.metrics.attempts import Facts, attempts_of
from pipeline.metrics.spans import SpanEnd
from pipeline.run import journal
from pipeline.run.control import read_control, write_control
from pipeline.run.endings import BY_EVIDENCE, Ending, Evidence, read_endings
from pipeline.run.failures import FailureKind
from pipeline.run.records import Records
from pipeline.run.submissions import Ledger
from pipeline.run.tasks import PREPARE, parse_task
from pipeline.workers.claims import Claim
from slurm.states import SlurmState
from tests.support.toyworld import Luck, World, is_driver, make_world


@pytest.fixture
def world(tmp_path, monkeypatch, clock) -> World:
    """A run whose first task has just begun."""
    world = make_world(tmp_path / "run", monkeypatch, 0, Luck())
    world.submit()
    waiting = (e for e in world.slurm.elements(SlurmState.PENDING) if not is_driver(e))
    element = next(element for element in waiting if world.task(element) == PREPARE)
    world.start(element)
    world.step(element)
    return world


def end(world: World, state: SlurmState, said: FailureKind | None = None) -> Claim:
    """End the job that is at work, which may say why. Returns its claim."""
    ((element, worker),) = world.workers.items()
    world.say_failure(worker.claim, said)
    world.slurm.end(element, state, int(state is not SlurmState.COMPLETED))
    return worker.claim


def judged(world: World) -> list[Ending]:
    """How attempts at the first task ended; not that their elements did."""
    return [e for e in read_endings(world.run.paths, [0]).values() if e.kind is not None]


def said_by(monkeypatch, capsys, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["slurm-ppo", *words])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "said", "kind", "evidence"),
    [
        (SlurmState.OUT_OF_MEMORY, None, FailureKind.MEMORY, Evidence.SLURM),
        (SlurmState.FAILED, None, FailureKind.KILLED, Evidence.EXIT_CODE),
        (SlurmState.FAILED, FailureKind.ERROR, FailureKind.ERROR, Evidence.FAILURE_FILE),
        (SlurmState.PREEMPTED, FailureKind.TIMEOUT, FailureKind.PREEMPTED, Evidence.SLURM),
    ],
)
def test_status_logs_doctor_and_timeline_tell_the_same_end_of_an_attempt(
    world, monkeypatch, capsys, state, said, kind, evidence
):
    run, claim = world.run, end(world, state, said)
    world.advance("a pass")
    (ending,) = judged(world)
    assert ending.attempt == claim.attempt
    assert (ending.kind, ending.evidence) == (kind, evidence)

    (event,) = (e for e in journal.read_events(run.paths.events) if e["event"] == "failed")
    status = json.loads(said_by(monkeypatch, capsys, "status", str(run.paths.root), "--json"))
    for told in (event, status["last_failure"]):
        assert (told["task"], told["attempt"], told["kind"]) == (ending.task, ending.number, ending.kind)
        assert (told["message"], told["evidence"]) == (ending.message, ending.evidence)
    line = f"{parse_task(ending.task)}, attempt {ending.number} ({kind}): {ending.message}"
    assert line in said_by(monkeypatch, capsys, "logs", str(run.paths.root), "--failed")
    finding = check_attempts(run)
    assert finding.measured == (
        f"failed attempts of current tasks: 1 {kind}; the last: prepare, attempt 1 "
        f"({kind}, {BY_EVIDENCE[evidence]}): {ending.message}"
    )
    assert timeline(world) == [(ending.attempt, ending.message)]


def timeline(world: World) -> list[tuple[str, str]]:
    """Attempts that failed, without Slurm's accounting."""
    facts = Facts(Ledger(world.run.paths).load([0]))
    spans = attempts_of(world.run, 0, Records(world.run.paths).readable, facts, 0.0)
    return [(span.attempt, span.note) for span in spans if span.end is SpanEnd.FAILED]


def test_what_cancel_ended_is_no_failed_attempt_to_anybody(world, monkeypatch, capsys):
    run, control = world.run, read_control(world.run.paths)
    write_control(run.paths, replace(control, cancelled=True, emptied=control.invocation))
    end(world, SlurmState.CANCELLED)
    world.submit()
    (ending,) = judged(world)
    assert (ending.kind, ending.evidence) == (FailureKind.CANCELLED, Evidence.CANCELLATION)
    status = json.loads(said_by(monkeypatch, capsys, "status", str(run.paths.root), "--json"))
    assert status["last_failure"] is None
    assert "no attempt has failed" in said_by(monkeypatch, capsys, "logs", str(run.paths.root), "--failed")
    assert check_attempts(run).measured == "no attempt of current tasks is known to have failed"
    assert timeline(world) == []


def test_an_attempt_whose_commit_is_taken_back_has_one_end(world):
    """By its own id; its job, which came to its end, is not judged once more."""
    claim = end(world, SlurmState.COMPLETED)
    task, attempt = claim.task, claim.attempt
    world.commit(task, attempt)
    (world.run.paths.root / world.record(task).outputs[0].path).write_text("")
    world.advance("a pass")
    (ending,) = judged(world)
    assert (ending.attempt, ending.evidence) == (attempt, Evidence.RETRACTION)
    assert not [e for e in journal.read_events(world.run.paths.events) if e["event"] == "failed"]
    world.live_on()
    world.check_is_complete()


def test_doctor_names_a_file_of_ends_that_cannot_be_read_and_the_next_pass_writes_it_again(world):
    end(world, SlurmState.FAILED, FailureKind.ERROR)
    world.advance("a pass")
    world.run.paths.endings(0).write_text("{")
    finding = check_attempts(world.run)
    assert str(world.run.paths.endings(0)) in finding.measured
    world.advance("a pass")
    assert any("it was written again from what the other says" in line for line in world.story)
    assert isinstance(next(iter(read_endings(world.run.paths, [0]).values())), Ending)
    assert check_attempts(world.run).measured.startswith("failed attempts of current tasks: 1 ")
