"""validate tries every model that a configuration names, in a process that may import torch."""

import dataclasses
import io
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.compose import to_yaml
from pipeline.config.schema import Config
from pipeline.config.update import LoraConfig
from stages.trials import check
from tests.support import tiny
from tests.support.families import family
from tests.support.processes import config_of

UP = "model.layers.1.mlp.up_proj.weight"
FILE = "model.safetensors"


def answer(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> dict[str, list[str]]:
    """What the process would print about a configuration that it reads."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(to_yaml(config)))
    monkeypatch.setattr(check.log, "handlers", [])
    monkeypatch.setattr(check.log, "propagate", True)
    check.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def with_weights(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Change tensors of a directory; dots in names are written as two underscores, None takes one away."""
    found = load_file(folder / FILE) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file(
        {name: value for name, value in found.items() if value is not None}, folder / FILE, {"format": "pt"}
    )
    return folder


def copied(models: Path, name: str, place: Path) -> Path:
    return Path(shutil.copytree(models / name, place))


def test_validate_names_every_model_that_cannot_be_used_in_a_line_each(models, tmp_path, slurm_ppo):
    """The policy lacks a weight, the reference is of another size than its config.json says, the critic and
    the reward model have numbers that are none."""
    up = UP.replace(".", "__")
    policy = with_weights(copied(models, "policy", tmp_path / "policy"), **{up: None})
    reference = with_weights(copied(models, "policy", tmp_path / "reference"), **{up: torch.zeros(40, 32)})
    critic = with_weights(
        copied(models, "policy", tmp_path / "critic"), **{up: torch.full((48, 32), math.nan)}
    )
    reward = copied(models, "reward_model", tmp_path / "reward")
    with_weights(reward, score__weight=torch.full((1, 32), -math.inf))
    given = {"model.policy": policy, "model.reference": reference, "model.critic": critic}
    given["reward.components.rm.path"] = reward
    run = tmp_path / "run"
    done = slurm_ppo(
        "validate", *tiny.overrides(models, run, *(f"{key}={path}" for key, path in given.items()))
    )
    assert done.returncode == 2
    random, none = (
        "they would be random numbers: copy the model again",
        "has NaN or infinite values; copy the",
    )
    assert [line.removeprefix("error: ") for line in done.stderr.splitlines()] == [
        f"model.policy: {policy} lacks weights of LlamaForCausalLM: {UP}; {random}",
        f"model.reference: {reference}: its weight {UP} has shape [40, 32], and by its config.json "
        "LlamaForCausalLM wants [48, 32]; copy both again from the same place",
        f"model.critic={critic}: its weight {UP} in {FILE} {none} model again, or give another checkpoint",
        f"reward.components.rm.path={reward}: its weight score.weight in {FILE} {none} model again, or give "
        "another checkpoint",
    ]
    assert not run.exists()


@pytest.fixture
def config(models, tmp_path) -> Config:
    return config_of(models, tmp_path / "run")


def test_models_without_a_fault_are_said_to_be_finite(config, monkeypatch, capsys):
    found = answer(config, monkeypatch, capsys)
    assert found["problems"] == []
    assert [
        line.partition("=")[0] for line in found["lines"] if "21 weights of 0.00 GiB, all finite" in line
    ] == [
        "model.policy",
        "reward.components.rm.path",
    ]


def test_of_a_large_model_the_beginning_of_every_weight_is_looked_at_and_that_is_said(
    models, config, tmp_path, monkeypatch, capsys
):
    size = sum(tensor.nbytes for tensor in load_file(models / "policy" / FILE).values())
    monkeypatch.setattr(check, "_MOST", size // 2)
    folder = copied(models, "policy", tmp_path / "model")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, policy=str(folder)))
    embeddings = load_file(folder / FILE)["lm_head.weight"]
    embeddings[-1, -1] = math.nan
    with_weights(folder, lm_head__weight=embeddings)
    found = answer(config, monkeypatch, capsys)
    assert found["problems"] == []
    assert f"model.policy={folder}: the first 50% of each of 21 weights of" in "\n".join(found["lines"])
    embeddings[0, 0] = math.nan
    with_weights(folder, lm_head__weight=embeddings)
    (problem,) = answer(config, monkeypatch, capsys)["problems"]
    assert problem.startswith(f"model.policy={folder}: its weight lm_head.weight in {FILE} has NaN")


def test_adapters_of_a_mixture_of_experts_are_refused_before_the_run(config, tmp_path, monkeypatch, capsys):
    family("mixtral").save_pretrained(tmp_path / "mixture")
    tiny.byte_tokenizer(("<pad>", "<eos>")).save_pretrained(tmp_path / "mixture")
    lora = dataclasses.replace(config.update, lora=LoraConfig())
    policy = dataclasses.replace(config.model, policy=str(tmp_path / "mixture"))
    found = answer(dataclasses.replace(config, update=lora, model=policy), monkeypatch, capsys)
    (problem,) = found["problems"]
    assert problem.startswith("update.lora.target_modules=all-linear: peft takes experts of MixtralForCausal")
    assert "give [k_proj,o_proj,q_proj,v_proj] (and update.lora.target_parameters=[down_proj," in problem
    named = LoraConfig(target_modules=("q_proj",), target_parameters=("gate_up_proj", "down_proj"))
    lora = dataclasses.replace(config.update, lora=named)
    found = answer(dataclasses.replace(config, update=lora, model=policy), monkeypatch, capsys)
    assert found["problems"] == []
    assert any(line.startswith("update.lora: ") and "of the policy's" in line for line in found["lines"])


def test_a_weight_of_routers_that_the_policy_lacks_is_refused_before_the_run(config, monkeypatch, capsys):
    weighed = dataclasses.replace(config.algorithm, router_aux_loss_coef=0.01)
    found = answer(dataclasses.replace(config, algorithm=weighed), monkeypatch, capsys)
    (problem,) = found["problems"]
    assert problem == (
        "algorithm.router_aux_loss_coef=0.01: LlamaForCausalLM has no experts; leave it out, or give 0"
    )


def test_with_another_python_for_tasks_the_libraries_here_judge_nothing(
    models, tmp_path, monkeypatch, capsys
):
    folder = with_weights(copied(models, "policy", tmp_path / "model"), **{UP.replace(".", "__"): None})
    words = ("scheduler=slurm", "scheduler.python=/opt/python", f"model.policy={folder}")
    found = answer(config_of(models, tmp_path / "run", *words), monkeypatch, capsys)
    assert found["problems"] == []
    assert found["lines"][0] == (
        "not checked: whether transformers loads the models (tasks have another Python, or a container); "
        "the run's first task does"
    )
