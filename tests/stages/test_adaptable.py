"""Adapters that generation could not use are refused before a run, with the layers that can have some."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipeline.config.update import LoraConfig
from stages.context import UserError
from stages.models.adapters import merge_into, read_adapter
from stages.ppo.lora import attach, save_adapter
from tests.support.families import family, settings_of

REFUSED = {
    "mixtral": (
        "peft adapts the experts of MixtralForCausalLM too (down_proj, gate.weight, gate_up_proj), which "
        "cannot be merged; give [k_proj,o_proj,q_proj,v_proj], or train all weights: update.lora=null"
    ),
    "qwen3_next": (
        "peft adapts the experts of Qwen3NextForCausalLM too (down_proj, gate.weight, gate_up_proj), which "
        "cannot be merged; give [in_proj_ba,in_proj_qkvz,k_proj,o_proj,out_proj,q_proj,shared_expert_gate,"
        "v_proj], or train all weights: update.lora=null"
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
    assert len(said) <= 300
    model = adapted(family(name), target_modules=tuple(re.search(r"\[(.*)\]", said)[1].split(",")))
    trained = {key: one for key, one in model.named_parameters() if one.requires_grad}
    ids, fresh = torch.tensor([[3, 4, 5, 6, 9]]), family(name)
    model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 7].sum().backward()
    assert all(one.grad is not None for one in trained.values())
    with torch.no_grad():
        for one in trained.values():
            one.add_(0.05)
        save_adapter(model, trained, tmp_path / "adapter")
        merge_into(fresh, read_adapter(tmp_path / "adapter"))
        found, wanted = (one(input_ids=ids, use_cache=False).logits for one in (fresh, model))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "falcon", "granitemoe", "gpt2"])
def test_all_linear_layers_are_taken_where_each_can_have_an_adapter(name):
    """Falcon's have a class of their own, and give one tensor. peft leaves Granite's experts alone."""
    assert any(".lora_" in key for key, _ in adapted(bare(name)).named_parameters())


def test_a_layer_that_is_named_and_that_peft_refuses_is_named_too():
    with pytest.raises(UserError, match=r"^update.lora.target_modules=\[in_proj,out_proj\]: peft puts no .*"):
        adapted(bare("mamba2"), target_modules=("in_proj", "out_proj"))
