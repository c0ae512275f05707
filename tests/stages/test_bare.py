"""With ZeRO 3 every model is shared out weight by weight: what it computes and writes is as if each rank had
loaded it whole, and no rank ever holds it whole."""

import contextlib
import dataclasses
import gc
import logging.handlers
import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from pipeline.config.schema import Config
from pipeline.config.update import LoraConfig, Precision, UpdateConfig
from stages import ranks
from stages.logs import log
from stages.models.loading import load_causal_lm
from stages.ppo import trainer as trainer_module
from stages.ppo.bare import Bare, bare_model
from stages.ppo.batching import Row, collate
from stages.ppo.committed import weights_in
from stages.ppo.forward import response_log_probs, response_values
from stages.ppo.reference import shared_out
from stages.ppo.resuming import critic_from, policy_from
from stages.ppo.state.conversion import TensorSource
from stages.ppo.trainer import Trainer
from stages.ppo.zero import engine_settings, share_out
from tests.support import tiny
from tests.support.composed import composed_of
from tests.support.ranks import ended, start_ranks

SIZE = 2
ROWS = [Row([3, 4, 5], [6, 7, 8, 9]), Row([5, 6, 7, 8], [1, 2, 3])]
TOKENIZER = tiny.byte_tokenizer(("<pad>", "<eos>"))


class Live(TorchDispatchMode):
    """Between its beginning and :meth:`stop`, the most bytes of tensors made since then that lived at once,
    as seen whenever torch makes one of some size. For a process of its own: what lives at the beginning is
    never looked at again, nor collected: going through all that torch imports takes half a second."""

    def __init__(self, noted: int) -> None:
        """Look whenever a tensor of at least ``noted`` bytes is made."""
        super().__init__()
        self.largest = 0
        self._noted = noted
        self._is_over = False

    def __enter__(self) -> "Live":
        gc.collect()
        gc.freeze()  # what is there already is not counted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stop()

    def stop(self) -> None:
        if not self._is_over:
            self._look()
            self._is_over = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(found) if type(one) is Tensor and not one.is_meta]
        if not self._is_over and any(one.nbytes >= self._noted for one in made):
            self._look(*made)
        return found

    def _look(self, *made: Tensor) -> None:
        # isinstance would make lazy modules import things.
        tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
        storages = [one.untyped_storage() for one in (*tensors, *made) if not one.is_meta]
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.largest = max(self.largest, sum(held.values()))


def llama(**others: object) -> PreTrainedConfig:
    config = tiny.llama_config(TOKENIZER, **others)
    config.num_hidden_layers = 4
    return config


def mixtral() -> PreTrainedConfig:
    """transformers keeps its experts' weights together, and files have each expert's."""
    shape = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 4, "num_local_experts": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return MixtralConfig(vocab_size=64, initializer_range=0.2, pad_token_id=0, **shape, **heads)


def gpt2() -> PreTrainedConfig:
    shape = {"n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 2, "initializer_range": 0.2}
    return GPT2Config(vocab_size=64, bos_token_id=1, eos_token_id=1, **shape)


@dataclass(frozen=True)
class Case:
    """A model that is loaded."""

    config: Callable[[], PreTrainedConfig]
    is_trained: bool = False
    is_critic: bool = False
    is_of_reward_model: bool = False
    has_adapters: bool = False
    precision: Precision = Precision.FP32
    change: Callable[[dict], dict] = lambda tensors: tensors
    """What was done to the files."""
    is_known: bool = True
    """Whether it is clear what its weights are made of."""


def with_head(tensors: dict) -> dict:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def with_another_head(tensors: dict) -> dict:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] / 2}


def with_the_head_alone(tensors: dict) -> dict:
    head = tensors.pop("model.embed_tokens.weight")
    return tensors | {"lm_head.weight": head}


def without_prefix(tensors: dict) -> dict:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def tied() -> PreTrainedConfig:
    return llama(tie_word_embeddings=True)


CASES = {
    "llama with adapters in bf16": Case(llama, is_trained=True, has_adapters=True, precision=Precision.BF16),
    "mixtral": Case(mixtral, is_trained=True),
    "mixtral with adapters in bf16": Case(mixtral, has_adapters=True, precision=Precision.BF16),
    "tied": Case(tied, is_trained=True),
    "tied, files have both": Case(tied, change=with_head),
    "tied, files have two others": Case(tied, change=with_another_head),
    "tied, files have the other": Case(tied, change=with_the_head_alone),
    "gpt2 without prefix, with adapters": Case(gpt2, has_adapters=True, change=without_prefix),
    "critic of a policy": Case(llama, is_critic=True),
    "critic of a mixture": Case(mixtral, is_critic=True, precision=Precision.BF16),
    "critic of a reward model": Case(llama, is_trained=True, is_critic=True, is_of_reward_model=True),
    "nobody knows, with adapters": Case(mixtral, has_adapters=True, is_known=False),
}
COMMITTED = ["mixtral", "tied", "nobody knows, with adapters"]
TRAINED = [name for name, case in CASES.items() if case.is_trained]


