"""Checks of memory: what an update, transformers' engine and vLLM take, beside the formulas of `validate`.

What is measured corrects these (:mod:`pipeline.forecast.corrections`).
"""

import importlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeline.config.engines import Engine
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from pipeline.forecast.corrections import CPU, PREFIX, Corrected, slope
from pipeline.forecast.parts import CONTEXT, GIB, peak_of
from pipeline.forecast.serving import cache_per_token, generating
from pipeline.forecast.shapes import ModelShape, read_shape
from pipeline.forecast.training import BatchSize, Ranks, update_parts, width_of
from stages.engines import make_generator
from stages.engines.base import Request, Sampling
from stages.engines.transformers import TransformersGenerator
from stages.engines.vllm_setup import be_quiet
from stages.models.loading import load_causal_lm
from stages.rehearsal.allocation import half_precision
from stages.rehearsal.answers import CheckFailed, CheckInput, Shown, with_torch
from stages.rehearsal.engines import check_vllm, eager, engine_config, responses
from stages.rehearsal.models import config_of, even_experience, policy, random_prompts, wide_policy
from stages.rehearsal.peaks import context_bytes, give_back_what_is_freed, resident, taken_by
from stages.rehearsal.training import learner_of, update_of

_PROMPT, _RESPONSE = 96, 32
_ROW = _PROMPT + _RESPONSE
_UPDATED, _GENERATED = (8, 32), (64, 256)
"""Rows of a micro-batch, and of a batch, of the two sizes."""
_WARM_UP = 2
_BELIEVED = (0.5, 2.0)
"""Least and largest factor of a formula that is a correction; beyond them something else is wrong."""
_OTHERS = 2 * GIB
"""Bytes of a GPU beside torch's that are not a process's own alone."""
_REPORT = "report this, with this command's --json; until then leave room beside what validate says"


@dataclass(frozen=True)
class Sized:
    """What one size takes; in bytes."""

    expected: float
    measured: float


def card() -> str:
    """Return the name of this process's card."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else CPU


@with_torch
def training(given: CheckInput) -> Shown:
    """Measure the peak of an update with micro-batches of two sizes."""
    give_back_what_is_freed()
    folder = wide_policy(given.folder)
    updated(given.folder, folder, _WARM_UP)
    found = [
        Sized(
            expected_of_update(config_of(given.folder, *settings(folder, rows)), read_shape(folder), rows),
            taken_by(partial(updated, given.folder, folder, rows)),
        )
        for rows in _UPDATED
    ]
    numbers = {Corrected.UPDATE: slope_of(found)}
    if torch.cuda.is_available() and (size := context_bytes()) < _OTHERS:
        numbers[Corrected.CONTEXT_BYTES] = size
    return judged("micro-batches", found, _UPDATED, numbers)


def settings(model: Path, rows: int) -> tuple[str, ...]:
    """Return words for an update of two micro-batches: in bf16 and with ZeRO on a card that has it."""
    has_bf16 = torch.cuda.is_available() and half_precision() is Precision.BF16
    precision, stage = (Precision.BF16, 2) if has_bf16 else (Precision.FP32, 0)
    return (
        f"model.policy={model}",
        f"data.prompts_per_iteration={2 * rows}",
        "update.minibatches=1",
        f"update.tokens_per_micro_batch={rows * _ROW}",
        f"update.precision={precision}",
        f"update.zero_stage={stage}",
    )


def expected_of_update(config: Config, shape: ModelShape, rows: int) -> float:
    """Return the bytes that the formulas say, without a card's context."""
    batch, ranks = (
        BatchSize(rows * _ROW, rows * (_RESPONSE + 1), _ROW),
        Ranks(1, torch.cuda.is_available()),
    )
    parts = update_parts(config.update, shape, None, None, batch, ranks)
    return peak_of(part for part in parts if part.name != CONTEXT)


def updated(root: Path, model: Path, rows: int) -> None:
    """Take an optimizer step of two micro-batches, and free what it had."""
    learner = learner_of(root, *settings(model, rows))
    try:
        update_of(learner, given=even_experience(2 * rows, 256, _PROMPT, _RESPONSE))
    finally:
        learner.policy.free()


