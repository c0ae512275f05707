"""What is said of judged prompt files: lines for people, and the counts that every row of a run has."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.engines import Engine
from pipeline.config.model_files import text_settings
from pipeline.config.reward import RuleConfig, prefill_of
from pipeline.config.reward_rules import special_token_warnings
from pipeline.config.schema import Config
from pipeline.data.checks import Judged, trained_on
from pipeline.data.fit import fit_warnings
from pipeline.data.prompts import Rejected, summarize
from pipeline.data.rows import RejectReason
from pipeline.data.tokens import Ends, end_warnings, hidden_ids
from pipeline.forecast.lengths import MOST, PromptLengths, lengths_of
from pipeline.text import printable

_WARN_ABOVE = 0.1
"""Share of dropped rows above which people are warned."""
_MOST_LISTED = 10


# --- lines ---


def lines(
    files: Sequence[Judged],
    config: Config,
    tokenizer: Any | None = None,
    special: Collection[str] = (),
    ends: Ends | None = None,
) -> Iterator[str]:
    """Yield lines for people on all prompt files, and on how the policy's tokenizer fits them.

    Args:
        tokenizer: None where it cannot be had.
        special: its special tokens.
        ends: ids that end a response; None where they are not known.
    """
    policy = config.model.policy
    if ends is not None:
        yield from end_warnings(ends, tokenizer, policy)
    if tokenizer is not None:
        yield from fit_warnings(config, tokenizer, any(judged.has_chats for judged in files))
    if masked := num_masked(config, tokenizer):
        yield f"policy: {masked:,} ids that its tokenizer has no token for are never written"
    for judged in files:
        yield from describe(judged, config)
    yield from special_token_warnings(config, special)


def num_masked(config: Config, tokenizer: Any | None) -> int:
    """Count the ids of the policy that its tokenizer has no token for; 0 where that is not known."""
    size = text_settings(Path(config.model.policy)).get("vocab_size")
    return len(hidden_ids(tokenizer, size)) if tokenizer is not None and isinstance(size, int) else 0


def describe(judged: Judged, config: Config) -> Iterator[str]:
    """Yield lines for people: counts by reason, rows as examples, a warning if many are dropped."""
    found, limit = judged.found, config.data.max_prompt_tokens
    line = f"{judged.key}: {len(judged.kept)} usable rows {judged.origin}; {summarize(judged.rejected)}"
    if found.num_rows < found.num_total:
        line += f"; looked at {found.num_rows:,} of {found.num_total:,} rows"
    yield line
    yield from (f"  {text}" for text in listed(judged.rejected))
    read_as = {str(reading): count for reading, count in judged.read_as.items()}
    for said, count in sorted({**read_as, **judged.left_out}.items()):
        yield printable(f"  {count:,} rows: {said}")
    if judged.num_truncated:
        yield f"  {judged.num_truncated} prompts truncated to their last {limit} tokens"
    if judged.share_dropped > _WARN_ABOVE:
        portion = judged.portion_dropped
        yield f"warning: {judged.key}: {portion} cannot be used, and the policy never sees them"
    yield from prefill_warnings(judged, config)
    if judged.tokens and judged.kept:
        yield f"{judged.key}: {lengths_in_words(judged, config)}"
    if judged.tokens and (num_short := num_without_room(judged, config)):
        yield (
            f"warning: {judged.key}: after {num_short} of {len(judged.kept)} prompts there is no room for "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}; their responses are cut shorter"
        )


def prefill_warnings(judged: Judged, config: Config) -> Iterator[str]:
    """Warn of prompts that do not end as a rule's ``prefill`` says."""
    for name, rule in config.reward.components.items():
        if not (isinstance(rule, RuleConfig) and rule.prefill and judged.texts):
            continue
        others = [i for i in judged.kept if not prefill_of(judged.texts[i], rule)]
        if others:
            yield (
                f"warning: {judged.key}: {len(others)} of {len(judged.kept)} prompts do not end with "
                f"reward.components.{name}.prefill={rule.prefill!r}, as "
                f"{judged.found.rows[others[0]].where}, which ends with {judged.texts[others[0]][-20:]!r}"
            )


def lengths_in_words(judged: Judged, config: Config) -> str:
    """Return how long the usable prompts are, and whether a response has room after them."""
    found = prompt_lengths(judged)
    assert found is not None, "it has prompts that were tokenised"
    num_short, wanted = num_without_room(judged, config), config.rollout.max_new_tokens
    leaving = f"{num_short:,} of {found.number:,} leave no" if num_short else "all leave"
    context = config.model.context_length
    limit = f"data.max_prompt_tokens={config.data.max_prompt_tokens} of a context of {context}"
    over = f"{found.num_over:,} beside them are over" if found.num_over else "none is over"
    if judged.num_truncated:
        over = f"{found.num_over:,} of them were over"
    return f"{span_in_words(found)}; {leaving} room for rollout.max_new_tokens={wanted}; {over} {limit}"


