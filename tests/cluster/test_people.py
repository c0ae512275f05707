"""What people see of runs on a real Slurm: one run that completes, one that cannot."""

import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm.devcluster import PracticeCluster
from tests.cluster.conftest import NETWORK
from tests.cluster.scenario import SHARDS, room_on, take
from tests.support import tiny

Answer = subprocess.CompletedProcess[str]
PATIENCE = 150.0


@dataclass(frozen=True)
class Runs:
    """Both are submitted at once, so that one waits while the other does."""

    ask: Callable[..., Answer]
    """The command line, on the cluster."""
    good: Path
    bad: Path
    inputs: Path
    first_status: dict[str, object]
    """Of the good run, right after it was submitted."""

    def wait_until(self, run: Path, state: str) -> dict[str, object]:
        until = time.monotonic() + PATIENCE
        while True:
            status = json.loads(self.ask("status", run, "--json").stdout)
            if status["state"] == state:
                return status
            assert time.monotonic() < until, status
            time.sleep(0.5)


@pytest.fixture(scope="module")
def runs(
    cluster_with_accounting: PracticeCluster,
    inputs: Path,
    environment: dict[str, str],
    slurm_ppo: Callable[..., Answer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    folder = room_on(cluster_with_accounting, tmp_path_factory.mktemp("people"))

    def ask(*arguments: object) -> Answer:
        return slurm_ppo(
            *arguments, env=environment | cluster_with_accounting.environment(), timeout=PATIENCE
        )

    good, bad = folder / "good", folder / "bad"
    (folder / "told").write_text('#!/bin/sh\n{ cat; echo; } >>"$0.$SLURM_PPO_NAME.$SLURM_PPO_EVENT"\n')
    (folder / "told").chmod(0o755)
    told = f"notify.command={folder / 'told'}"
    gate = f'scheduler.prepare.setup=["until test -e {folder}/go; do sleep 0.1; done"]'
    submit(ask, small(inputs, good, told, "name=good", gate, *take("0.5", "rollout"), *take("2", "update")))
    unlucky = 'scheduler.reward.setup=["echo no luck; exit 7"]'
    submit(ask, small(inputs, bad, told, "name=bad", "scheduler.max_attempts=1", unlucky))
    first = json.loads(ask("status", good, "--json").stdout)
    (folder / "go").touch()
    return Runs(ask, good, bad, inputs, first)


def submit(ask: Callable[..., Answer], words: list[str]) -> None:
    done = ask("submit", *words)
    assert done.returncode == 0, done.stderr


def small(inputs: Path, run: Path, *more: str) -> list[str]:
    words = ["iterations=1", f"rollout.num_shards={SHARDS}", "scheduler=devcluster"]
    return tiny.overrides(inputs, run, *words, *more)


def test_a_run_that_was_just_submitted_is_running(runs):
    assert runs.first_status["state"] == "running"
    slurm = runs.first_status["slurm"]
    assert slurm["unanswered"] is None
    assert [(s["stage"], s["total"]) for s in slurm["stages"]] == [
        *(("prepare", 1), ("rollout", SHARDS), ("reward", SHARDS), ("update", 1))
    ]


def test_following_shows_every_stage_and_ends_with_the_run(runs):
    done = runs.ask("logs", runs.good, "--follow")
    assert done.returncode == 0, done.stderr
    for name in ("rollout@1 0", "reward@1 1", "update@1"):
        assert re.search(rf"^{name} \| .* INFO iteration 1 .*committed: ", done.stdout, re.MULTILINE), (
            done.stdout
        )
    assert done.stdout.splitlines()[-1] == "the run is complete"


def test_costs_are_in_the_row_and_in_status(runs):
    runs.wait_until(runs.good, "complete")
    until = time.monotonic() + PATIENCE
    while not (runs.good / "metrics.jsonl").exists():  # the driver job writes it after the last commit
        assert time.monotonic() < until
        time.sleep(0.5)
    row = json.loads((runs.good / "metrics.jsonl").read_text())
    assert row["slurm/attempts/rollout"] == SHARDS
    assert row["slurm/wasted_share"] == 0
    costs = json.loads(runs.ask("status", runs.good, "--cost", "--json").stdout)["cost"]["iterations"]["1"]
    is_known = row["slurm/gpu_hours/update"] > 0  # else accounting did not answer within a pass's patience
    for stage in ("rollout", "reward", "update"):  # whole jobs, so with what came after their last tasks
        held, jobs = costs[stage]["gpu_hours"], costs[stage]["attempts"]
        assert held > 0, stage
        assert not is_known or held / 60 < row[f"slurm/gpu_hours/{stage}"] < held + jobs / 3600, stage
    done = runs.ask("status", runs.good, "--cost")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^reward +2 +0\.\d\d +0\.\d\d ", done.stdout, re.MULTILINE), done.stdout
    assert max(map(len, re.sub(r"/\S+", "RUN", done.stdout).splitlines())) <= 83


def test_a_run_that_failed_says_what_where_and_how_to_continue(runs):
    status = runs.wait_until(runs.bad, "failed")
    assert status["slurm"]["stages"][1]["failed"] >= 1
    shown = runs.ask("status", runs.bad)
    assert shown.returncode == 1
    assert f"why:  slurm-ppo logs {runs.bad} --failed" in shown.stdout
    assert shown.stdout.splitlines()[-1] == f"next: slurm-ppo resume {runs.bad}"
    failed = runs.ask("logs", runs.bad, "reward", "--failed").stdout
    assert re.search(r"iteration 1 reward shard \d, attempt 1 \(killed\): exit code 7\n", failed), failed
    assert re.search(r"^job \d+_\d on node reward0$", failed, re.MULTILINE), failed
    assert "  | no luck" in failed
    block = runs.ask("logs", runs.bad, "driver", "--lines", 100).stdout
    assert re.search(r"failed: iteration 1 reward shard \d, attempt 1 \(killed\): exit code 7\n", block), (
        block
    )
    assert re.search(r"job \d+_\d on node reward0: FAILED, exit code 7\n", block), block
    assert f"to continue: slurm-ppo resume {runs.bad}" in block


def test_driver_jobs_tell_people_once_how_it_ended(runs):
    runs.wait_until(runs.good, "complete")
    runs.wait_until(runs.bad, "failed")
    for name, event, ends in (("good", "complete", "report"), ("bad", "failed", "resume")):
        events = runs.good.parent / name / "events.jsonl"
        until = time.monotonic() + PATIENCE
        while '"notified"' not in events.read_text():
            assert time.monotonic() < until
            time.sleep(0.2)
        (line,) = (runs.good.parent / f"told.{name}.{event}").read_text().splitlines()
        told = json.loads(line)
        assert (told["event"], told["run"]) == (event, str(runs.good.parent / name))
        assert told["next"] == f"slurm-ppo {ends} {runs.good.parent / name}"


def test_the_doctor_looks_at_a_run_its_cluster_and_its_nodes(runs):
    runs.wait_until(runs.good, "complete")
    before = sorted(runs.good.rglob("*"))
    done = runs.ask("doctor", runs.good)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(runs.good.rglob("*")) == before
    for said in (
        r"ok +controller: slurm-wlm [\d.]+, squeue answers in ",
        r"ok +limits: MaxArraySize \d+, MaxJobCount \d+",
        r"ok +accounting: sacct answers in ",
        r"ok +jobs of rollout: rollout takes them: ",
        r"ok +node for rollout: rollout0, Python 3",
        r"ok +files of update\d: \d\.\d\d s to be seen here, \d\.\d\d s to be seen there",
        r"ok +commits at hand: 1 of 1 iterations are done",
    ):
        assert re.search(rf"^  {said}", done.stdout, re.MULTILINE), done.stdout
    if NETWORK:
        assert "is on fuse.glusterfs, mounted at" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-2:] == ["0 problems, 0 warnings", f"next: slurm-ppo status {runs.good}"]


def test_a_cluster_that_does_not_answer_is_told_and_the_disk_shown(runs, slurm_ppo, environment, tmp_path):
    squeue = tmp_path / "squeue"
    squeue.write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n"
    )
    squeue.chmod(0o755)
    runs.wait_until(runs.bad, "failed")
    # an answer of some seconds ago would do, where somebody has got one
    nobody_asked = {"PATH": f"{tmp_path}:{environment['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shown = slurm_ppo("status", runs.bad, env=environment | nobody_asked)
    assert "Slurm does not answer, so this is from files alone" in shown.stdout
    assert re.search(r"1 +rollout +4/4", shown.stdout)


def test_validate_probes_every_partition_and_leaves_nothing(runs, tmp_path):
    done = runs.ask("validate", *small(runs.inputs, tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    for stage, node in (("rollout", "rollout0"), ("reward", "reward0"), ("update", r"update\d")):
        assert re.search(rf"^node for {stage}: {node}, Python .*, GPUs: 1;", done.stdout, re.MULTILINE), (
            done.stdout
        )
    assert list(tmp_path.iterdir()) == []


def test_validate_says_what_a_compute_node_lacks(runs, tmp_path):
    more = (
        "scheduler.update.python=/no/python",
        'scheduler.reward.setup=["export CUDA_VISIBLE_DEVICES=0,1"]',
    )
    done = runs.ask("validate", *small(runs.inputs, tmp_path / "run", *more))
    assert done.returncode == 2
    assert re.search(
        r"update.partition=update: job \d+ on update\d left no answer \(exit code 127\)", done.stderr
    )
    assert "reward.gpus_per_node=1: 2 GPUs are visible on node reward0, 1 were asked for" in done.stderr


def test_submit_refuses_what_the_cluster_cannot_give_and_makes_no_run(runs, tmp_path):
    more = (
        "scheduler.reward.partition=rm",
        "scheduler.update.gpus_per_node=3",
        "scheduler.driver.constraint=fast",
    )
    done = runs.ask("submit", *small(runs.inputs, tmp_path / "run", *more))
    assert done.returncode == 2
    assert "scheduler.reward.partition=rm: no such partition; legal: all, cpu" in done.stderr
    assert "scheduler.update.gpus_per_node=3: 3 on a node" in done.stderr
    assert "scheduler.driver=cpu: sbatch failed" in done.stderr
    assert not (tmp_path / "run").exists()
