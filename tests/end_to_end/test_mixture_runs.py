"""Runs of mixtures of experts: a killed update is repeated, and ends in the same policy."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.run.commits import require_record
from pipeline.run.directory import load_run
from pipeline.run.plan import policy_maker
from tests.support import tiny
from tests.support.families import settings_of
from tests.support.killing import hooked
from tests.support.tables import sample

GRPO = ("algorithm=grpo", "rollout.samples_per_prompt=4", "data.prompts_per_iteration=4")
REPLAY = "algorithm.router_replay=true"
OF_EXPERTS = "+update.lora={rank: 4, target_modules: [q_proj], target_parameters: [gate_up_proj, down_proj]}"
CASES = {
    "routers": ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.1}, (REPLAY,)),
    "a bias": ("deepseek_v3", {"output_router_logits": True}, ("update.zero_stage=2",)),
    "adapters": ("gpt_oss", {}, (OF_EXPERTS, "algorithm.router_aux_loss_coef=0.1", REPLAY)),
}


@pytest.fixture
def mixture(models, tmp_path):
    def made(name: str, **settings: object) -> Path:
        folder = Path(shutil.copytree(models, tmp_path / "inputs"))
        torch.manual_seed(0)
        ids = {"vocab_size": AutoConfig.from_pretrained(folder / "policy").vocab_size, "pad_token_id": 0}
        described = AutoConfig.for_model(name, **{**settings_of(name), **ids, **settings, "eos_token_id": 1})
        AutoModelForCausalLM.from_config(described).save_pretrained(folder / "policy")
        return folder

    return made


def fingerprint(root: Path) -> str:
    return require_record(load_run(root).paths, policy_maker(2)).fingerprint


@pytest.mark.parametrize("case", sample(list(CASES), 1 / 3))
def test_a_mixture_of_experts_is_trained_through_kills(case, mixture, slurm_ppo, environment, tmp_path):
    name, settings, more = CASES[case]
    inputs = mixture(name, **settings)
    killing = hooked(environment, tmp_path, "before-link:iterations/00002/update/shard-00000.json")
    for run, given in (("straight", environment), ("killed", killing)):
        done = slurm_ppo("run", *tiny.overrides(inputs, tmp_path / run, *GRPO, *more), env=given)
        assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("killed-*")), "the hook never fired"
    assert fingerprint(tmp_path / "killed") == fingerprint(tmp_path / "straight")
    rows = [json.loads(line) for line in (tmp_path / "killed/metrics.jsonl").read_text().splitlines()]
    assert [row["policy/ratio_error_first"] for row in rows] == [0, 0]
    assert all(row["mismatch/max"] < 1e-5 for row in rows), "the engine generates with what was trained"
    assert all(("policy/router_loss" in row) == (case != "a bias") for row in rows)
    assert all(("policy/replayed_differ" in row) == (REPLAY in more) for row in rows)
    (shard, *_) = sorted((tmp_path / "straight").glob("iterations/*/rollout/*.arrow"))
    with pa.ipc.open_file(shard) as file:
        assert ("routed_experts" in file.schema.names) == (REPLAY in more)
