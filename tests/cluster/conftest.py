"""A real Slurm for the tests in this folder, shared where they leave it as it was."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.scenario import Cli, Runs
from slurm.devcluster import Cluster, Layout, PackagesMissing, start

OwnCluster = Callable[..., Cluster]


def _start(folder: Path, layout: Layout | None = None, accounting: bool = False) -> Cluster:
    try:
        return start(folder, layout, accounting)
    except PackagesMissing as error:
        if "CI" in os.environ:
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Without accounting. Every node must be idle again after a test."""
    running = _start(tmp_path_factory.mktemp("cluster"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def cluster_with_accounting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """``sacct`` answers. Every node must be idle again after a test."""
    running = _start(tmp_path_factory.mktemp("accounting"), accounting=True)
    yield running
    running.stop()


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[OwnCluster]:
    """Start clusters that a test may break: ``own_cluster(Layout(...), accounting=True)``."""
    started: list[Cluster] = []

    def bring_up(layout: Layout | None = None, accounting: bool = False) -> Cluster:
        running = _start(tmp_path / f"cluster{len(started)}", layout, accounting)
        started.append(running)
        return running

    yield bring_up
    for running in started:
        if running.folder.exists():
            running.stop()


@pytest.fixture(scope="session")
def make_run(inputs: Path, environment: dict[str, str], slurm_ppo: Cli) -> Runs:
    """Light runs, or ones of tasks that do nothing: ``make_run.of_noops``."""
    return Runs(inputs, environment, slurm_ppo)


@pytest.fixture(scope="session")
def make_real_run(models: Path, environment: dict[str, str], slurm_ppo: Cli) -> Runs:
    """Of real models."""
    return Runs(models, environment, slurm_ppo)


@pytest.fixture(params=range(int(os.environ.get("SOAK_ROUNDS", "1"))), ids="round{}".format)
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Moments and victims of disturbances, others in each round. CHANCE_SEED repeats what a round printed."""
    seed = int(os.environ.get("CHANCE_SEED", random.randrange(10**6)))
    print(f"CHANCE_SEED={seed}")
    return random.Random(seed)
