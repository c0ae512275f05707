"""A hundred folders that are no policy: each is refused in one line, before anything is computed.

What validate reads without torch it refuses itself; what needs the model's class or every number is refused
by the run's first task. Nothing that both let pass is refused later.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from pipeline.config.schema import Config
from stages.context import UserError
from stages.trials.check import problems_of
from stages.trials.models import try_models
from tests.stages.test_modeltrial import given_as, settings, tensors
from tests.support.processes import config_of

KEY = "model.policy"
WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
Damage = Callable[[Path], object]


def written(name: str, content: str | bytes) -> Damage:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def without(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def renamed(old: str, new: str) -> Damage:
    return lambda folder: (folder / old).rename(folder / new)


def only(name: str, content: str) -> Damage:
    """A folder of one file."""

    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_text(content)

    return damage


def file_in_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("weights")


def header(change: Callable[[dict[str, object]], object]) -> Damage:
    def damage(folder: Path) -> None:
        whole = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(whole[:8], "little")
        found = json.loads(whole[8 : 8 + size])
        change(found)
        text = json.dumps(found).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])

    return damage


def described(**changes: object) -> Damage:
    return header(lambda found: found[NORM].update(changes))


def quantised(how: object) -> Damage:
    return settings(quantization_config=how)


def of_images(folder: Path) -> None:
    """A model of images and text of which transformers loads the language model alone."""
    names = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    settings(**names, vision_config={})(folder)
    tensors(lambda found: found.update({"model.visual.patch_embed.bias": found[NORM].clone()}))(folder)


def adapter(folder: Path) -> None:
    renamed(WEIGHTS, "adapter_model.safetensors")(folder)
    written("adapter_config.json", "{}")(folder)


CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
DEEP = "[" * 100_000
AT_VALIDATE: dict[str, tuple[Damage, str]] = {
    "nothing there": (shutil.rmtree, "no such directory; give"),
    "a file": (file_in_place, "is a file; give the Hugging Face model directory"),
    "empty": (only("README.md", ""), "holds no config.json, .*; give one"),
    "no config": (without("config.json"), "holds no config.json"),
    "config is a folder": (
        lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()),
        "holds no config.json",
    ),
    "config of a dangling link": (
        lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").symlink_to("gone")),
        "holds no config.json",
    ),
    "empty config": (written("config.json", ""), "is not JSON of a model's configuration; copy"),
    "config of a list": (written("config.json", "[]"), "is not JSON of a model's"),
    "config of a number": (written("config.json", "7"), "is not JSON of a model's"),
    "deep config": (written("config.json", DEEP), "is not JSON of a model's"),
    "binary config": (written("config.json", b"\xff\xfe\x00"), "is not JSON of a model's"),
    "html config": (written("config.json", "<html>"), "is not JSON of a model's"),
    "config of no model": (written("config.json", "{}"), "has no model_type, .*; copy"),
    "no model_type": (settings(model_type=None), "has no model_type"),
    "model_type of a list": (settings(model_type=["llama"]), "has no model_type"),
    "unknown model_type": (settings(model_type="wonder"), "knows no model_type 'wonder'; install"),
    "classifier": (settings(architectures=["LlamaForSequenceClassification"]), "a policy is a language"),
    "architectures of a text": (settings(architectures="LlamaForSequenceClassification"), "a policy is"),
    "architectures of a number": (settings(architectures=7, model_type="t5"), "has no AutoModelForCausalLM"),
    "masked": (settings(architectures=["BertForMaskedLM"], model_type="bert"), "a policy is a language"),
    "roberta that is no decoder": (
        settings(architectures=["RobertaForCausalLM"], model_type="roberta"),
        "reads in both directions, .* is_decoder; give one",
    ),
    "t5": (
        settings(architectures=["T5ForConditionalGeneration"], model_type="t5", is_encoder_decoder=True),
        "is an encoder-decoder model, .*; give a decoder-only model",
    ),
    "t5 that does not say so": (settings(model_type="t5"), "has no AutoModelForCausalLM; give"),
    "bart": (settings(model_type="bart", is_encoder_decoder=True), "is an encoder-decoder model"),
    "qwen2_vl": (settings(model_type="qwen2_vl"), "has no AutoModelForCausalLM; give"),
    "llava": (settings(model_type="llava"), "has no AutoModelForCausalLM; give"),
    "whisper's encoder": (settings(model_type="wav2vec2"), "has no AutoModelForCausalLM; give"),
    "loses its images": (
        of_images,
        r"is a Qwen3_5ForConditionalGeneration, of which only .* \(such as model.visual.* save_pretrained",
    ),
    "loses its images by name": (
        settings(model_type="llama4", architectures=["Llama4ForConditionalGeneration"]),
        "of which only the language model",
    ),
    "fp8": (
        quantised({"quant_method": "fp8", "weight_block_size": [32, 32]}),
        r"is quantised \(fp8\), which cannot be trained: give the weights it was made from",
    ),
    "awq": (quantised({"quant_method": "awq", "bits": 4}), r"is quantised \(awq\)"),
    "gptq": (quantised({"quant_method": "gptq", "bits": 4}), r"is quantised \(gptq\)"),
    "bitsandbytes": (
        quantised({"quant_method": "bitsandbytes", "load_in_4bit": True}),
        r"is quantised \(bitsandbytes\)",
    ),
    "mxfp4": (quantised({"quant_method": "mxfp4"}), r"is quantised \(mxfp4\)"),
    "quantised without a method": (quantised({"bits": 4}), "is quantised"),
    "quantised by a word": (quantised("fp8"), "is quantised"),
    "compressed": (
        settings(compression_config={"quant_method": "compressed-tensors"}),
        r"is quantised \(compressed-tensors\)",
    ),
    "quantised text": (
        settings(text_config={"quantization_config": {"quant_method": "fp8"}}),
        "is quantised",
    ),
    "remote code": (
        settings(model_type="wonder", auto_map=CODE),
        "needs Python code .*trust_remote_code=true",
    ),
    "gguf": (
        only("my model.gguf", "GGUF"),
        r"are in GGUF, .*; make a model directory .*\(python -m stages.models.gguf '\S+/my model.gguf' DIR",
    ),
    "gguf beside config": (renamed(WEIGHTS, "model-q4.gguf"), r"are in GGUF, .*/model-q4.gguf DIR"),
    "pickles": (renamed(WEIGHTS, "pytorch_model.bin"), r"holds no \*.safetensors; .*convert"),
    "no weights": (without(WEIGHTS), r"holds no \*.safetensors"),
    "adapter": (adapter, "has only an adapter's weights .*; merge"),
    "adapter alone": (
        lambda folder: (adapter(folder), without("config.json")(folder)),
        "holds no config.json but an adapter's settings; merge",
    ),
    "another name": (renamed(WEIGHTS, "weights.safetensors"), "but neither model.safetensors nor"),
    "an index of nothing": (
        lambda folder: (
            renamed(WEIGHTS, "a.safetensors")(folder),
            written(f"{WEIGHTS}.index.json", "{}")(folder),
        ),
        "has no weight_map; copy",
    ),
    "a deep index": (
        lambda folder: (
            renamed(WEIGHTS, "a.safetensors")(folder),
            written(f"{WEIGHTS}.index.json", DEEP)(folder),
        ),
        "has no weight_map; copy",
    ),
    "fewer layers than the weights have": (
        settings(num_hidden_layers=1),
        r"have 2 layers \(model.layers.0 to model.layers.1\), .* num_hidden_layers=1: the others would be "
        "left out; copy",
    ),
    "more layers than the weights have": (settings(num_hidden_layers=3), "others would be random numbers"),
    "git lfs": (
        written(WEIGHTS, "version https://git-lfs.github.com/spec/v1"),
        "pointer of Git LFS, .*; run",
    ),
    "empty weights": (written(WEIGHTS, ""), r"\(0 bytes\) is cut short or not of safetensors; copy"),
    "html weights": (written(WEIGHTS, "<!DOCTYPE html><html>"), "is cut short or not of safetensors"),
    "a header that is too long": (written(WEIGHTS, b"\xff" * 8 + b"{}"), "is cut short or not of"),
    "a deep header": (
        written(WEIGHTS, len(DEEP).to_bytes(8, "little") + DEEP.encode()),
        "is cut short or not of safetensors",
    ),
    "a header of a list": (written(WEIGHTS, b"\x02" + b"\0" * 7 + b"[]"), "is cut short or not of"),
    "unknown dtype": (described(dtype="F33"), f"is damaged at {NORM}; copy"),
    "dtype of a number": (described(dtype=3), "is damaged at"),
    "shape of a text": (described(shape="32"), "is damaged at"),
    "a fraction of a shape": (described(shape=[32.5]), "is damaged at"),
    "a negative shape": (described(shape=[-32]), "is damaged at"),
    "an endless shape": (described(shape=[float("inf")]), "is damaged at"),
    "another shape": (described(shape=[31]), "is damaged at"),
    "offsets of one": (described(data_offsets=[0]), "is damaged at"),
    "offsets beyond": (described(data_offsets=[10**9, 10**9 + 128]), "is damaged at|header says"),
    "overlapping offsets": (described(data_offsets=[0, 128]), "is damaged at"),
    "no offsets": (header(lambda found: found[NORM].pop("data_offsets")), "is damaged at"),
    "a text for a tensor": (header(lambda found: found.update({NORM: "x"})), "is damaged at"),
    "metadata of numbers": (header(lambda found: found.update(__metadata__={"a": 1})), "at __metadata__"),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "has no tokenizer; copy"),
    "cut tokenizer": (written("tokenizer.json", '{"model": {'), "its tokenizer.json is cut short"),
    "deep tokenizer": (written("tokenizer.json", DEEP), "its tokenizer.json is cut short"),
}
BY_PREPARE: dict[str, tuple[Damage, str]] = {
    "a weight that is not there": (
        tensors(lambda found: found.pop(NORM)),
        "lacks weights of LlamaForCausalLM",
    ),
    "a renamed weight": (tensors(lambda found: found.update(a=found.pop(NORM))), "lacks weights of"),
    "a weight that the class leaves out": (
        tensors(lambda found: found.update({BIAS: found[NORM].clone()})),
        f"has weights that LlamaForCausalLM leaves out by its config.json: {BIAS}; .*: copy",
    ),
    "weights of another width": (settings(intermediate_size=40), "its weight .* has shape"),
    "weights of another family": (settings(model_type="gpt2", architectures=["GPT2LMHeadModel"]), ""),
    "a size of words": (settings(hidden_size="wide"), "cannot be loaded as a policy"),
    "an activation of its own": (settings(hidden_act="wonder"), "cannot be loaded as a policy"),
}


@pytest.fixture(scope="module")
def config(models, tmp_path_factory) -> Config:
    return config_of(models, tmp_path_factory.mktemp("folders") / "run")


@pytest.fixture
def folder(models, tmp_path) -> Path:
    return Path(shutil.copytree(models / "policy", tmp_path / "model"))


def refused(config: Config, folder: Path) -> str:
    """The line of validate."""
    with pytest.raises(ConfigError) as found:
        resolve(given_as(config, KEY, folder))
    return one_line(found.value, folder)


def one_line(error: Exception, folder: Path) -> str:
    line = str(error)
    assert line.startswith(KEY)
    assert str(folder) in line
    assert "\n" not in line
    assert len(line) <= 300 + len(str(folder))
    return line


def assert_matches(said: str, line: str) -> None:
    assert re.search(said, line), line


@pytest.mark.parametrize("name", list(AT_VALIDATE))
def test_validate_refuses_what_is_no_policy(config, folder, name):
    damage, said = AT_VALIDATE[name]
    damage(folder)
    assert_matches(said, refused(config, folder))


@pytest.mark.parametrize("name", list(BY_PREPARE))
def test_the_first_task_refuses_what_needs_the_models_class(config, folder, name):
    damage, said = BY_PREPARE[name]
    damage(folder)
    resolve(given_as(config, KEY, folder))
    with pytest.raises(UserError) as found:
        try_models(given_as(config, KEY, folder))
    assert_matches(said, one_line(found.value, folder))


@pytest.mark.parametrize(
    "damage",
    [
        written("tokenizer_config.json", "{"),
        written("tokenizer_config.json", '{"eos_token": 5}'),
        written("chat_template.jinja", b"\xff"),
        without("tokenizer.json"),
    ],
)
def test_validate_loads_the_tokenizer_as_the_first_task_does(config, folder, damage):
    damage(folder)
    given = given_as(config, KEY, folder)
    resolve(given)
    (problem,) = problems_of(given)
    assert_matches(
        r"cannot load its tokenizer: .*; copy it again, or give another", one_line(problem, folder)
    )


@pytest.mark.parametrize("seed", range(25))
def test_a_bit_of_the_weights_header_that_flipped(config, folder, seed):
    """It is refused, unless safetensors reads the same tensors all the same: then it stood in a comment."""
    draw, path = random.Random(seed), folder / WEIGHTS
    whole, before = bytearray(path.read_bytes()), names_in(path)
    size = 8 + int.from_bytes(whole[:8], "little")
    whole[draw.randrange(size)] ^= 1 << draw.randrange(8)
    path.write_bytes(bytes(whole))
    try:
        resolve(given_as(config, KEY, folder))
        assert names_in(path), "what validate lets pass can be read"
        try_models(given_as(config, KEY, folder))
        assert names_in(path) == before
    except (ConfigError, UserError) as error:
        one_line(error, folder)


def names_in(path: Path) -> dict[str, list[int]] | None:
    """Shapes of the tensors that safetensors finds; None where it cannot read the file."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    except SafetensorError:
        return None


def test_a_folder_of_links_as_the_hub_has_is_a_policy(config, folder, tmp_path):
    links = tmp_path / "snapshot"
    links.mkdir()
    for path in folder.iterdir():
        (links / path.name).symlink_to(os.path.relpath(path, links))
    resolve(given_as(config, KEY, links))
    try_models(given_as(config, KEY, links))


def test_a_language_model_of_a_family_with_images_is_a_policy(config, folder):
    """Saved alone it keeps the family's name, and has nothing to lose."""
    settings(model_type="qwen3_5", architectures=["Qwen3_5ForCausalLM"])(folder)
    resolve(given_as(config, KEY, folder))


def test_weights_that_make_no_difference_may_be_there(config, folder):
    """A head of another use, what predicts further tokens, and constants that earlier versions stored."""
    names = (
        *("v_head.summary.weight", "mtp.fc.weight", "model.rotary_emb.inv_freq"),
        *("model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"),
        *("model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.layers.7.fc.weight"),
        *("model.layers.0.self_attn.masked_bias", "model.pooler.dense.weight"),
    )
    tensors(lambda found: found.update({name: found[NORM].clone() for name in names}))(folder)
    resolve(given_as(config, KEY, folder))
    try_models(given_as(config, KEY, folder))
