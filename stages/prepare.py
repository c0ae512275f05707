"""Once per run: check and tokenise the prompts, measure reward normalisation, try the rules.

Everything that can be wrong with the user's input shows here, before the first rollout.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from jinja2 import TemplateError

from pipeline.commits import file_state, hash_file, replace_durably
from pipeline.config import BadRows, Config, LongPrompts
from pipeline.data import Message, Prompt, Rejected, RejectReason, read_prompts, summarize, write_rejected
from pipeline.modeldirs import text_settings
from pipeline.plugincheck import Sample, check_rules, check_scheduler
from pipeline.rewardchecks import unknown_field
from pipeline.rewardconfig import RemoteConfig, RewardModelConfig
from pipeline.schemas import PROMPTS, conform, extra_columns, reserved_columns
from pipeline.shards import write_shard
from pipeline.tasks import Task
from stages.chat import messages_json, prompt_text
from stages.context import Context, Result, UserError
from stages.rewards.components import measure_normalization
from stages.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run(task: Task, context: Context) -> Result:
    config = context.config
    check_lora(config)
    tokenizer = load_tokenizer(config.model.policy, config.model)
    prompts, rejected, num_cut = tokenized(config.data.prompts, config, tokenizer)
    heldout, rejected_heldout = empty_prompts(), []
    if config.data.heldout:
        heldout, rejected_heldout, num_cut_heldout = tokenized(config.data.heldout, config, tokenizer)
        num_cut += num_cut_heldout
        heldout = heldout.slice(0, config.evaluate.num_prompts)
        where = f"in {config.data.heldout}: "
        rejected_heldout = [replace(row, detail=where + row.detail) for row in rejected_heldout]
    listing = context.files.data(context.attempt, "rejected", "jsonl")
    listing.parent.mkdir(parents=True, exist_ok=True)
    write_rejected(listing, [*rejected, *rejected_heldout])
    check_usable(config, prompts, heldout, [*rejected, *rejected_heldout], listing)
    check_rules(
        config,
        [
            *samples(prompts, "data.prompts", config.data.prompts),
            *samples(heldout, "data.heldout", config.data.heldout),
        ],
    )
    check_scheduler(config)
    check_remotes(config, prompts, heldout)
    normalization = context.files.data(context.attempt, "normalization", "json")
    replace_durably(normalization, json.dumps(measure_normalization(context)) + "\n")
    outputs = (
        write_shard(context.paths, context.files.data(context.attempt), prompts),
        write_shard(context.paths, context.files.data(context.attempt, "heldout"), heldout),
        hash_file(context.paths, listing),
        hash_file(context.paths, normalization),
    )
    context.lineage.update(hash_user_files(config))
    metrics = {
        "prompts": float(prompts.num_rows),
        "rejected": float(len(rejected) + len(rejected_heldout)),
        "truncated": float(num_cut),
    }
    return Result(outputs, prompts.num_rows, "prompts/1", 0, metrics)


def samples(prompts: pa.Table, key: str, path: str | None) -> list[Sample]:
    """The first row of a prompt table, if it has any, to try rules on."""
    columns = extra_columns(prompts).slice(0, 1).to_pylist() or [{}]
    ids, texts = prompts["prompt_id"].to_pylist()[:1], prompts["prompt_text"].to_pylist()[:1]
    return [Sample(f"{key}={path}", *row) for row in zip(ids, texts, columns, strict=False)]


def check_remotes(config: Config, *tables: pa.Table) -> None:
    """Raises UserError where a service's key is not set, or its template names no column of the prompts."""
    for name, component in config.reward.components.items():
        if isinstance(component, RemoteConfig):
            from stages.rewards.posting import api_key

            api_key(name, component)
            for table in tables:
                columns = extra_columns(table).column_names
                if table.num_rows and (why := unknown_field(component, columns)):
                    raise UserError(f"reward.components.{name}.template: {why}")


def check_lora(config: Config) -> None:
    """That the update can adapt the policy. Raises UserError."""
    if config.update.lora is not None:
        from stages.ppo.lora import check_fits

        check_fits(config.model, config.update.lora)