def saved(case: Case, folder: Path) -> Path:
    torch.manual_seed(0)
    auto = AutoModelForSequenceClassification if case.is_of_reward_model else AutoModelForCausalLM
    config = case.config()
    config.num_labels = 1
    auto.from_config(config).save_pretrained(folder)
    tensors = case.change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def config_of(models: Path, case: Case, zero_stage: int) -> Config:
    layers = ("q_proj", "v_proj") if case.config is mixtral else "all-linear"  # experts cannot be merged
    lora = LoraConfig(rank=4, alpha=8.0, target_modules=layers) if case.has_adapters else None
    update = UpdateConfig(zero_stage=zero_stage, precision=case.precision, lora=lora)
    return dataclasses.replace(composed_of(models, models / "no-run"), update=update)


@contextlib.contextmanager
def nothing_known(case: Case) -> Iterator[None]:
    """As if transformers' conversions gave other weights than the model's."""
    known = TensorSource.names
    if not case.is_known:
        TensorSource.names = lambda source, model: None
    yield
    TensorSource.names = known


def ending_when_shared_out(live: Live) -> contextlib.AbstractContextManager:
    """Before the optimizer gets its share too."""

    def share_out_and_stop(*given: object) -> None:
        share_out(*given)
        live.stop()

    return mock.patch.object(trainer_module, "share_out", share_out_and_stop)


