"""Judgement of a prompt file: which prompts the policy can be given.

Prepare and validate judge by the same functions, with the tokenizer that each of them has.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.config.environment import HELDOUT_TASKS_KEY, TASKS_KEY
from pipeline.config.model_files import text_settings
from pipeline.config.schema import PROMPTS_KEY, Config, LongPrompts
from pipeline.data.chat import Rendering
from pipeline.data.curriculum import unordered
from pipeline.data.prompts import Prompt, Prompts, Rejected, read_prompts
from pipeline.data.rendering import PromptTokenizer, ScoringTemplate, prompt_texts
from pipeline.data.rows import ReadAs, Reading, RejectReason
from pipeline.data.tables import PromptError
from pipeline.data.tokens import affixes_of, text_ids
from pipeline.run.schemas import reserved_columns
from pipeline.text import listing


@dataclass(frozen=True)
class Judged:
    """A prompt file, read and as far as possible tokenised."""

    key: str
    """The key of the configuration that names it."""
    path: str
    found: Prompts
    kept: tuple[int, ...]
    """Indices into ``found.rows`` of the prompts that can be used."""
    rejected: tuple[Rejected, ...]
    """All others that were looked at, in the file's order."""
    texts: Sequence[str] = ()
    """Text of each of ``found.rows`` as the policy reads it, cut if it was too long. Empty where
    nothing was tokenised."""
    tokens: Sequence[Sequence[int]] = field(default=(), repr=False)
    num_truncated: int = 0
    read_as: Counter[Reading] = field(default_factory=Counter)
    """Counts of rows, by what in them was read otherwise than it is written."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Counts of prompts, by what in them a chat template does not write, in words."""

    @property
    def is_made(self) -> bool:
        """Whether environments have made it, and it is no file."""
        return self.key in (TASKS_KEY, HELDOUT_TASKS_KEY)

    @property
    def origin(self) -> str:
        """Where the rows are from, for people."""
        return "of environments" if self.is_made else f"in {self.path}"

    @property
    def has_chats(self) -> bool:
        """Whether any usable prompt is made of messages."""
        return any(not isinstance(self.found.rows[i].prompt, str) for i in self.kept)

    @property
    def is_heldout(self) -> bool:
        return not _is_trained_on(self.key)

    @property
    def name(self) -> str:
        """Name of the file among several that are trained on; empty for any other."""
        return name_of(self.key)

    def without(
        self, problems: Mapping[int, str], reason: RejectReason = RejectReason.BAD_ANSWER
    ) -> "Judged":
        """Return the same file without the rows that a reward rule cannot score responses to, or that are
        left out for another ``reason``.

        Args:
            problems: why, by index into ``found.rows``.
        """
        rows = self.found.rows
        unfit = [rows[i].rejected(reason, problems[i]) for i in self.kept if i in problems]
        kept = tuple(i for i in self.kept if i not in problems)
        rejected = tuple(sorted([*self.rejected, *unfit], key=lambda one: one.row))
        return replace(self, kept=kept, rejected=rejected)

    @property
    def share_dropped(self) -> float:
        """Dropped share of the rows that were looked at."""
        return len(self.rejected) / max(self.found.num_rows, 1)

    @property
    def portion_dropped(self) -> str:
        """Dropped rows in words, e.g. ``3 of 8 rows (38%)``."""
        return f"{len(self.rejected):,} of {self.found.num_rows:,} rows ({self.share_dropped:.0%})"

    @property
    def most_usable(self) -> int:
        """Rows that can be used, if all that were not looked at can be."""
        return len(self.kept) + self.found.num_total - self.found.num_rows


# --- judging ---


def prompt_files(config: Config) -> Iterator[tuple[str, str]]:
    """Yield keys and paths of the prompt files to read, or keys and values of the tasks that environments
    make: held-out prompts only if something is evaluated."""
    made = config.data.environment
    if made is None:
        yield from config.data.prompt_keys.items()
    else:
        yield TASKS_KEY, str(made.size)
    if config.evaluate.every:
        yield from (
            config.data.heldout_keys.items()
            if made is None
            else [(HELDOUT_TASKS_KEY, str(made.heldout_size))]
        )


