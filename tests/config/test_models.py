"""A model that cannot work is one line of validate, run and submit: by its files' headers, without torch."""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pipeline.config.compose import compose
from pipeline.config.issue import ConfigError
from pipeline.config.model_classes import classes_of_tasks, table
from pipeline.config.model_files import BadModel, read_header
from pipeline.config.model_rules import model_notes
from pipeline.config.resolve import resolve
from pipeline.config.reward import ModelSteps, RewardModelConfig, StepScore
from pipeline.config.schema import Config
from tests.support import light, tiny
from tests.support.composed import composed_of

ROWS = 2 + 256
POLICY = {"model.embed_tokens.weight": (ROWS, 4), "model.norm.weight": (4,), "lm_head.weight": (ROWS, 4)}
REWARD = {"model.embed_tokens.weight": (ROWS + 1, 4), "model.norm.weight": (4,), "score.weight": (1, 4)}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path, {"format": "pt"})


@pytest.fixture(scope="module")
def headers(inputs, tmp_path_factory) -> Path:
    """Models of which nothing is right but what can be read without torch."""
    folder = tmp_path_factory.mktemp("headers")
    light.make_directory(folder / "policy", 0, "LlamaForCausalLM")
    light.make_directory(
        folder / "reward_model", 1, "LlamaForSequenceClassification", ("<eos>", "<x>", "<pad>")
    )
    write_weights(folder / "policy" / WEIGHTS, POLICY)
    write_weights(folder / "reward_model" / WEIGHTS, REWARD)
    shutil.copyfile(inputs / "prompts.jsonl", folder / "prompts.jsonl")
    return folder


@pytest.fixture(scope="module")
def config(headers) -> Config:
    return composed_of(headers, headers / "run", "rollout.engine=transformers")


def given_as(config: Config, key: str, directory: Path) -> Config:
    """The configuration with another model under ``key``."""
    section, _, name = key.partition(".")
    if section == "model":
        return dataclasses.replace(config, model=dataclasses.replace(config.model, **{name: str(directory)}))
    components = {"rm": RewardModelConfig(path=str(directory))}
    return dataclasses.replace(config, reward=dataclasses.replace(config.reward, components=components))


def refusal(config: Config, key: str, directory: Path) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        resolve(given_as(config, key, directory))
    return str(refused.value).splitlines()


# what is wrong with a directory


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names]


def pipe(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def cut(name: str, kept: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * kept)])

    return damage


