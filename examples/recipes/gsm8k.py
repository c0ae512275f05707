"""Make prompt files of GSM8K: questions as messages, so that the policy's chat template applies, and answers.

    python examples/recipes/gsm8k.py DATASET --out data/gsm8k

DATASET is a copy of openai/gsm8k (MIT licence), fetched where there is internet:
``hf download openai/gsm8k --repo-type dataset --local-dir DATASET``.
"""

import argparse
import json
from pathlib import Path

import pyarrow.parquet as pq

HOW = "Think step by step. End with the answer alone, in \\boxed{}."
MARK = "#### "
"""Stands before the answer in a solution."""
FILES = {"train.jsonl": "train", "heldout.jsonl": "test"}


def row(name: str, index: int, question: str, solution: str) -> dict[str, object]:
    """Return a prompt. Raises ValueError where a solution has no answer."""
    _, mark, answer = solution.rpartition(MARK)
    if not mark:
        raise ValueError(f"{name} {index}: no {MARK!r} in {solution[-60:]!r}")
    messages = [{"role": "user", "content": f"{question.strip()}\n{HOW}"}]
    return {"id": f"{name}-{index:05d}", "prompt": messages, "answer": answer.strip().replace(",", "")}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make prompt files of GSM8K.")
    parser.add_argument("dataset", type=Path, help="folder of openai/gsm8k, as hf download writes it")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl")
    given = parser.parse_args()
    for file, split in FILES.items():
        parts = sorted(given.dataset.glob(f"main/{split}-*.parquet"))
        if not parts:
            parser.error(f"{given.dataset}/main has no {split}-*.parquet")
        table = pq.read_table(parts, columns=["question", "answer"])
        rows = [row(split, i, one["question"], one["answer"]) for i, one in enumerate(table.to_pylist())]
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / file).write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
        print(f"{given.out / file}: {len(rows):,} prompts")


if __name__ == "__main__":
    main()
