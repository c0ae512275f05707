"""examples/recipes, by models of the same architecture with few random weights, and rows of such columns."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import ROOT, tiny
from tests.support.processes import script

RECIPES = ROOT / "examples/recipes"
EXPERIMENTS = [path.stem for path in sorted((RECIPES / "experiment").glob("*.yaml"))]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SOLUTION = "She has 3 + 4 = <<3+4=7>>7 apples.\n#### 1,007"
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


def make_qwen(folder: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = tiny.byte_tokenizer(SPECIALS, TEMPLATE)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = Qwen2Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=2048, **sizes, **ends
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with models and data where the recipes look for them."""
    folder = tmp_path_factory.mktemp("recipes")
    for size in ("0.5B", "1.5B", "7B"):
        make_qwen(folder / f"models/Qwen2.5-{size}-Instruct")
    tiny.make_reward_model(folder / "models/reward-model", chat_template=TEMPLATE)
    dataset = folder / "data/openai-gsm8k/main"
    dataset.mkdir(parents=True)
    for split, count in (("train", 300), ("test", 8)):
        columns = {
            "question": [f"How many are {i} apples?" for i in range(count)],
            "answer": [SOLUTION] * count,
        }
        pq.write_table(pa.table(columns), dataset / f"{split}-00000-of-00001.parquet")
    made = script(RECIPES / "gsm8k.py", dataset.parent, "--out", folder / "data/gsm8k")
    assert made.code == 0, made.log
    chats = [{"prompt": [{"role": "user", "content": f"Help me with {i}."}]} for i in range(300)]
    (folder / "data/helpfulness").mkdir()
    (folder / "data/helpfulness/prompts.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
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
    assert "GPU-hours of the run at work: rollout " in done.stdout


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