@with_torch
def generation(given: CheckInput) -> Shown:
    """Measure the peak of transformers' engine with batches of two sizes."""
    give_back_what_is_freed()
    folder = wide_policy(given.folder)
    shape, width = read_shape(folder), width_of(Precision.FP32)
    generated(folder, _WARM_UP)
    found = [
        Sized(
            peak_of(generating(shape, width, rows * _ROW, _RESPONSE, gpus=1)),
            taken_by(partial(generated, folder, rows)),
        )
        for rows in _GENERATED
    ]
    return judged("batches", found, _GENERATED, {Corrected.SERVING: slope_of(found)})


def generated(model: Path, rows: int) -> None:
    """Generate one batch of so many rows."""
    loaded = load_causal_lm(model, Precision.FP32, trust_remote_code=False)
    # prompts that differ, as those alike are computed once
    requests = [
        Request([4 + seed % 200, 4 + seed // 200, *[4] * (_PROMPT - 2)], _RESPONSE, seed)
        for seed in range(rows)
    ]
    TransformersGenerator(loaded, rows * _ROW).generate(requests, Sampling())


def slope_of(found: list[Sized]) -> float:
    """Return the factor of what grows with the size."""
    small, large = found
    return slope((small.expected, large.expected), (small.measured, large.measured))


def judged(what: str, found: list[Sized], rows: tuple[int, ...], numbers: dict[Corrected, float]) -> Shown:
    """Judge two sizes beside the formulas. Raises CheckFailed where these are of no use. Pure, but for the
    card's name."""
    off = [f"{one.expected / one.measured - 1:+.0%}" for one in found]
    tokens = " and ".join(str(number * _ROW) for number in rows)
    factor = next(iter(numbers.values()))
    measured = f"{what} of {tokens} tokens: the formulas are off by {' and '.join(off)}"
    measured += f", what grows with them takes {factor:.2f} times as much as they say"
    if not _BELIEVED[0] <= factor <= _BELIEVED[1]:
        raise CheckFailed(measured, _REPORT)
    return Shown(f"{measured}; kept for {card()}", named(numbers))


def named(numbers: dict[Corrected, float]) -> dict[str, float]:
    """Return corrections of this card by the names under which the record finds them."""
    return {f"{PREFIX}{card()}/{what}": value for what, value in numbers.items()}


@with_torch
def vllm(given: CheckInput) -> Shown:
    """Measure what vLLM takes as it starts, and its key-value cache for a token."""
    check_vllm(given)
    cache = 2**26
    config = engine_config(given.folder, Engine.VLLM, *eager(), f"rollout.vllm.kv_cache_gib={cache / GIB}")
    folder = policy(given.folder)
    shape, width = read_shape(folder), width_of(Precision.FP32)
    be_quiet()
    importlib.import_module("vllm.v1.engine.llm_engine")  # what it takes is not the engine's
    before = in_use()
    engine: Any = make_generator(config, str(folder))  # vLLM's, which knows its cache
    try:
        start = in_use() - before - shape.parameters * width
        start -= cache if torch.cuda.is_available() else 0  # no page of the host's is there before it is used
        tokens = engine.cache_tokens
        responses(engine, random_prompts(4, 256, 24), 1.0)
    finally:
        engine.close()
    factor = cache / tokens / cache_per_token(shape, width, config.rollout.vllm)
    measured = f"vLLM takes {start / GIB:.2f} GiB as it starts, beside weights and cache, and of its cache "
    measured += f"{factor:.2f} times what the formulas say for a token"
    if not _BELIEVED[0] <= factor <= _BELIEVED[1]:
        raise CheckFailed(measured, _REPORT)
    return Shown(
        f"{measured}; kept for {card()}",
        named({Corrected.CACHE: factor, Corrected.VLLM_BYTES: max(0.0, start)}),
    )


def in_use() -> float:
    """Return the bytes of this process's card in use by all; of the process without one."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return float(total - free)
    return float(resident())
