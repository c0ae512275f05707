"""Checks of generation: log-probabilities, seeds, new weights, what is left after an end, memory."""

import gc
import itertools
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.config.engines import Engine
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from stages.engines import make_generator
from stages.engines.base import Generator, Request, Response, Sampling
from stages.models.adapters import merge_into, read_adapter
from stages.models.loading import load_causal_lm
from stages.process.preemption import listen, warned
from stages.rehearsal.allocation import half_precision
from stages.rehearsal.answers import CheckFailed, CheckInput, NotShown, Shown, with_torch
from stages.rehearsal.models import adapter, config_of, is_installed_vllm, policy, random_prompts

_PROMPTS, _ALONE, _LONGEST_PROMPT = 16, 4, 24
_TEMPERATURES = (1.0, 0.7)
_SPLIT = 2
"""Processes that a model is split over."""
_WARNED_AFTER = 5
"""Token steps after which generation is warned."""
_MOST_NATS = 5e-3
"""Largest difference of log-probabilities in fp32 that is rounding."""
_MOST_HALF_NATS = {Precision.BF16: 0.1, Precision.FP16: 0.0125}
"""Largest mean difference of log-probabilities in half precision that is rounding, in nats. Between vLLM
and transformers on CPUs it was 0.03 in bf16 and 0.0035 in fp16; a wrong temperature makes it 0.45."""
_MOST_LOST_GIB = 0.5
_OWN_PROCESS = "rollout.vllm.own_process=true"
"""What vLLM does on a GPU without being asked."""
_WRONG_NUMBERS = "take rollout.engine=transformers here, or another version of vLLM"


@with_torch
def transformers_numbers(given: CheckInput) -> Shown:
    """Check the numbers of transformers' engine."""
    return numbers_of(given, Engine.TRANSFORMERS)


@with_torch
def vllm_numbers(given: CheckInput) -> Shown:
    """Check the numbers of vLLM, and of its kernels for half precision, which fp32 does not take. Raises
    NotShown where it is not installed and no stage asks for it."""
    check_vllm(given)
    exact = numbers_of(given, Engine.VLLM)
    rounded = half_numbers(given.folder, half_precision())
    return Shown(f"{exact.measured}; {rounded.measured}", {**exact.numbers, **rounded.numbers})


def half_numbers(folder: Path, precision: Precision) -> Shown:
    """Compare vLLM's log-probabilities in half precision with transformers' in the same."""
    directory, prompts = policy(folder), random_prompts(_PROMPTS, 256, _LONGEST_PROMPT)
    config = engine_config(folder, Engine.VLLM, f"rollout.precision={precision}", *eager())
    engine = make_generator(config, str(directory))
    try:
        found = {temperature: responses(engine, prompts, temperature) for temperature in _TEMPERATURES}
    finally:
        engine.close()
    model = load_causal_lm(directory, precision, trust_remote_code=False)
    nats = {f"{t:g}": float(differences(model, prompts, found[t], t).mean()) for t in _TEMPERATURES}
    return judged_half(precision, nats)


def judged_half(precision: Precision, nats: Mapping[str, float]) -> Shown:
    """Judge mean differences of log-probabilities by temperature. Raises CheckFailed where they are more than
    rounding. Pure."""
    most = _MOST_HALF_NATS[precision]
    if bad := [f"{key} {value:.1e}" for key, value in nats.items() if not value <= most]:
        measured = f"log-probabilities in {precision} differ from transformers' in nats, on average: "
        raise CheckFailed(f"{measured}{', '.join(bad)}", _WRONG_NUMBERS)
    measured = f"in {precision} off by {max(nats.values()):.1e} nats on average"
    return Shown(measured, {f"nats/{precision}/{key}": value for key, value in nats.items()})


def check_vllm(given: CheckInput) -> None:
    """Raise where vLLM is missing: CheckFailed if the configuration names it, else NotShown."""
    if not is_installed_vllm():
        if given.needs_vllm:
            raise CheckFailed("vLLM is not installed", "install slurm-ppo[vllm], see docs/howto/vllm.md")
        raise NotShown("vLLM is not installed, and no stage asks for it")


@with_torch
def vllm_split(given: CheckInput) -> Shown:
    """Check the numbers of vLLM with a model that is split over two processes."""
    check_vllm(given)
    if torch.cuda.is_available() and torch.cuda.device_count() < _SPLIT:
        raise NotShown(f"needs {_SPLIT} GPUs, there are {torch.cuda.device_count()}")
    return numbers_of(given, Engine.VLLM, f"rollout.vllm.tensor_parallel_size={_SPLIT}", *eager())


def eager() -> tuple[str, ...]:
    """Return words with which vLLM compiles nothing where that takes longer than the check: on CPUs."""
    return () if torch.cuda.is_available() else ("rollout.vllm.enforce_eager=true",)