def name_of(key: str) -> str:
    """Return the name in ``data.prompts.NAME``; empty for any other key."""
    above, _, name = key.partition(f"{PROMPTS_KEY}.")
    return "" if above else name


def trained_on(files: Sequence[Judged]) -> list[Judged]:
    """Return the files, or the tasks, that are trained on: those that are not held out."""
    return [judged for judged in files if not judged.is_heldout]


def without_known(files: Sequence[Judged]) -> list[Judged]:
    """Return files without the prompts that one before them has: of several files those of an id, and of
    environments held-out tasks whose prompt is trained on, as those of few different tasks make the same by
    any seed."""
    found = {judged.key: judged for judged in files}
    if any(judged.name for judged in files):
        return _without_repeated(files)
    if HELDOUT_TASKS_KEY not in found or TASKS_KEY not in found:
        return list(files)
    heldout, known = found[HELDOUT_TASKS_KEY], found[TASKS_KEY].found.rows
    where = {row.prompt_id: row.where for row in known}
    same = {i: row.prompt_id for i, row in enumerate(heldout.found.rows) if row.prompt_id in where}
    problems = {i: f"same prompt as {where[one]}, which is trained on" for i, one in same.items()}
    return [found[TASKS_KEY], heldout.without(problems, RejectReason.DUPLICATE_ID)]


def _without_repeated(files: Sequence[Judged]) -> list[Judged]:
    """Leave a prompt that several files have to the first of them."""
    where: dict[str, str] = {}
    left = []
    for judged in files:
        if judged.name:
            rows = judged.found.rows
            same = {i: where[rows[i].prompt_id] for i in judged.kept if rows[i].prompt_id in where}
            problems = {i: f"same prompt as {first}" for i, first in same.items()}
            judged = judged.without(problems, RejectReason.DUPLICATE_ID)
            where |= {rows[i].prompt_id: f"{rows[i].where} of {judged.path}" for i in judged.kept}
        left.append(judged)
    return left


def read_file(config: Config, key: str, path: str, is_sample: bool = False) -> Prompts:
    """Read a prompt file. Ids that the rows of one of several files bring begin with its name: two data sets
    may both count from 0. Raises PromptError where the whole file cannot be used."""
    data = config.data
    found = read_prompts(
        Path(path),
        prompt_column=data.prompt_column,
        id_column=data.id_column,
        tools_column=data.tools_column,
        split=data.split,
        columns=data.columns,
        reserved=reserved_columns(config),
        is_sample=is_sample,
        limit=limit_of(config, key),
    )
    names, column = found.columns.column_names, data.sort_column
    if _is_sorted(config, key) and column not in names:
        way_out = f"set data.sort_by to one of: {listing(names)}"
        raise PromptError(f"{path} has no column {column!r} beside prompts and ids; {way_out}")
    if not (name := name_of(key)) or data.id_column is None:
        return found
    rows = tuple(replace(row, prompt_id=f"{name}/{row.prompt_id}") for row in found.rows)
    rejected = tuple(
        one if one.prompt_id is None else replace(one, prompt_id=f"{name}/{one.prompt_id}")
        for one in found.rejected
    )
    return replace(found, rows=rows, rejected=rejected)


def limit_of(config: Config, key: str) -> int | None:
    """Return the most rows to read of a file; None for all, as of held-out prompts."""
    return config.data.limit if _is_trained_on(key) else None


def _is_trained_on(key: str) -> bool:
    return key in (PROMPTS_KEY, TASKS_KEY) or bool(name_of(key))


def _is_sorted(config: Config, key: str) -> bool:
    return config.data.sort_by is not None and _is_trained_on(key)


def judge(
    key: str,
    path: str,
    found: Prompts,
    config: Config,
    rendering: Rendering,
    tokenizer: PromptTokenizer | None = None,
    templates: Sequence[ScoringTemplate] = (),
) -> Judged:
    """Decide for each prompt whether it can be used; without a tokenizer, as far as is known without tokens.

    Args:
        rendering: what the policy's chat template is given besides messages and tools.
        templates: chat templates of scoring components, which have to take the messages too.

    Raises:
        PromptError: the chat template, or the tokenizer, is of no use for the whole file.
    """
    judged = _tokenized(key, path, found, config, rendering, tokenizer, templates)
    if not _is_sorted(config, key):
        return judged
    return judged.without(unordered(found.columns, str(config.data.sort_column)), RejectReason.NO_NUMBER)


