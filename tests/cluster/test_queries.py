"""How often Slurm is asked: by a run with its workers, passes and people who watch, and by a user's runs."""

import os
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.slurm_costs import LOG, Call, Kind, most_in_a_minute, read_calls, write_wrappers
from tests.cluster.scenario import SlurmRun, take, wait_for

pytestmark = pytest.mark.soak  # minutes have to pass
MOST, MOST_OF_SEVERAL = 12, 30
"""Queries in a minute: of one run, and of a user's runs together."""
_SECONDS = 75.0


@pytest.fixture
def wrappers(tmp_path) -> Path:
    return write_wrappers(tmp_path / "wrappers")


def with_calls_in(run: SlurmRun, wrappers: Path, log: Path) -> SlurmRun:
    """Note the calls of everything that the run's commands and jobs start."""
    path = f"{wrappers}{os.pathsep}{run.environment['PATH']}"
    run.environment |= {"PATH": path, LOG: str(log), "XDG_CACHE_HOME": str(log.parent / "cache")}
    return run


def queries_of(log: Path, since: float) -> list[Call]:
    """Without what a person's own commands ask at the begin: once, of limits."""
    return [call for call in read_calls(log) if call.kind is Kind.QUERY and call.time > since]


def assert_few(queries: list[Call], most: int) -> None:
    asked = most_in_a_minute([call.time for call in queries])
    assert 0 < asked <= most, Counter(call.program for call in queries)


def watch(run: SlurmRun) -> subprocess.Popen[str]:
    return run.begin("watch", run.root, "--interval", "2")


def test_a_run_that_is_watched_asks_seldom_however_short_its_iterations_are(
    cluster_with_accounting, make_run, tmp_path, wrappers
):
    """Two places for four shards, so that workers and jobs come and go."""
    words = ["iterations=40", "evaluate.every=2", *take("0.1", "rollout", "reward", "update")]
    run = with_calls_in(
        make_run(cluster_with_accounting, tmp_path / "run", *words), wrappers, tmp_path / "calls"
    )
    run.submit()
    began = time.time()
    viewers = [watch(run) for _ in range(3)]
    try:
        wait_for(lambda: time.time() - began > _SECONDS or len(run.rows()) == 40, "a minute", 120)
    finally:
        run.command("cancel", run.root)
        for viewer in viewers:
            viewer.terminate()
            viewer.wait(30)
    assert len(run.rows()) > 2, run.story()
    assert_few(queries_of(tmp_path / "calls", began), MOST)
    assert not run.events("failed"), run.story()


def test_a_users_runs_ask_hardly_more_often_than_one(cluster_with_accounting, make_run, tmp_path, wrappers):
    words = ["iterations=40", "rollout.num_shards=2", *take("0.2", "rollout", "reward", "update")]
    log, names = tmp_path / "calls", [f"run{number}" for number in range(4)]
    runs = [
        with_calls_in(make_run(cluster_with_accounting, tmp_path / n, *words), wrappers, log) for n in names
    ]
    for run in runs:
        run.submit()
    began = time.time()
    wait_for(
        lambda: time.time() - began > _SECONDS or all(len(r.rows()) == 40 for r in runs), "a minute", 120
    )
    for run in runs:
        run.command("cancel", run.root)
    assert all(run.rows() for run in runs), runs[0].story()
    assert_few(queries_of(log, began), MOST_OF_SEVERAL)
