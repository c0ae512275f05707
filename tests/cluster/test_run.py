"""Runs on a real Slurm: the policy of one machine, made by jobs in the partitions that suit them."""

import re
import signal

import pytest

from pipeline.run.paths import RunPaths
from pipeline.workers.beats import read_beats
from tests.cluster import scenario
from tests.cluster.scenario import SlurmRun, policy_of, processes_of, results_of, room_on, staying, take
from tests.support import light
from tests.support.tables import ON_CLUSTER

SHARDS = 2
RULES = """
import json, os

PLACE = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURMD_NODENAME", "SLURM_JOB_PARTITION")

def brevity(*, responses, **columns):
    if notes := os.environ.get("NOTES"):
        with open(notes, "a") as file:
            file.write(json.dumps({name: os.environ.get(name) for name in PLACE}) + "\\n")
    return [-len(response) / 10 for response in responses]
"""
"""A rule of the user's that also notes where it was called, if the environment says in which file."""


# --- real models ---


@pytest.fixture(scope="module")
def submitted(cluster, make_real_run, tmp_path_factory) -> SlurmRun:
    """By ``slurm-ppo submit`` alone, typed in the user's own folder. A rollout takes both GPUs there are."""
    folder = tmp_path_factory.mktemp("submitted")
    (folder / "my_rules.py").write_text(RULES)
    words = [
        "iterations=1",
        f"scheduler.environment={{NOTES: '{folder / 'notes'}'}}",
        "+reward.components.brevity={kind: rule, function: 'my_rules:brevity', weight: 0.0, "
        "rows_per_call: shard, trial: false}",
        "scheduler.rollout.gpus_per_node=2",
    ]
    run = make_real_run(cluster, room_on(cluster, folder) / "run", *words, folder=folder)
    run.submit()
    assert not scenario.outside_slurm(str(run.root))
    run.wait_until_complete()
    return run


def test_submit_alone_gives_the_policy_of_one_machine(submitted, complete_real_run):
    """That run was evaluated, and lacked a rule of weight 0."""
    assert submitted.policy() == policy_of(complete_real_run, 1)
    assert not submitted.events("failed")
    (row,), (wanted, _) = results_of(submitted.root), results_of(complete_real_run)
    of_both = {k: v for k, v in wanted.items() if not k.startswith(("evaluate/", "padding/evaluate"))}
    assert row | of_both == row


def test_reward_tasks_see_a_gpu_of_the_reward_partition_and_no_other(submitted):
    places = scenario.read_lines(submitted.folder / "notes")
    assert len(places) == SHARDS
    for place in places:
        assert (place["SLURM_JOB_PARTITION"], place["SLURMD_NODENAME"]) == ("reward", "reward0")
        assert place["CUDA_VISIBLE_DEVICES"] in {"0", "1"}  # one of its node's two
        assert place["SLURM_JOB_GPUS"] == place["CUDA_VISIBLE_DEVICES"]


# --- an update on two nodes ---


def ranks_of(job: scenario.Job) -> set[tuple[str, str]]:
    """(node, rank) of the processes that srun started for a job."""
    mine = set(processes_of(job))
    found = [variables for pid, variables in scenario.processes() if pid in mine]
    return {(v["SLURMD_NODENAME"], v["SLURM_PROCID"]) for v in found if v.get("SLURM_STEP_ID") == "0"}


def updates_of_each(run: SlurmRun) -> list[int]:
    """Updates that each worker has committed."""
    return sorted(b.tasks for b in read_beats(RunPaths(run.root)).values() if b.job_kind == "update")


@ON_CLUSTER
def test_a_worker_on_two_nodes_makes_the_bytes_of_a_fresh_one(cluster, make_real_run, tmp_path):
    """One rank on each; they meet over gloo, and stay for the second update. What they learn from is made by
    light tasks."""
    words = [word for word in light.WORDS if not word.startswith("update.engine=")]
    small = ["iterations=2", "rollout.num_shards=1", "update.minibatches=1", "update.epochs=1"]
    small += ["scheduler.update.nodes=2", *staying(300)]
    root = room_on(cluster, tmp_path) / "run"
    run = make_real_run(cluster, root, *words, *small)
    run.submit()
    update = run.wait_for_job("update")
    both = {("update0", "0"), ("update1", "1")}
    run.wait_for(lambda: ranks_of(update) == both, "a rank on each node")
    run.wait_until_complete()
    assert not run.events("failed"), run.story()
    made = run.policy()
    assert updates_of_each(run) == [2]
    again = run.command("resume", run.root, "--from", "update@2")
    assert again.returncode == 0, again.stderr
    assert len(list((run.root / "superseded").glob("*/policy/00002.*"))) == 1, "it was made anew"
    assert updates_of_each(run) == [1, 2]
    assert run.policy() == made


# --- in the foreground ---


@ON_CLUSTER
def test_ctrl_c_leaves_a_run_to_itself_and_resume_watches_it_again(
    cluster, inputs, make_run, complete_run, tmp_path
):
    """The update asks for two partitions at once, and gets the one that has room."""
    words = ["iterations=1", f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1"]
    pools = "scheduler.update.partition=[rollout,reward]"
    root = room_on(cluster, tmp_path) / "run"
    run = make_run(cluster, root, *words, pools, *take("1", "rollout"))
    watching = run.begin("run", *run.words)
    run.wait_for(lambda: run.jobs(), "jobs")
    looking = run.begin("watch", run.root, "--interval", 1)
    run.wait_for_job("rollout")
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=120)
    assert watching.returncode == 3, said
    assert re.search(rf"the jobs go on .* slurm-ppo cancel {run.root}", said)
    assert not [command for command in scenario.outside_slurm(str(run.root)) if " watch " not in command]
    run.wait_for(lambda: run.has_committed(1, "reward"), "a shard that was scored while nobody drove")

    resumed = run.command("resume", run.root)
    assert resumed.returncode == 0, resumed.stderr
    assert run.policy() == policy_of(complete_run, 1)
    assert results_of(run.root) == results_of(complete_run)[:1]
    run.wait_for(lambda: not run.jobs(), "an empty queue")
    assert run.logs("passes/*"), "workers made passes while nobody watched"
    assert {job.partition for job in run.jobs_ever() if job.stage == "update"} <= {"rollout", "reward"}
    seen, trouble = looking.communicate(timeout=120)
    assert looking.returncode == 0, trouble
    assert re.search(r"iteration 1 rollout: .*\d running", seen)
    assert re.search(r"submitted iteration 1 update", seen)
    assert seen.splitlines()[-1] == f"next: slurm-ppo report {run.root}"
