"""A run that is tracked on W&B."""

import pytest

from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.run.directory import Run, create_run
from tests.support import tiny


@pytest.fixture
def run(inputs, tmp_path, monkeypatch) -> Run:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    overrides = [*tiny.overrides(inputs, tmp_path / "run"), "tracking=wandb"]
    return create_run(resolve(compose(overrides)))
