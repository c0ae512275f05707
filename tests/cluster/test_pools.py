"""Pools on a real Slurm: components scored by arrays of their own, each in the partition it was given."""

import json
import re

from tests.cluster.scenario import SHARDS, policy_of, take
from tests.support import tiny

RULES = """
import os

def noted(*, responses, **columns):
    if notes := os.environ.get("NOTES"):  # validate tries rules too
        with open(notes, "a") as file:
            file.write(os.environ["SLURM_JOB_PARTITION"] + "\\n")
    return [float(len(response)) for response in responses]
"""
COMPONENTS = [
    # A rule of weight 0, so that the policy is that of the reward model alone.
    "+reward.components.noted={kind: rule, function: 'pool_rules:noted', weight: 0.0, pool: rules}",
    "reward.components.rm.pool=models",
    "scheduler.pools.rules.partition=cpu",
    "scheduler.pools.models.partition=update",
    "scheduler.pools.models.gpus_per_node=1",
]


def test_pools_score_in_arrays_and_partitions_of_their_own(cluster, inputs, make_run, slurm_ppo, tmp_path):
    (tmp_path / "pool_rules.py").write_text(RULES)
    shards = (f"rollout.num_shards={SHARDS}",)
    words = tiny.overrides(inputs, tmp_path / "here", *shards, "iterations=1", *COMPONENTS[:2])
    assert slurm_ppo("run", *words, cwd=tmp_path).returncode == 0
    notes = f"scheduler.environment={{NOTES: '{tmp_path / 'notes'}'}}"
    words = ["iterations=1", notes, *COMPONENTS, *take("0.7", "pools.models")]
    run = make_run(cluster, tmp_path / "run", *words, folder=tmp_path)
    run.submit()
    score = run.wait_for_job("score-models")
    status = run.command("status", run.root).stdout
    assert re.search(rf"job [\d, ]*\b{score.id.partition('_')[0]}\b[\d, ]* on update", status), status
    lines = [line for line in status.splitlines() if str(run.root) not in line]  # one says who makes a pass
    assert max(map(len, lines)) <= 80, "all but the lines with the run's path"
    run.wait_until_complete()
    assert not run.events("failed")
    assert run.policy() == policy_of(tmp_path / "here")

    partitions = {job.stage: job.partition for job in run.jobs_ever()}
    wanted = {"rollout": "rollout", "score-models": "update", "score-rules": "cpu", "reward": "reward"}
    assert {stage: partitions[stage] for stage in wanted} == wanted
    assert set((tmp_path / "notes").read_text().split()) == {"cpu"}, "where the rule was called"

    for shard in range(SHARDS):
        scores = [run.record(1, job_kind, shard) for job_kind in ("score-models", "score-rules")]
        assert run.record(1, "reward", shard)["started"] >= max(score["ended"] for score in scores)
    (row,) = run.rows()
    assert {"seconds/score-models", "seconds/score-rules"} <= row.keys(), json.dumps(row)
