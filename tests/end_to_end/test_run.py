"""A complete run, seen from outside: its files, its rows, its policies."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from pipeline.metrics.catalogue import METRICS, describe
from pipeline.run.directory import load_run
from tests.support import tiny


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_policies_and_critics_load_with_from_pretrained(complete_real_run):
    first, last = (
        AutoModelForCausalLM.from_pretrained(complete_real_run / "policy" / v) for v in ("00001", "00002")
    )
    AutoTokenizer.from_pretrained(complete_real_run / "policy" / "00002")
    AutoModelForTokenClassification.from_pretrained(complete_real_run / "state" / "00002" / "critic")
    assert not torch.equal(first.lm_head.weight, last.lm_head.weight)


def test_every_number_of_a_row_is_described_and_finite(complete_real_run):
    rows = rows_of(complete_real_run)
    assert [row["iteration"] for row in rows] == [1, 2]
    for row in rows:
        assert [name for name in row if describe(name) is None] == []
        assert all(isinstance(value, int | float) and abs(value) < 1e12 for value in row.values())


def test_every_described_metric_of_this_configuration_is_written(complete_real_run):
    row = rows_of(complete_real_run)[-1]
    described = {describe(name).name for name in row}
    # Slurm, a correction that is asked for, ReMax, several held-out sets and samples, a program
    of_others = (
        "slurm/",
        "correction/",
        "reward/greedy/",
        "evaluate/*/",
        "evaluate/mean@",
        "evaluate/pass@",
        "eval/",
        "engine/",  # vLLM
        "environment/",
        "staleness/",
        "teacher/",
        "refill/",
        "policy/is_warmup",
        "policy/router_loss",  # mixtures of experts
        "policy/replayed_differ",
        "data/prompts/",  # several files of prompts
        "epoch/",
        "epoch_left_out",  # data.band
        "reward/mean/",
        "validity/",  # reasons why responses do not count
    )
    assert row["validity/scored"] == 8
    of_components = {
        "reward/*/abstained",
        "reward/*/late",
        "reward/*/failed",
        "reward/*/unreadable",
        "reward/*/retries",
    }  # rules and services
    of_odd_inputs = ("data/rejected", "data/truncated", "data/read_as/", "data/left_out", "data/masked_ids")
    of_others += (*of_odd_inputs, "evaluate/reward/*/", "evaluate/refused")  # test_counts.py
    absent = {metric.name for metric in METRICS if not metric.name.startswith(of_others)} - described
    assert absent == {"gpu_memory_gib/*", "halvings/*", "records_lost", *of_components}


def test_ratio_of_the_first_minibatch_is_exactly_one(complete_real_run):
    assert [row["policy/ratio_error_first"] for row in rows_of(complete_real_run)] == [0.0, 0.0]


def test_samples_are_counted_over_the_whole_run(complete_real_run):
    assert [row["samples"] for row in rows_of(complete_real_run)] == [8, 16]


def test_kl_to_the_reference_starts_at_zero(complete_real_run):
    first, second = rows_of(complete_real_run)
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert second["objective/kl"] != pytest.approx(0, abs=1e-5)


def test_best_names_the_evaluation_with_the_highest_reward(complete_real_run):
    best = json.loads((complete_real_run / "best.json").read_text())
    rows = rows_of(complete_real_run)
    assert best["reward"] == max(row["evaluate/reward"] for row in rows)
    assert (complete_real_run / "policy" / "best").resolve() == (complete_real_run / best["policy"]).resolve()


def test_records_name_their_inputs(complete_real_run):
    record = json.loads((complete_real_run / "iterations/00002/reward/shard-00001.json").read_text())
    assert set(record["inputs"]) == {"0/prepare/0", "2/rollout/1"}
    assert record["policy_version"] == 1


def test_grpo_needs_no_critic(models, slurm_ppo, tmp_path):
    run_dir = tmp_path / "run"
    arguments = tiny.overrides(
        models, run_dir, "algorithm=grpo", "rollout.samples_per_prompt=4", "iterations=1"
    )
    done = slurm_ppo("run", *arguments)
    assert done.returncode == 0, done.stderr
    assert not (run_dir / "state" / "00001" / "critic").exists()
    assert load_run(run_dir).config.rollout.samples_per_prompt == 4
