"""What the demo's two models share: tokenizer training, size, padding, batching and the optimiser loop.

Shapes: B sequences in a batch, T tokens of the longest of them.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CONTEXT = 256


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout stays the answer."""
    print(text, file=sys.stderr, flush=True)


def train_tokenizer(texts: Sequence[str], vocab_size: int, padding_side: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is in the vocabulary, so it encodes any text. Puts <bos> first, no <eos>."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side=padding_side,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(tokenizer: PreTrainedTokenizerFast, **extra: Any) -> LlamaConfig:
    """2 layers x 128, half a million parameters: an update on hundreds of texts takes about a second."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **extra,
    )


def num_parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int) -> torch.Tensor:
    """[B, T] ids. No mask goes with it: causal attention never looks right, at the padding."""
    rows = [torch.tensor(sequence) for sequence in sequences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)


def shuffled_batches(lengths: Sequence[int], size: int, rng: Random) -> Iterator[list[int]]:
    """One epoch of index batches of similar length (little padding), the batches in random order."""
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], rng.random()))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    rng.shuffle(batches)
    yield from batches


def fit(
    model: PreTrainedModel,
    epochs: Sequence[Sequence[list[int]]],
    loss_of: Callable[[list[int]], torch.Tensor],
    peak_lr: float,
    name: str,
) -> list[float]:
    """AdamW over all the batches, with a short warm-up and a linear decay; returns each epoch's mean loss."""
    num_steps = sum(len(batches) for batches in epochs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=peak_lr, total_steps=num_steps + 1, pct_start=0.1, anneal_strategy="linear"
    )
    means, started = [], time.perf_counter()
    for epoch, batches in enumerate(epochs, start=1):
        losses = []
        for batch in batches:
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
        seconds = time.perf_counter() - started
        say(f"  {name}: epoch {epoch}/{len(epochs)}, loss {means[-1]:.3f}, {seconds:.1f} s")
    return means


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Weights as safetensors, config and tokenizer, as `from_pretrained` reads them."""
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
