"""Jobs that Slurm takes and cannot start on their nodes: waited for, elsewhere if there is another node."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.devcluster import Layout, PracticeCluster
from tests.cluster.conftest import NETWORK
from tests.cluster.scenario import SlurmRun, assert_same_policy, failed, room_on
from tests.cluster.test_faults import gate, let_a_guard_come
from tests.support.tables import ON_CLUSTER


@contextlib.contextmanager
def without(cluster: PracticeCluster, folder: Path, *nodes: str) -> Iterator[None]:
    """Some nodes see an empty folder in the place of one, which takes no files."""

    def on_each(*command: str) -> None:
        for node in nodes:
            subprocess.run(cluster.inside(node, [*command, str(folder)]), check=True)

    on_each("mount", "-t", "tmpfs", "-o", "ro", "none")
    try:
        yield
    finally:
        on_each("umount", "-l")


@ON_CLUSTER
@pytest.mark.skipif(not NETWORK, reason="the nodes have one view of the disk")
def test_a_node_that_cannot_open_the_runs_files_costs_no_attempt(cluster, make_run, complete_run, tmp_path):
    """Updates have a second node; rewards wait until theirs is fixed. Status says what is wrong."""
    words = ["scheduler.reward.partition=[update]", "scheduler.reward.exclude=[update1]"]
    go = tmp_path / "go"
    run = make_run(cluster, room_on(cluster, tmp_path) / "run", "iterations=1", gate("rollout", go), *words)
    run.submit()
    run.wait_for_job("rollout")
    with without(cluster, run.root / "logs", "update0"):
        go.touch()
        run.wait_for(lambda: len(unstarted(run, "reward/0")) >= 3, "starts that come to nothing")
        said = run.command("status", run.root).stdout
        assert "could not open" in said, said
    run.wait_until_complete()
    assert_same_policy(run, complete_run)
    assert {kind for _, kind in failed(run)} == {"unstarted"}
    assert {event["node"] for event in run.events("failed")} == {"update0"}
    assert len(unstarted(run, "update/0")) <= 1, "the other node was taken at once"


def unstarted(run: SlurmRun, task: str) -> list[dict]:
    return [event for event in run.events("failed") if event["task"] == f"1/{task}"]


@ON_CLUSTER
def test_what_slurm_holds_after_a_failed_prolog_costs_no_attempt(
    own_cluster, make_run, complete_run, tmp_path
):
    """The node is drained then, until an administrator gives it back; with one node nothing else helps."""
    prolog, broken, go = tmp_path / "prolog", tmp_path / "broken", tmp_path / "go"
    prolog.write_text(f'#!/bin/sh\ntest "$SLURM_JOB_PARTITION" != reward || test ! -e {broken}\n')
    prolog.chmod(0o755)
    cluster = own_cluster(Layout(more=(f"Prolog={prolog}",)))
    run = make_run(cluster, tmp_path / "run", "iterations=1", gate("rollout", go))
    run.submit()
    run.wait_for_job("rollout")
    broken.touch()
    go.touch()
    run.wait_for(lambda: is_drained(cluster), "a node that is drained")
    broken.unlink()
    assert cluster.call("scontrol", "update", "nodename=reward0", "state=resume").returncode == 0
    let_a_guard_come(run)
    run.wait_until_complete()
    assert {kind for _, kind in failed(run)} == {"unstarted"}, run.story()
    assert_same_policy(run, complete_run)


def is_drained(cluster: PracticeCluster) -> bool:
    return "drain" in cluster.call("sinfo", "-h", "-n", "reward0", "-o", "%T").stdout
