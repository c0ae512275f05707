"""What only transformers, or a look at every weight, can say of a model is one line of prepare."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pipeline.config.model_classes import installed_classes
from pipeline.config.model_files import read_header
from pipeline.config.schema import Config
from pipeline.run.tasks import PREPARE
from stages.context import UserError
from stages.trials.models import is_finite, tried_tokenizer, try_models
from tests.support.processes import config_of, make_run, stage

P, R, C, REF = "model.policy", "reward.components.rm.path", "model.critic", "model.reference"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def config(models, tmp_path_factory) -> Config:
    return config_of(models, tmp_path_factory.mktemp("trial") / "run")


def given_as(config: Config, key: str, directory: Path) -> Config:
    if key == R:
        component = dataclasses.replace(config.reward.components["rm"], path=str(directory))
        return dataclasses.replace(
            config, reward=dataclasses.replace(config.reward, components={"rm": component})
        )
    changed = {key.removeprefix("model."): str(directory)}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changed))


def settings(**changes: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(found | changes))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", {"format": "pt"})

    return damage


def number(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    def change(found: dict[str, torch.Tensor]) -> None:
        found[UP] = found[UP].to(dtype)
        found[UP][-1, -1] = value

    return tensors(change)


OWN_CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
BROKEN = {
    "unknown": (
        P,
        settings(model_type="wonder"),
        "={}: transformers .* knows no model_type 'wonder'; install",
    ),
    "own code": (
        P,
        settings(model_type="wonder", auto_map=OWN_CODE),
        "={}: its model_type 'wonder' needs Python code .* model.trust_remote_code=true",
    ),
    "wrong config": (
        P,
        settings(intermediate_size=40),
        r": {}: its weight model.layers.0.mlp.down_proj.weight has shape \[32, 48\], .* wants \[32, 40\]",
    ),
    "nonsense": (P, settings(hidden_size="wide"), "={}: cannot be loaded as a policy: "),
    "missing weight": (P, tensors(lambda found: found.pop(UP)), rf": {{}} lacks weights of .*: {UP}"),
    "no head": (P, tensors(lambda found: found.pop("lm_head.weight")), ": {} lacks weights of .*: lm_head"),
    "nan": (P, number(math.nan), f"={{}}: its weight {UP} in model.safetensors has NaN or infinite values"),
    "inf in bf16": (P, number(math.inf, torch.bfloat16), f"={{}}: its weight {UP} in model.safetensors has"),
    "nan in fp16": (REF, number(math.nan, torch.float16), f"={{}}: its weight {UP} in"),
    "reward's nan": (R, number(math.nan), f"={{}}: its weight {UP} in model.safetensors has NaN or"),
    "reward without class": (R, settings(model_type="granite"), "={}: cannot be loaded as a reward model: "),
    "reward of AWQ": (
        R,
        settings(quantization_config={"quant_method": "awq", "bits": 4}),
        "={}: cannot be loaded, as it is quantised: .*gptqmodel",
    ),
    "reward quantised in a way of its own": (
        R,
        settings(quantization_config={"quant_method": "wonder"}),
        "={}: cannot be loaded, as it is quantised: Unknown quantization type, got wonder",
    ),
    "critic's nan": (C, number(-math.inf), f"={{}}: its weight {UP} in model.safetensors has NaN or"),
    "critic's backbone": (C, tensors(lambda found: found.pop(UP)), rf": {{}} lacks weights of .*: {UP}"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_model_that_cannot_be_used_is_one_line(models, config, tmp_path, name):
    key, damage, said = BROKEN[name]
    folder = tmp_path / "model"
    shutil.copytree(models / ("reward_model" if key == R else "policy"), folder)
    damage(folder)
    with pytest.raises(UserError, match=f"^{key}{said.format(folder)}") as refused:
        try_models(given_as(config, key, folder))
    assert len(str(refused.value)) <= 300
    assert "\n" not in str(refused.value)


def test_what_is_read_of_transformers_source_is_what_it_does():
    """validate, which does not import it, refuses by these tables."""
    read = installed_classes()
    assert read is not None
    assert read.version == transformers.__version__
    assert read.causal == dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert read.scoring == first_of(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    assert read.with_images == first_of(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    assert read.masked == first_of(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    unknown = {name for name in CONFIG_MAPPING if name not in read.types}
    assert not unknown & {*read.causal, *read.scoring, *read.with_images}


def first_of(table: Mapping[str, str | tuple[str, ...]]) -> dict[str, str]:
    return {name: found if isinstance(found, str) else found[0] for name, found in table.items()}


def test_models_without_a_fault_are_counted_in_the_log(config, caplog):
    try_models(config)
    said = caplog.messages
    assert [line.split("=")[0] for line in said if "all finite" in line] == [P, R]
    assert "21 weights of 0.00 GiB, all finite" in "\n".join(said)


def test_a_critic_that_is_not_used_is_not_tried(models, tmp_path):
    config = config_of(models, tmp_path / "run", "algorithm=grpo", "rollout.samples_per_prompt=2")
    folder = Path(shutil.copytree(models / "policy", tmp_path / "critic"))
    tensors(lambda found: found.pop(UP))(folder)
    try_models(given_as(config, C, folder))


def test_a_tokenizer_that_cannot_be_loaded_is_named(models, config, tmp_path):
    folder = Path(shutil.copytree(models / "policy", tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=f"^model.policy={folder}: cannot load its tokenizer: "):
        tried_tokenizer(given_as(config, P, folder), "model.policy", str(folder))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_every_number_of_a_weight_is_looked_at(tmp_path, monkeypatch, dtype):
    """The last one of several pieces as well; the largest number there is is one."""
    monkeypatch.setattr("stages.trials.models._PIECE", 64)
    is_float = dtype.is_floating_point
    tensor = torch.full((101,), torch.finfo(dtype).max if is_float else 2**31 - 1, dtype=dtype)
    for value in (1, *((math.nan, math.inf, -math.inf) if is_float else ())):
        tensor[-1] = value
        save_file({"other": torch.ones(3), "weight": tensor}, tmp_path / "file.safetensors")
        described = read_header(tmp_path / "file.safetensors")["weight"]
        with (tmp_path / "file.safetensors").open("rb") as file:
            assert is_finite(file, described) == math.isfinite(value)


def test_prepare_gives_up_at_once(models, tmp_path):
    """The kind of failure says that nobody has to try it three times."""
    folder = Path(shutil.copytree(models / "policy", tmp_path / "model"))
    number(math.nan)(folder)
    run = make_run(models, tmp_path / "run", f"model.policy={folder}")
    done = stage(run, "prepare", more=["--failure-file", str(tmp_path / "failure.json")])
    assert done.code == 2
    assert "Traceback" not in done.log
    said = json.loads((tmp_path / "failure.json").read_text())
    assert said["kind"] == "config"
    assert said["message"].startswith(f"model.policy={folder}: its weight {UP}")
    assert f"{PREPARE} failed: {said['message']}" in done.log
