"""Trainers in processes of their own, in every precision and ZeRO stage, compared with AdamW."""

import itertools
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors.torch import load_file

from pipeline.config.update import Precision, Schedule, UpdateConfig
from stages import ranks
from stages.ppo.state.saved_state import files_of, write_counters, write_slices
from stages.ppo.state.tensor_files import read_metadata
from stages.ppo.trainer import StepOutcome, Trainer

RATE = 1e-2


TOTAL = 8


def precision_of(case: str) -> Precision:
    return Precision(case.split("-")[0])


def settings(case: str) -> UpdateConfig:
    """Of a case such as bf16-zero2-offload."""
    _, zero, *extras = case.split("-")
    return UpdateConfig(
        learning_rate=RATE,
        schedule=Schedule.LINEAR,
        weight_decay=0.1,
        epsilon=1e-3,  # with a tiny one, AdamW blows up the rounding of gradients that are almost zero
        max_grad_norm=0.5,
        zero_stage=int(zero.removeprefix("zero")),
        precision=precision_of(case),
        offload_optimizer="offload" in extras,
        activation_checkpointing="checkpointing" in extras,
    )


def micro_batches(step: int) -> list[torch.Tensor]:
    """Unequal: one, two and three rows of different lengths."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(2, 200, (1 + i, 4 + 3 * i), generator=generator) for i in range(3)]


def share_of_loss(model: torch.nn.Module, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    return (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        / tokens
    )


def accumulate(trainer: Trainer, step: int) -> None:
    batches = micro_batches(step)
    tokens = sum(ids[:, 1:].numel() for ids in batches)
    for number, ids in enumerate(batches):
        trainer.backward(share_of_loss(trainer.engine, ids, tokens), is_last=number == len(batches) - 1)


def advance(trainer: Trainer, steps: range) -> list[StepOutcome]:
    seen = []
    for step in steps:
        accumulate(trainer, step)
        seen.append(trainer.step(trainer.steps, TOTAL))
    return seen


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: trainer._master(p).clone() for name, p in trainer.model.named_parameters()}


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What this rank holds of the state, flat."""
    return {f"{kind}/{one.name}": one.parts[kind].clone() for one in trainer.held() for kind in trainer.kinds}


def save_state(trainer: Trainer, folder: Path) -> None:
    """As an update does, of one trainer."""
    folder.mkdir(parents=True, exist_ok=True)
    list(write_slices(folder, trainer.name, ranks.rank(), trainer.own(), trainer.kinds))
    if ranks.is_first():
        write_counters(folder, {trainer.name: trainer.counters()})


def whole_state(folder: Path, name: str = "policy") -> dict[str, torch.Tensor]:
    """What all ranks wrote of a trainer's state, each tensor flat and in one piece."""
    pieces: dict[str, list] = {}
    for path in files_of(folder, name):
        starts = json.loads(read_metadata(path)["starts"])
        for key, tensor in load_file(path).items():
            pieces.setdefault(key, []).append((starts[key], tensor))
    together = {key: sorted(found, key=lambda pair: pair[0]) for key, found in pieces.items()}
    for found in together.values():  # without gaps and overlaps
        for (start, tensor), (following, _) in itertools.pairwise(found):
            assert start + len(tensor) == following
    return {key: torch.cat([tensor for _, tensor in found]) for key, found in together.items()}


def into_file(story: Callable, case: str, model: Path, folder: Path) -> Path:
    """Tensors go through a file, because the process that made them ends."""
    torch.save(story(case, model, folder), folder / "seen.pt")
    return folder / "seen.pt"


def seen_in(future: Future) -> dict:
    return torch.load(future.result(timeout=500), weights_only=False)  # written by into_file


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).detach().abs().max()) for name in one)


def same_bytes(one: Path, other: Path) -> bool:
    """Whether both folders have the same safetensors files."""
    contents = [{file.name: file.read_bytes() for file in f.glob("*.safetensors")} for f in (one, other)]
    assert contents[0]
    return contents[0] == contents[1]
