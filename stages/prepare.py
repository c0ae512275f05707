"""Once per run: check and tokenise the prompts, measure reward normalisation, import the rules.

Everything that can be wrong with the user's input shows here, before the first rollout.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from pipeline.commits import file_state, hash_file, replace_durably
from pipeline.config import BadRows, Config, RewardModelConfig
from pipeline.data import Message, Prompt, Rejected, RejectReason, read_prompts, summarize, write_rejected
from pipeline.modeldirs import text_settings
from pipeline.plugins import load_rules
from pipeline.schemas import PROMPTS, conform, reserved_columns
from pipeline.shards import write_shard
from pipeline.tasks import Task
from stages.chat import prompt_text
from stages.context import Context, Result, UserError
from stages.models import load_tokenizer
from stages.ppo.lora import attach
from stages.rewards.components import measure_normalization


def run(task: Task, context: Context) -> Result:
    config = context.config
    check_lora(config)
    tokenizer = load_tokenizer(config.model.policy, config.model.trust_remote_code)
    prompts, rejected = tokenized(config.data.prompts, config, tokenizer)
    heldout, rejected_heldout = empty_prompts(), []
    if config.data.heldout:
        heldout, rejected_heldout = tokenized(config.data.heldout, config, tokenizer)
        heldout = heldout.slice(0, config.evaluate.num_prompts)
        where = f"in {config.data.heldout}: "
        rejected_heldout = [replace(row, detail=where + row.detail) for row in rejected_heldout]
    listing = context.files.data(context.attempt, "rejected", "jsonl")
    listing.parent.mkdir(parents=True, exist_ok=True)
    write_rejected(listing, [*rejected, *rejected_heldout])
    check_usable(config, prompts, heldout, [*rejected, *rejected_heldout], listing)
    load_rules(config)
    normalization = context.files.data(context.attempt, "normalization", "json")
    replace_durably(normalization, json.dumps(measure_normalization(context)) + "\n")
    outputs = (
        write_shard(context.paths, context.files.data(context.attempt), prompts),
        write_shard(context.paths, context.files.data(context.attempt, "heldout"), heldout),
        hash_file(context.paths, listing),
        hash_file(context.paths, normalization),
    )
    context.lineage.update(hash_user_files(config))
    metrics = {"prompts": float(prompts.num_rows), "rejected": float(len(rejected) + len(rejected_heldout))}
    return Result(outputs, prompts.num_rows, "prompts/1", 0, metrics)


def check_lora(config: Config) -> None:
    """That the update can adapt the policy, tried on the model without its weights.

    Raises:
        UserError: peft is missing, or ``update.lora.target_modules`` does not fit the model.
    """
    if config.update.lora is None:
        return
    source, trust = config.model.policy, config.model.trust_remote_code
    described = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=trust)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, trust_remote_code=trust)
        attach(model, Path(source), config.update.lora, seed=0)


def tokenized(
    source: str, config: Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[pa.Table, list[Rejected]]:
    """Usable rows as a prompt table, and the rows that cannot be used.

    Raises:
        PromptError, UserError: the whole file cannot be used.
    """
    data = config.data
    found = read_prompts(
        Path(source),
        prompt_column=data.prompt_column,
        id_column=data.id_column,
        split=data.split,
        reserved=reserved_columns(config),
    )
    texts, refused = prompt_texts(found.rows, tokenizer)
    tokens = tokenize(texts, found.rows, tokenizer)
    limit = config.data.max_prompt_tokens or 0
    problems = [refused.get(i) or length_problem(row, tokens[i], limit) for i, row in enumerate(found.rows)]
    kept = [i for i, problem in enumerate(problems) if problem is None]
    check_vocabulary(tokens, tokenizer, config)
    table = conform(
        {
            "prompt_id": [found.rows[i].prompt_id for i in kept],
            "prompt_text": [texts[i] for i in kept],
            "prompt_messages": [messages_json(found.rows[i].prompt) for i in kept],
            "prompt_tokens": [tokens[i] for i in kept],
        },
        PROMPTS,
        extra=found.columns.take(kept),
    )
    return table, [*found.rejected, *(problem for problem in problems if problem)]


def prompt_texts(
    rows: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], dict[int, Rejected]]:
    """The text of each row, and by index the rows whose messages the chat template refuses."""
    texts, refused = [], {}
    for index, row in enumerate(rows):
        try:
            texts.append(prompt_text(row.prompt, tokenizer))
        except TemplateError as error:
            detail = f"the policy's chat template refuses it: {error}"
            refused[index] = Rejected(row.row, row.prompt_id, RejectReason.BAD_MESSAGE, detail)
            texts.append("")
    return texts, refused


def tokenize(
    texts: Sequence[str], rows: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Token ids; a chat template has written its own special tokens already."""
    tokens: list[list[int]] = [[] for _ in texts]
    for is_chat in (False, True):
        chosen = [i for i, row in enumerate(rows) if isinstance(row.prompt, str) is not is_chat]
        if chosen:
            # verbose=False: what is too long is reported by us, row by row
            found = tokenizer([texts[i] for i in chosen], add_special_tokens=not is_chat, verbose=False)
            batch = found["input_ids"]
            for i, ids in zip(chosen, batch, strict=True):
                tokens[i] = ids
    return tokens


