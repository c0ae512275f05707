"""Rollout tables of given texts, and a context to score them in."""

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa

from pipeline.run.tasks import PREPARE
from stages.context import Context
from tests.support.processes import make_run
from tests.support.rollouts import rollout_table


def responses(
    models: Path,
    texts: list[tuple[str, str]],
    messages: list[str | None] | None = None,
    following: list[str] | None = None,
    refused: Collection[int] = (),
    **extra: list,
) -> pa.Table:
    """A rollout table of (prompt, response) texts; each response ends in the end-of-sequence id. Rows that
    are refused have none, and a token in the prompt that no model has."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "policy")
    ids = [[*tokenizer(response)["input_ids"], tokenizer.eos_token_id] for _, response in texts]
    prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in texts]
    for i in refused:
        ids[i], prompts[i] = [], [*prompts[i], 10**6]
    return rollout_table(
        ids,
        prompt_tokens=prompts,
        prompt_text=[prompt for prompt, _ in texts],
        prompt_messages=messages,
        response_text=[response for _, response in texts],
        response_messages=following,
        **extra,
    )


TEXTS = [("say a", "xyz"), ("tell me", "a longer answer"), ("q", "ü")]


def context(models: Path, folder: Path, *more: str) -> Context:
    """As prepare has it, before there is a record of the models' files to compare with."""
    run = make_run(models, folder / "run", *more)
    return Context(run.paths, run.config, PREPARE, "test")
