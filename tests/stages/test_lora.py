"""LoRA: adapters start as nothing, they alone are trained and saved; whole models are merged on demand."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from pipeline.config.schema import Config
from pipeline.config.update import LoraConfig, Precision
from stages.context import UserError
from stages.models.adapters import merge_into, read_adapter
from stages.models.loading import DTYPES, load_causal_lm
from stages.models.merging import stored_names, write_merged
from stages.ppo.lora import attach, load_policy, save_adapter
from stages.ppo.trainer import Trainer
from stages.ranks import start_distributed
from tests.support.composed import composed_of
from tests.support.trainers import (
    RATE,
    advance,
    into_file,
    largest_difference,
    precision_of,
    same_bytes,
    save_state,
    seen_in,
    settings,
    weights,
)

CASES = ["fp32-zero0", "fp32-zero0-checkpointing", "bf16-zero2", "fp32-zero3", "bf16-zero3-checkpointing"]
IDS = torch.arange(2, 32).view(2, 15)


def config_of(models: Path, case: str = "fp32-zero0", **lora: object) -> Config:
    config = composed_of(models, models / "no-run")
    update = dataclasses.replace(settings(case), lora=LoraConfig(rank=4, alpha=8.0, **lora))
    return dataclasses.replace(config, update=update)


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def trainer_of(config: Config, policy: Path) -> Trainer:
    return Trainer("policy", load_policy(policy, config), RATE, config.update)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits.float()


def life_with_adapters(case: str, policy: Path, folder: Path) -> dict:
    """Three steps, a checkpoint, two more; the same two from the checkpoint and the base."""
    torch.set_num_threads(1)
    start_distributed()
    config = config_of(policy.parent, case)
    trainer = trainer_of(config, policy)
    start, first = weights(trainer), logits(trainer.engine)
    advance(trainer, range(3))
    after_three, last = weights(trainer), logits(trainer.engine)
    trainer.save_model(folder / "model")
    save_state(trainer, folder / "state")
    again = trainer_of(config, policy)
    again.load_state(folder / "state")
    restored = logits(again.engine)
    for name, one in (("straight", trainer), ("resumed", again)):
        advance(one, range(3, 5))
        one.save_model(folder / name)
        save_state(one, folder / name / "state")
    names = ("start", "first", "after_three", "last", "restored")
    return dict(zip(names, (start, first, after_three, last, restored), strict=True))


@pytest.fixture(scope="module")
def lives(processes, models, tmp_path_factory):
    folders = {case: tmp_path_factory.mktemp(case) for case in CASES}
    return {
        case: (folder, processes.submit(into_file, life_with_adapters, case, models / "policy", folder))
        for case, folder in folders.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_new_adapters_change_nothing(lives, models, case):
    seen = seen_in(lives[case][1])
    base = load_causal_lm(models / "policy", precision_of(case), trust_remote_code=False)
    assert torch.equal(seen["first"], logits(base))
    assert not torch.equal(seen["first"], seen["last"])


@pytest.mark.parametrize("case", CASES)
def test_training_moves_the_adapters_and_nothing_else(lives, case):
    seen = seen_in(lives[case][1])
    before, after = seen["start"], seen["after_three"]
    assert sum(is_adapter(name) for name in before) == 2 * 2 * 7, "two for each linear layer of two blocks"
    for name in before:
        assert is_adapter(name) != torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("case", CASES)
def test_going_on_from_base_and_adapters_is_bit_exact(lives, case):
    folder, life = lives[case]
    seen = seen_in(life)
    assert torch.equal(seen["last"], seen["restored"])
    for part in ("state", "adapter"):
        assert same_bytes(folder / "straight" / part, folder / "resumed" / part)
    config = "adapter/adapter_config.json"
    assert (folder / "straight" / config).read_text() == (folder / "resumed" / config).read_text()


@pytest.mark.parametrize("case", CASES)
def test_the_state_holds_the_adapters_in_fp32(lives, case):
    folder, life = lives[case]
    seen = seen_in(life)
    state = load_file(folder / "state" / "policy-rank-00000-000.safetensors")
    adapters = {name: tensor for name, tensor in seen["after_three"].items() if is_adapter(name)}
    assert state.keys() == {f"{k}/{name}" for k in ("exp_avg", "exp_avg_sq", "weight") for name in adapters}
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    expected = {name: adapter.flatten() for name, adapter in adapters.items()}
    assert largest_difference({name: state[f"weight/{name}"] for name in adapters}, expected) == 0


def test_a_policy_is_the_adapter_alone_whatever_the_size_of_the_model(lives):
    folder, life = lives["bf16-zero2"]
    seen_in(life)
    names = sorted(path.relative_to(folder / "model") for path in (folder / "model").rglob("*.*"))
    assert list(map(str, names)) == [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "base.json",
    ]
    assert json.loads((folder / "model" / "base.json").read_text()) == {"policy_version": 0}
    written = load_file(folder / "model" / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}, "not rounded to bf16"


@pytest.mark.parametrize("case", CASES)
def test_the_merged_policy_is_a_plain_model_that_equals_the_adapter_on_the_base(
    lives, models, case, tmp_path
):
    folder, life = lives[case]
    seen = seen_in(life)
    write_merged(models / "policy", folder / "model" / "adapter", precision_of(case), False, tmp_path)
    plain, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert plain.dtype == DTYPES[precision_of(case)]
    base = AutoModelForCausalLM.from_pretrained(models / "policy", dtype=plain.dtype).float()
    adapted = PeftModel.from_pretrained(base, folder / "model" / "adapter")
    half = precision_of(case) is not Precision.FP32
    assert torch.allclose(seen["last"], logits(adapted), atol=0.2 if half else 1e-5)
    assert torch.allclose(logits(plain), logits(adapted), atol=0.2 if half else 1e-5)
    expected = {name: w.to(plain.dtype) for name, w in adapted.merge_and_unload().named_parameters()}
    # In half precision a weight may be rounded the other way, which is 2**-8 of it.
    for name, weight in plain.named_parameters():
        assert torch.allclose(weight, expected[name], rtol=2**-7 if half else 1e-6, atol=1e-6), name


def test_checkpointing_gives_adapters_the_same_gradients(lives):
    plain, checkpointed = (lives[case] for case in ("fp32-zero0", "fp32-zero0-checkpointing"))
    for _, life in (plain, checkpointed):
        life.result(timeout=500)
    assert same_bytes(plain[0] / "state", checkpointed[0] / "state")


def test_the_adapter_says_what_it_is_for(lives, models):
    folder, life = lives["fp32-zero0"]
    life.result(timeout=500)
    told = json.loads((folder / "model" / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(models / "policy")
    assert (told["r"], told["lora_alpha"], told["lora_dropout"]) == (4, 8.0, 0.0)
    assert told["target_modules"] == sorted(told["target_modules"])
    assert (told["task_type"], told["inference_mode"]) == ("CAUSAL_LM", True)


def test_adapters_follow_from_the_seed_alone(models):
    config = config_of(models)
    torch.manual_seed(5)
    one, state = load_policy(models / "policy", config), torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator was used"
    torch.manual_seed(6)
    two = load_policy(models / "policy", config)
    other = load_policy(models / "policy", dataclasses.replace(config, seed=config.seed + 1))
    weights_of = [dict(model.named_parameters()) for model in (one, two, other)]
    assert largest_difference(weights_of[0], weights_of[1]) == 0
    assert largest_difference(weights_of[0], weights_of[2]) > 0


def test_only_the_layers_that_were_named_get_adapters(models):
    model = load_policy(models / "policy", config_of(models, target_modules=("q_proj", "mlp.up_proj")))
    names = [name for name, _ in model.named_parameters() if is_adapter(name)]
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == {"q_proj", "up_proj"}


@pytest.mark.parametrize("target", ["nonsense", "embed_tokens", "lm_head"])
def test_a_layer_that_cannot_have_an_adapter_is_named(models, target):
    with pytest.raises(
        UserError, match=rf"lora\.target_modules: .*'{target}'; it has .*down_proj, gate_proj"
    ):
        load_policy(models / "policy", config_of(models, target_modules=("q_proj", target)))


def test_without_peft_the_error_says_what_to_install(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"update\.lora needs peft: pip install \"slurm-ppo\[train\]\""):
        load_policy(models / "policy", config_of(models))


def gpt2() -> PreTrainedModel:
    """Its weights are [in, out]."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2))


