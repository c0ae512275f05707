"""Families of language models, tiny and random, made from the configurations of transformers.

A family is here if it can be trained: one forward pass, generation with a cache, and weights of its own.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stages.engines.base import Request, Response, Sampling
from stages.engines.padding import Batching
from stages.engines.transformers import TransformersGenerator
from stages.ppo.batching import Row, collate
from stages.ppo.forward import response_log_probs

VOCABULARY, CONTEXT = 97, 128
PROMPTS = (5, 19, 11, 5, 3)
"""Tokens of the prompts that are answered."""
NEW_TOKENS = 12
NOT_PADDED = {
    **dict.fromkeys(("bart", "minimax", "recurrent_gemma", "reformer"), Batching.ONE_LENGTH),
    "rwkv": Batching.ALONE,
}
"""Families whose answers depend on padding, or on any row beside them. The engine finds them itself."""

# Settings that a family does not have are ignored by its configuration. Without an id of padding the
# embedding of id 0, which stands where nothing is, is random as others are; else it is 0, and hides what
# reads it.
_BASE = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_HEAD = {"head_dim": 8}
_DECODER = {"is_decoder": True}
_STATE = {"state_size": 8}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_EXPERTS = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
}
_LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    **{"v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1},
}
_MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 8, "mamba_d_ssm": 64, "attn_layer_indices": [1]},
}
_DELTA = {
    **{"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 24},
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
_PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
_PLAIN = """
apertus arcee biogpt bitnet bloom cohere cohere2 diffllama doge ernie4_5 exaone4 gemma gemma2 gemma3_text
glm glm4 gpt_neox gpt_neox_japanese granite helium hunyuan_v1_dense jais2 lfm2 llama ministral mistral mpt
nanochat nemotron olmo olmo2 olmo3 opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2
vaultgemma xglm
"""
_MIXTURES = """
afmoe aria_text dots1 ernie4_5_moe flex_olmo glm4_moe gpt_oss granitemoe granitemoeshared hunyuan_v1_moe
jetmoe llama4_text minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe solar_open
"""
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(_PLAIN.split(), _HEAD),
    **dict.fromkeys(_MIXTURES.split(), _HEAD | _EXPERTS),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "ctrl", "openai-gpt"), _GPT2),
    **dict.fromkeys(("gptj", "codegen"), _GPT2 | {"rotary_dim": 4}),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "youtu", "minicpm3"), _LATENT | _EXPERTS),
    **dict.fromkeys(("bert", "bert-generation", "roberta"), _DECODER),
    **dict.fromkeys(("bamba", "falcon_h1"), _HEAD | _MAMBA),
    **dict.fromkeys(("mamba", "falcon_mamba"), _STATE),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_text"), _HEAD | _DELTA),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), _HEAD | _DELTA | _EXPERTS),
    "bart": {
        **{"is_decoder": True, "is_encoder_decoder": False, "d_model": 32, "decoder_layers": 2},
        **{"decoder_ffn_dim": 48, "decoder_attention_heads": 4},
    },
    "falcon": {},
    "gemma3n_text": {
        **(_HEAD | _SLIDING | _PER_LAYER),
        **{"num_kv_shared_layers": 0, "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]},
    },
    "gemma4_text": _HEAD | _SLIDING | _PER_LAYER,
    "gpt_neo": {
        **{"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
        **{"window_size": 8},
    },
    "granitemoehybrid": {
        **(_HEAD | _EXPERTS | _MAMBA),
        **{"layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    },
    "jamba": {
        **(_EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1}),
        **{"use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4},
    },
    "kimi_linear": _LATENT | _EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": _HEAD | _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "minimax": {
        **(_HEAD | _EXPERTS),
        **{"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    },
    "modernbert-decoder": _HEAD | {"pad_token_id": 0},
    "nemotron_h": {
        **(_HEAD | _EXPERTS | {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8}),
        **{"mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
    },
    "recurrent_gemma": _HEAD | {"lru_width": 32, "attention_window_size": 16},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "rwkv": {"attention_hidden_size": 32, "context_length": CONTEXT},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
}


@dataclass(frozen=True)
class Gaps:
    """Largest difference of a token's log-probability between rollout and update, in nats."""

    together: float
    """All prompts in one call."""
    alone: float
    """Each prompt alone, in both."""


def family(name: str, scale: float = 2.0) -> PreTrainedModel:
    """Make a model of a family.

    Args:
        scale: factor of its matrices: tokens of freshly made models are all about equally likely.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings_of(name)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(scale)
    return model.eval()


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a family's tiny model."""
    return {**_BASE, **FAMILIES[name]}


def make_mixture(inputs: Path, folder: Path, name: str, **settings: object) -> Path:
    """Make the inputs of a run like others, whose policy is a mixture of its tokenizer's vocabulary."""
    shutil.copytree(inputs, folder)
    rows = AutoConfig.from_pretrained(folder / "policy").vocab_size
    torch.manual_seed(0)
    ids = {"vocab_size": rows, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    described = AutoConfig.for_model(name, **{**settings_of(name), **ids, **settings})
    AutoModelForCausalLM.from_config(described).save_pretrained(folder / "policy")
    return folder


def requests() -> list[Request]:
    """Return one request for each of :data:`PROMPTS`, of random tokens."""
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in PROMPTS]
    return [Request(prompt, NEW_TOKENS, seed=seed) for seed, prompt in enumerate(prompts)]


def gaps_of(generator: TransformersGenerator, model: PreTrainedModel) -> Gaps:
    """Answer the requests together and each alone, and compare with the update's forward pass."""
    asked = requests()
    together = gap(model, asked, generator.generate(asked, Sampling()))
    each = [gap(model, [request], generator.generate([request], Sampling())) for request in asked]
    return Gaps(together, max(each))


@torch.no_grad()
def gap(model: PreTrainedModel, asked: Sequence[Request], responses: Sequence[Response]) -> float:
    """Return the largest difference between an engine's log-probabilities and the update's."""
    rows = [Row(one.prompt_tokens, said.tokens) for one, said in zip(asked, responses, strict=True)]
    found = response_log_probs(model, collate(rows, range(len(rows))), temperature=1.0)
    pairs = zip(found, responses, strict=True)
    return max(
        float((line[: len(said.tokens)] - torch.tensor(said.log_probs)).abs().max()) for line, said in pairs
    )
