"""Ctrl-C at any moment of a command's life: one line, exit code 130, no traceback from any process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.process import interruptible
from tests.support import ROOT, tiny

HOOK = ROOT / "tests/support/interrupting"
RULE = "def score(responses, **columns):\n    return [0.0 for _ in responses]\n"


def interrupted_at(module: str, environment: dict[str, str], folder: Path, *words: object) -> tuple[int, str]:
    """A command whose process group gets SIGINT when it imports a module: its exit code, and what it said."""
    marker = folder / "interrupted"
    marker.unlink(missing_ok=True)
    more = {"INTERRUPT_AT": module, "INTERRUPT_MARKER": str(marker)}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *map(str, words)],
        env=environment | more | {"PYTHONPATH": os.pathsep.join([str(HOOK), str(folder), str(ROOT)])},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert marker.exists(), "it has never come to the module"
    # A shell says 130 of both: Python kills itself where an import of its own was interrupted.
    return 130 if done.returncode == -signal.SIGINT else done.returncode, done.stderr


@pytest.mark.parametrize("module", ["typer", "pipeline.cli.errors", "pydantic", "pydantic_core", "yaml"])
def test_while_a_command_imports(complete_run, environment, tmp_path, module):
    assert interrupted_at(module, environment, tmp_path, "status", complete_run) == (130, "interrupted\n")


@pytest.mark.parametrize("module", ["hydra", "omegaconf", "pyarrow", "stages.trials.models"])
def test_while_it_composes_and_reads(inputs, environment, tmp_path, module):
    words = tiny.overrides(inputs, tmp_path / "run")
    assert interrupted_at(module, environment, tmp_path, "validate", *words) == (130, "interrupted\n")
    assert not (tmp_path / "run").exists()


def test_under_nohup_a_terminal_that_closes_interrupts_nothing():
    """As try and doctor have it, which end at a closed terminal else."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible(signal.SIGHUP):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("module", ["typer", "pyarrow"])
def test_a_warning_of_slurm_in_an_allocation_while_a_run_is_checked(inputs, environment, tmp_path, module):
    """A run that comes to its tasks goes on with them for as long as it was warned before."""
    words = ["run", *tiny.overrides(inputs, tmp_path / "run")]
    code, said = interrupted_at(module, environment | {"INTERRUPT_BY": "SIGUSR2"}, tmp_path, *words)
    assert (code, said) == (130, "interrupted by SIGUSR2, as Slurm warns of a time limit\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("module", ["multiprocessing.spawn#2", "myrules"])
def test_while_a_rule_of_the_users_is_imported(inputs, environment, tmp_path, module):
    (tmp_path / "myrules.py").write_text(RULE)
    rule = ("reward.components.mine.kind=rule", "reward.components.mine.function=myrules:score")
    words = [*tiny.overrides(inputs, tmp_path / "run"), *rule]
    code, said = interrupted_at(module, environment, tmp_path, "validate", *words)
    assert (code, said) == (130, "interrupted\n")


@pytest.mark.parametrize("module", ["stages.attempts.execution"])
def test_while_the_server_of_tasks_imports(inputs, environment, tmp_path, module):
    """As with models it does for seconds; the driver waits for it meanwhile, and says how to go on."""
    light = [
        word for word in tiny.overrides(inputs, tmp_path / "run") if not word.startswith("rollout.engine")
    ]
    words = light if module == "torch.utils" else tiny.overrides(inputs, tmp_path / "run")
    code, said = interrupted_at(module, environment, tmp_path, "run", *words)
    assert "Traceback" not in said
    assert "KeyboardInterrupt" not in said
    assert code == 3
    assert said.splitlines()[-1] == f"interrupted; to continue: slurm-ppo resume {tmp_path / 'run'}"
