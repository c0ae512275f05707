"""A run inside one allocation of two nodes: its tasks are job steps, and its bytes those of one machine."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.devcluster import PracticeCluster
from tests.cluster.conftest import on_one_machine
from tests.cluster.scenario import SHARDS, policy_of, processes, read_lines, results_of, room_on, wait_for
from tests.support import ROOT, light, noting, tiny
from tests.support.tables import ON_CLUSTER, sample

SCRIPT = ROOT / "examples/slurm/allocation.sh"
Sbatch = Callable[..., str]


@pytest.fixture
def sbatch(cluster: PracticeCluster, environment, tmp_path) -> Sbatch:
    """Submit the example's script with the words of a run, as a user does; return the job's id."""
    command = tmp_path / "bin/slurm-ppo"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m pipeline "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{environment['PATH']}"
    notes = {noting.FILE: str(tmp_path / "notes")}

    def submit(
        *words: object, options: tuple[str, ...] = ("--partition=update",), script: Path = SCRIPT
    ) -> str:
        done = subprocess.run(
            ["sbatch", "--parsable", f"--output={tmp_path}/%j.out", *options, script, *map(str, words)],
            env=environment | cluster.environment() | notes | {"PATH": path},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return submit


@pytest.fixture
def story(cluster, tmp_path) -> Callable[[str], str]:
    """What a job has said, once it has ended."""

    def told(job: str) -> str:
        over = ("-h", "-j", job, "-o", "%T", "--states=PENDING,CONFIGURING,RUNNING,COMPLETING")
        wait_for(lambda: not cluster.call("squeue", *over).stdout.strip(), f"the end of job {job}", 300)
        return (tmp_path / f"{job}.out").read_text()

    return told


def words_of(inputs: Path, root: Path, *more: str) -> list[str]:
    heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
    own = ("scheduler=allocation", f"rollout.num_shards={SHARDS}")
    words = tiny.overrides(inputs, root, *own, *heldout, *noting.WORDS, *more)
    return [word for word in words if not word.startswith("run_dir=")]


@ON_CLUSTER
def test_an_allocation_of_two_nodes_gives_the_bytes_of_one_machine(
    cluster, inputs, complete_run, sbatch, story, tmp_path
):
    """A rollout takes both GPUs of a node, two reward tasks share one; the update has a rank on each."""
    root = room_on(cluster, tmp_path) / "run"
    resources = ["scheduler.rollout.gpus_per_node=2", "scheduler.update.nodes=2"]
    said = story(sbatch(root, *words_of(inputs, root, *resources)))
    assert policy_of(root) == policy_of(complete_run), said
    assert results_of(root) == results_of(complete_run)
    assert not [event for event in read_lines(root / "events.jsonl") if event["event"] == "failed"]
    notes = tmp_path / "notes"
    rollouts = noting.read(notes, "rollout")
    places = {(one["node"], one["sees"]) for one in rollouts}
    assert {("update0", "0,1"), ("update1", "0,1")} <= places, "evaluations, of one GPU, are there too"
    assert {one["sees"] for one in noting.read(notes, "reward")} <= {"0", "1"}
    places = {(one["node"], one["rank"]) for one in noting.read(notes, "update")}
    assert places == {("update0", "0"), ("update1", "1")}


@ON_CLUSTER
def test_a_chain_of_allocations_ends_like_one_run_though_one_is_warned_and_one_is_killed(
    cluster, inputs, complete_run, sbatch, story, tmp_path
):
    """They wait in the queue together: of one name one runs at a time."""
    root = room_on(cluster, tmp_path) / "run"
    hold = tmp_path / "hold"
    hold.touch()
    held_up = f"scheduler.rollout.environment={{{light.SECONDS}: '0 2', {light.HOLD}: '{hold}'}}"
    words = words_of(inputs, root, held_up, "scheduler.grace=30")
    warned, killed, last = (sbatch(root, *words) for _ in range(3))
    wait_for(lambda: list(tmp_path.glob("hold.*")), "a rollout that has a response", 200)
    assert cluster.call("scancel", "--signal=USR2", "--batch", warned).returncode == 0
    assert "interrupted; to continue" in story(warned)
    saved = list(root.glob("iterations/00001/rollout/*.partial.*.json"))
    assert saved, "what was generated is kept"
    hold.unlink()
    wait_for(lambda: list(root.glob("iterations/00001/rollout/shard-?????.json")), "a committed shard", 200)
    mine = {"SLURM_CLUSTER_NAME": cluster.identity.name, "SLURM_JOB_ID": killed}
    for pid in [pid for pid, variables in processes() if mine.items() <= variables.items()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert "interrupted" not in story(killed)
    assert "policy/00002" in story(last)
    assert policy_of(root) == policy_of(complete_run)
    assert results_of(root) == results_of(complete_run)
    again = story(sbatch(root))
    assert "Traceback" not in again


@ON_CLUSTER
@pytest.mark.parametrize("staleness", sample([1, 2], 1 / 2))
def test_responses_of_older_policies_give_the_bytes_of_one_machine_though_the_allocation_is_killed(
    cluster, inputs, slurm_ppo, sbatch, story, tmp_path, staleness
):
    root = room_on(cluster, tmp_path) / "run"
    stale = (f"rollout.staleness={staleness}", "algorithm.correction.level=token", "iterations=5")
    heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
    local = on_one_machine(inputs, slurm_ppo, tmp_path / "local", *heldout, *stale)
    slow = [f"scheduler.{stage}.environment={{{light.SECONDS}: '0.1'}}" for stage in ("rollout", "update")]
    killed, last = (sbatch(root, *words_of(inputs, root, *stale, *slow)) for _ in range(2))
    wait_for(lambda: list(root.glob("iterations/00003/rollout/shard-?????.json")), "a third iteration", 200)
    mine = {"SLURM_CLUSTER_NAME": cluster.identity.name, "SLURM_JOB_ID": killed}
    for pid in [pid for pid, variables in processes() if mine.items() <= variables.items()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    story(killed)
    assert "policy/00005" in story(last)
    assert policy_of(root) == policy_of(local)
    assert results_of(root) == results_of(local)


def test_more_than_the_allocation_has_is_refused_before_anything_starts(
    cluster, inputs, sbatch, story, tmp_path
):
    root = tmp_path / "run"
    said = story(sbatch(root, *words_of(inputs, root, "scheduler.update.nodes=3")))
    told = "scheduler.update: a task asks for 3 nodes with 4 CPUs, 1 GPUs; allocation"
    assert told in said
    assert "update0 8 CPUs, 2 GPUs" in said
    assert not root.exists()


@ON_CLUSTER
def test_cores_alone_make_an_allocation_too(cluster, inputs, complete_run, sbatch, story, tmp_path):
    root = room_on(cluster, tmp_path) / "run"
    cpus = [f"scheduler.{s}.gpus_per_node=null" for s in ("rollout", "reward", "update", "evaluate")]
    script = tmp_path / "cores.sh"
    script.write_text(SCRIPT.read_text().replace("#SBATCH --gpus-per-node=2\n", ""))
    options = ("--partition=cpu", "--nodes=1")
    said = story(sbatch(root, *words_of(inputs, root, *cpus, "iterations=1"), options=options, script=script))
    assert policy_of(root) == policy_of(complete_run, 1), said
