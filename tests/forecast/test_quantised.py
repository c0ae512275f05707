"""A reward model in FP8: what its engine holds of it, and what the forecast says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.update import Precision
from pipeline.forecast.shapes import read_shape
from pipeline.forecast.stages import reward_needs
from stages.models.loading import load_reward_model
from tests.support.processes import config_of
from tests.support.tiny import make_reward_model

_BLOCK = 16


def in_fp8(folder: Path) -> Path:
    """A reward model of which the matrices of layers are FP8, with a scale for each block of 16 x 16."""
    make_reward_model(folder)
    path, settings = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(path)
    for name in [name for name in tensors if "_proj." in name]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        scales = torch.ones(rows // _BLOCK, columns // _BLOCK)
        tensors[name.replace("weight", "weight_scale_inv")] = scales
    save_file(tensors, path, {"format": "pt"})
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": how}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return in_fp8(tmp_path_factory.mktemp("fp8") / "reward_model")


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.skipif(torch.cuda.is_available(), reason="some GPUs compute in FP8")
def test_transformers_without_a_gpu_holds_it_as_the_forecast_says(model, precision):
    loaded = load_reward_model(model, precision, trust_remote_code=False)
    held = sum(weight.nbytes for weight in loaded.parameters())
    width = 4 if precision is Precision.FP32 else 2
    assert read_shape(model, gives_number=True).dequantised(width) == pytest.approx(held, rel=0.01)


def needs(config, engine, folder):
    """Bytes of the model's weights where it scores: for certain, and in all."""
    component = replace(config.reward.components["rm"], path=str(folder), engine=engine)
    reward = replace(config.reward, precision=Precision.BF16, components={"rm": component})
    (need,) = reward_needs(replace(config, reward=reward), "", "reward", 1)
    found = [part for part in need.parts if part.name in ("rm", "weights")]
    return sum(part.size for part in found if part.is_certain), sum(part.size for part in found)


def test_vllm_keeps_the_bytes_of_the_file_and_transformers_may_need_them_twice(inputs, tmp_path, model):
    config, shape = config_of(inputs, tmp_path / "run"), read_shape(model, gives_number=True)
    stored, dequantised = shape.as_stored(2), shape.dequantised(2)
    assert stored < 0.8 * dequantised
    assert needs(config, "vllm", model) == (stored, stored)
    assert needs(config, "transformers", model) == (stored, dequantised)
