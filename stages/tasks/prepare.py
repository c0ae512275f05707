"""Prepare, once per run: check and tokenise the prompts, measure reward normalisation, try the rules.

Everything that can be wrong with the user's input shows here, before the first rollout.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.reward import RemoteConfig, RewardModelConfig, strange_column, unknown_field
from pipeline.config.schema import Config
from pipeline.data.checks import (
    Judged,
    judge,
    prompt_files,
    read_file,
    trained_on,
    without_known,
)
from pipeline.data.curriculum import curriculum_order
from pipeline.data.enough import SETS_MERGE, check_sets, check_usable
from pipeline.data.fit import check_top_k
from pipeline.data.prompts import Rejected, made_prompts, write_rejected
from pipeline.data.rendering import scoring_templates
from pipeline.data.summary import counts, length_metrics, lines, num_masked
from pipeline.plugins.environments import made_tasks
from pipeline.plugins.row_checks import chunks_of, row_problems
from pipeline.plugins.trial import OpenRule, SampleRow, check_rules, check_scheduler, open_rules
from pipeline.run.commits import FileEntry, hash_file
from pipeline.run.durable import file_state, make_folder, replace_durably
from pipeline.run.schemas import (
    HELDOUT_SET,
    PROMPT_SOURCE,
    PROMPT_TOOLS,
    PROMPTS,
    conform,
    extra_columns,
    version_of,
)
from pipeline.run.shards import LISTING, SOURCES, listing, write_in_chunks, write_shard
from pipeline.run.tasks import Task
from pipeline.run.wide import combined, take
from stages.context import Context, StageResult, UserError
from stages.generation.chat import messages_json, tools_json
from stages.logs import log
from stages.models.tokenizers import policy_ends, same_tokenizer, special_tokens, tokenizer_of
from stages.rewards.components import measure_normalization
from stages.trials.models import check_lora, check_routers, tried_tokenizer, try_models


def run(task: Task, context: Context) -> StageResult:
    config = context.config
    try_models(config)
    check_lora(config)
    check_routers(config)
    rejected = context.files.data(context.attempt, "rejected", "jsonl")
    make_folder(rejected.parent, context.paths.root)
    with open_rules(config) as rules:
        files = checked_files(context, rules, rejected)
        tables = {judged.key: prompt_table(judged) for judged in files}
        sets = {
            one.key: tables[one.key].slice(0, config.evaluate.num_prompts) for one in files if one.is_heldout
        }
        tables |= sets
        tried = [sample for one in files for sample in samples(tables[one.key], one.key, one.path)]
        tell(check_rules(config, rules, tried))
    check_scheduler(config)
    prompts = in_order(
        config,
        joined(PROMPT_SOURCE, config.data.prompts, [tables[one.key] for one in trained_on(files)]),
    )
    heldout = joined(HELDOUT_SET, config.data.heldout, list(sets.values()))
    check_remotes(config, prompts, heldout)
    check_teachers(config, prompts)
    normalization = context.files.data(context.attempt, "normalization", "json")
    replace_durably(normalization, json.dumps(measure_normalization(context)) + "\n")
    outputs = (
        *write_prompts(context, prompts),
        write_shard(context.paths, context.files.data(context.attempt, "heldout"), heldout),
        hash_file(context.paths, rejected),
        hash_file(context.paths, normalization),
    )
    context.lineage.update(hash_user_files(config))
    metrics = counts(files, num_masked(config, tokenizer_of(context, config.model.policy)))
    metrics |= length_metrics(files)
    return StageResult(outputs, prompts.num_rows, version_of(PROMPTS), 0, metrics)


def checked_files(context: Context, rules: Sequence[OpenRule], rejected: Path) -> list[Judged]:
    """Return the prompt files, judged and checked by the rules. The rows that cannot be used are listed in
    the file ``rejected``. Raises PromptError, PluginError."""
    config, rendering = context.config, context.rendering
    tokenizer = tried_tokenizer(config, "model.policy", config.model.policy)
    check_top_k(config, tokenizer)
    templates = scoring_templates(
        config, rendering, partial(tried_tokenizer, config), partial(same_tokenizer, tokenizer)
    )
    files, made = [], made_tasks(config)
    for key, path in prompt_files(config):
        prompts = made_prompts(made[key]) if key in made else read_file(config, key, path)
        judged = judge(key, path, prompts, config, rendering, tokenizer, templates)
        found = row_problems(rules, chunks_of(judged.found.columns), f"{key}={path}")
        files.append(judged.without(dict(found)))
    files = without_known(files)
    write_rejected(rejected, [row for judged in files for row in named(judged)])
    tell(lines(files, config, tokenizer, special_tokens(tokenizer), policy_ends(context)))
    check_usable(config, files, str(rejected))
    check_sets(files)
    return files


def tell(said: Iterable[str]) -> None:
    """Write lines into the log, warnings as such."""
    for line in said:
        is_warning = line.startswith("warning: ")
        log.log(WARNING if is_warning else INFO, line.removeprefix("warning: "))


def joined(column: str, given: object, tables: Sequence[pa.Table]) -> pa.Table:
    """Return the prompts of several files, which fit each other, one after the other. Where the files were
    ``given`` by name, ``column`` has their names."""
    if not isinstance(given, dict) or not tables:
        return next(iter(tables), conform({name: [] for name in PROMPTS.names}, PROMPTS))
    with_names = [
        table.append_column(column, pa.array([name] * table.num_rows, pa.string()))
        for name, table in zip(given, tables, strict=True)
    ]
    found = pa.concat_tables(with_names, promote_options=SETS_MERGE)
    columns = [combined(one) for one in found.columns]
    return pa.Table.from_arrays(columns, schema=found.schema.with_metadata(tables[0].schema.metadata))


def in_order(config: Config, prompts: pa.Table) -> pa.Table:
    """Return the prompts sorted by the column of data.sort_by, if one is given; with weights file by file."""
    data, column = config.data, config.data.sort_column
    if column is None:
        return prompts
    files = prompts[PROMPT_SOURCE].to_pylist() if data.weights else None
    values, descends = prompts[column].to_pylist(), data.sort_by != column
    return take(prompts, curriculum_order(values, files, config.seed, data.shuffle, descends))


def write_prompts(context: Context, prompts: pa.Table) -> tuple[FileEntry, FileEntry]:
    """Write the prompts in chunks, and the listing by which a rollout reads only its own: where files have
    names, it has their rows by name, in the order of the prompts."""
    paths, files = context.paths, context.files
    entry, chunks = write_in_chunks(paths, files.data(context.attempt), prompts)
    path = files.data(context.attempt, LISTING, "json")
    listed = listing(chunks)
    if PROMPT_SOURCE in prompts.column_names:
        counts = pc.value_counts(prompts[PROMPT_SOURCE]).to_pylist()
        listed[SOURCES] = [[one["values"], one["counts"]] for one in counts]
    replace_durably(path, json.dumps(listed) + "\n")
    return entry, hash_file(paths, path)


def named(judged: Judged) -> Sequence[Rejected]:
    """Return the rows of a file that cannot be used; those of held-out prompts, and of one of several files,
    name their file."""
    if not (judged.is_heldout or judged.name):
        return judged.rejected
    return [
        replace(
            row, detail=f"in {judged.path}: {row.detail}" if not judged.is_made else f"held-out {row.detail}"
        )
        for row in judged.rejected
    ]


def samples(prompts: pa.Table, key: str, path: str | None) -> list[SampleRow]:
    """Return the first row of a prompt table, if it has any, to try rules on."""
    columns = extra_columns(prompts).slice(0, 1).to_pylist() or [{}]
    ids, texts = prompts["prompt_id"].to_pylist()[:1], prompts["prompt_text"].to_pylist()[:1]
    return [SampleRow(f"{key}={path}", *row) for row in zip(ids, texts, columns, strict=False)]


def check_remotes(config: Config, *tables: pa.Table) -> None:
    """Raise UserError where a service's key is not set, or its template names no column of the prompts."""
    for name, component in config.reward.components.items():
        if isinstance(component, RemoteConfig):
            from stages.rewards.posting import api_key

            api_key(name, component)
            for table in tables:
                columns = extra_columns(table).column_names
                if table.num_rows and (why := unknown_field(component, columns)):
                    raise UserError(f"reward.components.{name}.template: {why}")


