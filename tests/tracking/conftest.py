"""A run that is tracked on W&B."""

import pytest

from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.run.directory import Run, create_run
from pipeline.run.wandb_place import VARIABLES
from tests.support import tiny


@pytest.fixture
def home(tmp_path, monkeypatch) -> None:
    """A home without W&B's files, in a shell without its variables."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [*VARIABLES.values(), "WANDB_MODE", "WANDB_API_KEY", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(home, inputs, tmp_path) -> Run:
    overrides = [*tiny.overrides(inputs, tmp_path / "run"), "tracking=wandb"]
    return create_run(resolve(compose(overrides)))