def with_adapter(model: PreTrainedModel, folder: Path, lora: LoraConfig) -> PreTrainedModel:
    """A model saved in ``base``, an adapter of random numbers in ``adapter``; the model has both."""
    model.save_pretrained(folder / "base")
    attach(model, folder / "base", lora, seed=0)
    factors = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for weight in factors.values():
        torch.nn.init.normal_(weight)
    save_adapter(model, {name: weight.detach() for name, weight in factors.items()}, folder / "adapter")
    return model


def merged_by_peft(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weights of the adapted layers by the name that they have without adapters."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            module.merge()
            found[f"{name}.weight"] = module.base_layer.weight.detach()
    return found


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_transposed_weights_are_merged_as_peft_does(tmp_path):
    expected = merged_by_peft(with_adapter(gpt2(), tmp_path, LoraConfig(rank=2)))
    adapter = read_adapter(tmp_path / "adapter")
    assert adapter.is_transposed
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert len(expected) == 4
    assert expected.keys() == adapter.factors.keys()
    for name, weight in expected.items():
        assert torch.allclose(adapter.merged(name, base[name]), weight, atol=1e-5)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_a_base_whose_files_leave_out_the_prefix_of_its_class_is_merged_all_the_same(tmp_path):
    """As GPT-2's do."""
    expected = merged_by_peft(with_adapter(gpt2(), tmp_path, LoraConfig(rank=2)))
    file = tmp_path / "base" / "model.safetensors"
    short = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(short, file, metadata={"format": "pt"})
    (tmp_path / "merged").mkdir()
    write_merged(tmp_path / "base", tmp_path / "adapter", Precision.FP32, False, tmp_path / "merged")
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == short.keys()
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, atol=1e-5)


