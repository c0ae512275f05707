"""Checks of speed: the update's share of a card's peak, and vLLM behind our interface beside vLLM alone.

Models are of Qwen2's shape and random. Model FLOPs of a forward pass over a sequence of s tokens: 2 per
weight of the layers and token, 2 per weight of the output layer and response token, and 2 x layers x width x
s^2 for causal attention. Backward is twice that. What activation checkpointing computes again does not count.
Utilisation is of the device's dense bf16 peak.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.config.algorithm import Estimator
from pipeline.config.engines import Engine
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from pipeline.forecast.cards import kind_of, peak_flops
from pipeline.forecast.corrections import Corrected
from stages.engines import make_generator
from stages.models.devices import device
from stages.ppo.experience import Experience
from stages.ppo.timing import timed, timed_updates
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner
from stages.rehearsal.allocation import half_precision
from stages.rehearsal.answers import CheckInput, Shown, with_torch
from stages.rehearsal.engines import check_vllm, eager, engine_config, responses
from stages.rehearsal.meeting import meet
from stages.rehearsal.memory import named
from stages.rehearsal.models import config_of, policy, random_experience, random_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UTILISATION_GOAL = 0.45
"""Share of the peak that an update of the largest size is to reach, in bf16."""
BARE_GOAL = 0.95
"""Share of the tokens per second of vLLM alone that are to come through our interface."""
_H100_PCIE, _H100_PCIE_TFLOPS = "H100 PCIe", 756
"""Name and dense bf16 peak of the card that has the name of a faster one."""
_TIMES = 3
"""Measurements of which the median counts."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    layers: int
    width: int
    inner: int
    heads: int
    key_value_heads: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(2, 64, 128, 4, 2, 512),
    "0.5b": Shape(24, 896, 4864, 14, 2, 151_936),
    "1.5b": Shape(28, 1536, 8960, 12, 2, 151_936),
}


@dataclass(frozen=True)
class Load:
    """Work of an update that is measured."""

    size: str
    """Name of the model's shape."""
    rows: int
    longest: int
    """Tokens of the longest prompt and response."""
    tokens: int
    """Tokens of a micro-batch."""


_LOADS = ((40.0, Load("1.5b", 128, 1024, 16_384)), (16.0, Load("0.5b", 128, 1024, 8_192)))
"""GiB that have to be free, and the update that is measured then; the first that fits."""
_SMALL = Load("tiny", 16, 64, 512)


def load_for(free_gib: float) -> Load:
    """Return the update that fits into so much memory of a card; the small one for none. Pure."""
    return next((load for need, load in _LOADS if free_gib >= need), _SMALL)


@with_torch
def training(given: CheckInput) -> Shown:
    """Measure tokens per second of updates without a critic, and the share of the card's peak."""
    meet()
    free = torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0
    load = load_for(free)
    has_bf16 = torch.cuda.is_available() and half_precision() is Precision.BF16
    config = config_of(
        given.folder,
        f"data.prompts_per_iteration={load.rows}",
        f"model.context_length={load.longest}",
        f"rollout.max_new_tokens={load.longest - 1}",
        f"update.precision={Precision.BF16 if has_bf16 else Precision.FP32}",
        "update.minibatches=2",
        f"update.zero_stage={int(has_bf16)}",
        f"update.tokens_per_micro_batch={load.tokens}",
    )
    shape = SHAPES[load.size]
    experience = random_experience(load.rows, shape.vocabulary, load.longest)
    learner = make_learner(config, shape, load.longest)
    try:
        seconds = statistics.median(timed_updates(learner, experience, _TIMES))
    finally:
        learner.policy.free()
    lengths = lengths_of(experience)
    per_second = sum(map(sum, lengths)) / seconds
    flops = update_flops(shape, lengths, 1, has_critic=False) / seconds
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shown = utilisation(load.size, per_second, flops / 1e12, peak_tflops(name))
    if load is _SMALL:
        return shown  # a model so small says nothing of others
    return replace(shown, numbers={**shown.numbers, **named({Corrected.UPDATE_FLOPS: flops})})


def utilisation(size: str, tokens_per_second: float, tflops: float, peak: float | None) -> Shown:
    """Describe the speed of an update. Pure.

    Args:
        size: name of the model's shape.
        tflops: model TFLOP/s.
        peak: of the card; None where it is not known.
    """
    numbers = {"tokens_per_s": tokens_per_second, "model_tflops": tflops}
    measured = f"update of {size}: {tokens_per_second:.0f} tokens/s, {tflops:.3g} model TFLOP/s"
    if peak is None:
        return Shown(f"{measured}; the peak of this device is not known", numbers)
    share = tflops / peak
    said = f"{measured}, {share:.0%} of its peak of {peak:g}"
    if size == "1.5b":
        said += f" (goal {UTILISATION_GOAL:.0%})"
    return Shown(said, numbers | {"mfu": share})