def span_in_words(found: PromptLengths) -> str:
    """Return the lengths of prompts without what they are compared with."""
    span = f"{found.shortest:,} to {found.longest:,} tokens"
    return f"prompts of {span}, median {found.median:,}, {MOST:.0%} up to {found.most:,}"


def prompt_lengths(*files: Judged) -> PromptLengths | None:
    """Sum up the lengths of the usable prompts of files; None where nothing was tokenised."""
    num_over = sum(
        one.num_truncated + sum(row.reason is RejectReason.TOO_LONG for row in one.rejected) for one in files
    )
    lengths = [len(one.tokens[i]) for one in files if one.tokens for i in one.kept]
    return lengths_of(files[0].key, lengths, num_over) if lengths else None


def all_prompt_lengths(files: Sequence[Judged]) -> list[PromptLengths]:
    """Return the lengths of the prompts that are trained on, of all their files together, and of each set of
    held-out ones."""
    groups = [trained_on(files), *([one] for one in files if one.is_heldout)]
    return [found for group in groups if (found := prompt_lengths(*group))]


def num_without_room(judged: Judged, config: Config) -> int:
    """Count usable prompts after which there is no room for the longest response."""
    is_vllm = config.rollout.engine == Engine.VLLM
    lengths = (config.model.context_length, config.rollout.vllm.max_model_len if is_vllm else None)
    room = min(length for length in lengths if length) - config.rollout.max_new_tokens
    return sum(len(judged.tokens[i]) > room for i in judged.kept)


def listed(rejected: Sequence[Rejected]) -> Iterator[str]:
    """Yield up to ten rows, at least one for each reason while there is room; then how many more exist."""
    first = {one.reason: index for index, one in reversed(list(enumerate(rejected)))}
    chosen = dict.fromkeys([*sorted(first.values()), *range(len(rejected))])
    shown = sorted(list(chosen)[:_MOST_LISTED])
    yield from (printable(f"{rejected[index].reason}: {rejected[index].detail}") for index in shown)
    if more := len(rejected) - len(shown):
        yield f"and {more:,} more"


# --- counts ---

_PREFIX = "data/"
_TOTALS = ("prompts", "rejected", "truncated", "left_out", "masked_ids")
_BY_KIND = ("prompts/", "rejected/", "read_as/")


MEAN_LENGTH = "prompt_length/mean"
"""Name of the mean length of a run's prompts among prepare's metrics."""


def length_metrics(files: Sequence[Judged]) -> dict[str, float]:
    """Return the lengths of the prompts that are trained on, as prepare's metrics: in tokens."""
    found = prompt_lengths(*trained_on(files))
    if found is None:
        return {}
    return {
        MEAN_LENGTH: found.mean,
        "prompt_length/median": float(found.median),
        "prompt_length/most": float(found.most),
        "prompt_length/longest": float(found.longest),
        "prompt_length/over": float(found.num_over),
    }


def counts(files: Sequence[Judged], num_masked: int) -> dict[str, float]:
    """Return what was left out, cut, masked or read otherwise in all prompt files, held-out ones included, as
    prepare's metrics.

    Args:
        num_masked: ids of the policy that no response has.
    """
    reasons = Counter(one.reason for judged in files for one in judged.rejected)
    kinds: Counter[str] = Counter()
    for judged in files:
        for reading, count in judged.read_as.items():
            kinds[reading.kind] += count
    return {
        "prompts": float(sum(len(judged.kept) for judged in trained_on(files))),
        **{f"prompts/{one.name}": float(len(one.kept)) for one in trained_on(files) if one.name},
        "rejected": float(reasons.total()),
        **{f"rejected/{reason}": float(count) for reason, count in reasons.items()},
        "truncated": float(sum(judged.num_truncated for judged in files)),
        **{f"read_as/{kind}": float(count) for kind, count in kinds.items()},
        "left_out": float(sum(sum(judged.left_out.values()) for judged in files)),
        "masked_ids": float(num_masked),
    }


def row_counts(prepared: Mapping[str, float]) -> dict[str, float]:
    """Return the :func:`counts` among prepare's metrics, by their names in rows, without zeros."""
    return {
        f"{_PREFIX}{name}": value
        for name, value in prepared.items()
        if value and (name in _TOTALS or name.startswith(_BY_KIND))
    }
