"""Reward models that score the steps of a response: which these are, and where the model reads their ends.

A model that has the policy's tokenizer reads its ids, and a step's score is the one at the token that ends
it. Another reads text by its own template, into which marks are put to find the ends again; they are taken
out before it is read.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from pipeline.config.reward import EMPTY_LINE, ModelSteps
from pipeline.config.schema import Config
from pipeline.data.chat import refusals
from pipeline.data.tokens import text_starts, written_text
from stages.context import UserError
from stages.engines import Wanted, engine
from stages.engines.base import SequenceLimits
from stages.models.tokenizers import check_step_token, check_tells_places, policy_ends, tokenizer_of
from stages.rewards.models import ReadText, RewardModel
from stages.rewards.rows import conversation_text, name_of, tools_of
from stages.rewards.steps import SteppedScore, at_tokens, last_of_turns, tokens_of
from stages.rewards.validity import Score

_COLUMNS = (
    *("prompt_text", "prompt_messages", "response_text", "response_messages"),
    *("prompt_tokens", "response_tokens", "response_mask"),
)


@dataclass(frozen=True)
class TextStep:
    """A step of a response's text."""

    start: int
    """Its first character."""
    end: int
    """The character behind its last."""
    stop: int | None
    """The character behind its separator; None if none follows."""


def text_steps(text: str, separator: str) -> list[TextStep]:
    """Return the steps of a text, of which none is blank; the whole of a text that has nothing else."""
    pieces, start, found = text.split(separator), 0, list[TextStep]()
    for number, piece in enumerate(pieces, 1):
        end = start + len(piece)
        if piece.strip():
            found.append(TextStep(start, end, end + len(separator) if number < len(pieces) else None))
        start = end + len(separator)
    return found or [TextStep(0, len(text), None)]


def marked(text: str, steps: Sequence[TextStep], mark: str, token: str | None) -> str:
    """Return a text with a mark behind what a step says, where blanks that a template may strip begin.

    Args:
        token: what is put behind each mark; separators are then left out. None: they stay, and a step
            without one has no mark.
    """
    if token is not None:
        return "".join(f"{text[step.start : step.end]}{mark}{token}" for step in steps)
    parts, done = list[str](), 0
    for step in (step for step in steps if step.stop is not None):
        end = step.start + len(text[step.start : step.end].rstrip())
        parts += text[done:end], mark
        done = end
    return "".join(parts) + text[done:]


def unmarked(text: str, mark: str, following: Sequence[str]) -> tuple[str, list[int]]:
    """Return a text without its marks, and the character up to which each step goes.

    Args:
        following: what ends each marked step behind its mark, if the template has left it.

    Raises:
        ValueError: there are more or fewer marks.
    """
    pieces = text.split(mark)
    if len(pieces) - 1 != len(following):
        raise ValueError(f"its chat template writes {len(pieces) - 1} of {len(following)} steps")
    plain, end, ends = "".join(pieces), 0, list[int]()
    for piece, behind in zip(pieces, following, strict=False):
        end += len(piece)
        ends.append(end + (len(behind) if plain.startswith(behind, end) else 0))
    return plain, ends


