"""What files of stages share: a process that trains for many tests, runs of a test's own, one thread."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from pipeline.run.directory import Run, load_run
from pipeline.run.tasks import PREPARE
from stages.context import Context
from tests.support.processes import fork_server, make_run


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=fork_server()) as pool:
        yield pool


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(copied_run: Path) -> Run:
    """A complete run of a test's own, which still names the shared one."""
    return load_run(copied_run)


@pytest.fixture
def context(models: Path, tmp_path: Path) -> Context:
    run = make_run(models, tmp_path / "run")
    return Context(run.paths, run.config, PREPARE, "test")
