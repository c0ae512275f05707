"""Rewards of steps: at which token of a response each of them lies, and what components give together."""

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

import pyarrow as pa

from pipeline.config.reward import Component, RemoteConfig, RuleConfig, StepUnit, prefill_of
from pipeline.data.tokens import written_text
from pipeline.plugins.called import Steps
from pipeline.run.schemas import component_column, steps_column
from stages.context import Context, UserError
from stages.models.tokenizers import policy_ends, tokenizer_of
from stages.rewards.rows import name_of
from stages.rewards.validity import Score, weight_scale

TokenSteps = Sequence[float | None]
"""One entry per response token: the reward of the step that ends there, or None."""


class SteppedScore(float):
    """Score of a response by steps: their sum, which knows them."""

    steps: TokenSteps

    @classmethod
    def of(cls, steps: TokenSteps) -> Self:
        score = cls(sum(value for value in steps if value is not None))
        score.steps = steps
        return score


def gives_steps(component: Component) -> bool:
    """Whether a component gives rewards of steps."""
    return not isinstance(component, RemoteConfig) and component.steps is not None


def stepped(
    context: Context, name: str, rule: RuleConfig, rows: pa.Table, answers: Sequence[Score | Steps]
) -> list[Score]:
    """Return a rule's answers as scores, with their steps at tokens. Numbers stay as they are: also those of
    responses that took too long, or at which it failed.

    Raises:
        UserError: it gave a response another number of steps than it has turns, or one beyond its end.
    """
    if rule.steps is None:
        return [answer for answer in answers if not isinstance(answer, tuple)]
    ends_of: EndsOf = turn_ends if rule.steps is StepUnit.TURNS else character_ends(context, rule)
    names = ("response_tokens", "response_mask", "prompt_text")
    found: list[Score] = []
    for index, (answer, *row) in enumerate(
        zip(answers, *(rows[column].to_pylist() for column in names), strict=True)
    ):
        if not isinstance(answer, tuple):
            found.append(answer)
            continue
        try:
            found.append(SteppedScore.of(at_tokens(answer, ends_of(answer, *row), len(row[0]))))
        except ValueError as error:
            where = f"reward component {name!r} ({rule.function}) gave {name_of(rows, index)}"
            raise UserError(f"{where} {error}") from None
    return found


def at_tokens(steps: Steps, ends: Sequence[int], num_tokens: int) -> list[float | None]:
    """Return the steps at their tokens; those that end at the same one are added up."""
    found: list[float | None] = [None] * num_tokens
    for end, (_, value) in zip(ends, steps, strict=True):
        found[end] = (found[end] or 0.0) + value
    return found


EndsOf = Callable[[Steps, Sequence[int], Sequence[bool], str], Sequence[int]]
"""Returns the token at which each step ends, of a response's steps, ids and mask, and the prompt's text.
Raises ValueError in words that follow the response's name."""


def turn_ends(steps: Steps, ids: Sequence[int], mask: Sequence[bool], prompt: str) -> list[int]:
    """Return the last token of each turn of the policy. An :data:`EndsOf`."""
    ends = last_of_turns(mask)
    if len(ends) != len(steps):
        raise ValueError(f"{len(steps)} steps, and it has {len(ends)} turns; give one number for each turn")
    return ends


def last_of_turns(mask: Sequence[bool]) -> list[int]:
    """Return the last token of each turn of the policy."""
    turns = itertools.pairwise([*mask, False])
    return [i for i, (one, following) in enumerate(turns) if one and not following]


def character_ends(context: Context, rule: RuleConfig) -> EndsOf:
    """Return an :data:`EndsOf` of steps that count characters of the text that the rule gets."""
    tokenizer, unwritten = tokenizer_of(context, context.config.model.policy), policy_ends(context).unwritten

    def ends_of(steps: Steps, ids: Sequence[int], mask: Sequence[bool], prompt: str) -> list[int]:
        before = len(prefill_of(prompt, rule)) if rule.prefill else 0

        def characters(count: int) -> int:
            part = ids[:count], mask[:count]
            return before + len(written_text(tokenizer, *part, unwritten, special=rule.special_tokens))

        length = characters(len(ids))
        if beyond := [end for end, _ in steps if end > length or not ids]:
            raise ValueError(
                f"a step up to character {beyond[0]}, and its text has {length}; give at most that"
            )
        return tokens_of([end for end, _ in steps], characters, len(ids))

    return ends_of


def tokens_of(ends: Sequence[int], characters: Callable[[int], int], num_tokens: int) -> list[int]:
    """Return the first token with which a response has as many characters.

    Args:
        ends: numbers of characters, ascending.
        characters: characters of the first tokens, by their number.
    """
    counts, known, found = range(1, num_tokens + 1), functools.cache(characters), list[int]()
    for end in ends:
        found.append(bisect_left(counts, end, lo=found[-1] if found else 0, key=known))
    return found


def step_rewards(
    scores: Sequence[Score], weights: Sequence[float], mask: Sequence[bool]
) -> list[float | None] | None:
    """Return the reward of each step of a response, at its token, from the scores of all components: one
    without steps gives its score at the last token of the policy's. The sum is the response's reward; None
    where it has none."""
    scale = weight_scale(scores, weights)
    if scale is None:
        return None
    found: list[float | None] = [None] * len(mask)
    last = max((i for i, is_own in enumerate(mask) if is_own), default=None)
    for score, weight in zip(scores, weights, strict=True):
        if score is None or not weight:
            continue
        at: Iterable[tuple[int | None, float | None]] = [(last, score)]
        if isinstance(score, SteppedScore):
            at = enumerate(score.steps)
        for index, value in at:
            if index is not None and value is not None:
                found[index] = (found[index] or 0.0) + scale * weight * value
    return found


def step_columns(scores: Mapping[str, Sequence[Score]]) -> dict[str, pa.Array]:
    """Return columns of a pool's shard with the steps of components: a list per row, null where the component
    gave one number or none."""
    kind = pa.list_(pa.float64())
    return {
        steps_column(name): pa.array([getattr(score, "steps", None) for score in values], kind)
        for name, values in scores.items()
    }


def scores_in(table: pa.Table, name: str) -> list[Score]:
    """Return a component's scores in a pool's shard, with their steps."""
    scores: list[Score] = table[component_column(name)].to_pylist()
    if steps_column(name) not in table.column_names:
        return scores
    pairs = zip(scores, table[steps_column(name)].to_pylist(), strict=True)
    return [score if steps is None else SteppedScore.of(steps) for score, steps in pairs]