def tokenized(
    source: str, config: Config, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[pa.Table, list[Rejected], int]:
    """Usable rows as a prompt table, the rows that cannot be used, and how many prompts were truncated.

    A truncated prompt's text is what is left of it; its messages, from which a reward model makes a prompt of
    its own, stay whole.

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
    long = [i for i, ids in enumerate(tokens) if len(ids) > limit] if cuts_prompts(config) else []
    for i in long:
        tokens[i] = tokens[i][-limit:]
        texts[i] = tokenizer.decode(tokens[i])
    if long:
        print(f"{source}: {len(long)} prompts truncated to their last {limit} tokens", flush=True)
    size = vocabulary_size(config)
    problems = [
        refused.get(i) or length_problem(row, tokens[i], limit) or vocabulary_problem(row, tokens[i], size)
        for i, row in enumerate(found.rows)
    ]
    kept = [i for i, problem in enumerate(problems) if problem is None]
    check_vocabulary([problem for problem in problems if problem], len(kept), config)
    table = conform(
        {
            "prompt_id": [found.rows[i].prompt_id for i in kept],
            "prompt_text": [texts[i] for i in kept],
            "prompt_messages": [prompt_messages(found.rows[i].prompt) for i in kept],
            "prompt_tokens": [tokens[i] for i in kept],
        },
        PROMPTS,
        extra=found.columns.take(kept),
    )
    return table, [*found.rejected, *(problem for problem in problems if problem)], len(long)


def cuts_prompts(config: Config) -> bool:
    return config.data.long_prompts is LongPrompts.TRUNCATE


def decided_by(config: Config, row: Rejected) -> str:
    """The key of ``data`` that says what becomes of a row that cannot be used."""
    is_long = row.reason is RejectReason.TOO_LONG and config.data.long_prompts is not None
    return "long_prompts" if is_long else "bad_rows"


def prompt_texts(
    rows: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase"
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
    texts: Sequence[str], rows: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase"
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


def prompt_messages(prompt: str | Sequence[Message]) -> str | None:
    return None if isinstance(prompt, str) else messages_json(prompt)


def empty_prompts() -> pa.Table:
    return conform({name: [] for name in PROMPTS.names}, PROMPTS)


def vocabulary_size(config: Config) -> int | None:
    size: int | None = text_settings(Path(config.model.policy)).get("vocab_size")
    return size


def vocabulary_problem(row: Prompt, tokens: Sequence[int], size: int | None) -> Rejected | None:
    if size is None or max(tokens) < size:
        return None
    detail = f"its token {max(tokens)} is beyond the model's {size} embeddings"
    return Rejected(row.row, row.prompt_id, RejectReason.UNKNOWN_TOKEN, detail)


def check_vocabulary(problems: Sequence[Rejected], num_kept: int, config: Config) -> None:
    """Raises UserError when ids without an embedding are the rule: the tokenizer is not the model's own."""
    unknown = [problem for problem in problems if problem.reason is RejectReason.UNKNOWN_TOKEN]
    if len(unknown) > num_kept:
        raise UserError(
            f"model.policy={config.model.policy}: in {len(unknown)} prompts its tokenizer gives ids that the "
            f"model has no embedding for ({unknown[0].detail}); it is not the model's own tokenizer"
        )


def check_usable(
    config: Config, prompts: pa.Table, heldout: pa.Table, rejected: Sequence[Rejected], listing: Path
) -> None:
    """Say what was left out; stop when that is fatal or leaves too few. Raises UserError."""
    if rejected:
        print(f"{summarize(rejected)}; listed in {listing}", flush=True)
        for key, value in (("bad_rows", config.data.bad_rows), ("long_prompts", config.data.long_prompts)):
            if value == BadRows.FATAL and (
                fatal := [row for row in rejected if decided_by(config, row) == key]
            ):
                raise UserError(f"{summarize(fatal)} (data.{key}=fatal); listed in {listing}")
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
    tokenizers = [c.tokenizer for c in components if isinstance(c, RemoteConfig)]
    norms = [c.normalization for c in components if isinstance(c, RewardModelConfig) and c.normalization]
    given = [config.model.policy, config.model.reference, config.model.critic, *models, *tokenizers]
    given += [config.data.prompts, config.data.heldout, *(norm.reference_samples for norm in norms)]
    files: set[Path] = set()
    for path in (Path(text) for text in given if text):
        files.update([path] if path.is_file() else (p for p in path.rglob("*") if p.is_file()))
    return {f"file:{path}": file_state(path) for path in sorted(files)}
