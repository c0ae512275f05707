"""Seconds that a run will take: by earlier runs beside it, or by cards that Slurm's GRES name."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.checks import rehearsal_record
from pipeline.checks.finding import Verdict, ok
from pipeline.checks.seconds import check_seconds
from pipeline.config.schema import Config, ModelConfig
from pipeline.forecast.corrections import PREFIX, Corrected
from pipeline.forecast.lengths import lengths_of
from pipeline.run import journal
from pipeline.run.commits import publish
from pipeline.run.forecast import Forecast, read_forecast, write_forecast
from pipeline.run.tasks import PREPARE, Stage, Task
from tests.support.large_models import weights_file
from tests.support.reportrun import SLURM, make_row, make_run, record

LENGTHS = lengths_of("data.prompts", [30, 40, 50], 0)


def make_model(folder: Path, hidden: int = 64) -> Path:
    """Headers of a model of one layer."""
    folder.mkdir()
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"]
    weights_file(folder / "model.safetensors", [500, hidden], [2 * hidden, hidden], names=names)
    sizes = {"hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 500}
    settings = {"architectures": ["QwenForCausalLM"], "intermediate_size": 2 * hidden, **sizes}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def run_in(folder: Path, name: str, policy: Path, **more: object):
    return make_run(folder / name, model=ModelConfig(policy=str(policy)), **more)


def carried_out(folder: Path, policy: Path, host: str = os.uname().nodename, **more: object) -> Config:
    """The configuration of a run with rows; prompts had 40 tokens, responses 60."""
    run = run_in(folder, "before", policy, **more)
    rows = [make_row(i) | {"response_length/mean": 60.0} for i in range(1, 7)]
    journal.rewrite(run.paths.metrics, rows)
    for task in (PREPARE, Task(6, Stage.UPDATE)):
        metrics = {"prompt_length/mean": 40.0}
        assert publish(run.paths, replace(record(task, started=1.0, ended=2.0, **metrics), host=host))
    return run.config


@pytest.fixture
def policy(tmp_path) -> Path:
    return make_model(tmp_path / "policy")


def test_an_earlier_run_of_such_a_model_here_says_what_an_iteration_takes(tmp_path, policy):
    before = carried_out(tmp_path, policy)
    found, finding = check_seconds(replace(before, run_dir=str(tmp_path / "new")), LENGTHS)
    assert found.stages == {"rollout": 41.0, "reward": 12.0, "update": 33.0}
    assert found.run == 20 * found.iteration
    assert "GPU-hours" not in finding.measured  # no stage has a GPU
    assert "measured in before, median of 5 iterations, times 1.00 the tokens" in finding.measured


@pytest.mark.parametrize("change", ["host", "engine", "model"])
def test_a_run_elsewhere_or_of_another_engine_or_model_says_nothing(tmp_path, policy, change):
    before = carried_out(tmp_path, policy, host="other" if change == "host" else os.uname().nodename)
    new = replace(before, run_dir=str(tmp_path / "new"))
    if change == "engine":
        new = replace(new, rollout=replace(new.rollout, engine="vllm"))
    if change == "model":
        new = replace(new, model=replace(new.model, policy=str(make_model(tmp_path / "wide", 128))))
    found, finding = check_seconds(new, LENGTHS)
    assert found is None
    assert finding.measured.startswith("not known: ")


def test_a_card_whose_peak_is_known_gives_seconds_by_a_share_that_is_named(tmp_path, policy, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gpu = {name: replace(getattr(SLURM, name), gpus_per_node="a100:1") for name in ("rollout", "update")}
    config = run_in(tmp_path, "run", policy, scheduler=replace(SLURM, **gpu)).config
    found, finding = check_seconds(config, LENGTHS)
    assert set(found.stages) >= {"rollout", "update"}
    assert "update 28% (assumed, not measured)" in finding.measured
    hours = found.stages["rollout"] * config.iterations * config.rollout.num_shards / 3600
    assert finding.numbers["rollout_gpu_hours"] == pytest.approx(hours)
    assert f"GPU-hours of computing: rollout {hours:.3g}, " in finding.measured
    speed = ok("speed-training", "", **{f"{PREFIX}NVIDIA A100-SXM4-80GB/{Corrected.UPDATE_FLOPS}": 156e12})
    rehearsal_record.keep_record("here", [("Rehearsal", speed)])
    measured, finding = check_seconds(config, LENGTHS)
    assert "update 50% (measured by the rehearsal on a100)" in finding.measured
    assert measured.stages["update"] == pytest.approx(found.stages["update"] * 0.28 / 0.5)


def test_without_ground_it_says_so(tmp_path, policy):
    found, finding = check_seconds(run_in(tmp_path, "run", policy).config, LENGTHS)
    assert found is None
    assert finding.measured.startswith("not known: there is no earlier run of such a model here")
    assert finding.verdict is Verdict.OK


def test_what_was_expected_is_read_as_it_was_written(tmp_path, policy):
    run = run_in(tmp_path, "run", policy)
    assert read_forecast(run.paths) is None
    seconds, _ = check_seconds(carried_out(tmp_path, policy), LENGTHS)
    expected = Forecast([LENGTHS], {"update": 2.0**31}, seconds, made=7.0)
    write_forecast(run.paths, expected)
    assert read_forecast(run.paths) == expected
    whole = run.paths.forecast.read_text()
    for spoilt in ("{", whole[:-20], whole.replace("2147483648.0", "3147483648.0"), "[1]", "\0"):
        assert spoilt != whole
        run.paths.forecast.write_text(spoilt)
        assert read_forecast(run.paths) is None
