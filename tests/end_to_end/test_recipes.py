"""examples/recipes, by models of the same architecture with few random weights, and rows of such columns."""

import json
from pathlib import Path

import pytest

from tests.support.recipes import RECIPES, make_gsm8k, make_helpfulness, make_qwen

EXPERIMENTS = [path.stem for path in sorted((RECIPES / "experiment").glob("*.yaml"))]
SMALL = (
    "iterations=1",
    "data.prompts_per_iteration=4",
    "rollout.samples_per_prompt=2",
    "rollout.num_shards=1",
    "rollout.max_new_tokens=8",
    "rollout.engine=transformers",
    "evaluate.every=1",
    "tracking=none",
)
CARDS = tuple(
    f"scheduler.{stage}.gpus_per_node={cards}"
    for stage, cards in {"rollout": "t4:1", "reward": "t4:1", "update": "a100:4"}.items()
)
"""What the partitions have, as no sinfo is asked."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with models and data where the recipes look for them."""
    folder = tmp_path_factory.mktemp("recipes")
    for size in ("0.5B", "1.5B", "7B"):
        make_qwen(folder / f"models/Qwen2.5-{size}-Instruct")
    make_gsm8k(folder)
    make_helpfulness(folder)
    return folder


def test_questions_are_messages_and_answers_are_numbers(workplace):
    rows = [json.loads(line) for line in (workplace / "data/gsm8k/train.jsonl").open()]
    assert len(rows) == 300
    assert rows[0]["answer"] == "1007"
    assert rows[0]["prompt"][0]["role"] == "user"
    assert "How many are 0 apples?" in rows[0]["prompt"][0]["content"]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_recipe_is_sound_and_is_planned_on_two_partitions(experiment, workplace, slurm_ppo):
    words = (f"--config-dir={RECIPES}", f"experiment={experiment}", "run_dir=runs/planned", "tracking=none")
    here = ("update=cpu", "scheduler.update.ranks=1", *SMALL[:6])
    done = slurm_ppo("validate", *words, *here, cwd=workplace)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "chat template" not in done.stdout + done.stderr
    assert "reward is never above 0" not in done.stdout + done.stderr
    looked = "the text of column answer in the rule's pattern as response gets 1" in done.stdout + done.stderr
    assert looked is experiment.startswith("gsm8k")
    there = ("scheduler=two_partitions", "rollout.engine=transformers", *CARDS)
    done = slurm_ppo("plan", *words, *there, cwd=workplace)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "GPU-hours of computing: rollout " in done.stdout


def test_an_iteration_of_gsm8k(workplace, slurm_ppo):
    words = (f"--config-dir={RECIPES}", "experiment=gsm8k", "run_dir=runs/gsm8k", "update=cpu", *SMALL)
    done = slurm_ppo("run", *words, cwd=workplace)
    assert done.returncode == 0, done.stderr
    (row,) = (json.loads(line) for line in (workplace / "runs/gsm8k/metrics.jsonl").open())
    assert row["reward/mean"] == 0.0
    assert "evaluate/reward" in row


def test_text_without_the_chat_template_of_an_instruct_model_is_a_warning(workplace, slurm_ppo):
    plain = workplace / "data/plain.jsonl"
    plain.write_text(
        "".join(json.dumps({"id": f"q{i}", "prompt": "What?", "answer": "7"}) + "\n" for i in range(9))
    )
    words = ("experiment=gsm8k", "run_dir=runs/plain", f"data.prompts={plain}", "update=cpu", *SMALL)
    done = slurm_ppo("validate", f"--config-dir={RECIPES}", *words, cwd=workplace)
    assert done.returncode == 0, done.stderr
    said = f"warning: data.prompts={plain} holds text, which the policy reads without its chat template"
    assert said in done.stdout + done.stderr