def content(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def settings(**changes: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | changes
        kept = {name: value for name, value in found.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return damage


def weights(**shapes: tuple[int, ...]) -> Callable[[Path], object]:
    """Other tensors; dots in names are written as two underscores."""
    named = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return lambda folder: write_weights(folder / WEIGHTS, named)


def sharded(files: dict[str, dict[str, tuple[int, ...]]], **places: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        for name, shapes in files.items():
            write_weights(folder / name, shapes)
        places_by_name = {name.replace("__", "."): file for name, file in places.items()}
        (folder / INDEX).write_text(json.dumps({"weight_map": places_by_name}))

    return damage


def adapter(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def adapter_alone(folder: Path) -> None:
    adapter(folder)
    (folder / "config.json").unlink()


def other_ids(folder: Path) -> None:
    light.byte_level(("<eos>", "<pad>", "<x>", "<y>")).save(str(folder / "tokenizer.json"))


def looped(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


ENDLESS = '{"model": {"vocab": {"a": Infinity}}}'
ONE = {"a.safetensors": {"model.norm.weight": (4,)}}
NO_TOKENIZER = without("tokenizer.json", "tokenizer_config.json")
P, R, C, REF = "model.policy", "reward.components.rm.path", "model.critic", "model.reference"
BROKEN = {
    "pipe of weights": (P, pipe(WEIGHTS), "its model.safetensors is a pipe, socket or device; put the file"),
    "pipe of settings": (P, pipe("config.json"), "its config.json is a pipe, socket or device"),
    "pipe of tokens": (R, pipe("tokenizer.json"), "its tokenizer.json is a pipe, socket or device"),
    "no tokenizer": (P, NO_TOKENIZER, "has no tokenizer; copy the tokenizer's files"),
    "cut tokenizer": (P, cut("tokenizer.json", 0.5), "its tokenizer.json is cut short or no tokenizer"),
    "an endless id": (
        P,
        content("tokenizer.json", ENDLESS),
        "the vocabulary of its tokenizer.json is damaged",
    ),
    "no number of tokens": (
        P,
        settings(vocab_size="many"),
        "vocab_size='many', which is no number of tokens",
    ),
    "ends of words": (
        P,
        content("generation_config.json", '{"eos_token_id": "</s>"}'),
        "its generation_config.json has eos_token_id='</s>', which is no token's id; give its number",
    ),
    "ends of fractions": (P, settings(eos_token_id=[2, 2.5]), "has eos_token_id=[2, 2.5], which is no token"),
    "cut ends": (P, content("generation_config.json", "{"), "is not JSON of settings; copy it again, or"),
    "config that is a link to itself": (P, looped, "holds no config.json"),
    "weights without a name": (P, settings(transformers_weights=5), "names no file as transformers_weights"),
    "no model_type": (P, settings(model_type=None), "its config.json has no model_type"),
    "empty weights": (P, cut(WEIGHTS, 0), "its model.safetensors (0 bytes) is cut short or not of safetens"),
    "cut header": (P, cut(WEIGHTS, 0.01), "is cut short or not of safetensors; copy it again"),
    "cut weights": (P, cut(WEIGHTS, 0.7), "bytes, and its header says"),
    "no safetensors": (P, content(WEIGHTS, "<html>"), "is cut short or not of safetensors"),
    "git lfs": (P, content(WEIGHTS, "version https://git-lfs"), "is a pointer of Git LFS, not the weights"),
    "other name": (
        P,
        lambda f: (f / WEIGHTS).rename(f / "x.safetensors"),
        "but neither model.safetensors nor",
    ),
    "adapter": (P, adapter, "has only an adapter's weights (adapter_model.safetensors); merge it"),
    "adapter alone": (P, adapter_alone, "holds no config.json but an adapter's settings; merge the adapter"),
    "missing shard": (P, sharded(ONE, model__norm__weight="b.safetensors"), "lacks b.safetensors of 1 files"),
    "missing tensor": (
        P,
        sharded(ONE, lm_head__weight="a.safetensors"),
        "lacks the tensor lm_head.weight that",
    ),
    "no map": (P, lambda f: (sharded(ONE)(f), (f / INDEX).write_text("{}")), "has no weight_map"),
    "classifier": (
        P,
        settings(architectures=["LlamaForSequenceClassification"]),
        "is a LlamaForSequenceClassification; a policy is a language model (...ForCausalLM)",
    ),
    "quantised": (
        P,
        settings(quantization_config={"quant_method": "fp8"}),
        "is quantised (fp8), which cannot be trained: give the weights it was made from",
    ),
    "quantised critic": (
        C,
        settings(quantization_config={"quant_method": "awq"}),
        "is quantised (awq), which",
    ),
    "encoder and decoder": (
        P,
        settings(model_type="t5", is_encoder_decoder=True),
        "is an encoder-decoder model",
    ),
    "no language model": (P, settings(model_type="qwen2_vl"), "has no AutoModelForCausalLM; give a model"),
    "no classifier": (R, settings(model_type="granite"), "has no AutoModelForSequenceClassification; give"),
    "own code": (
        P,
        settings(model_type="wonder", auto_map={"AutoConfig": "code.C"}),
        "trust_remote_code=true",
    ),
    "a critic that nobody knows": (
        C,
        settings(model_type="wonder"),
        "knows no model_type 'wonder'; install a version that does, or give another model",
    ),
    "a critic's own code": (
        C,
        settings(model_type="wonder", auto_map={"AutoConfig": "code.C"}),
        "trust_remote_code=true",
    ),
    "small vocabulary": (
        P,
        weights(model__embed_tokens__weight=(100, 4)),
        "has 100 embeddings, and its tokenizer gives ids up to 257; it is not the model's own tokenizer",
    ),
    "reward without tokenizer": (R, NO_TOKENIZER, "has no tokenizer"),
    "reward without head": (R, weights(model__norm__weight=(4,)), "has no head that makes a score"),
    "language model as reward": (
        R,
        settings(architectures=["LlamaForCausalLM"]),
        "is a LlamaForCausalLM; a reward model is a classifier (...ForSequenceClassification)",
    ),
    "backbone as reward": (R, settings(architectures=["LlamaModel"]), "is a LlamaModel; a reward model is"),
    "two outputs": (R, settings(id2label={"0": "a", "1": "b"}), "has 2 outputs; a reward model has 1"),
    "outputs of words": (R, settings(num_labels="two", id2label=None), "does not count outputs (id2label"),
    "labels of a number": (R, settings(id2label=5), "does not count outputs (id2label, num_labels); copy"),
    "two rows": (R, weights(score__weight=(2, 4)), "its head score has 2 outputs; a reward model has 1"),
    "cut reward": (R, cut(WEIGHTS, 0.9), "bytes, and its header says"),
    "critic of two outputs": (
        C,
        weights(score__weight=(2, 4)),
        "its head score has 2 outputs; a critic has 1",
    ),
    "critic's rows": (
        C,
        weights(model__embed_tokens__weight=(100, 4)),
        "has 100 embeddings, and the policy's tokens need 258; give a model of its vocabulary",
    ),
    "critic's ids": (C, other_ids, "its tokenizer has other ids than the policy's"),
    "reference's rows": (REF, weights(model__embed_tokens__weight=(257, 4)), "the policy's tokens need 258"),
    "reference's ids": (REF, other_ids, "its tokenizer has other ids than the policy's"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_model_that_cannot_work_is_one_line(headers, config, tmp_path, name):
    key, damage, said = BROKEN[name]
    folder = tmp_path / "model"
    shutil.copytree(headers / ("reward_model" if key == R else "policy"), folder)
    resolve(given_as(config, key, folder))
    damage(folder)
    (line,) = refusal(config, key, folder)
    assert line.startswith(f"{key}={folder}: ")
    assert said in line
    assert len(line) <= 300


TOKENS = ["LlamaForTokenClassification"]
STEP_MODELS = {
    "one output": (settings(), StepScore.LOGIT, None),
    "of tokens": (settings(architectures=TOKENS), StepScore.PROBABILITY, None),
    "two as logits": (
        settings(id2label={"0": "a", "1": "b"}),
        StepScore.LOGIT,
        "has 2 outputs; set reward.components.rm.step_score=probability, or give a model with 1",
    ),
    "three": (
        settings(id2label={"0": "a", "1": "b", "2": "c"}),
        StepScore.PROBABILITY,
        "has 3 outputs; a probability is made of 1 or 2: the second is that of a right step",
    ),
    "pooled": (
        weights(classifier__dense__weight=(4, 4), classifier__out_proj__weight=(1, 4)),
        StepScore.LOGIT,
        "has no head that scores each token (score.weight), only one for whole sequences; give a "
        "token-classification model, or leave reward.components.rm.steps out",
    ),
}


@pytest.mark.parametrize("name", list(STEP_MODELS))
def test_a_model_of_steps_has_a_head_that_scores_each_token(headers, config, tmp_path, name):
    change, how, said = STEP_MODELS[name]
    folder = tmp_path / "model"
    shutil.copytree(headers / "reward_model", folder)
    change(folder)
    rm = RewardModelConfig(path=str(folder), steps=ModelSteps.TURNS, step_score=how)
    given = dataclasses.replace(config, reward=dataclasses.replace(config.reward, components={"rm": rm}))
    if said is None:
        resolve(given)
        return
    with pytest.raises(ConfigError) as refused:
        resolve(given)
    assert str(refused.value) == f"{R}={folder}: {said}"


def renamed_token(folder: Path) -> None:
    """As fine-tuned models have them."""
    content = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(content.replace("<eos>", "<end>"))


HARMLESS = {
    "padded embeddings": (P, weights(model__embed_tokens__weight=(320, 4))),
    "shards": (P, sharded(ONE, model__norm__weight="a.safetensors")),
    "unknown names": (P, weights(tokens=(3, 4))),
    "a renamed token": (REF, renamed_token),
    "a reference that is larger": (REF, weights(model__embed_tokens__weight=(320, 4))),
    "a reward model as critic": (C, weights(model__embed_tokens__weight=(ROWS, 4), score__weight=(1, 4))),
    "a reference without tokenizer": (REF, NO_TOKENIZER),
    "a quantised reference": (REF, settings(quantization_config={"quant_method": "fp8"})),
    "a quantised reward model": (R, settings(quantization_config={"quant_method": "fp8"})),
    "a head of two layers": (
        R,
        weights(classifier__dense__weight=(4, 4), classifier__out_proj__weight=(1, 4)),
    ),
}


@pytest.mark.parametrize("name", list(HARMLESS))
def test_what_may_work_is_not_refused(headers, config, tmp_path, name):
    key, change = HARMLESS[name]
    folder = tmp_path / "model"
    shutil.copytree(headers / ("reward_model" if key == R else "policy"), folder)
    change(folder)
    resolve(given_as(config, key, folder))


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_weight_file_that_is_cut_anywhere_is_refused(headers, share):
    whole = (headers / "policy" / WEIGHTS).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / WEIGHTS
        path.write_bytes(whole)
        assert {name: tensor.shape for name, tensor in read_header(path).items()} == POLICY
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(BadModel, match=r"^its model\.safetensors "):
            read_header(path)


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_header_with_a_bit_that_flipped_is_read_as_safetensors_reads_it(headers, place, bit):
    whole = bytearray((headers / "policy" / WEIGHTS).read_bytes())
    size = 8 + int.from_bytes(whole[:8], "little")
    whole[int(place * size)] ^= 1 << bit
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / WEIGHTS
        path.write_bytes(bytes(whole))
        try:
            with safe_open(path, "np") as file:
                names = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError:
            with pytest.raises(BadModel, match=r"its model\.safetensors "):
                read_header(path)
        else:
            assert {name: tensor.shape for name, tensor in read_header(path).items()} == names


OTHER_PYTHON = {
    "the same": ((), True),
    "another": (("scheduler.python=/opt/python",), False),
    "another for prepare": (("scheduler.prepare.python=/opt/python",), False),
    "a container": (("scheduler.container=apptainer exec image.sif",), False),
}


@pytest.mark.parametrize("scheduler", ["slurm", "allocation"])
@pytest.mark.parametrize("name", list(OTHER_PYTHON))
def test_families_are_judged_by_the_transformers_that_tasks_have(headers, tmp_path, scheduler, name):
    words, is_ours = OTHER_PYTHON[name]
    config = compose([*tiny.overrides(headers, tmp_path / "run"), f"scheduler={scheduler}", *words])
    assert (classes_of_tasks(config) is not None) == is_ours


@pytest.mark.parametrize(
    "source", ["", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = load()", "X = OrderedDict(\n)\n"]
)
def test_a_transformers_that_is_laid_out_otherwise_says_nothing(source):
    assert table(source, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES") == {}


def test_a_decoder_of_a_family_that_can_be_one_is_a_policy(headers, config, tmp_path):
    folder = Path(shutil.copytree(headers / "policy", tmp_path / "model"))
    settings(model_type="bert", architectures=["BertLMHeadModel"], is_decoder=True)(folder)
    resolve(given_as(config, P, folder))
    settings(is_decoder=False)(folder)
    (line,) = refusal(config, P, folder)
    assert "is a bert model that reads in both directions" in line


def test_models_that_only_the_users_own_engines_read_may_be_anything_but_damaged(inputs, tmp_path):
    config = composed_of(inputs, tmp_path / "run")
    folder = Path(shutil.copytree(inputs / "policy", tmp_path / "model"))
    weights(model__embed_tokens__weight=(100, 4))(folder)
    resolve(given_as(config, P, folder))
    cut(WEIGHTS, 0.5)(folder)
    (line,) = refusal(config, "model.policy", folder)
    assert "bytes, and its header says" in line


def test_validate_says_it_in_one_line_and_ends_with_exit_code_2(headers, tmp_path, slurm_ppo):
    folder = Path(shutil.copytree(headers / "policy", tmp_path / "model"))
    cut(WEIGHTS, 0.5)(folder)
    words = tiny.overrides(headers, tmp_path / "run", f"model.policy={folder}")
    done = slurm_ppo("validate", *words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: model.policy={folder}: its model.safetensors has ")


def test_a_process_that_is_killed_while_it_tries_the_models_is_said_to_have_tried_nothing(
    headers, tmp_path, slurm_ppo, without_torch
):
    """As one is that takes more memory than a login node allows."""
    (tmp_path / "torch.py").write_text("import os\nos.kill(os.getpid(), 9)")
    done = slurm_ppo("validate", *tiny.overrides(headers, tmp_path / "run"), env=without_torch)
    assert done.returncode == 0, done.stderr
    *_, warned, seconds, last = done.stdout.splitlines()
    assert warned == (
        "warning: not checked: whether the models can be loaded, and their numbers: the process that does "
        "so was killed by signal 9; the run's first task does"
    )
    assert seconds.startswith("seconds: not known")
    assert last == "ok so far; no run was started"


@pytest.fixture
def without_torch(environment, tmp_path) -> dict[str, str]:
    """The environment of a machine where torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    return environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])}


LAYER = {"input_layernorm.weight": (4,), "mlp.up_proj.weight": (8, 4)}
NOT_LOADED = (
    "not checked: whether transformers loads the models (import torch fails here: libcudart.so.12: cannot "
    "open shared object file); the run's first task does"
)


def test_where_torch_is_not_headers_and_numbers_are_looked_at_and_it_is_said_what_is_not(
    headers, tmp_path, slurm_ppo, without_torch
):
    """Of one layer a weight is missing, as after a bad copy; config.json is of a larger vocabulary."""
    folder = Path(shutil.copytree(headers / "policy", tmp_path / "model"))
    layers = {f"model.layers.{i}.{name}": shape for i in range(3) for name, shape in LAYER.items()}
    del layers["model.layers.2.mlp.up_proj.weight"]
    write_weights(folder / WEIGHTS, POLICY | layers)
    settings(vocab_size=ROWS + 2, num_hidden_layers=3)(folder)
    words = tiny.overrides(headers, tmp_path / "run", f"model.policy={folder}")
    done = slurm_ppo("validate", *words, env=without_torch)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    lacks = "lacks the weight model.layers.2.mlp.up_proj.weight, which each of its other layers has"
    assert lines[lines.index(NOT_LOADED) + 1 :][:2] == [
        f"warning: model.policy={folder}: has {ROWS} embeddings, and its config.json says "
        f"vocab_size={ROWS + 2}; copy the model again if that is not meant",
        f"warning: model.policy={folder}: {lacks}; copy the model again if that is not meant",
    ]
    assert f"model.policy={folder}: 8 weights of 0.00 GiB, all finite" in done.stdout
    assert f"reward.components.rm.path={headers / 'reward_model'}: 3 weights of" in done.stdout
    assert lines[-1] == "ok so far; no run was started"


def test_numbers_that_are_none_are_refused_where_torch_is_not(headers, tmp_path, slurm_ppo, without_torch):
    folder = Path(shutil.copytree(headers / "reward_model", tmp_path / "model"))
    found = {name: np.zeros(shape, np.float32) for name, shape in REWARD.items()}
    found["score.weight"][0, 3] = np.nan
    save_file(found, folder / WEIGHTS, {"format": "pt"})
    words = tiny.overrides(headers, tmp_path / "run", f"{R}={folder}")
    done = slurm_ppo("validate", *words, env=without_torch)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {R}={folder}: its weight score.weight in {WEIGHTS} has NaN or infinite values; copy the "
        "model again, or give another checkpoint\n",
    )


def test_validate_warns_of_tokens_that_were_added_without_an_embedding(
    headers, tmp_path, slurm_ppo, without_torch
):
    """As Gemma 3 has one. Rows that have such a token are left out one by one."""
    folder = Path(shutil.copytree(headers / "policy", tmp_path / "model"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": ROWS, "content": "<image>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = tiny.overrides(headers, tmp_path / "run", f"model.policy={folder}")
    done = slurm_ppo("validate", *words, env=without_torch)
    assert done.returncode == 0, done.stderr
    warning = next(line for line in done.stdout.splitlines() if line.startswith("warning"))
    assert f"model.policy={folder}: has no embedding for 1 tokens that were added" in warning
    assert "'<image>'" in warning


NOTED = {
    "code that is not run": (
        {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
        "warning: model.policy={}: the code that its auto_map names is not run, but transformers' own for "
        "llama; set model.trust_remote_code=true if it computes something else",
    ),
    "logits of routers": (
        {"output_router_logits": True},
        "model.policy={}: output_router_logits of its config.json is switched off to generate",
    ),
}


@pytest.mark.parametrize("name", list(NOTED))
def test_what_is_done_in_another_way_than_config_json_says_is_said(headers, config, tmp_path, name):
    changes, said = NOTED[name]
    folder = Path(shutil.copytree(headers / "policy", tmp_path / "model"))
    assert not [line for line in model_notes(given_as(config, P, folder)) if str(folder) in line]
    settings(**changes)(folder)
    assert said.format(folder) in list(model_notes(given_as(config, P, folder)))


def test_weights_that_are_no_numbers_end_a_run_after_one_attempt(inputs, tmp_path, slurm_ppo):
    """Only a look at all of them shows it, which is prepare's."""
    folder = Path(shutil.copytree(inputs / "policy", tmp_path / "model"))
    nothing = np.full((ROWS, 4), np.nan, np.float32)
    save_file({"model.embed_tokens.weight": nothing}, folder / WEIGHTS, {"format": "pt"})
    run = tmp_path / "run"
    done = slurm_ppo("run", *tiny.overrides(inputs, run, f"model.policy={folder}"))
    assert done.returncode == 2
    said = (
        f"model.policy={folder}: its weight model.embed_tokens.weight in {WEIGHTS} has NaN or infinite values"
    )
    assert f"attempt 1 (config): {said}" in done.stderr
    assert len(done.stderr.splitlines()) < 20
    assert [path.name for path in run.glob("logs/*/attempt-*")] == ["attempt-1"]