def length_problem(row: Prompt, tokens: Sequence[int], limit: int) -> Rejected | None:
    if not tokens:
        return Rejected(row.row, row.prompt_id, RejectReason.NO_TOKENS, "the tokenizer gives no token for it")
    if len(tokens) > limit:
        detail = f"{len(tokens)} tokens, and data.max_prompt_tokens is {limit}"
        return Rejected(row.row, row.prompt_id, RejectReason.TOO_LONG, detail)
    return None


def messages_json(prompt: str | Sequence[Message]) -> str | None:
    if isinstance(prompt, str):
        return None
    return json.dumps([{"role": m.role, "content": m.content} for m in prompt], ensure_ascii=False)


def empty_prompts() -> pa.Table:
    return conform({name: [] for name in PROMPTS.names}, PROMPTS)


def check_vocabulary(tokens: Iterable[Sequence[int]], tokenizer: Any, config: Config) -> None:
    """A tokenizer that is not the model's own gives ids the model has no embedding for."""
    size = text_settings(Path(config.model.policy)).get("vocab_size")
    highest = max((max(ids, default=0) for ids in tokens), default=0)
    if size is not None and highest >= size:
        raise UserError(
            f"model.policy={config.model.policy}: its tokenizer gives id {highest}, but the model has "
            f"{size} embeddings; the directory's tokenizer is not the model's own"
        )


def check_usable(
    config: Config, prompts: pa.Table, heldout: pa.Table, rejected: Sequence[Rejected], listing: Path
) -> None:
    """Say what was left out; stop when that is fatal or leaves too few. Raises UserError."""
    if rejected:
        print(f"{summarize(rejected)}; listed in {listing}", flush=True)
        if config.data.bad_rows is BadRows.FATAL:
            raise UserError(f"{summarize(rejected)} (data.bad_rows=fatal); listed in {listing}")
    if config.data.heldout and heldout.num_rows == 0:
        raise UserError(f"data.heldout={config.data.heldout} has no usable row; see {listing}")
    if prompts.num_rows < config.data.prompts_per_iteration:
        raise UserError(
            f"data.prompts={config.data.prompts} has {prompts.num_rows} usable rows, fewer than "
            f"data.prompts_per_iteration={config.data.prompts_per_iteration}"
            + (f"; unusable rows are listed in {listing}" if rejected else "")
        )


def hash_user_files(config: Config) -> dict[str, str]:
    """What the run was made from: every file of the models and of the data, with its hash and times."""
    components = config.reward.components.values()
    models = [c.path for c in components if isinstance(c, RewardModelConfig)]
    norms = [c.normalization for c in components if isinstance(c, RewardModelConfig) and c.normalization]
    given = [config.model.policy, config.model.reference, config.model.critic, *models]
    given += [config.data.prompts, config.data.heldout, *(norm.reference_samples for norm in norms)]
    files: set[Path] = set()
    for path in (Path(text) for text in given if text):
        files.update([path] if path.is_file() else (p for p in path.rglob("*") if p.is_file()))
    return {f"file:{path}": file_state(path) for path in sorted(files)}
