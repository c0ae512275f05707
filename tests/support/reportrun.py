"""Run directories made by hand, for what only reads them: configuration, rows, shards, records, spans."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.config.engines import AUTO
from pipeline.config.hardware import Decision, with_decisions
from pipeline.config.reward import RewardConfig, RewardModelConfig, RuleConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.config.scheduler import ResourcesConfig, SlurmConfig
from pipeline.config.schema import Config, DataConfig, ModelConfig
from pipeline.config.update import Precision
from pipeline.metrics.spans import Span, SpanEnd, iteration_spans, to_line
from pipeline.run import journal
from pipeline.run.commits import Record, publish
from pipeline.run.directory import Run, load_run, write_run
from pipeline.run.identity import Parent
from pipeline.run.paths import RunPaths
from pipeline.run.shards import write_shard
from pipeline.run.tasks import Stage, Task
from tests.support.rollouts import reward_table, rollout_table

START = 1_790_000_000.0
ITERATION_SECONDS = 100.0
STAGES = {"rollout": 41.0, "reward": 12.0, "update": 33.0}
SLURM = SlurmConfig(
    prepare=ResourcesConfig(partition=("cpu",)),
    rollout=ResourcesConfig(partition=("gpu",)),
    reward=ResourcesConfig(partition=("small",)),
    update=ResourcesConfig(partition=("big",)),
    evaluate=ResourcesConfig(partition=("gpu",)),
    driver=ResourcesConfig(partition=("cpu",)),
)


def make_run(root: Path, num_shards: int = 1, parent: Parent | None = None, **more: object) -> Run:
    """A run whose directory holds its configuration and nothing else."""
    components = {"rm": RewardModelConfig(path="models/rm"), "brevity": RuleConfig(function="mine:brevity")}
    given: dict = {
        "name": "demo",
        "run_dir": str(root),
        "iterations": 20,
        "model": ModelConfig(policy="models/policy"),
        "data": DataConfig(prompts="prompts.jsonl"),
        "reward": RewardConfig(components=components),
        "rollout": RolloutConfig(num_shards=num_shards),
    }
    root.mkdir(parents=True, exist_ok=True)
    write_run(RunPaths(root), decided(Config(**given | more)), str(root), parent)
    return load_run(root)


def decided(config: Config) -> Config:
    """A configuration of which nothing is auto, as that of a run on CPUs."""
    words = {"rollout.engine": "transformers", "update.zero_stage": 0}
    words |= dict.fromkeys(("update.precision", "rollout.precision", "reward.precision"), Precision.FP32)
    auto = [key for key in words if getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) == AUTO]
    return with_decisions(config, [Decision(key, words[key], "") for key in auto])


# --- rows ------------------------------------------------------------------------------------------------


def make_row(i: int, iterations: int = 20) -> dict[str, float]:
    """A row like those of a run with critic, KL, two components and an evaluation every other iteration."""
    p = 1 - math.exp(-i / iterations * 2)
    row: dict[str, float] = {"iteration": i, "policy_version": i, "epoch": 0, "samples": 64 * i}
    row |= {"reward/mean": p - 0.5, "reward/std": 0.6 - 0.2 * p, "reward/min": -2.0, "reward/max": 2.0}
    row |= {"reward/rm/mean": p - 0.4, "reward/brevity/mean": -0.1, "reward/rm/truncated": 0.0}
    row |= {"objective/kl": 6 * p, "objective/kl_per_token": 0.1 * p, "objective/kl_coef": 0.05}
    row |= {"policy/loss": -0.01 * p, "policy/entropy": 2.4 - p, "policy/approx_kl": 0.01 * p}
    row |= {"policy/clip_fraction_low": 0.04, "policy/clip_fraction_high": 0.06, "policy/grad_norm": 0.8}
    row |= {"value/loss": 0.3 - 0.2 * p, "value/explained_variance": 0.8 * p, "value/grad_norm": 2.0}
    row |= {"response_length/mean": 90 - 30 * p, "response_length/min": 3, "response_length/max": 128}
    row |= {"response_length/clip_ratio": 0.4 - 0.3 * p}
    row |= {"finish_reason/stop": 0.7, "finish_reason/length": 0.3}
    row |= {"validity/scored": 60.0, "validity/abstained": 3.0, "validity/truncated": 1.0}
    for stage, seconds in STAGES.items():
        row |= {f"seconds/{stage}": seconds, f"seconds/compute/{stage}": 2 * seconds}
        row |= {f"memory_gib/{stage}": 3.0, f"tokens_per_second/{stage}": 570.0}
        row |= {f"model_tokens_per_second/{stage}": 2280.0, f"padding/{stage}": 0.1}
    row |= {"seconds/iteration": 86.0, "seconds/elapsed": 86.0 * i}
    row |= {"seconds/remaining": 86.0 * (iterations - i)}
    if i % 2 == 0:
        row |= {"evaluate/reward": p - 0.4, "evaluate/reward/rm": p, "evaluate/response_length": 60.0}
    return row


def slurm_row(iteration: int, spans: Sequence[Span]) -> dict[str, float]:
    """The part that accounting adds."""
    stages = iteration_spans(iteration, spans).stages
    row = {f"slurm/gpu_hours/{job_kind}": stage.gpu_hours for job_kind, stage in stages.items()}
    return row | {
        f"slurm/idle_share/{job_kind}": stage.idle / stage.run for job_kind, stage in stages.items()
    }


# --- spans -----------------------------------------------------------------------------------------------


def make_spans(iteration: int, num_shards: int) -> list[Span]:
    """Attempts of an iteration on Slurm; the first rollout fails once, and a driver job follows."""
    begin = START + ITERATION_SECONDS * iteration
    spans = [
        _attempt("rollout", "gpu", iteration, shard, begin, 30.0 + shard % 7) for shard in range(num_shards)
    ]
    failed = _attempt(
        "rollout", "gpu", iteration, 0, begin, 9.0, SpanEnd.FAILED, "NODE_FAIL: the node <gone>"
    )
    spans[0] = _attempt("rollout", "gpu", iteration, 0, begin + 15.0, 30.0, number=2)
    spans += [
        _attempt("reward", "small", iteration, shard, (spans[shard].ended or 0.0) + 1.0, 8.0)
        for shard in range(num_shards)
    ]
    spans.append(_attempt("update", "big", iteration, 0, begin + 65.0, 30.0))
    driver = Span(
        "driver",
        0,
        f"driver-{iteration}-1",
        SpanEnd.ENDED,
        ready=begin + 96,
        started=begin + 97,
        ended=begin + 98,
        node="head",
        lane="cpu",
        job=f"{1000 * iteration + 300}_0",
        cpus=1,
    )
    return [failed, *spans, driver]


def _attempt(
    job_kind: str,
    lane: str,
    iteration: int,
    shard: int,
    ready: float,
    seconds: float,
    end: SpanEnd = SpanEnd.COMMITTED,
    note: str = "",
    number: int = 1,
) -> Span:
    array = 1000 * iteration + {"rollout": 0, "reward": 100, "update": 200}[job_kind] + number
    started = ready + 2.0 + shard % 5
    return Span(
        job_kind=job_kind,
        shard=shard,
        attempt=f"{number}-{array}r0",
        end=end,
        ready=ready,
        started=started,
        computing=started + seconds / 4,
        ended=started + seconds,
        compute=seconds / 2,
        node=f"{lane}-{shard % 16:02d}",
        lane=lane,
        job=f"{array}_{shard}",
        note=note,
        cpus=8,
        gpus=1,
    )


def write_spans(run: Run, iterations: Iterable[int], num_shards: int) -> None:
    """Lines of spans.jsonl."""
    lines = (
        to_line(iteration_spans(i, make_spans(i, num_shards), START + ITERATION_SECONDS * (i + 1)))
        for i in iterations
    )
    journal.rewrite(run.paths.spans, lines)


# --- commits ---------------------------------------------------------------------------------------------


def record(
    task: Task, outputs: tuple = (), started: float = 0.0, ended: float = 1.0, **metrics: float
) -> Record:
    return Record(task, "one", outputs, {}, 0, 0, 9, "rollout/1", started, ended, "host", 1, "", metrics)


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
    reasons: Sequence[str] | None = None,
    messages: Sequence[str] | None = None,
    prompt_ids: Sequence[str] | None = None,
) -> None:
    """Rollout and reward shard of an iteration. A token for each letter; every third is a tool's."""
    count = len(responses)
    tokens = [[ord(letter) for letter in text] for text in responses]
    rollout = rollout_table(
        tokens,
        prompt_id=prompt_ids or [f"{iteration}-{shard}-{i}" for i in range(count)],
        sample_index=sample_index,
        response_mask=[[i % 3 != 2 for i in range(len(row))] for row in tokens],
        rollout_logprobs=[[-0.5] * len(row) for row in tokens],
        finish_reason=reasons,
        response_messages=messages,
        prompt_text=prompts or [f"prompt {i}" for i in range(count)],
        response_text=responses,
    )
    halves = [value / 2 for value in rewards]
    reward = reward_table(rollout, rewards, reference_logprobs=reference, rm=rewards, brevity=halves)
    tables = {Stage.ROLLOUT: rollout, Stage.REWARD: reward}
    for stage, table in tables.items():
        task = Task(iteration, stage, shard)
        entry = write_shard(run.paths, run.paths.task(task).data("one"), table)
        assert publish(run.paths, record(task, (entry,)))
