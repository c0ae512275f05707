"""Adapters that generation could not use are refused before a run, with the layers that can have some."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipeline.config.update import LoraConfig
from pipeline.forecast.shapes import num_adapted
from stages.context import UserError
from stages.models.adapters import merge_into, read_adapter
from stages.ppo.lora import adapted_in_words, attach, save_adapter
from tests.support.families import family, settings_of
from tests.support.tables import sample

REFUSED = {
    "mixtral": (
        "peft takes experts of MixtralForCausalLM for such layers, which cannot be merged; give "
        "[k_proj,o_proj,q_proj,v_proj] (and update.lora.target_parameters=[down_proj,gate_up_proj] for "
        "experts), or train all weights: update.lora=null"
    ),
    "qwen3_next": (
        "peft takes experts of Qwen3NextForCausalLM for such layers, which cannot be merged; give "
        "[in_proj_ba,in_proj_qkvz,k_proj,o_proj,out_proj,q_proj,shared_expert_gate,v_proj] (and update.lora."
        "target_parameters=[down_proj,gate_up_proj] for experts), or train all weights: update.lora=null"
    ),
    "phimoe": (
        "model.layers.0.mlp.router is a PhimoeTopKRouter, which no adapter can be added to; give "
        "[k_proj,o_proj,q_proj,v_proj], or train all weights: update.lora=null"
    ),
    "mamba2": (
        "peft puts no adapter into out_proj of Mamba2ForCausalLM; give [in_proj], or train all weights: "
        "update.lora=null"
    ),
    "mamba": "peft puts no adapter into out_proj of MambaForCausalLM; give [in_proj,x_proj], or train all ",
}


OF_EXPERTS = (
    *("afmoe", "deepseek_v3", "dots1", "gpt_oss", "granitemoe", "llama4_text", "minimax_m2", "mixtral"),
    *("olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
)
"""Families whose experts' weights are tensors of all of them."""


def bare(name: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings_of(name)))


def adapted(model: PreTrainedModel, **lora: object) -> PreTrainedModel:
    attach(model, "base", LoraConfig(**lora), seed=0)
    return model


@pytest.mark.parametrize("name", list(REFUSED))
def test_layers_that_peft_or_merging_cannot_do_are_refused_and_the_others_named(name, tmp_path):
    """What is named is trained, and generation computes with it what training did."""
    with pytest.raises(UserError) as refused:
        adapted(bare(name))
    said = str(refused.value)
    assert said.startswith(f"update.lora.target_modules=all-linear: {REFUSED[name]}")
    assert len(said) <= 330
    modules, *experts = (tuple(names.split(",")) for names in re.findall(r"\[([^]]*)\]", said))
    named = {"target_modules": modules, "target_parameters": experts[0] if experts else ()}
    check_merged(name, adapted(family(name), **named), tmp_path)


def check_merged(name: str, model: PreTrainedModel, folder: Path) -> None:
    """Check that every adapter learns, and that a model into which they are merged computes what they do."""
    trained = {key: one for key, one in model.named_parameters() if one.requires_grad}
    ids, fresh = torch.tensor([[3, 4, 5, 6, 9]]), family(name)
    model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 7].sum().backward()
    assert all(one.grad is not None for one in trained.values())
    with torch.no_grad():
        for one in trained.values():
            one.add_(torch.randn_like(one) / 20)
        save_adapter(model, trained, folder / "adapter")
        merge_into(fresh, read_adapter(folder / "adapter"))
        found, wanted = (one(input_ids=ids, use_cache=False).logits for one in (fresh, model))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "falcon", "granitemoe", "gpt2"])
def test_all_linear_layers_are_taken_where_each_can_have_an_adapter(name):
    """Falcon's have a class of their own, and give one tensor. peft leaves Granite's experts alone."""
    assert any(".lora_" in key for key, _ in adapted(bare(name)).named_parameters())


@pytest.mark.parametrize("name", sample(OF_EXPERTS, 1 / 4))
def test_adapters_of_experts_are_merged_into_the_weights_of_all_of_them(name, tmp_path):
    """GPT-OSS has them the other way round; peft's adapters lie around each other."""
    model = adapted(family(name), rank=3, target_modules=(), target_parameters=("gate_up_proj", "down_proj"))
    check_merged(name, model, tmp_path)
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert written["target_parameters"] == ["down_proj", "gate_up_proj"]


def test_some_of_the_experts_weights_may_have_adapters_too(tmp_path):
    named = {"target_modules": ("q_proj",), "target_parameters": ("experts.down_proj",)}
    check_merged("qwen3_moe", adapted(family("qwen3_moe"), **named), tmp_path)


@pytest.mark.parametrize(
    ("name", "parameter", "said"),
    [
        ("qwen3_moe", "w1", "no weights 'w1' of experts; it has down_proj, gate_up_proj"),
        ("llama", "down_proj", "no weights 'down_proj' of experts; no tensor of it holds weights of experts"),
        ("mamba2", "weight", "no weights 'weight' of experts; no tensor of it holds weights of experts"),
    ],
)
def test_weights_of_experts_that_a_model_lacks_are_refused(name, parameter, said):
    with pytest.raises(UserError) as refused:
        adapted(bare(name), target_modules=(), target_parameters=(parameter,))
    assert str(refused.value) == f"update.lora.target_parameters: the policy has {said}"


def test_linear_layers_in_whose_place_peft_takes_experts_are_refused():
    """DeepSeek's first layers and shared experts have linear layers of these names."""
    with pytest.raises(
        UserError, match=r"^update.lora.target_modules=\[down_proj\]: peft takes experts of Deep"
    ):
        adapted(bare("deepseek_v3"), target_modules=("down_proj",))


def test_the_share_of_weights_that_are_adapted_is_said():
    config = AutoConfig.for_model("qwen3_moe", **settings_of("qwen3_moe"))
    model = AutoModelForCausalLM.from_config(config)
    whole = sum(one.numel() for one in model.parameters())
    queries, experts = 2 * 32 * 32, 2 * 4 * (32 * 48 + 24 * 32)
    attach(model, "base", LoraConfig(rank=4, target_modules=("q_proj",)), seed=0)
    assert adapted_in_words(model) == (
        f"update.lora: 512 weights adapt {queries / whole:.1%} of the policy's; experts, "
        f"{experts / whole:.0%}, have none (update.lora.target_parameters=[down_proj,gate_up_proj] adapts "
        "them)"
    )
    both = adapted(
        family("qwen3_moe"),
        target_modules=("q_proj",),
        target_parameters=("experts.gate_up_proj", "down_proj"),
    )
    assert adapted_in_words(both).endswith(f"adapt {(queries + experts) / whole:.1%} of the policy's")


def test_the_forecast_counts_the_adapters_of_each_expert(tmp_path):
    lora = LoraConfig(rank=4, target_modules=("q_proj",), target_parameters=("gate_up_proj", "down_proj"))
    model = family("gpt_oss")
    model.save_pretrained(tmp_path)
    attach(model, "base", lora, seed=0)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert num_adapted(tmp_path, lora) == trained


def test_a_layer_that_is_named_and_that_peft_refuses_is_named_too():
    with pytest.raises(UserError, match=r"^update.lora.target_modules=\[in_proj,out_proj\]: peft puts no .*"):
        adapted(bare("mamba2"), target_modules=("in_proj", "out_proj"))
