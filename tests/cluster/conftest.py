"""A real Slurm for the tests in this folder, shared where they leave it as it was."""

import os
import pwd
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.devcluster import (
    DevclusterError,
    Layout,
    PackagesMissing,
    PracticeCluster,
    network,
    programs,
    start,
)
from tests.cluster.scenario import SHARDS, Cli, Runs, wait_for
from tests.support import tiny

OwnCluster = Callable[..., PracticeCluster]

HAS_FAILED = pytest.StashKey[bool]()
SHARED = ("cluster", "cluster_with_accounting", "cluster_with_limits")
"""Fixtures of clusters that tests share."""

collect_ignore = [] if "SOAK_ROUNDS" in os.environ else ["test_queries.py"]
"""What takes minutes that have to pass, for `make soak`."""


def without_network() -> str:
    """Why the clusters of this session have no network filesystem; empty where they have one."""
    if os.environ.get("TEST_FILESYSTEM") == "local":
        return "TEST_FILESYSTEM=local asks for the local disk"
    try:
        programs.check(Layout(network_filesystem=True), accounting=False)
        network.check()
    except DevclusterError as error:
        return str(error)
    return ""


NETWORK = "CI" in os.environ or not without_network()
"""Whether clusters have a network filesystem. In CI one that cannot be had is a failure."""


def start_cluster(folder: Path, layout: Layout | None = None, accounting: bool = False) -> PracticeCluster:
    try:
        return start(folder, layout, accounting)
    except PackagesMissing as error:
        if "CI" in os.environ:
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PracticeCluster]:
    """Without accounting. Every node must be idle again after a test."""
    running = start_cluster(tmp_path_factory.mktemp("cluster"), Layout(network_filesystem=NETWORK))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def cluster_with_accounting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PracticeCluster]:
    """``sacct`` answers. Every node must be idle again after a test."""
    layout = Layout(network_filesystem=NETWORK)
    running = start_cluster(tmp_path_factory.mktemp("accounting"), layout, accounting=True)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def cluster_with_limits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PracticeCluster]:
    """With accounting whose limits are enforced, of which none is set, and which knows this user alone."""
    layout = Layout(more=("AccountingStorageEnforce=limits",))
    running = start_cluster(tmp_path_factory.mktemp("limits"), layout, accounting=True)
    if os.getuid():  # root has an account on every cluster
        user = pwd.getpwuid(os.getuid()).pw_name
        for words in (("account", "lab"), ("user", user, "account=lab")):
            assert running.call("sacctmgr", "-i", "add", *words).returncode == 0
    yield running
    running.stop()


def empty(running: PracticeCluster) -> None:
    running.call("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
    wait_for(lambda: not running.call("squeue", "--noheader").stdout, "an empty queue", 90)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = (yield).get_result()
    if report.when == "call":
        item.stash[HAS_FAILED] = report.failed


@pytest.fixture(autouse=True)
def _failures_are_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the jobs that a test left which failed: they would keep the places of all later ones."""
    shared = [request.getfixturevalue(name) for name in SHARED if name in request.fixturenames]
    yield
    if request.node.stash.get(HAS_FAILED, False):
        for running in shared:
            empty(running)


@pytest.fixture
def own_cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OwnCluster]:
    """Start clusters that a test may break: ``own_cluster(Layout(...), accounting=True)``.

    Every other round of those that are disturbed at random has its runs on the local disk.
    """
    call = getattr(request.node, "callspec", None)
    is_local = call is not None and call.params.get("chance", 0) % 2 == 1
    started: list[PracticeCluster] = []

    def bring_up(
        layout: Layout | None = None, accounting: bool = False, has_runs: bool = False
    ) -> PracticeCluster:
        """``has_runs``: on a network filesystem, where this machine can have one."""
        if has_runs and NETWORK and not is_local:
            layout = replace(layout or Layout(), network_filesystem=True)
        running = start_cluster(tmp_path / f"cluster{len(started)}", layout, accounting)
        started.append(running)
        return running

    yield bring_up
    for running in started:
        if running.folder.exists():
            running.stop()


@pytest.fixture(scope="session")
def make_run(inputs: Path, environment: dict[str, str], slurm_ppo: Cli) -> Runs:
    """Light runs of four shards."""
    return Runs(inputs, environment, slurm_ppo)


@pytest.fixture(scope="session")
def make_real_run(models: Path, environment: dict[str, str], slurm_ppo: Cli) -> Runs:
    """Of real models, in two shards."""
    return Runs(models, environment, slurm_ppo, shards=2)


@pytest.fixture(scope="session")
def complete_run(inputs: Path, slurm_ppo: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A light run on one machine, two iterations, evaluated. Tests must not change it."""
    heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
    return on_one_machine(inputs, slurm_ppo, tmp_path_factory.mktemp("complete") / "run", *heldout)


@pytest.fixture(scope="session")
def long_local_run(inputs: Path, slurm_ppo: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A light run on one machine. Shorter ones have the same policies; tests must not change it."""
    return on_one_machine(inputs, slurm_ppo, tmp_path_factory.mktemp("long_local") / "run", "iterations=20")


def on_one_machine(inputs: Path, slurm_ppo: Cli, root: Path, *more: str) -> Path:
    done = slurm_ppo("run", *tiny.overrides(inputs, root, f"rollout.num_shards={SHARDS}", *more))
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(params=range(int(os.environ.get("SOAK_ROUNDS", "1"))), ids="round{}".format)
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Moments and victims of disturbances, others in each round. CHANCE_SEED repeats what a round printed."""
    seed = int(os.environ.get("CHANCE_SEED", random.randrange(10**6)))
    print(f"CHANCE_SEED={seed}")
    return random.Random(seed)