def check_teachers(config: Config, *tables: pa.Table) -> None:
    """Raise UserError where a teacher is for values of a column that the prompts do not have."""
    for name, teacher in config.reward.teachers.items():
        for table in tables:
            if table.num_rows and (why := strange_column(teacher, extra_columns(table).column_names)):
                raise UserError(f"reward.teachers.{name}.only: {why}")


def prompt_table(judged: Judged) -> pa.Table:
    """Return the usable rows, with the user's own columns.

    A truncated prompt's text is what is left of it; its messages, from which a reward model makes a prompt of
    its own, stay whole.
    """
    rows = [judged.found.rows[i] for i in judged.kept]
    is_kept = np.zeros(len(judged.found.rows), dtype=bool)
    is_kept[list(judged.kept)] = True
    others = judged.found.columns.filter(pa.array(is_kept))  # not take: offsets of large columns overflow
    if any(row.tools for row in rows):
        tools = pa.array([tools_json(row.tools) for row in rows], pa.string())
        others = others.append_column(PROMPT_TOOLS, tools)
    return conform(
        {
            "prompt_id": [row.prompt_id for row in rows],
            "prompt_text": [judged.texts[i] for i in judged.kept],
            "prompt_messages": [
                None if isinstance(row.prompt, str) else messages_json(row.prompt) for row in rows
            ],
            "prompt_tokens": [judged.tokens[i] for i in judged.kept],
        },
        PROMPTS,
        extra=others,
    )


def hash_user_files(config: Config) -> dict[str, str]:
    """Return hash and times of every file that the run is made from: those of the models and of the data."""
    components = config.reward.components.values()
    models = [c.path for c in components if isinstance(c, RewardModelConfig)]
    tokenizers = [c.tokenizer for c in components if isinstance(c, RemoteConfig)]
    norms = [c.normalization for c in components if isinstance(c, RewardModelConfig) and c.normalization]
    given = [config.model.policy, config.model.reference, config.model.critic, *models, *tokenizers]
    given += [teacher.path for teacher in config.reward.teachers.values()]
    given += [
        *config.data.prompt_keys.values(),
        *config.data.heldout_sets.values(),
        *(norm.reference_samples for norm in norms),
    ]
    files: set[Path] = set()
    for path in (Path(text) for text in given if text):
        files.update([path] if path.is_file() else (p for p in path.rglob("*") if p.is_file()))
    return {f"file:{path}": file_state(path) for path in sorted(files)}