def _tokenized(
    key: str,
    path: str,
    found: Prompts,
    config: Config,
    rendering: Rendering,
    tokenizer: PromptTokenizer | None,
    templates: Sequence[ScoringTemplate],
) -> Judged:
    if tokenizer is None:
        return Judged(key, path, found, tuple(range(len(found.rows))), found.rejected, read_as=found.read_as)
    rendered = prompt_texts(found.rows, rendering, tokenizer, templates)
    texts, refused = rendered.texts, rendered.refused
    tokens, num_begun = tokenize(texts, found.rows, tokenizer)
    read_as = found.read_as + Counter({Reading(ReadAs.ONE_BEGIN_TOKEN): num_begun})
    limit, affixes = config.data.max_prompt_tokens or 0, affixes_of(tokenizer)
    cuts = config.data.long_prompts is LongPrompts.TRUNCATE
    long = [i for i, ids in enumerate(tokens) if len(ids) > limit] if cuts else []
    for i in long:
        tokens[i] = affixes.cut(tokens[i], limit)
        # What the tokenizer adds to plain text is no part of the text; what a template wrote is.
        added = affixes.num_leading(tokens[i]) if isinstance(found.rows[i].prompt, str) else 0
        texts[i] = tokenizer.decode(tokens[i][added:])
    size = text_settings(Path(config.model.policy)).get("vocab_size")
    problems = [
        refused.get(i) or token_problem(row, tokens[i], limit, size) for i, row in enumerate(found.rows)
    ]
    kept = tuple(i for i, problem in enumerate(problems) if problem is None)
    unfit = [problem for problem in problems if problem]
    check_vocabulary(unfit, len(kept), config)
    rejected = sorted([*found.rejected, *unfit], key=lambda one: one.row)
    return Judged(
        key, path, found, kept, tuple(rejected), texts, tokens, len(long), read_as, rendered.left_out
    )


def tokenize(
    texts: Sequence[str], rows: Sequence[Prompt], tokenizer: PromptTokenizer
) -> tuple[list[list[int]], int]:
    """Return the token ids of each text: plain text begins as the tokenizer begins texts, once, and has no
    end, since it is continued; a chat template has written its own special tokens already. And how many
    texts had that begin already."""
    affixes = affixes_of(tokenizer)
    bare = text_ids(tokenizer, texts, special=False, ends=False, affixes=affixes)
    is_plain = [isinstance(row.prompt, str) for row in rows]
    begun = [plain and affixes.begins_text(ids) for ids, plain in zip(bare, is_plain, strict=True)]
    whole = [
        affixes.around(ids, ends=False) if plain else ids for ids, plain in zip(bare, is_plain, strict=True)
    ]
    return whole, sum(begun)


def token_problem(row: Prompt, tokens: Sequence[int], limit: int, size: int | None) -> Rejected | None:
    """Return why the policy cannot be given a prompt of these tokens, of at most ``limit``; None if it can.
    The vocabulary's ``size`` is None where it is not known."""
    if not tokens:
        return row.rejected(RejectReason.NO_TOKENS, "the tokenizer gives no token for it")
    if len(tokens) > limit:
        said = f"{len(tokens)} tokens, and data.max_prompt_tokens is {limit}"
        return row.rejected(RejectReason.TOO_LONG, said)
    if size is not None and max(tokens) >= size:
        said = f"its token {max(tokens)} is beyond the model's {size} embeddings"
        return row.rejected(RejectReason.UNKNOWN_TOKEN, said)
    return None


def check_vocabulary(problems: Sequence[Rejected], num_kept: int, config: Config) -> None:
    """Raise PromptError when ids without an embedding are the rule: the tokenizer is not the model's own."""
    unknown = [problem for problem in problems if problem.reason is RejectReason.UNKNOWN_TOKEN]
    if len(unknown) > num_kept:
        raise PromptError(
            f"model.policy={config.model.policy}: in {len(unknown)} prompts its tokenizer gives ids that the "
            f"model has no embedding for ({unknown[0].detail}); it is not the model's own tokenizer"
        )
