"""The size of a model, of directories of every kind."""

import json
from dataclasses import replace

import pytest

from pipeline.checks.finding import Verdict
from pipeline.checks.memory import check_memory
from pipeline.config.issue import ConfigError
from pipeline.config.rollout import RolloutConfig
from pipeline.forecast.shapes import read_shape
from tests.support.large_models import weights_file
from tests.support.processes import config_of

SETTINGS = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 100}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    return tmp_path


def test_of_weights_that_are_there_twice_those_that_are_loaded_count(folder):
    for name in ("model-1-of-2.safetensors", "model-2-of-2.safetensors", "consolidated.safetensors"):
        weights_file(folder / name, [100, 8], names=[f"{name}.weight"])
    parts = {f"model-{n}-of-2.safetensors.weight": f"model-{n}-of-2.safetensors" for n in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert read_shape(folder).parameters == 1600
    weights_file(folder / "model.safetensors", [100, 8], [8], names=["embed_tokens.weight", "norm.weight"])
    assert read_shape(folder).parameters == 808, "as transformers takes it before the index"


_NAMES = ("embed_tokens.weight", "q_proj.weight", "q_proj.weight_scale_inv")


@pytest.mark.parametrize(
    ("formats", "how", "stored", "dequantised"),
    [
        (("BF16", "F8_E4M3", "F32"), "fp8", 2 * 800 + 64 + 2, 2 * (800 + 64 + 1)),
        (("BF16", "F8_E4M3", "F32"), None, 2 * (800 + 64 + 1), 2 * (800 + 64 + 1)),
        (("BF16", "I32", "BF16"), "gptq", 2 * 800 + 4 * 64 + 2, 2 * 800 + 4 * 64 + 2),
    ],
)
def test_quantised_weights_have_the_bytes_of_their_format(folder, formats, how, stored, dequantised):
    weights_file(folder / "model.safetensors", [100, 8], [8, 8], [1, 1], names=_NAMES, formats=formats)
    quantised = {"quantization_config": {"quant_method": how}} if how else {}
    (folder / "config.json").write_text(json.dumps(SETTINGS | quantised))
    shape = read_shape(folder)
    assert (shape.as_stored(2), shape.dequantised(2)) == (stored, dequantised)


@pytest.mark.parametrize("text", [None, "none", []])
def test_settings_of_a_text_model_that_are_none_leave_those_of_the_whole(folder, text):
    weights_file(folder / "model.safetensors", [100, 8], names=["embed_tokens.weight"])
    (folder / "config.json").write_text(json.dumps(SETTINGS | {"text_config": text}))
    assert read_shape(folder).hidden == 8


@pytest.mark.parametrize(
    ("settings", "weights", "said"),
    [
        (SETTINGS, None, "has no weights in safetensors"),
        (SETTINGS, "pytorch_model.bin", "has no weights in safetensors"),
        ({}, "model.safetensors", "its config.json names no hidden_size"),
        ({}, "some.safetensors", "its config.json names no hidden_size"),
    ],
)
def test_what_is_missing_is_named(folder, inputs, tmp_path, settings, weights, said):
    (folder / "config.json").write_text(json.dumps(settings))
    if weights:
        weights_file(folder / weights, [100, 8], names=["embed_tokens.weight"])
    with pytest.raises(ConfigError, match=said):
        read_shape(folder)


def test_a_model_whose_size_cannot_be_read_is_skipped_in_a_line(inputs, tmp_path):
    config = config_of(inputs, tmp_path / "run")
    model, rollout = (
        replace(config.model, policy=str(tmp_path / "nothing")),
        RolloutConfig(engine="transformers"),
    )
    (found,) = check_memory(replace(config, model=model, rollout=rollout))
    assert (found.verdict, found.title) == (Verdict.SKIPPED, "memory")
    assert f"{tmp_path}/nothing" in found.measured