@torch.no_grad()
def life(case: Case, models: Path, folder: Path, zero_stage: int) -> dict:
    """Load a model as an update does, and see what it is and how much this rank held; train with some."""
    config, lines = config_of(models, case, zero_stage), logging.handlers.QueueHandler(queue.SimpleQueue())
    name, trainer = "critic" if case.is_critic else "policy", None
    noted = (folder / "model" / "model.safetensors").stat().st_size // 50
    log.addHandler(lines)
    with Live(noted) as live, nothing_known(case), ending_when_shared_out(live):
        model = (critic_from if case.is_critic else policy_from)(folder / "model", config)
        if case.is_trained:
            trainer = Trainer(name, model, 1e-3, config.update)
            model = trainer.model
        elif isinstance(model, Bare):
            share_out(model.model, engine_settings(config.update, 1000), model)
            model = model.model
    log.removeHandler(lines)
    if trainer is not None:
        trainer.save_model(folder / f"written-{zero_stage}")
    named = dict(model.named_parameters())
    return {
        "weights": {name: whole(parameter) for name, parameter in named.items()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "trained": [name for name, parameter in named.items() if parameter.requires_grad],
        "outputs": outputs(trainer) if trainer is not None else torch.zeros(0),
        "held": live.largest,
        "log": [lines.queue.get().getMessage() for _ in range(lines.queue.qsize())],
    }


def whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def outputs(trainer: Trainer) -> torch.Tensor:
    batch = collate(ROWS, range(len(ROWS)))
    if trainer.name == "critic":
        return response_values(trainer.engine, batch)
    return response_log_probs(trainer.engine, batch, 1.0)


@torch.no_grad()
def reference(models: Path, folder: Path, zero_stage: int) -> dict:
    """A frozen model's log-probabilities, and how much this rank held of it."""
    config = config_of(models, CASES["mixtral"], zero_stage).update

    def load(placement: str | None) -> PreTrainedModel:
        return load_causal_lm(folder / "model", config.precision, False, placement)

    with Live(noted=2000) as live:
        model = shared_out(bare_model(load, folder / "model"), config) if zero_stage == 3 else load(None)
    batch = collate(ROWS, range(len(ROWS)))
    return {"outputs": response_log_probs(model, batch, 1.0), "held": live.largest}


def committed(case: Case, folder: Path) -> dict:
    """A policy's weights as replays read them: whole and in parts; and whether the model was loaded."""
    placements = []

    def load(placement: str) -> PreTrainedModel:
        placements.append(placement)
        return load_causal_lm(folder, case.precision, False, placement)

    with nothing_known(case):
        weights = weights_in(folder, load)
    names = [name for name, _ in load_causal_lm(folder, case.precision, False, "meta").named_parameters()]
    return {
        "parts": {name: weights.part(name, 5 * ranks.rank(), 3) for name in names},
        "none": {name: len(weights.part(name, 0, 0)) for name in names},
        "whole": {name: weights.whole(name) for name in names},
        "placements": placements,
    }


def lives(models: Path, folder: Path, rank: int) -> None:
    ranks.start_distributed()
    for zero_stage in (1, 3):  # DeepSpeed changes torch's functions for ZeRO 3
        for name, case in CASES.items():
            seen = life(case, models, folder / name, zero_stage)
            torch.save(seen, folder / name / f"seen-{zero_stage}-{rank}.pt")
        for name in COMMITTED if zero_stage == 1 else ():
            torch.save(committed(CASES[name], folder / name / "model"), folder / name / f"read-1-{rank}.pt")
        seen = reference(models, folder / "mixtral", zero_stage)
        torch.save(seen, folder / f"reference-{zero_stage}-{rank}.pt")


@pytest.fixture(scope="module")
def loaded(models, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("loaded")
    for name, case in CASES.items():
        saved(case, folder / name / "model")
    assert ended(start_ranks(SIZE, folder / "meeting", lives, models, folder)) == [0] * SIZE
    return folder


def seen_of(path: Path, zero_stage: int, rank: int) -> dict:
    return torch.load(path.with_name(f"{path.name}-{zero_stage}-{rank}.pt"), weights_only=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


@pytest.mark.parametrize("name", CASES)
def test_what_is_shared_out_is_what_every_rank_would_have_loaded(loaded, name):
    for rank in range(SIZE):
        whole, shared = (seen_of(loaded / name / "seen", stage, rank) for stage in (1, 3))
        for kind in ("weights", "buffers"):
            assert whole[kind].keys() == shared[kind].keys()
            assert all(torch.equal(whole[kind][key], shared[kind][key]) for key in whole[kind])
        assert whole["trained"] == shared["trained"]
        assert torch.equal(whole["outputs"], shared["outputs"])


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_written_first_has_the_same_bytes(loaded, name):
    whole, shared = (contents(loaded / name / f"written-{stage}") for stage in (1, 3))
    assert "model.safetensors" in whole or "adapter/adapter_model.safetensors" in whole
    assert whole == shared


def bound_of(weights: Mapping[str, torch.Tensor]) -> float:
    """Bytes that a rank may hold: its share, one weight, what that is made of (in fp32), and a little."""
    sizes = [weight.nbytes for weight in weights.values()]
    largest = max(weights.values(), key=lambda weight: weight.nbytes)
    bound = sum(sizes) / SIZE + largest.nbytes + 4 * largest.numel() + sum(sizes) / 20
    assert bound < 0.9 * sum(sizes), "the model is too small to tell"
    return bound


@pytest.mark.parametrize("name", CASES)
def test_no_rank_ever_holds_the_whole_model(loaded, name):
    bound = bound_of(seen_of(loaded / name / "seen", 1, 0)["weights"])
    first, second = (seen_of(loaded / name / "seen", 3, rank) for rank in range(SIZE))
    assert 0 < second["held"] <= bound
    said = [line for line in first["log"] if "cannot be read one by one; rank 0 loads the whole" in line]
    if CASES[name].is_known:
        assert 0 < first["held"] <= bound
        assert not said
    else:
        assert first["held"] > bound
        assert len(said) == 1


@pytest.mark.parametrize("name", COMMITTED)
def test_weights_of_a_committed_policy_are_read_in_parts_or_sent_by_the_first_rank(loaded, name):
    model = load_causal_lm(loaded / name / "model", CASES[name].precision, False)
    weights = dict(model.named_parameters())
    for rank in range(SIZE):
        seen = seen_of(loaded / name / "read", 1, rank)
        assert seen["whole"].keys() == weights.keys()
        for key, weight in weights.items():
            assert torch.equal(seen["whole"][key], weight)
            assert torch.equal(seen["parts"][key], weight.reshape(-1)[5 * rank : 5 * rank + 3])
        assert set(seen["none"].values()) == {0}
        assert seen["placements"] == (["meta"] if CASES[name].is_known or rank else ["meta", "cpu"])


def test_a_frozen_reference_is_never_whole_either(loaded):
    bound = bound_of(seen_of(loaded / "mixtral" / "seen", 1, 0)["weights"])
    for rank in range(SIZE):
        whole, shared = (seen_of(loaded / "reference", stage, rank) for stage in (1, 3))
        assert torch.equal(whole["outputs"], shared["outputs"])
        assert 0 < shared["held"] <= bound < whole["held"]


def test_a_critic_of_a_reward_model_starts_with_its_head_and_one_of_a_policy_with_zeros(loaded):
    head = "score.weight"
    given = load_file(loaded / "critic of a reward model" / "model" / "model.safetensors")[head]
    seen = seen_of(loaded / "critic of a reward model" / "seen", 3, 0)
    assert torch.equal(seen["weights"][head], given)
    assert seen["outputs"].abs().max() > 0
    assert seen_of(loaded / "critic of a policy" / "seen", 3, 0)["weights"][head].abs().max() == 0


def test_weights_that_are_tied_stay_one_unless_the_files_have_two(loaded):
    head = "lm_head.weight"
    for name in CASES:
        if name.startswith("tied"):
            is_apart = head in seen_of(loaded / name / "seen", 3, 0)["weights"]
            assert is_apart == (name == "tied, files have two others"), name
