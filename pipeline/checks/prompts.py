"""Checks of prompt files, and of rules on their rows: for ``validate``, before a start, and for ``try``."""

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from pipeline.config.findings import Findings
from pipeline.config.model_files import has_chat_template
from pipeline.config.schema import Config
from pipeline.data.band import band_warnings
from pipeline.data.chat import Rendering
from pipeline.data.checks import (
    Judged,
    judge,
    limit_of,
    prompt_files,
    read_file,
    trained_on,
    without_known,
)
from pipeline.data.enough import check_sets, check_usable
from pipeline.data.fit import check_top_k
from pipeline.data.prompts import Prompts, made_prompts
from pipeline.data.rendering import scoring_templates
from pipeline.data.rows import as_text
from pipeline.data.sources import scan
from pipeline.data.summary import all_prompt_lengths, lines
from pipeline.data.tables import PromptError
from pipeline.data.tokenizer_files import CannotLook, FileTokenizer, check_can_render, read_tokenizer
from pipeline.data.tokens import Ends, ends_of
from pipeline.forecast.lengths import PromptLengths
from pipeline.plugins.environments import made_tasks
from pipeline.plugins.load import MissingImport
from pipeline.plugins.row_checks import CHUNK_ROWS, Chunk, chunks_of, row_problems
from pipeline.plugins.trial import (
    NUM_ROWS,
    OpenRule,
    SampleRow,
    check_is_there,
    check_rules,
    first_look,
    open_rules,
)


def validate_rows(
    config: Config, found: Findings, lengths: list[PromptLengths]
) -> Generator[str, None, list[SampleRow]]:
    """Check the prompt files, and the rules on a row of each; rules that are not set rightly, or have no row,
    are imported only. Yields lines for people. Returns these rows, and adds to ``lengths`` those of the
    prompts."""
    files: list[Judged] = []
    with open_rules(config) as rules:
        sound = [rule for rule in rules if not found.names_below(f"reward.components.{rule.name}")]
        is_wrong = found.names("data.prompts") or found.names("data.environment")
        if not is_wrong and not found.names_below("data.environment"):
            with found.collecting("prompts"):
                try:
                    files = yield from validate_prompts(config, sound)
                except MissingImport as error:
                    if config.slurm is None:
                        raise
                    yield f"warning: {error}; compute nodes may have it, and no task was looked at"
        lengths += all_prompt_lengths(files)
        samples = [sample for judged in files for sample in samples_of(judged, 1)]
        with found.collecting("rules on rows"):
            if samples:
                yield from check_rules(config, sound, samples)
                yield from first_look(config, sound, samples_of(files[0], NUM_ROWS))
        for rule in [rule for rule in rules if not samples or rule not in sound]:
            with found.collecting(f"the rule {rule.name}"):
                check_is_there(rule)
    return samples


def validate_prompts(config: Config, rules: Sequence[OpenRule]) -> Generator[str, None, list[Judged]]:
    """Check the prompt files. Yields lines for people, and returns the files. Raises PromptError,
    PluginError."""
    found, tokenizer, why_not = judged_files(config)
    files = [judged.without(dict(problems_in(rules, judged))) for judged in found]
    if tokenizer:
        check_top_k(config, tokenizer)
        yield from lines(files, config, tokenizer, tokenizer.special, known_ends(config, tokenizer))
    else:
        yield from lines(files, config)
        yield f"not checked: lengths in tokens ({why_not}); the run's first task does"
    yield from untemplated(files, Path(config.model.policy))
    check_usable(config, files)
    yield from band_warnings(config, {judged.name: judged.most_usable for judged in trained_on(files)})
    for judged in files:
        yield from check_all_answers(config, rules, judged)
    return files


def problems_in(rules: Sequence[OpenRule], judged: Judged) -> Iterator[tuple[int, str]]:
    """Yield index and problem of rows that were looked at, and that a rule cannot score responses to."""
    return row_problems(rules, chunks_of(judged.found.columns), f"{judged.key}={judged.path}")


def check_all_answers(config: Config, rules: Sequence[OpenRule], judged: Judged) -> Iterator[str]:
    """Have rules check all rows of a file of which only a sample was judged. Yields a line for people.
    Raises PromptError where such rows are fatal, or too many."""
    found, names = judged.found, judged.found.columns.column_names
    if judged.is_made or found.num_rows == found.num_total or not names:
        return
    where: list[str] = []

    def chunks() -> Iterator[Chunk]:
        limit = limit_of(config, judged.key)
        for places, values in scan(Path(judged.path), config.data.split, names, CHUNK_ROWS, limit):
            where.extend(places)
            yield as_read(values, found.columns.schema)

    problems = list(row_problems(rules, chunks(), f"{judged.key}={judged.path}"))
    if not problems:
        return
    share, (index, why) = len(problems) / found.num_total, problems[0]
    text = (
        f"{len(problems):,} of all {found.num_total:,} rows are bad_answer, the first {where[index]}: {why}"
    )
    if share > config.data.max_dropped:
        raise PromptError(
            f"{judged.key}={judged.path}: {text} (data.max_dropped={config.data.max_dropped:g})"
        )
    yield f"{judged.key}: {text}"