def test_names_that_fit_several_weights_are_left_to_the_class_of_the_model():
    assert stored_names({"a.q.weight"}, {"a.q.weight", "b"}) == {"a.q.weight": "a.q.weight"}
    assert stored_names({"model.a.q.weight"}, {"a.q.weight", "b"}) == {"a.q.weight": "model.a.q.weight"}
    assert stored_names({"a.q.weight"}, {"model.a.q.weight"}) == {"model.a.q.weight": "a.q.weight"}
    assert stored_names({"a.q.weight"}, {"x.a.q.weight", "y.a.q.weight"}) is None
    assert stored_names({"a.q.weight"}, {"qkv.weight"}) is None


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_sharded_base_is_merged_file_by_file_to_the_bytes_that_merging_in_memory_gives(
    models, tmp_path, precision
):
    """What the base holds in a format of its own stays as it is."""
    policy = load_causal_lm(models / "policy", Precision.FP32, trust_remote_code=False)
    policy.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    with_adapter(policy, tmp_path, LoraConfig(rank=4, target_modules=("q_proj", "down_proj")))
    (tmp_path / "merged").mkdir()
    lines: list[str] = []
    write_merged(
        tmp_path / "sharded", tmp_path / "adapter", precision, False, tmp_path / "merged", lines.append
    )
    assert len(lines) == len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    from_disk = load_causal_lm(tmp_path / "merged", precision, trust_remote_code=False)
    in_memory = load_causal_lm(tmp_path / "base", precision, trust_remote_code=False)
    merge_into(in_memory, read_adapter(tmp_path / "adapter"))
    wanted, found = in_memory.state_dict(), from_disk.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    described = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert described["dtype"] == str(DTYPES[precision]).removeprefix("torch.")


@pytest.mark.parametrize(("key", "value"), [("use_dora", True), ("rank_pattern", {"q_proj": 8})])
def test_an_adapter_of_another_kind_is_refused(models, tmp_path, key, value):
    policy = load_causal_lm(models / "policy", Precision.FP32, trust_remote_code=False)
    with_adapter(policy, tmp_path, LoraConfig(rank=2))
    settings = tmp_path / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {key: value}))
    with pytest.raises(UserError, match=f"adapters with {key} cannot be merged here; write whole models"):
        read_adapter(tmp_path / "adapter")
