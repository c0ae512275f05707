"""LoRA: adapters start as nothing, they alone are trained, and a plain model and its adapter are saved."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from pipeline.config.compose import compose
from pipeline.config.schema import Config
from pipeline.config.update import LoraConfig, Precision
from stages.context import UserError
from stages.models import DTYPES, load_causal_lm
from stages.ppo.lora import adapted_layers, attach, factors, is_adapter, load_policy, merged
from stages.ppo.trainer import Trainer
from stages.ranks import start_distributed
from tests.support import tiny
from tests.support.trainers import (
    RATE,
    advance,
    into_file,
    largest_difference,
    precision_of,
    same_bytes,
    save_state,
    seen_in,
    settings,
    weights,
)

CASES = ["fp32-zero0", "fp32-zero0-checkpointing", "bf16-zero2", "fp32-zero3", "bf16-zero3-checkpointing"]
IDS = torch.arange(2, 32).view(2, 15)


def config_of(models: Path, case: str = "fp32-zero0", **lora: object) -> Config:
    config = compose(tiny.overrides(models, models / "no-run"))
    update = dataclasses.replace(settings(case), lora=LoraConfig(rank=4, alpha=8.0, **lora))
    return dataclasses.replace(config, update=update)


def trainer_of(config: Config, policy: Path) -> Trainer:
    return Trainer("policy", load_policy(policy, config), RATE, config.update)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits.float()


def life_with_adapters(case: str, policy: Path, folder: Path) -> dict:
    """Three steps, a checkpoint, two more; the same two from the checkpoint and the base."""
    torch.set_num_threads(1)
    start_distributed()
    config = config_of(policy.parent, case)
    trainer = trainer_of(config, policy)
    start, first = weights(trainer), logits(trainer.engine)
    advance(trainer, range(3))
    after_three, last = weights(trainer), logits(trainer.engine)
    trainer.save_model(folder / "model")
    save_state(trainer, folder / "state")
    again = trainer_of(config, policy)
    again.load_state(folder / "state")
    restored = logits(again.engine)
    for name, one in (("straight", trainer), ("resumed", again)):
        advance(one, range(3, 5))
        one.save_model(folder / name)
        save_state(one, folder / name / "state")
    names = ("start", "first", "after_three", "last", "restored")
    return dict(zip(names, (start, first, after_three, last, restored), strict=True))


@pytest.fixture(scope="module")
def lives(processes, models, tmp_path_factory):
    folders = {case: tmp_path_factory.mktemp(case) for case in CASES}
    return {
        case: (folder, processes.submit(into_file, life_with_adapters, case, models / "policy", folder))
        for case, folder in folders.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_new_adapters_change_nothing(lives, models, case):
    seen = seen_in(lives[case][1])
    base = load_causal_lm(models / "policy", precision_of(case), trust_remote_code=False)
    assert torch.equal(seen["first"], logits(base))
    assert not torch.equal(seen["first"], seen["last"])


@pytest.mark.parametrize("case", CASES)
def test_training_moves_the_adapters_and_nothing_else(lives, case):
    seen = seen_in(lives[case][1])
    before, after = seen["start"], seen["after_three"]
    assert sum(is_adapter(name) for name in before) == 2 * 2 * 7, "two for each linear layer of two blocks"
    for name in before:
        assert is_adapter(name) != torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("case", CASES)
def test_going_on_from_base_and_adapters_is_bit_exact(lives, case):
    folder, life = lives[case]
    seen = seen_in(life)
    assert torch.equal(seen["last"], seen["restored"])
    for part in ("", "state", "adapter"):
        assert same_bytes(folder / "straight" / part, folder / "resumed" / part)
    config = "adapter/adapter_config.json"
    assert (folder / "straight" / config).read_text() == (folder / "resumed" / config).read_text()


@pytest.mark.parametrize("case", CASES)
def test_the_state_holds_the_adapters_in_fp32(lives, case):
    folder, life = lives[case]
    seen = seen_in(life)
    state = load_file(folder / "state" / "policy-rank-00000-000.safetensors")
    adapters = {name: tensor for name, tensor in seen["after_three"].items() if is_adapter(name)}
    assert state.keys() == {f"{k}/{name}" for k in ("exp_avg", "exp_avg_sq", "weight") for name in adapters}
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    expected = {name: adapter.flatten() for name, adapter in adapters.items()}
    assert largest_difference({name: state[f"weight/{name}"] for name in adapters}, expected) == 0


@pytest.mark.parametrize("case", CASES)
def test_the_policy_is_a_plain_model_that_equals_the_adapter_on_the_base(lives, models, case):
    folder, life = lives[case]
    seen = seen_in(life)
    plain, loading = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert plain.dtype == DTYPES[precision_of(case)]
    base = AutoModelForCausalLM.from_pretrained(models / "policy", dtype=plain.dtype).float()
    adapted = PeftModel.from_pretrained(base, folder / "model" / "adapter")
    half = precision_of(case) is not Precision.FP32
    assert torch.allclose(seen["last"], logits(adapted), atol=0.2 if half else 1e-5)
    assert torch.allclose(logits(plain), logits(adapted), atol=0.2 if half else 1e-5)
    expected = {name: w.to(plain.dtype) for name, w in adapted.merge_and_unload().named_parameters()}
    # In half precision a weight may be rounded the other way, which is 2**-8 of it.
    for name, weight in plain.named_parameters():
        assert torch.allclose(weight, expected[name], rtol=2**-7 if half else 1e-6, atol=1e-6), name


def test_checkpointing_gives_adapters_the_same_gradients(lives):
    plain, checkpointed = (lives[case] for case in ("fp32-zero0", "fp32-zero0-checkpointing"))
    for _, life in (plain, checkpointed):
        life.result(timeout=500)
    assert same_bytes(plain[0] / "state", checkpointed[0] / "state")


def test_the_adapter_says_what_it_is_for(lives, models):
    folder, life = lives["fp32-zero0"]
    life.result(timeout=500)
    told = json.loads((folder / "model" / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(models / "policy")
    assert (told["r"], told["lora_alpha"], told["lora_dropout"]) == (4, 8.0, 0.0)
    assert told["target_modules"] == sorted(told["target_modules"])
    assert (told["task_type"], told["inference_mode"]) == ("CAUSAL_LM", True)


def test_adapters_follow_from_the_seed_alone(models):
    config = config_of(models)
    torch.manual_seed(5)
    one, state = load_policy(models / "policy", config), torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator was used"
    torch.manual_seed(6)
    two = load_policy(models / "policy", config)
    other = load_policy(models / "policy", dataclasses.replace(config, seed=config.seed + 1))
    weights_of = [dict(model.named_parameters()) for model in (one, two, other)]
    assert largest_difference(weights_of[0], weights_of[1]) == 0
    assert largest_difference(weights_of[0], weights_of[2]) > 0


def test_only_the_layers_that_were_named_get_adapters(models):
    model = load_policy(models / "policy", config_of(models, target_modules=("q_proj", "mlp.up_proj")))
    assert {name.rsplit(".", 3)[-3] for name in adapted_layers(model)} == {"q_proj", "up_proj"}


@pytest.mark.parametrize("target", ["nonsense", "embed_tokens", "lm_head"])
def test_a_layer_that_cannot_have_an_adapter_is_named(models, target):
    with pytest.raises(
        UserError, match=rf"lora\.target_modules: .*'{target}'; it has .*down_proj, gate_proj"
    ):
        load_policy(models / "policy", config_of(models, target_modules=("q_proj", target)))


def test_without_peft_the_error_says_what_to_install(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"update\.lora needs peft: pip install \"slurm-ppo\[lora\]\""):
        load_policy(models / "policy", config_of(models))


def gpt2() -> PreTrainedModel:
    """Its weights are [in, out]."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_transposed_weights_are_merged_as_peft_does(tmp_path):
    model = gpt2()
    attach(model, tmp_path, LoraConfig(rank=2), seed=0)
    layers = adapted_layers(model)
    assert len(layers) == 4
    for layer in layers.values():
        down, up = factors(layer)
        torch.nn.init.normal_(up)
        ours = merged(layer, layer.base_layer.weight, down, up)
        layer.merge()
        assert torch.allclose(ours, layer.base_layer.weight, atol=1e-5)
