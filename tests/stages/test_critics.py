"""A critic can be made of every architecture, starts with the head that it is given, and is loaded again."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from pipeline.config.update import Precision, UpdateConfig
from stages.ppo.batching import Row, collate
from stages.ppo.critics import load_critic
from stages.ppo.forward import response_values
from stages.ppo.trainer import Trainer
from stages.ranks import start_distributed
from tests.support.processes import in_process_of_its_own

SIZE = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.3}
HEADS = {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
LLAMA = SIZE | HEADS | {"max_position_embeddings": 32, "pad_token_id": 0}
GPT2 = {
    "vocab_size": 29,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "initializer_range": 0.3,
}
OPT = {"ffn_dim": 24, "num_attention_heads": 2, "max_position_embeddings": 32, "word_embed_proj_dim": 16}
SHAPES = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "gemma3_text": LLAMA | {"sliding_window": 8},
    "olmo2": LLAMA,
    "cohere": LLAMA,
    "granite": LLAMA,
    "gpt2": GPT2,
    "gpt_neox": SIZE | {"intermediate_size": 24, "num_attention_heads": 2, "max_position_embeddings": 32},
    "opt": SIZE | OPT,
    "mamba": SIZE | {"state_size": 4, "conv_kernel": 2, "expand": 2, "time_step_rank": 2},
}
NARROW_OPT = SIZE | OPT | {"word_embed_proj_dim": 8}
ROWS = [Row([3, 4, 5], [6, 7, 8, 9]), Row([2], [11, 12]), Row([5, 6, 7, 8], [1, 2, 3])]


@pytest.fixture(scope="module", autouse=True)
def one_group(process_group):
    """DeepSpeed's, for all."""


def saved(folder: Path, kind: str, auto_class: type = AutoModelForCausalLM, **shape: object) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SHAPES[kind] | shape), num_labels=1)
    config.pad_token_id = 0
    auto_class.from_config(config).save_pretrained(folder)
    return folder


def critic_of(folder: Path) -> PreTrainedModel:
    return load_critic(folder, Precision.FP32, trust_remote_code=False)


@torch.no_grad()
def values(model: PreTrainedModel) -> Tensor:
    return response_values(model, collate(ROWS, range(len(ROWS))))


def one_step(model: PreTrainedModel, config: UpdateConfig | None = None) -> Trainer:
    """Towards values of 1, which a head of zeros and then the backbone can learn."""
    trainer = Trainer("critic", model, 1e-2, config or UpdateConfig(precision=Precision.FP32))
    for step in range(2):
        found = response_values(trainer.engine, collate(ROWS, range(len(ROWS))))
        trainer.backward((found - 1).square().mean(), is_last=True)
        assert trainer.step(step, 2).is_taken
    return trainer


@pytest.mark.parametrize("kind", list(SHAPES))
def test_a_critic_of_every_architecture_learns_and_is_loaded_again(kind, tmp_path):
    directory = saved(tmp_path / "policy", kind)
    model = critic_of(directory)
    assert values(model).abs().max() == 0, "a head that nobody has trained is no noise"
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = one_step(model)
    unmoved = [n for n, p in trainer.model.named_parameters() if torch.equal(p, before[n])]
    assert len(unmoved) < len(before) / 2
    trainer.save_model(tmp_path / "critic")
    again = critic_of(tmp_path / "critic")
    assert torch.equal(values(again), values(trainer.model))
    assert values(again).abs().max() > 0
    kept = dict(trainer.model.named_parameters())
    assert all(torch.equal(p, kept[name]) for name, p in again.named_parameters())


SETTINGS = {
    "plain": UpdateConfig(precision=Precision.FP32),
    "checkpointing": UpdateConfig(precision=Precision.FP32, activation_checkpointing=True),
    "zero2-bf16": UpdateConfig(zero_stage=2, precision=Precision.BF16),
    "zero3": UpdateConfig(precision=Precision.FP32, zero_stage=3),
}


def train_all(directory: Path, folder: Path) -> None:
    """DeepSpeed changes torch's functions for ZeRO 3, so in a process of its own."""
    torch.set_num_threads(1)
    start_distributed()
    for name, config in SETTINGS.items():
        model = load_critic(directory, config.precision, trust_remote_code=False)
        one_step(model, config).save_model(folder / name)


@pytest.mark.parametrize("kind", ["opt", "mamba"])
def test_one_made_here_trains_under_all_settings(kind, tmp_path):
    directory = saved(tmp_path / "policy", kind)
    assert in_process_of_its_own(train_all, directory, tmp_path) == 0
    plain = values(critic_of(tmp_path / "plain"))
    assert plain.abs().max() > 0
    for name, config in SETTINGS.items():
        found = values(load_critic(tmp_path / name, config.precision, trust_remote_code=False))
        assert torch.allclose(found.float(), plain, atol=0.05 if "bf16" in name else 1e-5), name


def test_a_head_is_as_wide_as_what_a_models_own_head_reads(tmp_path):
    """OPT-350m projects its states to narrower embeddings."""
    saved(tmp_path / "policy", "opt", **NARROW_OPT)
    model = critic_of(tmp_path / "policy")
    assert model.score.weight.shape == (1, 8)
    one_step(model)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "opt", "gemma3_text"])
def test_a_reward_model_as_the_start_brings_its_head(kind, tmp_path, caplog):
    directory = saved(tmp_path / "reward", kind, AutoModelForSequenceClassification)
    scorer = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokens = torch.tensor([[3, 4, 5, 6]])
    critic = critic_of(directory).eval()
    with torch.no_grad():
        (score,) = scorer(input_ids=tokens).logits.flatten()
        found = critic(input_ids=tokens, use_cache=False).logits[0, -1, 0]
    assert found == pytest.approx(float(score), abs=1e-5)
    assert abs(score) > 1e-3
    assert f"critic: it starts with the head score of {directory}" in caplog.text


def test_so_does_a_value_model_of_trl(tmp_path, caplog):
    directory = saved(tmp_path / "policy", "gpt2")
    weights = load_file(directory / "model.safetensors")
    weights |= {
        "v_head.summary.weight": torch.full((1, 16), 0.5),
        "v_head.summary.bias": torch.tensor([0.25]),
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    critic = critic_of(directory)
    assert (critic.classifier.weight == 0.5).all()
    assert critic.classifier.bias == 0.25
    assert "it starts with the head v_head.summary of" in caplog.text


def test_a_head_that_cannot_be_taken_is_said(tmp_path, caplog):
    directory = saved(tmp_path / "policy", "llama")
    critic_of(directory)
    assert f"critic: {directory} has no head; values start at zero" in caplog.text
    weights = load_file(directory / "model.safetensors")
    weights["classifier.dense.weight"] = torch.zeros(16, 16)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    critic_of(directory)
    assert "is not one linear layer and cannot be taken; values start at zero" in caplog.text


def test_where_transformers_has_a_class_the_critic_is_of_it(tmp_path):
    one_step(critic_of(saved(tmp_path / "policy", "llama"))).save_model(tmp_path / "critic")
    again = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    assert torch.equal(values(again), values(critic_of(tmp_path / "critic")))
