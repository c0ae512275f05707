"""`make quickstart`, step by step: the demo is made, the run learns, the judge would say if it did not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart"
ROOT = EXAMPLE.parent.parent


@pytest.fixture(scope="session")
def workshop(environment, tmp_path_factory) -> Path:
    """A folder with the demo where experiment=quickstart looks for it."""
    folder = tmp_path_factory.mktemp("workshop")
    command = [sys.executable, EXAMPLE / "make_demo.py", "--out", folder / ".cache" / "quickstart"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def judge(run_dir: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLE / "judge.py", run_dir]
    paths = environment | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=paths, capture_output=True, text=True, timeout=60)


def run_quickstart(slurm_ppo, environment, workshop: Path, run_dir: Path, *overrides: str) -> str:
    paths = environment | {"PYTHONPATH": str(ROOT)}
    words = ("run", "experiment=quickstart", f"run_dir={run_dir}", *overrides)
    done = slurm_ppo(*words, cwd=workshop, env=paths)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_run_learns_and_so_does_the_rule_it_never_sees(slurm_ppo, environment, workshop, tmp_path):
    printed = run_quickstart(slurm_ppo, environment, workshop, tmp_path / "run")
    assert len(re.findall(r"^ +\d+ ", printed, re.MULTILINE)) >= 12, "a row per iteration"
    assert f"run directory: {tmp_path / 'run'}" in printed
    assert "report.html" in printed
    assert (tmp_path / "run" / "report.html").stat().st_size > 1_000_000
    verdict = judge(tmp_path / "run", environment)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    gains = [float(line.split()[-1]) for line in verdict.stdout.splitlines()[1:]]
    assert len(gains) == 2
    assert min(gains) >= 0.5


def test_the_judge_says_so_when_nothing_was_learnt(slurm_ppo, environment, workshop, tmp_path):
    overrides = ("iterations=6", "update.learning_rate=1e-12", "evaluate.every=0", "data.heldout=null")
    run_quickstart(slurm_ppo, environment, workshop, tmp_path / "run", *overrides)
    verdict = judge(tmp_path / "run", environment)
    assert verdict.returncode == 1
    assert "has not learnt" in verdict.stderr


def test_the_demo_is_made_once(environment, workshop):
    demo = workshop / ".cache" / "quickstart"
    before = (demo / "policy" / "model.safetensors").stat().st_mtime_ns
    command = [sys.executable, EXAMPLE / "make_demo.py", "--out", demo]
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0
    assert "already" in again.stdout + again.stderr
    assert (demo / "policy" / "model.safetensors").stat().st_mtime_ns == before
