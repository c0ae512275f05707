"""Make the calculator example's input: a tiny policy that has begun to learn the tool, and prompts.

    python examples/calculator/make_calculator.py --out DIR [--seed 0]

The policy learns from dialogues that are made up: it works out sums from the left, one call of the tool for
each operation. It learns for half a minute only, so it makes mistakes.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from calculator import answer_to

ROLES = ("<user>", "<assistant>", "<tool>")
PAD, END = "<pad>", "<end>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUM_PROMPTS, NUM_HELDOUT = 512, 64
BATCH_SIZE, PEAK_LR = 16, 4e-3

Messages = list[dict[str, str]]


def problem(rng: Random) -> str:
    """Two or three digits with operators between them."""
    text = str(rng.randrange(1, 10))
    for _ in range(rng.randrange(1, 3)):
        text += rng.choice("+-") + str(rng.randrange(1, 10))
    return text


def parts(text: str) -> list[str]:
    """Numbers and operators."""
    return text.replace("+", " + ").replace("-", " - ").split()


def dialogue(text: str) -> Messages:
    """How the problem is worked out with the tool."""
    value, *rest = parts(text)
    messages = [{"role": "user", "content": text}]
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        asked = f"{value}{operator}{number}"
        value = answer_to(asked)
        messages.append({"role": "assistant", "content": f"<calc>{asked}</calc>"})
        messages.append({"role": "tool", "content": value})
    return [*messages, {"role": "assistant", "content": value}]


def make_tokenizer() -> Any:
    """A token per byte, and one for each tag."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [PAD, END, *ROLES, *alphabet]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        chat_template=TEMPLATE,
        extra_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
    )
    # Not special, so that they stay in the text that the scheduler reads.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<calc>", "</calc>")])
    return tokenizer


def encoded(messages: Messages, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Ids of a dialogue, and which of them the assistant writes."""
    ids: list[int] = []
    is_own: list[bool] = []
    for message in messages:
        own = message["role"] == "assistant"
        for text, wanted in ((f"<{message['role']}>", False), (message["content"] + END, own)):
            new = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += new
            is_own += [wanted] * len(new)
    return ids, is_own


def train(rng: Random, tokenizer: Any, num_dialogues: int) -> Any:
    """Next-token training on what the assistant writes."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import LlamaForCausalLM

    from stages.demo.tiny_llama import fit, pad_right, shuffled_batches, tiny_config

    model = LlamaForCausalLM(tiny_config(tokenizer))
    rows = [encoded(dialogue(problem(rng)), tokenizer) for _ in range(num_dialogues)]

    def loss_of(batch: list[int]) -> torch.Tensor:
        ids = pad_right([rows[i][0] for i in batch], tokenizer.pad_token_id)
        is_own = pad_right([rows[i][1] for i in batch], 0).bool()[:, 1:]
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return cross_entropy(logits[is_own], ids[:, 1:][is_own])

    batches = list(shuffled_batches([len(ids) for ids, _ in rows], BATCH_SIZE, rng))
    fit(model, [batches], loss_of, PEAK_LR, "policy")
    return model


def write_prompts(path: Path, texts: Sequence[str]) -> None:
    rows = [
        {
            "id": f"{path.stem}-{i:04d}",
            "prompt": [{"role": "user", "content": text}],
            "answer": answer_to(text),
        }
        for i, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the calculator example's policy and prompts.")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another policy (default: 0)")
    parser.add_argument("--dialogues", type=int, default=8000, help="to learn from (default: 8000)")
    given = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which looks for a GPU
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads crawl where others work too
    import torch

    from stages.demo.tiny_llama import save

    torch.set_num_threads(2)
    torch.manual_seed(given.seed)
    rng = Random(given.seed)
    tokenizer = make_tokenizer()
    model = train(rng, tokenizer, given.dialogues)
    save(model, tokenizer, given.out / "policy")
    texts = list(dict.fromkeys(problem(rng) for _ in range(4 * (NUM_PROMPTS + NUM_HELDOUT))))
    write_prompts(given.out / "prompts.jsonl", texts[:NUM_PROMPTS])
    write_prompts(given.out / "heldout.jsonl", texts[NUM_PROMPTS:][:NUM_HELDOUT])
    print(f"{given.out} is ready (seed {given.seed})")


if __name__ == "__main__":
    main()
