"""Fixtures that are made once per session: tiny models and prompts, and the command line as a process."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny

from tests import light, warm

if TYPE_CHECKING:
    from stages.ppo.training import Learner

ROOT = Path(__file__).parent.parent
SLOW_FILES = (
    "cluster/test_vllm.py",
    "test_quickstart.py",
    "cluster/test_faults.py",
    "cluster/test_run.py",
    "test_engine_contract.py",
    "test_remote_vllm.py",
    "cluster/test_pools.py",
    "cluster/test_devcluster.py",
    "cluster/test_people.py",
    "test_docs_commands.py",
    "cluster/test_docs_slurm.py",
    "test_calculator.py",
    "test_wheel.py",
    "test_pools.py",
    "test_invariance.py",
    "test_kill.py",
)
"""Minutes each, most of them few long tests: begun first, lest one worker is left with them at the end."""
Cli = Callable[..., subprocess.CompletedProcess[str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {str(ROOT / "tests" / name): rank for rank, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: ranks.get(str(item.path), len(ranks)))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real models of a few thousand weights, and prompts, that no test changes."""
    return tiny.make_inputs(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directories for light tasks (see tests/light.py), and prompts, that no test changes."""
    return light.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of the user's shell, without what would point a test at a network or a scheduler."""
    hidden = ("WANDB_", "SLURM_", "HF_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"WANDB_MODE": "offline", "NO_COLOR": "1", "COLUMNS": "80", "PYTHONPATH": path}


@pytest.fixture(scope="session")
def warm_commands(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[warm.WarmCommands]:
    """A process that has imported the command line."""
    commands = warm.WarmCommands(environment, tmp_path_factory.mktemp("warm"))
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def slurm_ppo(environment: dict[str, str], warm_commands: warm.WarmCommands) -> Cli:
    """Run the command line as a user does: ``slurm_ppo("status", run)``."""

    def call(*arguments: object, timeout: float = 300, **options: object) -> subprocess.CompletedProcess[str]:
        settings: dict = {"env": environment, "cwd": ROOT} | options
        words = list(map(str, arguments))
        if settings.keys() == {"env", "cwd"} and warm_commands.fits(settings["env"]):
            return warm_commands.run(words, settings["env"], settings["cwd"], timeout)
        command = [sys.executable, "-m", "pipeline", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **settings)

    return call


@pytest.fixture(scope="session")
def complete_run(inputs: Path, slurm_ppo: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run, two iterations of two shards, evaluated. Tests must not change it."""
    run_dir = tmp_path_factory.mktemp("complete") / "run"
    done = slurm_ppo(
        "run",
        *tiny.overrides(inputs, run_dir, f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1"),
    )
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """DeepSpeed's group of one rank, for tests that train in their own process."""
    import learning

    with learning.process_group():
        yield


@pytest.fixture
def make(models: Path, tmp_path: Path, process_group: None) -> "Callable[..., Learner]":
    """A learner of the given settings, from the same policy each time."""
    import learning

    return lambda *more: learning.make_learner(models, tmp_path / "run", *more)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that only sleeping spends; files that need not survive a power cut."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return now
