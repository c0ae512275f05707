"""A GGUF file becomes a model directory that computes what its model computes; a difference is named."""

import fcntl
import json
import math
import os
import random
import shutil
import signal
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipeline.config.issue import ConfigError
from pipeline.config.model_files import model_end_ids
from pipeline.config.resolve import resolve
from stages.context import UserError
from stages.models import gguf, publishing
from stages.models.gguf_metadata import differences, read_metadata
from tests.stages.test_model_folders import given_as
from tests.support.processes import config_of
from tests.support.tables import SEED

END, BEGIN = "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|endoftext|>", BEGIN, END, *LETTERS, "ab", "ĠĠ"]
MERGES = ["a b", "Ġ Ġ"]
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Of transformers -> of GGUF."""
CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order: the halves of each head alternate."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_tensors(writer: GGUFWriter, model: LlamaForCausalLM) -> None:
    state = model.model.state_dict()
    heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}
    found = {"token_embd.weight": state["embed_tokens.weight"], "output_norm.weight": state["norm.weight"]}
    for layer in range(CONFIG.num_hidden_layers):
        for ours, theirs in NAMES.items():
            weight = state[f"layers.{layer}.{ours}.weight"]
            weight = interleaved(weight, heads[ours]) if ours in heads else weight
            found[f"blk.{layer}.{theirs}.weight"] = weight
    for name, weight in found.items():
        writer.add_tensor(name, weight.contiguous().numpy())


def write_gguf(file: Path, model: LlamaForCausalLM, **changes: object) -> Path:
    """``changes`` are metadata besides, or in place of, what is written here."""
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(12345.0)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(changes.get("pre", "smollm")))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(bool(changes.get("adds_bos", False)))
    writer.add_chat_template(TEMPLATE)
    write_tensors(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


@pytest.fixture(scope="module")
def made(file, tmp_path_factory) -> Path:
    return gguf.convert(file, tmp_path_factory.mktemp("made") / "policy").directory


def test_it_computes_what_the_model_of_the_file_computes(made, model):
    ids = torch.arange(1, 30)[None]
    found = AutoModelForCausalLM.from_pretrained(made)
    assert not hasattr(found, "hf_quantizer") or found.hf_quantizer is None
    assert torch.equal(found(ids).logits, model(ids).logits)


def test_responses_end_where_the_template_ends_a_turn_and_where_the_file_says(made):
    assert model_end_ids(made) == {0, 2}


def test_numbers_are_split_into_digits_before_spaces_are_joined(made):
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("ab  12").input_ids)
    assert tokens == ["ab", "ĠĠ", "1", "2"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False).endswith(
        END + "\n"
    )


def test_a_text_begins_as_the_file_says(model, tmp_path):
    file = write_gguf(tmp_path / "begins.gguf", model, adds_bos=True, pre="other")
    made = gguf.convert(file, tmp_path / "made")
    assert AutoTokenizer.from_pretrained(made.directory)("ab").input_ids == [1, TOKENS.index("ab")]
    assert any("(other)" in line for line in gguf.described(made))


def changed(name: str, **keys: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(found | keys))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed("config.json", rms_norm_eps=1e-6), "rms_norm_eps: 9.99"),
        (changed("config.json", num_key_value_heads=4), "num_key_value_heads: 2 in the file, 4 here"),
        (changed("config.json", tie_word_embeddings=False), "tied embeddings: True in the file, False here"),
        (
            changed("config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
            "rope theta: 12345.0 in the file, 10000.0 here",
        ),
        (changed("tokenizer_config.json", eos_token=END), "eos id: 0 in the file, 2 here"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "chat template: "),
    ],
)
def test_a_directory_that_differs_from_its_file_says_in_what(file, made, tmp_path, change, said):
    folder = Path(shutil.copytree(made, tmp_path / "changed"))
    assert differences(read_metadata(file), folder) == []
    change(folder)
    assert any(line.startswith(said) for line in differences(read_metadata(file), folder))


def test_what_is_no_gguf_and_what_is_there_already_is_one_line(file, tmp_path, capsys):
    (tmp_path / "no.gguf").write_bytes(b"safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for words, said in (
        ((tmp_path / "no.gguf", tmp_path / "out"), "is no GGUF file"),
        ((tmp_path / "gone.gguf", tmp_path / "out"), "no such file"),
        ((file, tmp_path), "exists; give a new directory"),
        ((file, tmp_path / "link"), "exists; give a new directory"),
    ):
        assert gguf.main([str(word) for word in words]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- damaged and hostile files ---


def number_behind(name: bytes, value: int, form: str = "<Q", gap: int = 8) -> Callable[[bytes], bytes]:
    """Change a number that stands so many bytes behind a name."""

    def change(content: bytes) -> bytes:
        at = content.index(name) + len(name) + gap
        return content[:at] + struct.pack(form, value) + content[at + struct.calcsize(form) :]

    return change


TOKEN_TYPES, EMBEDDING = b"tokenizer.ggml.token_type", b"token_embd.weight"
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in its header": (lambda content: content[:400], "bytes more, which it does not have"),
    "cut in its weights": (lambda content: content[:-1], "ends at byte"),
    "of a later version": (number_behind(b"GGUF", 4, "<I", 0), "version 4 of GGUF is not known"),
    "big-endian": (number_behind(b"GGUF", 3 << 24, "<I", 0), "2 and 3 are, little-endian"),
    "with 2^63 tensors": (number_behind(b"GGUF", 2**63, gap=4), "damaged"),
    "with 2^63 keys": (number_behind(b"GGUF", 2**63, gap=12), "damaged"),
    "with a list of 2^63 numbers": (number_behind(TOKEN_TYPES, 2**63), "states a list of"),
    "with a list longer than the file": (number_behind(TOKEN_TYPES, 2**20), "which it does not have"),
    "with a list of lists": (number_behind(TOKEN_TYPES, 9, "<I", 4), "a list of type 9"),
    "with a value of no type": (number_behind(b"llama.block_count", 77, "<I", 0), "a value of type 77"),
    "with a name that is no text": (
        lambda content: content.replace(b"<|im_end|>", b"<|im_\xff\xff\xff|>", 1),
        "no UTF-8",
    ),
    "with a key twice": (
        lambda content: content.replace(b"bos_token_id", b"eos_token_id", 1),
        "is there twice",
    ),
    "with a tensor of many dimensions": (number_behind(EMBEDDING, 9, "<I", 0), "a tensor of 9 dimensions"),
    "with a tensor of no rows": (number_behind(EMBEDDING, 0, gap=4), "a tensor without numbers"),
    "with a tensor of 2^62 rows": (number_behind(EMBEDDING, 2**62, gap=4), "ends at byte"),
    "of an unknown format": (number_behind(EMBEDDING, 777, "<I", 20), "number format 777 is not known"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_before_anything_of_the_size_it_states_is_kept(file, tmp_path, name):
    change, said = DAMAGES[name]
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(change(file.read_bytes()))
    tracemalloc.start()
    with pytest.raises(UserError, match=r"is damaged \(.*\); copy it again") as found:
        read_metadata(damaged)
    assert said in str(found.value)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_a_bit_that_has_flipped_is_one_line_or_another_model_and_never_half_a_directory(
    file, tmp_path, capsys
):
    content = file.read_bytes()
    end_of_header = content.index(b"output_norm.weight")
    for at in random.Random(SEED).sample(range(8 * end_of_header), 8):
        flipped = bytearray(content)
        flipped[at // 8] ^= 1 << at % 8
        (tmp_path / "flipped.gguf").write_bytes(flipped)
        code, out = gguf.main([str(tmp_path / "flipped.gguf"), str(tmp_path / "out")]), tmp_path / "out"
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert (code, len(errors), out.exists()) in ((0, 0, True), (2, 1, False)), at
        shutil.rmtree(out, ignore_errors=True)
        assert {path.name for path in tmp_path.iterdir()} == {"flipped.gguf"}


def test_weights_that_are_not_finite_are_named(file, tmp_path):
    content = bytearray(file.read_bytes())
    content[-4:] = struct.pack("<f", math.inf)
    (tmp_path / "spoilt.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged \(weights of .* are not finite\); copy it again"):
        gguf.convert(tmp_path / "spoilt.gguf", tmp_path / "out")


def test_a_weight_that_the_file_lacks_is_not_made_up(file, tmp_path):
    """A flipped bit in a tensor's name: as many weights, and one of them at random, if it were not seen."""
    (tmp_path / "renamed.gguf").write_bytes(
        file.read_bytes().replace(b"blk.0.attn_output", b"blk.0.attn_outpat")
    )
    with pytest.raises(UserError, match=r"1 weights are missing, such as model.layers.0.self_attn.o_proj"):
        gguf.convert(tmp_path / "renamed.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_architecture_that_transformers_does_not_read_is_one_line(file, tmp_path):
    (tmp_path / "other.gguf").write_bytes(file.read_bytes().replace(b"llama", b"lamas"))
    with pytest.raises(UserError, match=r"transformers .* cannot read this lamas: ") as found:
        gguf.convert(tmp_path / "other.gguf", tmp_path / "out")
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("fits", "said"), [("disk", "memory has 1.0 KiB free"), ("memory", "has 1.0 KiB free")]
)
def test_a_model_that_does_not_fit_is_refused_before_it_is_read(file, tmp_path, monkeypatch, fits, said):
    if fits == "disk":
        monkeypatch.setattr(gguf, "free_bytes", lambda: 1024.0)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1024))
    with pytest.raises(
        UserError, match=rf"its weights take .* in fp32, and .*{said}; .* or give --precision"
    ):
        gguf.convert(file, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- conversions that do not end well ---


def test_one_that_is_stopped_leaves_nothing(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gguf, "_write_ends", lambda folder, ends: os.kill(os.getpid(), signal.SIGTERM))
    assert gguf.main([str(file), str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.endswith("interrupted; nothing is left\n")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(file, tmp_path, monkeypatch, capsys):
    """As safetensors says it."""

    def full(*given: object) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(gguf, "_save_model", full)
    assert gguf.main([str(file), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith(
        "No space left on device (os error 28); fix that, and run it again\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_one_has_left_is_removed_by_the_next_and_what_another_builds_is_not(file, tmp_path):
    left, used, fresh, others = (
        tmp_path / name for name in (".out.making-1", ".out.making-2", ".out.making-3", ".in.making-1")
    )
    for folder in (left, used, fresh, others):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        if folder is not fresh:
            os.utime(folder, (0, 0))
    lock = os.open(used, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    publishing.remove_abandoned_beside(tmp_path / "out")
    assert {path for path in (left, used, fresh, others) if path.exists()} == {used, fresh, others}
    os.close(lock)


@pytest.mark.parametrize("key", ["model.policy", "reward.components.rm.path"])
def test_as_the_path_of_a_model_it_is_refused_with_what_to_do(models, file, tmp_path, key):
    config = given_as(config_of(models, tmp_path / "run"), key, file)
    with pytest.raises(ConfigError) as found:
        resolve(config)
    said = next(line for line in str(found.value).splitlines() if key in line)
    way = f"python -m stages.models.gguf {file} DIR" if key == "model.policy" else "give the safetensors"
    assert way in said


def test_a_missing_package_says_how_to_install_it(file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'slurm-ppo\[gguf\]'"):
        gguf.convert(file, tmp_path / "out")
