"""Files of a state and of a policy: what safetensors and transformers read, whoever wrote which part."""

import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.torch import save
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from pipeline.config.model_files import read_header
from pipeline.run.durable import digest_file
from stages.ppo.math.rounding import nearest_that_rounds_to
from stages.ppo.state import model_files
from stages.ppo.state.model_files import ModelFiles, plan_files
from stages.ppo.state.saved_state import SavedState, files_of, write_slices
from stages.ppo.state.slices import MOMENTS, WEIGHT, Slice, share_of
from stages.ppo.state.sums import contradiction
from stages.ppo.state.tensor_files import Described, TensorFile, read_part
from stages.ppo.state.writer import StatePart, free_device
from tests.support import tiny

KINDS = (*MOMENTS, WEIGHT)


def described(tensors: dict[str, torch.Tensor]) -> list[Described]:
    return [Described(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def test_a_file_written_tensor_by_tensor_is_what_safetensors_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("stages.ppo.state.tensor_files._CHUNK", 8)
    numbers = {
        "steps": torch.tensor(7),
        "a": torch.arange(6.0).view(2, 3),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "b": torch.arange(5.0).bfloat16(),
        "nothing": torch.empty(0, 3).bfloat16(),
        "mask": torch.tensor([True, False]),
    }
    with TensorFile(tmp_path / "file", described(numbers), {"format": "pt"}) as file:
        for tensor in numbers.values():
            file.add(tensor)
        size, digest = file.end()
    expected = save({name: t.contiguous() for name, t in numbers.items()}, {"format": "pt"})
    assert (tmp_path / "file").read_bytes() == expected
    assert digest_file(tmp_path / "file") == (size, digest)
    stored = read_header(tmp_path / "file")
    assert read_part(stored["a"], 2, 5).tolist() == [2, 3, 4]
    assert read_part(stored["b"]).tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=40)
@given(
    lengths=some.lists(some.integers(1, 40), min_size=1, max_size=4),
    writers=some.integers(1, 5),
    readers=some.integers(1, 5),
    limit=some.integers(4, 200),
)
def test_a_state_written_by_any_ranks_is_read_by_any_others(
    tmp_path_factory, lengths, writers, readers, limit
):
    folder = tmp_path_factory.mktemp("state")
    whole = {f"p{i}": {kind: torch.randn(length) for kind in KINDS} for i, length in enumerate(lengths)}

    def part_of(rank: int, size: int) -> list[Slice]:
        slices = [Slice(name, 0, parts) for name, parts in whole.items()]
        return [one.cut(*share_of(len(one), rank, size)) for one in slices]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.ppo.state.saved_state.LARGEST_FILE", limit)
        written = [
            file
            for rank in range(writers)
            for file in write_slices(folder, "policy", rank, part_of(rank, writers), KINDS)
        ]
    saved, verified = SavedState(files_of(folder, "policy")), []
    for rank in range(readers):
        expected = part_of(rank, readers)
        found = [
            Slice(one.name, one.start, {kind: torch.zeros(len(one)) for kind in KINDS}) for one in expected
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stages.ranks.rank", lambda rank=rank: rank)
            patch.setattr("stages.ranks.size", lambda: readers)
            verified += saved.read_into(found, KINDS)
        for one, other in zip(expected, found, strict=True):
            assert all(torch.equal(one.parts[kind], other.parts[kind]) for kind in KINDS)
    assert sorted(verified) == sorted(written), "each file is hashed by one reader, as it was by its writer"


def test_a_state_that_lacks_a_ranks_file_is_not_read(tmp_path):
    whole = Slice("p", 0, {kind: torch.arange(10.0) for kind in KINDS})
    list(write_slices(tmp_path, "policy", 1, [whole.cut(4, 10)], KINDS))
    saved = SavedState(files_of(tmp_path, "policy"))
    saved.read("weight/p", 6, torch.empty(3))
    with pytest.raises(KeyError, match=r"weight/p: 2 of 4 elements from 2 are there"):
        saved.read("weight/p", 2, torch.empty(4))


def mixtral() -> PreTrainedModel:
    """transformers keeps its experts' weights together, and writes each expert's."""
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=3,
        )
    )


