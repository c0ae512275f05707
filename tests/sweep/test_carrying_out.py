"""A sweep's command among runs made by hand: what is due, what is left alone, and who can be told to stop."""

import signal
from pathlib import Path

import pytest

from pipeline.cli import sweep as sweep_command
from pipeline.cli.sweep import Asked, cancel_sweep, carry_out, drop_point
from pipeline.cli.sweep_runs import Runner
from pipeline.config.allocation import AllocationConfig
from pipeline.config.evaluate import EvaluateConfig
from pipeline.run.control import Control, read_control, write_control
from pipeline.run.lease import hold
from pipeline.run.tasks import Stage, Task
from pipeline.sweep.grid import SweepError
from pipeline.sweep.manifest import SweepPoint, locks_of
from slurm.commands import SlurmMissing
from tests.support.reportrun import SLURM
from tests.support.sweeps import make_sweep

RATES = ["1e-6", "3e-6", "1e-5"]


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "lr"


@pytest.fixture
def due(monkeypatch) -> list[list[SweepPoint]]:
    """Points of each command that are carried out, in place of carrying them out."""
    seen: list[list[SweepPoint]] = []
    monkeypatch.setattr(Runner, "carry_out", lambda runner, points: seen.append(list(points)) or [])
    return seen


def test_a_run_goes_on_while_policies_are_left_to_measure(root, due):
    """Ctrl-C after the last row, while the program was at work."""
    measured = EvaluateConfig(command=("measure", "{policy}", "{output}"), command_every=20)
    _, runs = make_sweep(root, RATES[:2], 1, evaluate=measured)
    last = [run.paths.task(Task(20, Stage.BENCHMARK)).record for run in runs]
    for record in last:
        record.parent.mkdir(parents=True)
    last[0].touch()
    assert carry_out(Asked([str(root)])) == 3
    last[1].touch()
    assert carry_out(Asked([str(root)])) == 0
    assert [[point.settings["update.learning_rate"] for point in points] for points in due] == [["3e-6"], []]


def test_a_run_that_another_command_drives_is_left_alone(root, monkeypatch, capsys):
    monkeypatch.setattr(sweep_command, "_END_SECONDS", 0.0)
    sweep, runs = make_sweep(root, RATES[:1], 1)
    with hold(runs[0].paths.locks):
        assert carry_out(Asked([str(root)]), point=sweep.names[0]) == 3
    assert "left alone: a driver is active on this run" in capsys.readouterr().err


class Warned(Runner):
    """Gets a signal when it has begun its first run, which has not even imported anything."""

    number = signal.SIGINT

    def _say(self, child, text) -> None:
        super()._say(child, text)
        if not self._is_stopping:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_runs_that_are_stopped_before_they_have_begun_are_interrupted_not_failed(root, capfd, number):
    """By Ctrl-C, and by what Slurm sends before an allocation ends."""
    sweep, _ = make_sweep(root, RATES[:2], 1)
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with hold(locks_of(root)) as lease:
            runner = Warned(root, root, 1, lease)
            runner.number = number
            ends = runner.carry_out(sweep.points)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [(end.point, end.code) for end in ends] == [(sweep.points[0], 3)]
    assert "[1/2] not complete" in capfd.readouterr().err


def test_runs_in_an_allocation_follow_each_other(root, due):
    make_sweep(root, RATES[:2], 1, scheduler=AllocationConfig())
    with pytest.raises(SweepError, match="--at-once=2: in an allocation each run takes all of it"):
        carry_out(Asked([str(root)], at_once=2))
    carry_out(Asked([str(root)], at_once=1))
    assert len(due) == 1


@pytest.fixture
def on_slurm(root, monkeypatch):
    """Three runs that wait in the queue; Slurm is asked to cancel them."""
    sweep, runs = make_sweep(root, RATES, 1, scheduler=SLURM)
    for run in runs:
        write_control(run.paths, Control(1))
    monkeypatch.setattr("pipeline.cli.queue.cancel_all", lambda run: 2)
    return sweep, runs


def test_cancel_reaches_the_runs_behind_one_that_is_spoilt(root, on_slurm, monkeypatch, capsys):
    sweep, runs = on_slurm
    runs[0].paths.config_yaml.write_text("changed: true\n")
    assert cancel_sweep(root) == 1
    said = capsys.readouterr()
    assert said.out.count("cancelled 2 jobs") == 2
    assert f"error: not cancelled: {sweep.names[0]}: " in said.err
    assert [read_control(run.paths).cancelled for run in runs] == [False, True, True]


def test_cancel_says_of_which_runs_slurm_did_not_answer(root, on_slurm, monkeypatch, capsys):
    def away(run):
        raise SlurmMissing("squeue is not here")

    monkeypatch.setattr("pipeline.cli.queue.cancel_all", away)
    assert cancel_sweep(root) == 1
    assert capsys.readouterr().err.count("squeue is not here") == 3


def test_what_a_run_that_is_dropped_leaves_in_the_queue_is_said(root, on_slurm):
    name = on_slurm[0].names[1]
    said = drop_point(Asked([str(root)]), name)
    assert said.endswith(f"its jobs in the queue; to cancel them: slurm-ppo cancel {root / name}")
