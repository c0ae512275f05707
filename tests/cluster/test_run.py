"""Real stages on a real Slurm: the policy of one machine, made by jobs in the partitions that suit them."""

import re
import signal
from pathlib import Path

import pytest

from cluster import scenario
from cluster.scenario import SlurmRun, policy_of, prepare, processes_of, results_of

ITERATIONS, SHARDS = 3, 4
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


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's own folder, in which the commands are typed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_rules.py").write_text(RULES)
    return folder


def of_three_iterations(run_dir: Path) -> list[str]:
    return [
        f"run_dir={run_dir}",
        f"iterations={ITERATIONS}",
        f"rollout.num_shards={SHARDS}",
        "+reward.components.brevity={kind: rule, function: 'my_rules:brevity', weight: 0.5, "
        "rows_per_call: shard, trial: false}",
    ]


@pytest.fixture(scope="module")
def undisturbed(inputs, project, slurm_ppo, tmp_path_factory) -> Path:
    """On this machine, without Slurm."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    words = [*scenario.tiny.overrides(inputs, run_dir), *of_three_iterations(run_dir)]
    done = slurm_ppo("run", *words, cwd=project)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture(scope="module")
def submitted(cluster, inputs, environment, project, tmp_path_factory) -> SlurmRun:
    """On Slurm, by ``slurm-ppo submit`` alone."""
    folder = tmp_path_factory.mktemp("submitted")
    notes = f"scheduler.environment={{NOTES: '{folder / 'notes'}'}}"
    words = [*of_three_iterations(folder / "run"), notes]
    run = prepare(cluster, inputs, folder / "run", environment, *words, folder=project)
    run.submit()
    assert not scenario.outside_slurm(str(run.root))
    run.wait_until_complete()
    return run


def test_submit_alone_gives_the_policy_of_one_machine(submitted, undisturbed):
    assert submitted.policy() == policy_of(undisturbed)
    assert results_of(submitted.root) == results_of(undisturbed)
    assert len(submitted.rows()) == ITERATIONS
    assert not submitted.events("failed")


def test_shards_are_scored_while_others_are_generated(submitted):
    for iteration in range(1, ITERATIONS + 1):
        rollouts, rewards = (
            [submitted.record(iteration, stage, shard) for shard in range(SHARDS)]
            for stage in ("rollout", "reward")
        )
        assert min(r["started"] for r in rewards) < max(r["ended"] for r in rollouts)


def test_reward_tasks_see_a_gpu_of_the_reward_partition_and_no_other(submitted):
    places = scenario.read_lines(submitted.root.parent / "notes")
    assert len(places) == ITERATIONS * SHARDS
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


def test_an_update_on_two_nodes_repeats_its_bytes(cluster, inputs, environment, tmp_path):
    """One rank on each; they meet over gloo."""
    words = ["iterations=1", "scheduler.update.nodes=2"]
    run = prepare(cluster, inputs, tmp_path / "run", environment, *words)
    run.submit()
    update = run.wait_for_job("update")
    both = {("update0", "0"), ("update1", "1")}
    run.wait_for(lambda: ranks_of(update) == both, "a rank on each node")
    run.wait_until_complete()
    assert not run.events("failed")
    made = run.policy()
    again = run.command("resume", run.root, "--from", "update@1")
    assert again.returncode == 0, again.stderr
    assert len(list((run.root / "superseded").glob("*/policy/00001.*"))) == 1, "it was made anew"
    assert run.policy() == made


# --- in the foreground ---


def test_ctrl_c_leaves_a_run_to_itself_and_resume_watches_it_again(
    cluster, inputs, complete_run, environment, tmp_path
):
    """The update asks for two partitions at once, and gets the one that has room."""
    words = ["iterations=1", f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1"]
    pools = "scheduler.update.partition=[rollout,reward]"
    run = prepare(cluster, inputs, tmp_path / "run", environment, *words, pools)
    watching = run.begin("run", *run.words)
    run.wait_for_job("rollout")
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=120)
    assert watching.returncode == 3, said
    assert re.search(rf"the jobs go on .* slurm-ppo cancel {run.root}", said)
    assert not scenario.outside_slurm(str(run.root))
    looking = run.begin("watch", run.root, "--interval", 1)
    run.wait_for(lambda: run.has_committed(1, "reward"), "a shard that was scored while nobody watched")

    resumed = run.command("resume", run.root)
    assert resumed.returncode == 0, resumed.stderr
    assert run.policy() == policy_of(complete_run, 1)
    assert results_of(run.root) == results_of(complete_run)[:1]
    run.wait_for(lambda: not run.jobs(), "an empty queue")
    assert run.logs("*driver/*/*"), "driver jobs ran beside the command"
    assert {job.partition for job in run.jobs_ever() if job.stage == "update"} <= {"rollout", "reward"}
    seen, trouble = looking.communicate(timeout=120)
    assert looking.returncode == 0, trouble
    assert re.search(r"iteration 1 rollout: .*\d running", seen)
    assert re.search(r"iteration 1 update: .*waiting", seen)
    assert seen.splitlines()[-1] == f"next: slurm-ppo report {run.root}"
