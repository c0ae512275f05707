"""Tiny random models, and configurations and requests for them."""

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config.compose import compose
from pipeline.config.schema import Config
from pipeline.run.schemas import REWARD, ROLLOUT, Validity, conform
from stages.ppo.experience import Experience, build_experience

CONTEXT = 128


def byte_tokenizer(specials: Sequence[str], chat_template: str | None = None) -> Any:
    """Return a tokenizer with one token per byte after the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=chat_template
    )


def policy(folder: Path, seed: int = 0, is_tied: bool = False) -> Path:
    """Return a random policy in ``folder``, which is made unless it is there.

    Args:
        is_tied: whether its output layer is its embeddings.
    """
    name = f"policy-{'tied-' if is_tied else ''}{seed}"
    return _made(folder, name, lambda place: _save(place, seed, tie_word_embeddings=is_tied))


def wide_policy(folder: Path) -> Path:
    """Return a random policy large enough for its memory to be measured: of 8 million weights."""
    sizes = {
        "vocab_size": 8_000,
        "hidden_size": 256,
        "intermediate_size": 682,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 64,
    }
    return _made(folder, "wide-policy", lambda place: _save(place, 0, **sizes))


def timed_policy(folder: Path) -> Path:
    """Return a random policy large enough for a GPU's kernels to take the time of an update, not their
    launches: of 90 million weights, for 1,024 tokens."""
    sizes = {
        "vocab_size": 16_000,
        "hidden_size": 1024,
        "intermediate_size": 2730,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    return _made(folder, "timed-policy", lambda place: _save(place, 0, **sizes))


def reward_model(folder: Path) -> Path:
    """Return a random reward model in ``folder``."""
    return _made(folder, "reward-model", lambda place: _save(place, 0, num_labels=1))


def adapter(folder: Path, seed: int) -> Path:
    """Return a random adapter of the policy in ``folder``."""
    base = policy(folder)
    return _made(folder, f"adapter-{seed}", lambda place: save_random_adapter(base, place, seed=seed))


def save_random_adapter(base: Path, folder: Path, rank: int = 4, seed: int = 0) -> None:
    """Write an adapter of all linear layers of the model in ``base``, of random numbers."""
    import torch

    from pipeline.config.update import LoraConfig, Precision
    from stages.models.loading import load_causal_lm
    from stages.ppo.lora import attach, save_adapter

    model = load_causal_lm(base, Precision.FP32, trust_remote_code=False)
    attach(model, base, LoraConfig(rank=rank, alpha=8.0), seed=0)
    factors = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    torch.manual_seed(seed)
    for weight in factors.values():
        torch.nn.init.normal_(weight, std=0.2)
    save_adapter(model, {name: weight.detach() for name, weight in factors.items()}, folder)


def _made(folder: Path, name: str, save: Callable[[Path], None]) -> Path:
    """Return what is saved into ``folder`` unless it is there. Ranks may call this at once."""
    place = folder / name
    if not place.is_dir():
        private = Path(tempfile.mkdtemp(dir=folder))
        save(private / name)
        try:
            (private / name).rename(place)
        except OSError:  # another rank was first
            assert place.is_dir()
    return place


def _save(folder: Path, seed: int, **others: object) -> None:
    import torch
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    tokenizer = byte_tokenizer(("<pad>", "<eos>"))
    torch.manual_seed(seed)
    described = llama_config(tokenizer, **others)
    kind = LlamaForSequenceClassification if "num_labels" in others else LlamaForCausalLM
    kind(described).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def llama_config(tokenizer: Any, **others: object) -> Any:
    """Return the settings of a Llama of two layers for a tokenizer; ``others`` replace and add some."""
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest that vLLM computes on CPUs
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
    }
    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    return LlamaConfig(**sizes | ids | others)


def config_of(folder: Path, *words: str) -> Config:
    """Return a configuration of a policy in ``folder`` and one rule, without a critic."""
    return compose(
        [
            "reward=rule",
            "reward.components.rule.function=unused:scores",
            "tracking=none",
            f"run_dir={folder / 'run'}",
            f"model.policy={policy(folder)}",
            f"model.context_length={CONTEXT}",
            "data.prompts=unused",
            "rollout.engine=transformers",
            "rollout.max_new_tokens=64",
            "update.precision=fp32",
            "algorithm.estimator=reinforce++",
            "algorithm.kl.coef=0",
            *words,
        ]
    )


def random_prompts(number: int, vocabulary: int, longest: int) -> list[list[int]]:
    """Return prompts of 4 to ``longest`` random tokens."""
    draw = random.Random(0)
    return [[draw.randrange(4, vocabulary) for _ in range(draw.randint(4, longest))] for _ in range(number)]


def ragged_responses(rows: int, vocabulary: int, longest: int) -> tuple[pa.Table, pa.Table]:
    """Return a rollout and a reward table of random tokens and scores. Total lengths go from 8 tokens up, of
    which the prompt is at most half."""
    draw = random.Random(0)
    totals = [draw.randint(8, longest) for _ in range(rows)]
    prompts = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, n // 2))] for n in totals]
    responses = [
        [draw.randrange(vocabulary) for _ in range(n - len(p))] for n, p in zip(totals, prompts, strict=True)
    ]
    return tables_of(prompts, responses, [draw.gauss(0, 1) for _ in range(rows)])


def tables_of(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], scores: Sequence[float]
) -> tuple[pa.Table, pa.Table]:
    """Return a rollout and a reward table of the given tokens and scores."""
    rows = len(prompts)
    ids = {"prompt_id": [str(i) for i in range(rows)], "sample_index": [0] * rows}
    rollout = {
        **ids,
        "prompt_tokens": prompts,
        "response_tokens": responses,
        "response_mask": [[True] * len(r) for r in responses],
        "rollout_logprobs": [[0.0] * len(r) for r in responses],
        "finish_reason": ["stop"] * rows,
        "num_turns": [1] * rows,
        "prompt_text": [""] * rows,
        "prompt_messages": [None] * rows,
        "response_text": [""] * rows,
        "response_messages": [None] * rows,
    }
    reward = {**ids, "reward": scores, "reference_logprobs": pa.nulls(rows)}
    reward["validity"] = [Validity.SCORED] * rows
    extra = pa.table({"reward/rule": pa.array(scores, pa.float32())})
    return conform(rollout, ROLLOUT), conform(reward, REWARD, extra=extra)


def random_experience(rows: int, vocabulary: int, longest: int) -> Experience:
    """Return the matrices of :func:`ragged_responses`."""
    return build_experience(*ragged_responses(rows, vocabulary, longest), shards=[0] * rows)


def even_experience(rows: int, vocabulary: int, prompt: int, response: int) -> Experience:
    """Return matrices of random rows that are all as long: of so many tokens."""
    draw = random.Random(0)
    prompts, responses = (
        [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(rows)]
        for length in (prompt, response)
    )
    tables = tables_of(prompts, responses, [draw.gauss(0, 1) for _ in range(rows)])
    return build_experience(*tables, shards=[0] * rows)


def is_installed_vllm() -> bool:
    """Whether vLLM can be found, without importing it."""
    from importlib.util import find_spec

    return find_spec("vllm") is not None
