"""The demo's policy: next-token training on reviews, and sampling from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from stages.demo.tiny_llama import fit, pad_right, shuffled_batches, tiny_config, train_tokenizer

VOCAB_SIZE = 512
BATCH_SIZE = 64
EPOCHS = 2
PEAK_LR = 6e-3
IGNORED = -100


@dataclass(slots=True)
class TrainedPolicy:
    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    train_loss: float
    heldout_loss: float


def next_token_loss(model: LlamaForCausalLM, ids_BT: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Mean cross-entropy per real token, <eos> among them: the policy must learn where a review ends."""
    logits = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
    targets = ids_BT[:, 1:].masked_fill(ids_BT[:, 1:] == pad_id, IGNORED)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def train_policy(texts: Sequence[str], heldout: Sequence[str], rng: Random) -> TrainedPolicy:
    """From random weights to a writer of reviews; the held-out loss shows that it learnt the grammar."""
    tokenizer = train_tokenizer(texts, VOCAB_SIZE, padding_side="left")
    pad_id, eos_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    sequences = [[*ids, eos_id] for ids in tokenizer(list(texts))["input_ids"]]
    model = LlamaForCausalLM(tiny_config(tokenizer))
    lengths = [len(sequence) for sequence in sequences]

    def loss_of(batch: list[int]) -> torch.Tensor:
        return next_token_loss(model, pad_right([sequences[index] for index in batch], pad_id), pad_id)

    epochs = [list(shuffled_batches(lengths, BATCH_SIZE, rng)) for _ in range(EPOCHS)]
    train_loss = fit(model, epochs, loss_of, PEAK_LR, "policy")[-1]
    model.eval()
    unseen = pad_right([[*ids, eos_id] for ids in tokenizer(list(heldout))["input_ids"]], pad_id)
    with torch.no_grad():
        heldout_loss = next_token_loss(model, unseen, pad_id).item()
    return TrainedPolicy(model, tokenizer, train_loss, heldout_loss)


@torch.no_grad()
def sample_responses(
    policy: TrainedPolicy, prompts: Sequence[str], max_new_tokens: int, batch_size: int = 256
) -> list[str]:
    """One response per prompt at temperature 1; sorted by length, because generation pays for padding."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    responses = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        inputs = policy.tokenizer(
            [prompts[index] for index in chosen],
            return_tensors="pt",
            padding=True,
            return_token_type_ids=False,
        )
        ids: torch.Tensor = policy.model.generate(  # type: ignore[misc, assignment]
            **inputs, do_sample=True, top_k=0, max_new_tokens=max_new_tokens
        )
        texts = policy.tokenizer.batch_decode(
            ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for index, text in zip(chosen, texts, strict=True):
            responses[index] = text
    return responses