def as_read(values: Chunk, schema: pa.Schema) -> Chunk:
    """Return values as reading the whole file makes them: text in a column of text."""
    text_types = (pa.string(), pa.large_string())
    texts = {field.name for field in schema if field.type in text_types}
    return {
        name: [as_text(one) for one in column] if name in texts else column for name, column in values.items()
    }


def judged_files(config: Config) -> tuple[list[Judged], FileTokenizer | None, str]:
    """Read the prompt files, or samples of large ones. Returns them, and the policy's tokenizer or why they
    were not tokenised. Raises PromptError where a whole file cannot be used."""
    found, unreadable = {}, Findings()
    made = made_tasks(config, NUM_ROWS)
    for key, path in prompt_files(config):
        with unreadable.collecting(f"{key}={path}"):
            is_made = key in made
            found[key, path] = (
                made_prompts(made[key], int(path))
                if is_made
                else read_file(config, key, path, is_sample=True)
            )
    unreadable.refuse()
    for (key, path), prompts in found.items():
        check_chat(key, path, prompts, Path(config.model.policy))
    has_chats = any(not isinstance(row.prompt, str) for prompts in found.values() for row in prompts.rows)
    tokenizer, why_not = None, ""
    try:
        if has_chats:
            check_can_render()
        tokenizer = policy_tokenizer(config)
    except CannotLook as error:
        why_not = str(error)
    rendering = Rendering(time.time(), config.model.chat_template_arguments)
    templates = []
    if tokenizer and has_chats:
        templates = scoring_templates(config, rendering, scorers_tokenizer, tokenizer.is_same)
    judged = [
        judge(*names, prompts, config, rendering, tokenizer, templates) for names, prompts in found.items()
    ]
    judged = without_known(judged)
    check_sets(judged)
    return judged, tokenizer, why_not


def check_chat(key: str, path: str, found: Prompts, policy: Path) -> None:
    """Raise PromptError when there are chat messages and no template to make text of them."""
    chats = sum(not isinstance(row.prompt, str) for row in found.rows)
    if chats and not has_chat_template(policy):
        raise PromptError(
            f"{key}={path} holds chat messages in {chats} rows, but the tokenizer of model.policy={policy} "
            "has no chat template; add chat_template to the tokenizer, or give prompts as plain text"
        )


def untemplated(files: Sequence[Judged], policy: Path) -> Iterator[str]:
    """Yield a warning for each file of text alone, where the policy has a chat template: a model that follows
    instructions would be trained outside of its format, while a base model may have a template that it was
    never trained with."""
    if not has_chat_template(policy):
        return
    for judged in files:
        if not judged.is_made and all(isinstance(row.prompt, str) for row in judged.found.rows):
            yield (
                f"warning: {judged.key}={judged.path} holds text, which the policy reads without its chat "
                'template; for an Instruct model write {"prompt": [{"role": "user", "content": ...}]}'
            )


def scorers_tokenizer(key: str, directory: str) -> FileTokenizer | None:
    """Read the tokenizer of a reward model or service; None where only the run's first task can."""
    with contextlib.suppress(CannotLook):
        return read_tokenizer(Path(directory))
    return None


def policy_tokenizer(config: Config) -> FileTokenizer:
    """Read the policy's tokenizer. Raises CannotLook."""
    if config.model.tokenizer:
        raise CannotLook(f"only tasks call model.tokenizer={config.model.tokenizer}")
    return read_tokenizer(Path(config.model.policy))


def known_ends(config: Config, tokenizer: FileTokenizer) -> Ends | None:
    """Return the ids that end a response; None where only tasks can look, as the template may name one."""
    if tokenizer.chat_template:
        try:
            check_can_render()
        except CannotLook:
            return None
    return ends_of(Path(config.model.policy), tokenizer, config.rollout.stop_token_ids)


def samples_of(judged: Judged, most: int) -> list[SampleRow]:
    """Return usable rows of a file to try rules on, spread over it, beginning with the first."""
    step = max(1, len(judged.kept) // most)
    chosen = judged.kept[::step][:most]
    return [sample_of(f"{judged.key}={judged.path}", judged.found, index) for index in chosen]


def sample_of(source: str, found: Prompts, index: int) -> SampleRow:
    """Return a row as rules get it, except for the chat template, which only tasks can apply."""
    row = found.rows[index]
    text = row.prompt if isinstance(row.prompt, str) else "\n".join(m.content or "" for m in row.prompt)
    columns = found.columns.slice(index, 1).to_pylist()[0] if found.columns.num_columns else {}
    return SampleRow(source, row.prompt_id, text, columns)