@with_torch
def generation(given: CheckInput) -> Shown:
    """Measure tokens per second of vLLM through our interface, and of the same engine in a bare loop."""
    check_vllm(given)
    has_gpu = torch.cuda.is_available()
    model = saved_model(given.folder / "half-billion") if has_gpu else policy(given.folder)
    prompts, longest = (random_prompts(512, 250, 96), 256) if has_gpu else (random_prompts(16, 250, 24), 64)
    words = (
        *eager(),
        *((f"rollout.precision={half_precision()}", "model.context_length=512") if has_gpu else ()),
    )
    engine: Any = make_generator(engine_config(given.folder, Engine.VLLM, *words), str(model))
    try:
        responses(engine, prompts, 1.0, longest=longest)
        ours, bare = (
            statistics.median(timed(work) for _ in range(_TIMES))
            for work in (
                lambda: responses(engine, prompts, 1.0, longest=longest),
                lambda: bare_loop(engine._engine._engine, prompts, longest),
            )
        )
    finally:
        engine.close()
    return against_bare(len(prompts) * longest / ours, bare / ours, has_gpu)


def against_bare(most_tokens_per_second: float, share: float, has_gpu: bool) -> Shown:
    """Describe the speed of generation. Pure.

    Args:
        most_tokens_per_second: as if no response had ended before its longest.
        share: of the speed of the bare loop.
    """
    goal = f" (goal {BARE_GOAL:g})" if has_gpu else ""
    return Shown(
        f"vLLM gives {share:.2f} times the tokens/s of its bare loop{goal}",
        {"most_tokens_per_s": most_tokens_per_second, "of_bare": share},
    )


def bare_loop(engine: Any, prompts: Sequence[Sequence[int]], longest: int) -> None:
    """Generate as vLLM's offline class does, with an engine of it."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=longest,
            logprobs=0,
            detokenize=False,
            seed=index,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(f"bare-{time.time_ns()}-{index}", tokens_input(list(prompt)), params)
    while engine.has_unfinished_requests():
        engine.step()


def saved_model(place: Path) -> Path:
    """Return a random model of half a billion weights in a folder, which is made. It hardly ever draws its
    end token."""
    if not place.is_dir():
        model: Any = random_model(SHAPES["0.5b"], 2048, False, None)
        model.config.eos_token_id = model.generation_config.eos_token_id = 0
        model.save_pretrained(place)
    return place


# --- an update of models of a size ---


def random_model(shape: Shape, longest: int, is_critic: bool, attention: str | None) -> "PreTrainedModel":
    """Return a model with random weights in bf16 on this rank's device, the same on all ranks."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

    described: Any = Qwen2Config  # which names only some of its settings
    config = described(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        num_labels=1,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    with device():
        model: Any = (Qwen2ForTokenClassification if is_critic else Qwen2ForCausalLM)(config)
    made: PreTrainedModel = model.to(torch.bfloat16)
    return made


def make_learner(config: Config, shape: Shape, longest: int) -> Learner:
    """Return a learner of random models of a shape, with a critic where the estimator has one."""

    def trainer(name: str, rate: float) -> Trainer:
        model = random_model(shape, longest, name == "critic", config.update.attention)
        if config.update.precision is Precision.FP32:
            model = model.float()
        return Trainer(name, model, rate, config.update)

    policy, critic = trainer("policy", config.update.learning_rate), None
    if config.algorithm.estimator is Estimator.GAE:
        critic = trainer("critic", config.update.critic_learning_rate)
    return Learner(config, policy, critic)


def lengths_of(experience: Experience) -> list[tuple[int, int]]:
    """Return prompt and response tokens of each row."""
    return [(len(row.prompt), len(row.response)) for row in experience.rows]


def forward_flops(shape: Shape, lengths: Sequence[tuple[int, int]], is_critic: bool) -> float:
    """Return the model FLOPs of one pass over sequences of (prompt, response) tokens. Pure."""
    head = shape.width // shape.heads
    attention = 2 * shape.width * (shape.width + shape.key_value_heads * head)
    weights = shape.layers * (attention + 3 * shape.width * shape.inner)
    totals = [prompt + response for prompt, response in lengths]
    outputs = 0 if is_critic else shape.width * shape.vocabulary * sum(response for _, response in lengths)
    squares = sum(total**2 for total in totals)
    return 2 * weights * sum(totals) + 2 * outputs + 2 * shape.layers * shape.width * squares


def update_flops(shape: Shape, lengths: Sequence[tuple[int, int]], epochs: int, has_critic: bool) -> float:
    """Return the model FLOPs of old log-probabilities and values, and of each epoch's forward and backward
    pass. Pure."""
    passes = 1 + 3 * epochs
    flops = forward_flops(shape, lengths, is_critic=False)
    return passes * (flops + (forward_flops(shape, lengths, is_critic=True) if has_critic else 0))


def peak_tflops(name: str) -> float | None:
    """Return the dense bf16 peak of a device by its name; None where it is not known. Pure."""
    if _H100_PCIE in name:
        return _H100_PCIE_TFLOPS
    peak = peak_flops(kind_of(name))
    return None if peak is None else peak / 1e12
