"""examples/recipes: models of the same architecture and rows of such columns, where recipes look for them."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support import ROOT, tiny
from tests.support.processes import script

RECIPES = ROOT / "examples/recipes"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SOLUTION = "She has 3 + 4 = <<3+4=7>>7 apples.\n#### 1,007"


def make_qwen(folder: Path) -> None:
    """Few random weights, with the tokenizer's format."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = tiny.byte_tokenizer(SPECIALS, TEMPLATE)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = Qwen2Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=2048, **sizes, **ends
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_gsm8k(folder: Path) -> None:
    """Rows like the data set's, and the prompts that the recipe's script makes of them."""
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


def make_helpfulness(folder: Path) -> None:
    tiny.make_reward_model(folder / "models/reward-model", chat_template=TEMPLATE)
    chats = [{"prompt": [{"role": "user", "content": f"Help me with {i}."}]} for i in range(300)]
    (folder / "data/helpfulness").mkdir(parents=True)
    (folder / "data/helpfulness/prompts.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