class StepModel(RewardModel):
    """A reward model that gives a score for each step."""

    def _load(self, whole: Config, fingerprint: str) -> SequenceLimits:
        from stages.engines.token_scores import make_token_scorer  # torch

        path, how = self._config.path, self._config.step_score
        settings = (path, whole, how)
        wanted = Wanted("scorer", self._context.attempt, settings, (fingerprint,))
        self._token_scorer = engine(wanted, lambda: make_token_scorer(whole, path, how))
        self._policy_tokenizer = tokenizer_of(self._context, whole.model.policy)
        self._unwritten = policy_ends(self._context).unwritten
        self._token_id, token = None, self._config.step_token
        if token is not None:
            self._token_id = check_step_token(self._tokenizer, f"step_token of {path}", token)
        if not self._reads_ids:
            check_tells_places(self._tokenizer, path)
        limits: SequenceLimits = self._token_scorer.limits
        return limits

    @property
    def _reads_ids(self) -> bool:
        """Whether the model is given the policy's own ids."""
        return self._shares_tokens and self._config.step_token is None

    def _scores(self, readings: Sequence[ReadText]) -> Sequence[Score]:
        found = self._token_scorer.score([one.ids for one in readings], [one.places for one in readings])
        return [
            SteppedScore.of(at_tokens(tuple((0, score) for score in scores), one.ends, one.num_tokens))
            for one, scores in zip(readings, found, strict=True)
        ]

    def _readings(self, rows: pa.Table) -> list[ReadText]:
        """Return what the model reads of each row. A text whose steps are not found is what the policy
        happened to write; raises UserError where that is so of all, which is the template's or the model's
        doing."""
        found = []
        for row, tools in zip(rows.select(_COLUMNS).to_pylist(), tools_of(rows), strict=True):
            try:
                found.append(self._reading(row, tools))
            except ValueError as error:
                found.append(ReadText([], problem=str(error)))
        if found and all(one.problem for one in found):
            first = f"reward model {self._config.path}: {name_of(rows, 0)}: {found[0].problem}"
            raise UserError(f"{first}; change its template, or leave its steps out")
        return found

    def _reading(self, row: dict[str, Any], tools: str | None) -> ReadText:
        """Return what the model reads of a row. Raises ValueError where it cannot tell the steps."""
        steps = None
        if self._config.steps is ModelSteps.SEPARATOR:
            steps = text_steps(row["response_text"], self._config.separator or EMPTY_LINE)
        ends, num_tokens = self._ends(row, steps), len(row["response_tokens"])
        if self._reads_ids:
            before = len(row["prompt_tokens"])
            ids, places = row["prompt_tokens"] + row["response_tokens"], [before + end for end in ends]
        elif steps is not None:
            ids, places = self._by_marks(row, tools, steps)
        else:
            ids, places = self._by_turns(row, tools, len(ends))
        return ReadText(ids, tuple(places), tuple(ends), num_tokens)

    def _ends(self, row: dict[str, Any], steps: Sequence[TextStep] | None) -> list[int]:
        """Return the policy's token at which each step ends; text behind the last separator ends with the
        response."""
        ids, mask = row["response_tokens"], row["response_mask"]
        if steps is None:
            return last_of_turns(mask)

        def characters(count: int) -> int:
            return len(written_text(self._policy_tokenizer, ids[:count], mask[:count], self._unwritten))

        found = tokens_of([step.stop for step in steps if step.stop is not None], characters, len(ids))
        last = [len(ids) - 1] if steps[-1].stop is None else []
        return [*(min(end, len(ids) - 1) for end in found), *last]

    def _by_marks(
        self, row: dict[str, Any], tools: str | None, steps: Sequence[TextStep]
    ) -> tuple[list[int], list[int]]:
        """Return the model's ids of a response in one text, and the place of each step in them."""
        said, token = row["response_text"], self._config.step_token
        mark = next(_unused(said, row["prompt_text"], row["prompt_messages"], tools))
        text, special = self._text(row, tools, marked(said, steps, mark, token))
        if token is not None:
            following = [token] * len(steps)
        else:
            following = [_behind(said, step) for step in steps if step.stop is not None]
        plain, ends = unmarked(text, mark, following)
        ids, starts = text_starts(self._tokenizer, plain, special=special, affixes=self._affixes)
        places = [bisect_left(starts, end) - 1 for end in ends]
        if min(places, default=0) < 0:
            raise ValueError("a step has no token that ends it")
        if any(ids[place] != self._token_id for place in places if token is not None):
            raise ValueError(f"step_token {token} is read as part of other tokens")
        return ids, places if len(places) == len(steps) else [*places, len(ids) - 1]

    def _by_turns(
        self, row: dict[str, Any], tools: str | None, num_turns: int
    ) -> tuple[list[int], list[int]]:
        """Return the model's ids of a conversation, and the last of each turn in them: that of the text which
        its template makes of the conversation up to there."""
        given = row["response_messages"]
        said = json.loads(given) if given else [{"role": "assistant", "content": row["response_text"]}]
        parts = [said[: i + 1] for i, message in enumerate(said) if message["role"] == "assistant"]
        if len(parts) != num_turns:
            raise ValueError(f"it has {num_turns} turns and {len(parts)} messages of the policy")
        if num_turns > 1 and row["prompt_messages"] is None:
            raise ValueError("its prompt is no chat, and its template cannot tell turns apart")
        whole, special = self._text(row, tools, row["response_text"], said)
        ids, starts = text_starts(self._tokenizer, whole, special=special, affixes=self._affixes)
        places = []
        for number, part in enumerate(parts, 1):
            text, _ = self._text(row, tools, row["response_text"], part)
            if not whole.startswith(text):
                raise ValueError(f"its chat template writes turn {number} otherwise when others follow")
            places.append(len(ids) - 1 if text == whole else bisect_left(starts, len(text)) - 1)
        return ids, places

    def _text(
        self, row: dict[str, Any], tools: str | None, response: str, said: Sequence[Any] | None = None
    ) -> tuple[str, bool]:
        """Return a text as :func:`conversation_text`. Raises ValueError where the template refuses it."""
        own = self._rendering.without_arguments()
        text_of = partial(conversation_text, self._tokenizer, own, row["prompt_text"], row["prompt_messages"])
        try:
            return text_of(response, None if said is None else json.dumps(said), tools=tools)
        except refusals() as error:
            raise ValueError(f"its chat template refuses it: {error}") from error


def _behind(text: str, step: TextStep) -> str:
    """Return the blanks behind what a step says, and its separator."""
    return text[step.start + len(text[step.start : step.end].rstrip()) : step.stop]


def _unused(*texts: str | None) -> Iterator[str]:
    """Yield characters of the private use area that are in none of the texts."""
    used = set("".join(text or "" for text in texts))
    return (mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in used)
