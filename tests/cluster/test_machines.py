"""Nodes as machines of their own: two of one name, clocks that are off, one that dies and is brought back."""

import os
import sys
import time

import pytest

from pipeline.run.paths import RunPaths
from pipeline.workers.beats import read_beats
from slurm.devcluster import (
    DevclusterError,
    Layout,
    PackagesMissing,
    PracticeNode,
    PracticePartition,
    attach,
    programs,
)
from slurm.devcluster import start as start_cluster
from tests.cluster.scenario import SlurmRun, assert_same_policy, failed, room_on
from tests.cluster.test_devcluster import field, related_to, submit, wait_for, wait_until
from tests.support import ROOT
from tests.support.tables import ON_CLUSTER

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 and "CI" not in os.environ, reason="host names of their own need root"
)
AHEAD = 90
PLACES = ("left", "right")
TWINS = Layout(
    nodes=(*(PracticeNode(name, cpus=4, host="twin") for name in PLACES), PracticeNode("rest")),
    partitions=(
        PracticePartition("cpu", ("rest",), default=True),
        *(PracticePartition(stage, PLACES) for stage in ("rollout", "reward")),
        PracticePartition("update", ("rest",)),
        PracticePartition("all", ("rest", *PLACES)),
    ),
).with_machines([], [f"right={AHEAD}", f"rest=-{AHEAD}"])
PAIR = Layout(
    nodes=(PracticeNode("one", gpus=0), PracticeNode("two", gpus=0)),
    partitions=(PracticePartition("cpu", ("one", "two"), default=True),),
)
WITHOUT_GPUS = [
    word
    for stage in ("rollout", "reward")
    for word in (f"scheduler.{stage}.gpus_per_node=null", f"scheduler.{stage}.cpus_per_task=2")
]
"""Where sharded tasks have GPUs, a slow one is rightly done by another worker too. Two fill a node."""
SEEN = "uname -n; cat /proc/sys/kernel/random/boot_id; date +%s; srun date +%s"


@ON_CLUSTER
@needs_root
def test_twin_nodes_and_clocks_that_are_off_change_nothing(own_cluster, make_run, complete_run, tmp_path):
    cluster = own_cluster(TWINS, has_runs=True)
    run = make_run(cluster, room_on(cluster, tmp_path) / "run", "iterations=2", *WITHOUT_GPUS)
    run.submit()
    run.wait_until_complete()
    assert_same_policy(run, complete_run)
    assert failed(run) == []
    beats = read_beats(RunPaths(run.root)).values()
    assert {beat.host for beat in beats if beat.job_kind == "rollout"} == {"twin"}
    assert len({beat.process_space for beat in beats if beat.job_kind == "rollout"}) == 2, run.story()
    assert done_twice(run) == [], run.story()


def done_twice(run: SlurmRun) -> list[str]:
    """Logs of tasks that more than one attempt has written."""
    return sorted(
        str(log) for log in run.root.glob("logs/*/attempt-*/shard-*.log") if "attempt-1" not in str(log)
    )


@needs_root
def test_jobs_see_the_name_the_boot_and_the_clock_of_their_machine(own_cluster, tmp_path):
    cluster = own_cluster(TWINS)
    ids = {
        node.name: submit(cluster, SEEN, "-pall", f"-w{node.name}", output=tmp_path / node.name)
        for node in TWINS.nodes
    }
    for job in ids.values():
        wait_for(cluster, job, "COMPLETED")
    now, seen = time.time(), {name: (tmp_path / name).read_text().split() for name in ids}
    assert {seen["left"][0], seen["right"][0]} == {"twin"} != {seen["rest"][0]}
    assert len({boot for _, boot, *_ in seen.values()}) == len(seen)
    for node in TWINS.nodes:
        for second in seen[node.name][2:]:
            assert int(second) == pytest.approx(now + node.clock_seconds, abs=20)


@needs_root
def test_a_node_dies_with_all_that_ran_on_it_and_is_another_boot_when_it_is_back(
    own_cluster, slurm_ppo, tmp_path
):
    cluster, out = own_cluster(TWINS), tmp_path / "out"
    job = submit(
        cluster, f"setsid sh -c 'sleep 1000; : {out}' & {SEEN}; wait", "-pall", "-wright", output=out
    )
    wait_until(lambda: out.exists() and len(out.read_text().split()) == 4, "the job runs")
    before = out.read_text().split()
    killed = slurm_ppo("devcluster", "kill", "right", cluster.folder)
    assert killed.returncode == 0, killed.stderr
    assert related_to(out) == []
    assert field(cluster, job, "JobState") == "RUNNING", "the controller does not know yet"
    back = killed.stdout.splitlines()[-1].partition("slurm-ppo ")[2].split()
    revived = slurm_ppo(*back)
    assert revived.returncode == 0, revived.stderr
    again = submit(cluster, SEEN, "-pall", "-wright", output=tmp_path / "again")
    wait_for(cluster, again, "COMPLETED", 60)
    after = (tmp_path / "again").read_text().split()
    assert after[0] == before[0] == "twin"
    assert after[1] != before[1]
    assert slurm_ppo("devcluster", "kill", "elsewhere", cluster.folder).returncode == 2


def test_a_job_that_goes_back_for_another_node_gets_it(own_cluster, tmp_path):
    """Slurm alone gives it the same one, which may be the only one that does not see the run's folder."""
    cluster = own_cluster(PAIR)
    go = "import os; from slurm.elsewhere import requeue_elsewhere as go; e = os.environ; "
    go += "go(e['SLURM_JOB_ID'], e['SLURMD_NODENAME'])"
    script = f'echo $SLURMD_NODENAME; test -n "$SLURM_RESTART_COUNT" || {sys.executable} -c "{go}"'
    job = submit(cluster, f"cd {ROOT}; {script}", "--requeue", "--open-mode=append", output=tmp_path / "out")
    wait_for(cluster, job, "COMPLETED", 60)
    said = (tmp_path / "out").read_text().splitlines()
    assert {"one", "two"} == {line for line in said if line in ("one", "two")}, said


@needs_root
def test_up_makes_machines_and_clocks_and_down_leaves_nothing_of_them(own_cluster, slurm_ppo, tmp_path):
    own_cluster(TWINS).stop()  # skips without the packages
    folder = tmp_path / "practice"
    words = ("--host", "update0=twin", "--host", "update1=twin", "--clock", "reward0=-90")
    up = slurm_ppo("devcluster", "up", folder, *words)
    assert up.returncode == 0, up.stderr
    try:
        status = slurm_ppo("devcluster", "status", folder)
        assert status.returncode == 0
        assert "machine-update1" in status.stdout
        changed = Layout().with_machines(["update0=twin", "update1=twin"], ["reward0=-90"])
        assert attach(folder).layout == changed
    finally:
        down = slurm_ppo("devcluster", "down", folder)
    assert down.returncode == 0, down.stderr
    assert related_to(folder) == []


def test_without_a_compiler_or_root_it_says_what_it_needs(monkeypatch, tmp_path):
    find = programs.find
    monkeypatch.setattr(programs, "find", lambda name: None if name == "cc" else find(name) or tmp_path)
    with pytest.raises(PackagesMissing, match=r"sudo apt install .* gcc libc6-dev$"):
        start_cluster(tmp_path / "new", TWINS)
    monkeypatch.setattr(programs, "find", lambda name: find(name) or tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DevclusterError, match="need root; leave the option out"):
        start_cluster(tmp_path / "new", TWINS)
    assert list(tmp_path.iterdir()) == []