def numbers_of(given: CheckInput, name: Engine, *words: str) -> Shown:
    """Compare log-probabilities with transformers' own, seeds alone with those in a batch, weights after a
    reload, and what an engine says after requests were thrown away."""
    first, other = policy(given.folder), policy(given.folder, seed=1)
    engine = make_generator(engine_config(given.folder, name, *words), str(first))
    try:
        prompts = random_prompts(_PROMPTS, 256, _LONGEST_PROMPT)
        found = {temperature: responses(engine, prompts, temperature) for temperature in _TEMPERATURES}
        nats = {f"{t:g}": furthest(first, prompts, found[t], t) for t in _TEMPERATURES}
        alone = responses(engine, prompts[:_ALONE], 1.0, alone=True)
        same = sum(one.tokens == batched.tokens for one, batched in zip(alone, found[1.0], strict=False))
        repeated = after_abort(engine, prompts)
        if is_reloaded := engine.reload(str(other)):
            nats["reloaded"] = furthest(other, prompts, responses(engine, prompts, 1.0), 1.0)
        runner = f"{runner_of(engine)}: " if name is Engine.VLLM else ""
    finally:
        engine.close()
    check_numbers(nats, same, [one.tokens for one in repeated] == [one.tokens for one in found[1.0]])
    measured = f"{runner}off by {max(nats.values()):.1e} nats at most, {same} of {_ALONE} responses the same "
    weights = "new weights are taken" if is_reloaded else "made again for new weights"
    measured += f"alone as in a batch, {weights}"
    return Shown(measured, {f"nats/{key}": value for key, value in nats.items()} | {"same_alone": same})


@with_torch
def vllm_reloads(given: CheckInput) -> Shown:
    """Check new weights in vLLM of a model whose layers share one, and another adapter on a model."""
    check_vllm(given)
    nats = {**after_tied(given.folder), **after_adapter(given.folder)}
    check_numbers(nats, 1, True)
    worst = max(nats.values())
    return Shown(
        f"a shared weight and an adapter are replaced: off by {worst:.1e} nats at most",
        {f"nats/{key}": value for key, value in nats.items()},
    )


def after_tied(folder: Path) -> dict[str, float]:
    """Return how far off vLLM is with a tied model, and with other weights of it."""
    first, other = (policy(folder, seed, is_tied=True) for seed in (0, 1))
    prompts = random_prompts(_PROMPTS, 256, _LONGEST_PROMPT)
    engine = make_generator(engine_config(folder, Engine.VLLM, *eager()), str(first))
    try:
        nats = {"tied": furthest(first, prompts, responses(engine, prompts, 1.0), 1.0)}
        if not engine.reload(str(other)):
            raise CheckFailed("vLLM takes no new weights of a tied model", _WRONG_NUMBERS)
        nats["tied, reloaded"] = furthest(other, prompts, responses(engine, prompts, 1.0), 1.0)
    finally:
        engine.close()
    return nats


def after_adapter(folder: Path) -> dict[str, float]:
    """Return how far off vLLM is with an adapter, and with another one."""
    base, first, other = policy(folder), adapter(folder, 0), adapter(folder, 1)
    prompts = random_prompts(_PROMPTS, 256, _LONGEST_PROMPT)
    engine = make_generator(engine_config(folder, Engine.VLLM, *eager()), str(base), str(first))
    try:
        nats = {"adapter": furthest(base, prompts, responses(engine, prompts, 1.0), 1.0, first)}
        if not engine.reload(str(base), str(other)):
            raise CheckFailed("vLLM takes no other adapter", "set rollout.merge_adapters=true")
        nats["adapter, replaced"] = furthest(base, prompts, responses(engine, prompts, 1.0), 1.0, other)
    finally:
        engine.close()
    return nats


def check_numbers(nats: dict[str, float], same: int, is_repeated: bool) -> None:
    """Raise CheckFailed where log-probabilities, seeds or what follows an end are not as they must be."""
    if bad := [f"{key} {value:.1e}" for key, value in nats.items() if not value <= _MOST_NATS]:
        raise CheckFailed(
            f"log-probabilities differ from transformers' in nats: {', '.join(bad)}", _WRONG_NUMBERS
        )
    if not same:
        raise CheckFailed("no response is the same alone as in a batch: seeds have no effect", _WRONG_NUMBERS)
    if not is_repeated:
        raise CheckFailed(
            "after requests were thrown away the same seeds give other responses", _WRONG_NUMBERS
        )


def engine_config(folder: Path, name: Engine, *words: str) -> Config:
    """Return a configuration of a tiny policy and an engine that leaves room for others on the card."""
    return config_of(
        folder,
        f"rollout.engine={name}",
        "rollout.precision=fp32",
        "rollout.vllm.gpu_memory_utilization=0.3",
        *words,
    )


def responses(
    engine: Generator,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    alone: bool = False,
    longest: int = 32,
) -> list[Response]:
    """Return a response to each prompt, seeded by its number; ``alone``: one call for each."""
    asked = [Request(prompt, longest, seed) for seed, prompt in enumerate(prompts)]
    sampling = replace(Sampling(), temperature=temperature)
    if alone:
        return [engine.generate([request], sampling)[0] for request in asked]
    return engine.generate(asked, sampling)


