"""How often Slurm is asked: by a run with its workers, passes and people who watch, and by a user's runs."""

import os
import subprocess
import time

import pytest

from tests.cluster.scenario import SlurmRun, take, wait_for
from tests.support.counting import Call, Counting, most_in_a_minute, put_in_front

pytestmark = pytest.mark.soak
MOST, MOST_OF_SEVERAL = 12, 30
"""Queries in a minute: of one run, and of a user's runs together."""
_SECONDS = 75.0
_RUNS = 20


@pytest.fixture
def counting(environment, tmp_path) -> Counting:
    return put_in_front(tmp_path / "wrappers", environment["PATH"])


def with_calls_in(run: SlurmRun, counting: Counting) -> SlurmRun:
    """Note the calls of everything that the run's commands and jobs start."""
    run.environment = counting.environment(run.environment)
    run.environment["XDG_CACHE_HOME"] = str(counting.folder.parent / "cache")
    return run


def calls_of(counting: Counting, since: float) -> list[Call]:
    """Without what a person's own commands ask at the begin: once, of limits. Of ``watch`` that is later."""
    asked_once = ("scontrol", ("show", "config"))
    return [
        call for call in counting.calls() if call.time > since and (call.program, call.words) != asked_once
    ]


def assert_few(calls: list[Call], most: int) -> None:
    asked, programs = most_in_a_minute(calls)
    assert 0 < asked <= most, programs


def watch(run: SlurmRun) -> subprocess.Popen[str]:
    return run.begin("watch", run.root, "--interval", "2")


def test_a_run_that_is_watched_asks_seldom_however_short_its_iterations_are(
    cluster_with_accounting, make_run, tmp_path, counting
):
    """Two places for four shards, so that workers and jobs come and go."""
    words = ["iterations=40", *take("0.1", "rollout", "reward", "update")]
    run = with_calls_in(make_run(cluster_with_accounting, tmp_path / "run", *words), counting)
    run.submit()
    began = time.time()
    viewers = [watch(run) for _ in range(3)]
    try:
        wait_for(lambda: time.time() - began > _SECONDS or len(run.rows()) == 40, "a minute", 120)
        calls = calls_of(counting, began)
    finally:
        run.command("cancel", run.root)
        for viewer in viewers:
            viewer.terminate()
            viewer.wait(30)
    assert len(run.rows()) > 2, run.story()
    assert_few(calls, MOST)
    assert not run.events("failed"), run.story()


def test_a_users_runs_ask_hardly_more_often_than_one(cluster_with_accounting, make_run, tmp_path, counting):
    words = ["iterations=40", "rollout.num_shards=2", *take("0.2", "rollout", "reward", "update")]
    roots = [tmp_path / f"run{number}" for number in range(_RUNS)]
    runs = [with_calls_in(make_run(cluster_with_accounting, root, *words), counting) for root in roots]
    for run in runs:
        run.submit()
    began = time.time()
    wait_for(lambda: time.time() - began > _SECONDS, "a minute", 120)
    calls = calls_of(counting, began)
    runs[0].cluster.call("scancel", f"--user={os.getuid()}")
    assert any(run.rows() for run in runs), runs[0].story()
    assert_few(calls, MOST_OF_SEVERAL)
