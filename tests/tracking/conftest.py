"""A run that is tracked on W&B's server, and the shell that names it."""

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.run.directory import Run, create_run
from pipeline.run.wandb_place import VARIABLES
from tests.support import tiny
from tests.support.wandb_server import WandbServer


@pytest.fixture
def home(tmp_path, monkeypatch) -> None:
    """A home without W&B's files, in a shell without its variables."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [*VARIABLES.values(), "WANDB_MODE", "WANDB_API_KEY", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def wandb_server(home: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with WandbServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def make(home, inputs, tmp_path) -> Callable[..., Run]:
    """Make a run in the shell as it is by then."""

    def made(*words: str) -> Run:
        overrides = tiny.overrides(inputs, tmp_path / "run")
        return create_run(resolve(compose([*overrides, "tracking=wandb", *words])))

    return made


@pytest.fixture
def sync(slurm_ppo, environment) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``slurm-ppo sync`` in the shell as it is by then."""

    def call(run: Run, *options: object) -> subprocess.CompletedProcess[str]:
        given = {name: value for name, value in os.environ.items() if name.startswith(("WANDB_", "HOME"))}
        return slurm_ppo("sync", run.paths.root, *options, env=environment | given)

    return call
