"""A run of one real cluster, looked at and acted upon from another that sees the same folder: nothing of it
is ended, there is no second set of jobs, and a take-over moves it."""

import json
import os
import pwd
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.run.control import read_control
from pipeline.run.paths import RunPaths
from slurm.devcluster import Layout, PracticeCluster
from tests.cluster.scenario import Hold, SlurmRun, assert_same_policy, queue_of
from tests.support.tables import ON_CLUSTER, sample

IDS_OF_THE_OTHER = 5001
"""Two sites hardly count their jobs alike."""
ACTING = (
    *(["submit"], ["resume"], ["resume", "--from", "rollout@1"]),
    *(["cancel"], ["clean", "--yes"], ["advance"]),
)
"""Commands that act on a run, with their options."""


@pytest.fixture
def other(own_cluster) -> PracticeCluster:
    return own_cluster(Layout(more=(f"FirstJobId={IDS_OF_THE_OTHER}",)))


@pytest.fixture
def folder() -> Iterator[Path]:
    """That both clusters see, with a short name: what is refused is one line for people."""
    made = Path(tempfile.mkdtemp(prefix="two-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def hold(folder) -> Hold:
    """Keeps rollouts at work, so that what is done to them shows."""
    found = Hold(folder / "hold")
    found.begin()
    return found


@pytest.fixture
def run(cluster, make_run, hold, folder) -> SlurmRun:
    """At work on its own cluster."""
    made = make_run(cluster, folder / "run", "iterations=2", hold.on("rollout"))
    made.submit()
    made.wait_for(lambda: list(folder.glob("hold.*")), "rollouts at work")
    return made


def seen_from(run: SlurmRun, cluster: PracticeCluster) -> SlurmRun:
    return replace(run, cluster=cluster, environment=run.environment | cluster.environment())


def rollouts(run: SlurmRun) -> set[str]:
    return {job.id for job in run.jobs("RUNNING") if job.stage == "rollout"}


@ON_CLUSTER
def test_from_another_cluster_a_live_run_is_seen_as_alive_and_left_alone(
    run, other, cluster, hold, long_local_run
):
    there, home, me = seen_from(run, other), cluster.identity.name, pwd.getpwuid(os.getuid()).pw_name
    before, asked = rollouts(run), read_control(RunPaths(run.root))
    hidden = f"its jobs are not seen from here, where {other.identity.name} is asked"
    shown = " ".join(there.command("status", run.root).stdout.split())
    assert f"runs as {me} on cluster {home}; last commit " in shown
    assert hidden in shown
    assert "resume" not in shown
    assert json.loads(there.command("status", run.root, "--json").stdout)["state"] == "running"
    examined = " ".join(there.command("doctor", run.root, "--no-probe").stdout.split())
    assert f"jobs: runs as {me} on cluster {home}" in examined
    assert f"jobs of stages: the run was submitted to cluster {home}" in examined
    assert not re.search("problem (jobs|workers|driver|requests|commits)", examined), examined
    for command, *options in sample(ACTING, 0.5):
        done = there.command(command, run.root, *options)
        assert done.returncode == 2, (command, done.stderr)
        told = " ".join(done.stderr.split())
        assert f"was submitted to cluster {home}, and this machine asks {other.identity.name}" in told
        assert f"run this on a machine of {home}, or take the run over: slurm-ppo resume" in told
    assert not queue_of(other, "--states=all")
    assert asked == read_control(RunPaths(run.root))
    assert before == rollouts(run)
    hold.end()
    run.wait_until_complete(120)
    assert_same_policy(run, long_local_run)
    assert not run.events("failed")


@ON_CLUSTER
def test_taken_over_from_another_cluster_a_run_goes_on_there_and_its_former_jobs_leave(
    run, other, cluster, hold, long_local_run
):
    there, home = seen_from(run, other), cluster.identity.name
    before = rollouts(run)
    taking = there.begin("resume", run.root, "--take-over")
    try:
        run.wait_for(lambda: run.events("taken_over"), "the take-over", 60)
        (event,) = run.events("taken_over")
        assert (event["by"]["cluster"], event["former"]["cluster"]) == (other.identity.name, home)
        assert before >= rollouts(run)
        run.wait_for(lambda: rollouts(there), "rollouts there")
        hold.end()
        out, err = taking.communicate(timeout=200)
        assert taking.returncode == 0, out + err
    finally:
        taking.kill()
    assert f"taken over from {pwd.getpwuid(os.getuid()).pw_name} on cluster {home}" in err
    for job in queue_of(cluster):  # guards wait by the clock
        cluster.call("scontrol", "update", f"jobid={job.id.partition('_')[0]}", "starttime=now")
    run.wait_for(lambda: not queue_of(cluster), "the end of the former jobs", 60)
    assert len(run.rows()) == 2
    assert_same_policy(run, long_local_run)
    assert not run.events("failed"), run.story()
    control = read_control(RunPaths(run.root))
    assert control.owner
    assert (control.owner.cluster, [one.cluster for one in control.former]) == (other.identity.name, [home])
    again = run.command("submit", run.root)
    assert again.returncode == 2
    assert f"was submitted to cluster {other.identity.name}, and this machine asks {home}" in again.stderr
    assert not queue_of(cluster)
