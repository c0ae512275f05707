"""The smallest honest inputs of a run: random models of a few thousand weights, byte tokenizers, prompts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.light import CONTEXT, write_jsonl, write_prompts  # noqa: F401

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast


def byte_tokenizer(specials: tuple[str, ...], chat_template: str | None = None) -> "PreTrainedTokenizerFast":
    """One token per byte after the special tokens; other specials give other ids for the same text."""
    from stages.rehearsal import models

    return models.byte_tokenizer(specials, chat_template)


def llama_config(tokenizer: "PreTrainedTokenizerFast", **others: object) -> "LlamaConfig":
    """Half as wide as the models of a rehearsal, with half of their context."""
    from stages.rehearsal import models

    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": CONTEXT}
    return models.llama_config(tokenizer, **sizes | others)


def make_policy(folder: Path, seed: int = 0, chat_template: str | None = None, **others: object) -> Path:
    """``others`` are settings of its config."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    tokenizer = byte_tokenizer(("<pad>", "<eos>"), chat_template)
    LlamaForCausalLM(llama_config(tokenizer, **others)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_reward_model(
    folder: Path,
    seed: int = 1,
    specials: tuple[str, ...] = ("<eos>", "<x>", "<pad>"),
    chat_template: str | None = None,
) -> Path:
    """By default its tokenizer gives other ids than the policy's."""
    import torch
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(seed)
    tokenizer = byte_tokenizer(specials, chat_template)
    LlamaForSequenceClassification(llama_config(tokenizer, num_labels=1)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_inputs(folder: Path) -> Path:
    """policy/, reward_model/, prompts.jsonl and heldout.jsonl."""
    make_policy(folder / "policy")
    make_reward_model(folder / "reward_model")
    return write_prompts(folder)


def overrides(inputs: Path, run_dir: Path, *more: str) -> list[str]:
    """A complete run of two small iterations in two shards, of real models or light ones; with a reward model
    unless ``more`` has a ``reward=``."""
    words = inputs / "words.json"  # what light inputs need
    model = ("reward=model", f"reward.components.rm.path={inputs / 'reward_model'}")
    return [
        *(json.loads(words.read_text()) if words.exists() else ()),
        *(() if any(word.startswith("reward=") for word in more) else model),
        f"model.policy={inputs / 'policy'}",
        f"data.prompts={inputs / 'prompts.jsonl'}",
        "data.id_column=id",
        "data.prompts_per_iteration=8",
        f"run_dir={run_dir}",
        "iterations=2",
        "rollout.max_new_tokens=12",
        "update.minibatches=2",
        "update.epochs=2",
        "update.keep_last=null",
        "update.learning_rate=1e-3",
        "update.critic_learning_rate=1e-3",
        "tracking=none",
        *more,
    ]


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    """Tokens of prompts of very different lengths, from one token on."""
    import torch

    draw = torch.Generator().manual_seed(5)
    lengths = [1 + (i * 7) % longest for i in range(count)]
    return [torch.randint(2, 258, (n,), generator=draw).tolist() for n in lengths]
