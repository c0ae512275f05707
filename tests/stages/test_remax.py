"""ReMax's baselines: one greedy response more per prompt, told apart by its sample index."""

import json
import math
import shutil
from itertools import pairwise

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.metrics.responses import read_samples
from pipeline.run.commits import Record, read_record
from pipeline.run.directory import Run, load_run
from pipeline.run.schemas import GREEDY_SAMPLE, REWARD, ROLLOUT, is_sampled
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task
from tests.support.processes import in_process_of_its_own, make_run, stage, stage_arguments, stopping

SETTINGS = (
    "algorithm.estimator=remax",
    "rollout.samples_per_prompt=2",
    "rollout.temperature=1.3",
    "rollout.top_p=0.9",
    "rollout.tokens_per_batch=60",
)
SHARDS = range(2)


def record_of(run: Run, name: Stage, shard: int = 0) -> Record:
    record = read_record(run.paths, Task(1, name, shard))
    assert record is not None
    return record


def rollout(run: Run, shard: int = 0) -> pa.Table:
    return read_shard(run.paths, record_of(run, Stage.ROLLOUT, shard), ROLLOUT)


def reward(run: Run, shard: int = 0) -> pa.Table:
    return read_shard(run.paths, record_of(run, Stage.REWARD, shard), REWARD)


def do(run: Run, *task: object) -> None:
    done = stage(run, *task)
    assert done.code == 0, done.log


@pytest.fixture(scope="module")
def remax(models, tmp_path_factory) -> Run:
    """Two shards of four prompts, generated and scored. Tests must not change it."""
    run = make_run(models, tmp_path_factory.mktemp("remax") / "run", *SETTINGS)
    do(run, "prepare")
    for shard in SHARDS:
        do(run, "rollout", 1, shard)
        do(run, "reward", 1, shard)
    return run


def test_every_prompt_has_its_samples_and_then_a_greedy_one(remax):
    for shard in SHARDS:
        rows = rollout(remax, shard)
        assert rows["sample_index"].to_pylist() == [0, 1, GREEDY_SAMPLE] * 4
        ids = rows["prompt_id"].to_pylist()
        assert ids == [prompt for prompt in dict.fromkeys(ids) for _ in range(3)]


def test_log_probabilities_are_the_tempered_distributions_and_of_greedy_rows_the_models_own(remax, models):
    model = AutoModelForCausalLM.from_pretrained(models / "policy").eval()
    for row in rollout(remax).to_pylist():
        prompt, response = row["prompt_tokens"], row["response_tokens"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        is_greedy = row["sample_index"] == GREEDY_SAMPLE
        assert (logits.argmax(-1).tolist() == response) is is_greedy
        temperature = 1.0 if is_greedy else 1.3
        expected = torch.log_softmax(logits / temperature, dim=-1).gather(
            -1, torch.tensor(response)[:, None]
        )[:, 0]
        torch.testing.assert_close(torch.tensor(row["rollout_logprobs"]), expected, atol=1e-4, rtol=0)


def test_samples_are_those_of_a_run_without_baselines(remax, models, tmp_path):
    """Their seeds are their own; only what they are batched with differs."""
    plain = make_run(models, tmp_path / "run", *SETTINGS, "algorithm.estimator=rloo")
    do(plain, "prepare")
    do(plain, "rollout", 1)
    sampled = rollout(remax).filter(is_sampled(rollout(remax)))
    for name in ("prompt_id", "sample_index", "response_tokens", "finish_reason"):
        assert rollout(plain)[name].to_pylist() == sampled[name].to_pylist()


def test_baselines_are_scored_like_samples_but_need_no_reference(remax):
    rows, scored = rollout(remax), reward(remax)
    assert scored.select(["prompt_id", "sample_index"]).equals(rows.select(["prompt_id", "sample_index"]))
    assert all(math.isfinite(value) for value in scored["reward"].to_pylist())
    for row, score in zip(rows.to_pylist(), scored.to_pylist(), strict=True):
        reference = score["reference_logprobs"]
        if row["sample_index"] == GREEDY_SAMPLE:
            assert reference is None
        else:
            assert len(reference) == len(row["response_tokens"])


def test_counts_are_of_samples_and_tokens_of_all(remax):
    rollouts = [record_of(remax, Stage.ROLLOUT, shard) for shard in SHARDS]
    rewards = [record_of(remax, Stage.REWARD, shard) for shard in SHARDS]
    for records in (rollouts, rewards):
        assert sum(r.metrics["responses"] for r in records) == remax.config.responses_per_iteration == 16
        assert sum(r.rows for r in records) == 24
        for shard, record in enumerate(records):
            tokens = rollout(remax, shard)["response_tokens"].to_pylist()
            assert record.metrics["response_tokens"] == sum(map(len, tokens))
    reasons = [
        row["finish_reason"]
        for shard in SHARDS
        for row in rollout(remax, shard).to_pylist()
        if row["sample_index"] >= 0
    ]
    assert sum(r.metrics["stopped"] for r in rollouts) == reasons.count("stop")


def test_the_report_shows_samples_only(remax):
    rows = rollout(remax)
    expected = rows.filter(is_sampled(rows))["response_text"].to_pylist()
    found = read_samples(remax, 1).rows
    assert [sample.response for sample in found][: len(expected)] == expected
    assert all(sample.sample_index >= 0 for sample in found)


def test_stopped_again_and_again_between_samples_and_baselines_it_ends_in_the_same_bytes(remax, tmp_path):
    """What was saved of either kind is taken over; killed within a save: tests/stages/test_partial.py."""
    shutil.copytree(remax.paths.root, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "iterations")
    run = load_run(tmp_path / "run")
    folder = run.paths.task(Task(1, Stage.ROLLOUT)).folder
    saved = [0]
    for steps in (16, 17, 10**6):
        log = tmp_path / f"{len(saved)}.log"
        arguments = stage_arguments(run, "rollout", 1)
        code = in_process_of_its_own(stopping, arguments, str(log), steps)
        if code == 0:
            break
        assert code == 5, log.read_text()
        saved.append(max(json.loads(path.read_text())["rows"] for path in folder.glob("*.partial.*.json")))
    assert code == 0, log.read_text()
    assert f"continues from {saved[-1]} of 12 responses" in log.read_text()
    assert len(saved) == 3
    assert all(before < after for before, after in pairwise(saved))
    assert record_of(run, Stage.ROLLOUT).fingerprint == record_of(remax, Stage.ROLLOUT).fingerprint
