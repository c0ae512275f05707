"""Run directories made by hand, for what only reads them: configuration, shards, records."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from pipeline.commits import Record, publish
from pipeline.config import Config, DataConfig, ModelConfig
from pipeline.paths import RunPaths
from pipeline.rewardconfig import RewardConfig, RewardModelConfig, RuleConfig
from pipeline.rolloutconfig import RolloutConfig
from pipeline.runs import Parent, Run, load_run, write_run
from pipeline.schemas import REWARD, ROLLOUT, conform
from pipeline.shards import write_shard
from pipeline.tasks import Stage, Task


def make_config(root: Path, num_shards: int = 1, iterations: int = 20, **more: object) -> Config:
    components = {"rm": RewardModelConfig(path="models/rm"), "brevity": RuleConfig(function="mine:brevity")}
    given = {
        "name": "demo",
        "run_dir": str(root),
        "iterations": iterations,
        "model": ModelConfig(policy="models/policy"),
        "data": DataConfig(prompts="prompts.jsonl"),
        "reward": RewardConfig(components=components),
        "rollout": RolloutConfig(num_shards=num_shards),
    }
    return Config(**given | more)


def make_run(root: Path, num_shards: int = 1, parent: Parent | None = None, **more: object) -> Run:
    root.mkdir(parents=True, exist_ok=True)
    write_run(RunPaths(root), make_config(root, num_shards, **more), str(root), parent)
    return load_run(root)


def record(task: Task, outputs=(), started: float = 0.0, ended: float = 1.0, **metrics: float) -> Record:
    attempt, host, job = "one", "host", ""
    return Record(task, attempt, outputs, {}, 0, 0, 9, "rollout/1", started, ended, host, 1, job, metrics)


def commit_shard(
    run: Run,
    iteration: int,
    shard: int,
    *,
    responses: Sequence[str],
    rewards: Sequence[float],
    prompts: Sequence[str] | None = None,
    reference: Sequence[Sequence[float]] | None = None,
    sample_index: Sequence[int] | None = None,
) -> None:
    """Rollout and reward shard of an iteration. A token for each letter; every third is a tool's."""
    count = len(responses)
    tokens = [[ord(letter) for letter in text] for text in responses]
    common = {
        "prompt_id": [f"{iteration}-{shard}-{i}" for i in range(count)],
        "sample_index": list(sample_index or [0] * count),
    }
    rollout = common | {
        "prompt_tokens": [[1]] * count,
        "response_tokens": tokens,
        "response_mask": [[i % 3 != 2 for i in range(len(row))] for row in tokens],
        "rollout_logprobs": [[-0.5] * len(row) for row in tokens],
        "finish_reason": ["stop"] * count,
        "num_turns": [1] * count,
        "prompt_messages": [None] * count,
        "response_messages": [None] * count,
        "prompt_text": list(prompts or [f"prompt {i}" for i in range(count)]),
        "response_text": list(responses),
    }
    reward = common | {"reward": list(rewards), "reference_logprobs": reference or [None] * count}
    scores = pa.table(
        {
            "reward/rm": pa.array(rewards, pa.float32()),
            "reward/brevity": pa.array([value / 2 for value in rewards], pa.float32()),
        }
    )
    for stage, table in (
        (Stage.ROLLOUT, conform(rollout, ROLLOUT)),
        (Stage.REWARD, conform(reward, REWARD, scores)),
    ):
        task = Task(iteration, stage, shard)
        entry = write_shard(run.paths, run.paths.task(task).data("one"), table)
        assert publish(run.paths, record(task, (entry,)))