def llama(**others: object) -> PreTrainedModel:
    torch.manual_seed(0)
    tokenizer = tiny.byte_tokenizer(("<pad>", "<eos>"))
    return AutoModelForCausalLM.from_config(tiny.llama_config(tokenizer, **others))


def files_for(model: PreTrainedModel) -> ModelFiles:
    weights = dict(model.named_parameters())
    files = plan_files(model, described(weights))
    return ModelFiles(model, files, lambda name, is_wanted: weights[name].detach() if is_wanted else None)


@pytest.mark.parametrize("make", [mixtral, llama, lambda: llama(tie_word_embeddings=True)])
@pytest.mark.parametrize("limit", [1 << 30, 3_000])
def test_a_models_files_have_the_names_and_forms_that_transformers_gives_them(
    tmp_path, monkeypatch, make, limit
):
    monkeypatch.setattr(model_files, "_SMALLEST_FILE", limit)
    monkeypatch.setattr(model_files, "_LARGEST_FILE", limit)
    model = make()
    files = files_for(model)
    written = files.write(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    theirs = read_header(tmp_path / "theirs" / "model.safetensors")
    ours = {name: t for path, _, _ in written for name, t in read_header(path).items()}
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    assert all(torch.equal(read_part(ours[name]), read_part(theirs[name])) for name in theirs)
    assert (len(written) == 1) == (limit == 1 << 30)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
    if len(written) > 1:
        index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == theirs.keys()


@settings(max_examples=300)
@given(
    value=some.floats(width=32, allow_nan=False, allow_infinity=False),
    to=some.floats(-1e4, 1e4, width=16),
    dtype=some.sampled_from([torch.bfloat16, torch.float16]),
)
def test_a_weight_is_moved_to_the_nearest_that_rounds_to_the_committed_one(value, to, dtype):
    weight, committed = torch.tensor([value], dtype=torch.float32), torch.tensor([to]).to(dtype)
    found = nearest_that_rounds_to(weight, committed)
    assert torch.equal(found.to(dtype), committed)
    if torch.equal(weight.to(dtype), committed):
        assert torch.equal(found, weight)
    else:  # the next number towards the weight rounds to another
        beyond = torch.nextafter(found, weight)
        assert not torch.equal(beyond.to(dtype), committed)


def test_a_full_precision_weight_is_the_committed_one():
    committed = torch.tensor([1.0, 2.0])
    assert torch.equal(nearest_that_rounds_to(torch.tensor([1.0, 2.5]), committed), committed)


def test_sums_tell_another_state_from_the_same_added_up_otherwise():
    expected = {"exp_avg/p": (1.0, 10.0), "weight/p": (0.0, 5.0)}
    close = expected | {"exp_avg/p": (1.0 + 1e-12, 10.0)}
    assert contradiction(close, expected) is None
    for found in (expected | {"weight/p": (1e-4, 5.0)}, {}):
        assert "is not what was learned" in contradiction(found, expected)


@pytest.mark.parametrize(("place", "needed"), [("meta", 24), ("cpu", 0)])
def test_what_lies_in_the_hosts_memory_already_needs_no_room_there(place, needed):
    """The optimizer's part does with update.offload_optimizer, but not what another device has."""
    parts = {kind: torch.empty(3, device=place) for kind in KINDS}
    assert StatePart("policy", [Slice("a", 0, parts)], MOMENTS).num_bytes(of_host=False) == needed


def test_a_rank_without_room_for_a_copy_gathers_for_the_others_to_the_end():
    model, asked = llama(), []
    files = files_for(model)

    class TooLarge:
        def to(self, *_: object, **__: object) -> None:
            raise MemoryError

    def gather(name: str, is_wanted: bool) -> TooLarge:
        asked.append(name)
        return TooLarge()

    with pytest.raises(MemoryError):
        replace(files, gather=gather).on_host()
    assert sorted(asked) == sorted(name for name, _ in model.named_parameters())


def test_tensors_are_freed_beside_proxies_of_what_is_gone():
    """Libraries keep weak proxies; one that is dead answers nothing, not even what it is."""
    model = llama()
    dead = weakref.proxy(model)
    del model
    gc.collect()
    with pytest.raises(ReferenceError):
        isinstance(dead, torch.Tensor)
    free_device()