def after_abort(engine: Generator, prompts: Sequence[Sequence[int]]) -> list[Response]:
    """Return responses after a call that was stopped before its end, and a reset."""
    asked = [Request(prompt, 32, seed + 100) for seed, prompt in enumerate(prompts)]
    steps = iter((False, False, *[True] * 1000))
    for _ in engine.stream(asked, Sampling(), should_stop=lambda: next(steps)):
        pass
    engine.reset()
    return responses(engine, prompts, 1.0)


def furthest(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    found: Sequence[Response],
    temperature: float,
    adapter: Path | None = None,
) -> float:
    """Return the largest of :func:`differences` from transformers in fp32 on the CPU.

    Args:
        adapter: adapter of the model in ``directory``.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if adapter is not None:
        with torch.no_grad():
            merge_into(model, read_adapter(adapter))
    return float(differences(model, prompts, found, temperature).max())


@torch.no_grad()
def differences(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    found: Sequence[Response],
    temperature: float,
) -> torch.Tensor:
    """Return by how much the log-probability of each response token is off from the model's own, in nats;
    [n], all responses end to end, in the host's memory."""
    off = []
    for prompt, response in zip(prompts, found, strict=True):
        ids = torch.tensor([[*prompt, *response.tokens]], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float().cpu()
        expected = torch.log_softmax(logits / temperature, -1)
        taken = expected.gather(-1, torch.tensor(response.tokens)[:, None])[:, 0]
        off.append((taken - torch.tensor(response.log_probs)).abs())
    return torch.cat(off)


def runner_of(engine: Any) -> str:
    """Return which model runner of vLLM an engine has, and whether it schedules asynchronously."""
    numbers = engine.facts().numbers
    schedules = "asynchronous" if numbers["async_scheduling"] else "in step"
    return f"model runner {numbers['model_runner']:.0f}, {schedules}"


@with_torch
def warned_generation(given: CheckInput) -> Shown:
    """Check that transformers' engine stops at Slurm's warning."""
    return until_warned(given.folder, Engine.TRANSFORMERS)


@with_torch
def warned_vllm(given: CheckInput) -> Shown:
    """Check that vLLM stops at Slurm's warning."""
    check_vllm(given)
    return until_warned(given.folder, Engine.VLLM, _OWN_PROCESS)


def until_warned(folder: Path, name: Engine, *words: str) -> Shown:
    """Warn this process as an engine generates. Raises CheckFailed where it goes on."""
    listen(can_save=True)
    engine = make_generator(engine_config(folder, name, *words, *eager()), str(policy(folder)))
    asked = [Request([5, 6, 7], 100, seed) for seed in range(_ALONE)]
    calls = itertools.count()

    def should_stop() -> bool:
        if next(calls) == _WARNED_AFTER:
            os.kill(os.getpid(), signal.SIGUSR2)
        return warned()

    try:
        finished = sum(map(len, engine.stream(asked, Sampling(), should_stop=should_stop)))
    finally:
        engine.close()
    if finished == len(asked) or not warned():
        raise CheckFailed("generation went on after SIGUSR2", "report this, with this command's log")
    return Shown(f"generation stops at SIGUSR2 with {finished} of {len(asked)} responses finished")


def free_gib() -> float:
    """Return the free memory of this process's card; 0 without one."""
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0


@with_torch
def second_engine(given: CheckInput) -> Shown:
    """Check that an engine that was closed gives its memory back, and that a second one starts, beside a
    trainer that stays."""
    from stages.rehearsal.training import learner_of, update_of

    name = Engine.VLLM if is_installed_vllm() else Engine.TRANSFORMERS
    prompts, before = random_prompts(_ALONE, 256, _LONGEST_PROMPT), free_gib()
    first = with_engine(given, name, prompts)
    lost = before - free_gib()
    learner = learner_of(given.folder, "update.zero_stage=1")
    update_of(learner)
    second = with_engine(given, name, prompts)
    update_of(learner, iteration=2)
    if [one.tokens for one in first] != [one.tokens for one in second]:
        raise CheckFailed(f"a second {name} engine gives other responses", _WRONG_NUMBERS)
    started = f"a second {name} engine starts after the first, beside a trainer"
    if not torch.cuda.is_available():
        return Shown(f"{started}; GPU memory is not shown here")
    if lost > _MOST_LOST_GIB:
        advice = "let tasks of this engine have processes of their own: scheduler.STAGE.linger=0"
        raise CheckFailed(f"{lost:.2f} GiB are not given back after {name} was closed", advice)
    return Shown(f"{started}; {lost:.2f} GiB of GPU memory are not given back", {"lost_gib": lost})


def with_engine(given: CheckInput, name: Engine, prompts: Sequence[Sequence[int]]) -> list[Response]:
    """Return responses of an engine that is made and closed for them."""
    own = _OWN_PROCESS  # in this process vLLM would end the trainer's ranks
    engine = make_generator(engine_config(given.folder, name, own, *eager()), str(policy(given.folder)))
    try:
        return responses(engine, prompts, 1.0)
    finally:
        engine.close()
        del engine
        gc.collect()
