"""Conversations of several turns: after each turn of the policy's, the user's scheduler says what comes next.

    def step(conversation: Conversation) -> list[dict[str, Any]] | None

It returns the messages to continue with, ``{"role": ..., "content": ...}`` each, with other keys that the
chat template takes, such as tool_call_id, or None to stop. It must say the same for the same conversation, or
a repeated task would not repeat its result: a task that goes on after a warning may ask again. Calls come
from several threads at once.
"""

import contextlib
import copy
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.config.rollout import ENVIRONMENT_SCHEDULER, MultiTurnConfig, RolloutConfig
from pipeline.config.schema import Config
from pipeline.data.chat import Rendering, refusals
from pipeline.data.messages import Message, as_dicts, is_json
from pipeline.data.tokens import written_text
from pipeline.plugins.interpreter.contract import DescribedError
from pipeline.plugins.load import load_plugin
from pipeline.run.schemas import ENVIRONMENT_ENTRY, FinishReason, extra_columns
from pipeline.run.seeds import derive_seed
from pipeline.text import shown
from stages.context import Quoting, UserError
from stages.engines.base import Generator, Request, Response, Turns
from stages.generation.calls import Answer, CallPool, Late
from stages.generation.chat import continuation_text
from stages.generation.environments import name_of_task, open_environments
from stages.generation.episodes import BEFORE_THE_FIRST_TURN, Episode
from stages.logs import log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEDULER_KEY = "rollout.multi_turn.scheduler"


@dataclass(frozen=True)
class Conversation:
    """The argument of a scheduler, after a turn of the policy's: copies, which it may change as it likes."""

    prompt_id: str
    sample_index: int
    """Index among the samples of a prompt, 0 to n - 1; -1 is a greedy one, of an evaluation or for ReMax."""
    prompt_text: str
    """Text that the policy was given, rendered by the chat template if there is one."""
    prompt_messages: list[dict[str, Any]] | None
    """The prompt's chat messages; None if it is plain text."""
    response_messages: list[dict[str, Any]]
    """Messages after the prompt: the policy's turns (role assistant) and the scheduler's replies. The last
    one is the turn that the policy has just ended."""
    num_turns: int
    """Turns of the policy so far, at least 1."""
    columns: Mapping[str, Any]
    """The user's own columns of the prompt's row."""

    @property
    def last_turn(self) -> str:
        """Text that the policy has just written, without special tokens."""
        return str(self.response_messages[-1]["content"])


class SchedulerFailed(Quoting):
    """The user's scheduler raised an error of its own, or took too long; a retry may succeed."""


@contextlib.contextmanager
def open_conversations(
    config: Config,
    prompts: pa.Table,
    samples: Sequence[int],
    requests: Sequence[Request],
    tokenizer: "PreTrainedTokenizerBase",
    generator: Generator,
    rendering: Rendering,
    should_stop: Callable[[], bool],
    unwritten: frozenset[int],
) -> "Iterator[Conversations | None]":
    """Yield the conversations of a task's requests; None where each has one turn only.

    Args:
        prompts: a row per request.
        samples: ``sample_index`` of each request of a prompt, as in :func:`.responding.respond`.
        generator: the engine that the requests are for.
        rendering: what the policy's chat template is given besides messages.
        should_stop: waiting for the scheduler ends once it holds.
        unwritten: end tokens, which are no part of a turn's text.

    Raises:
        PluginError: there is no such scheduler.
    """
    settings = config.rollout.multi_turn
    if settings is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        function = stack.enter_context(_scheduler(settings, prompts))
        calls = CallPool(function, settings.workers, settings.step_seconds)
        stack.callback(calls.close)
        yield Conversations(
            settings,
            openings_of(prompts, samples),
            requests,
            tokenizer,
            rendering,
            TokenBudget.of(config.rollout, generator.limits.context),
            generator.problem_with,
            calls,
            should_stop,
            unwritten,
        )


@contextlib.contextmanager
def _scheduler(settings: MultiTurnConfig, prompts: pa.Table) -> Iterator[Callable[[Conversation], Any]]:
    if settings.scheduler != ENVIRONMENT_SCHEDULER:
        yield load_plugin(SCHEDULER_KEY, settings.scheduler)
        return
    with open_environments(prompts[ENVIRONMENT_ENTRY].to_pylist(), settings.workers) as scheduler:
        yield scheduler


def openings_of(prompts: pa.Table, samples: Sequence[int]) -> list[Conversation]:
    """Return one conversation without turns per row of ``prompts``, which has each prompt once per sample."""
    extra = extra_columns(prompts).to_pylist() if extra_columns(prompts).num_columns else cycle([{}])
    ids, texts = prompts["prompt_id"].to_pylist(), prompts["prompt_text"].to_pylist()
    messages = [text and json.loads(text) for text in prompts["prompt_messages"].to_pylist()]
    rows = zip(ids, cycle(samples), texts, messages, extra, strict=False)
    return [Conversation(key, sample, text, begun, [], 0, own) for key, sample, text, begun, own in rows]


def _name(opening: Conversation) -> str:
    return f"prompt_id {opening.prompt_id}, sample {opening.sample_index}{name_of_task(opening.columns)}"


@dataclass(frozen=True)
class TokenBudget:
    """Limits on the tokens of a conversation."""

    response_tokens: int
    """Most tokens of all turns and of what comes between them (rollout.max_new_tokens)."""
    turn_tokens: int | None
    context: int

    @staticmethod
    def of(rollout: RolloutConfig, context: int) -> "TokenBudget":
        turns = rollout.multi_turn
        return TokenBudget(rollout.max_new_tokens, turns.max_turn_tokens if turns else None, context)

    def of_turn(self, num_prompt: int, num_response: int) -> int:
        """Return the most tokens of the next turn; less than 1 where there is no room for one."""
        left = min(self.response_tokens - num_response, self.context - num_prompt - num_response)
        return left if self.turn_tokens is None else min(left, self.turn_tokens)


@dataclass
class Conversations(Turns):
    """All conversations of a task, by the index of their first request. The user's scheduler says what
    follows each response."""

    _settings: MultiTurnConfig
    _openings: Sequence[Conversation]
    _requests: Sequence[Request]
    _tokenizer: "PreTrainedTokenizerBase"
    _rendering: Rendering
    _room: TokenBudget
    _problem_with: Callable[[Request], str | None]
    _calls: CallPool
    _should_stop: Callable[[], bool]
    _unwritten: frozenset[int] = frozenset()
    _episodes: dict[int, Episode] = field(default_factory=dict)
    _over: dict[int, None] = field(default_factory=dict)

    def ended(self, index: int, response: Response) -> None:
        is_own = [True] * len(response.tokens)
        text = written_text(self._tokenizer, response.tokens, is_own, self._unwritten)
        episode = self._episodes.get(index, BEFORE_THE_FIRST_TURN).with_turn(response, text)
        self._episodes[index] = episode
        if response.finish_reason is FinishReason.STOP and episode.num_turns < self._settings.max_turns:
            opening, messages = copy.deepcopy(self._openings[index]), as_dicts(episode.messages or ())
            asked = replace(opening, response_messages=messages, num_turns=episode.num_turns)
            self._calls.start(index, asked)
        else:
            self._over[index] = None

    def due(self, wait: bool) -> Mapping[int, Request | None]:
        """Return next requests, as :class:`stages.engines.base.Turns` says.

        Raises:
            Stopped: nothing has come back yet, and the process is to stop.
            SchedulerFailed: the scheduler raised an error, or is late.
            UserError: it returned what it may not, or the chat template refuses its messages.
        """
        answers: dict[int, Request | None] = dict(self._over)
        self._over.clear()
        try:
            back = self._calls.answers(wait and not answers, self._should_stop)
        except Late as late:
            raise SchedulerFailed(
                f"{self._who} was not back after rollout.multi_turn.step_seconds="
                f"{self._settings.step_seconds:g} for {_name(self._openings[late.key])}"
            ) from None
        return answers | {index: self._next_request(index, answer) for index, answer in back.items()}

    def episode(self, index: int, response: Response) -> Episode:
        """Return the episode of a conversation that is over; ``response`` is its last."""
        if index in self._episodes:
            return self._episodes[index]
        return replace(BEFORE_THE_FIRST_TURN, finish_reason=response.finish_reason)

    @property
    def _who(self) -> str:
        return f"{SCHEDULER_KEY}={self._settings.scheduler}"

    def _next_request(self, index: int, answer: Answer) -> Request | None:
        """Return the request of the next turn; None when the conversation is over: the scheduler ends it, or
        there is no room for its messages and one token more, or the model cannot take them. In the latter two
        cases the messages are left out whole."""
        opening, first, episode = self._openings[index], self._requests[index], self._episodes[index]
        messages = self._messages(opening, answer)
        if messages is None:
            return None
        said = self._tokens(opening, episode, messages)
        room = self._room.of_turn(len(first.prompt_tokens), len(episode.tokens) + len(said))
        tokens = [*first.prompt_tokens, *episode.tokens, *said]
        if room < 1:
            self._episodes[index] = replace(episode, finish_reason=FinishReason.LENGTH)
            return None
        seed = derive_seed(first.seed, "turn", episode.num_turns)
        following = replace(first, prompt_tokens=tokens, max_new_tokens=room, seed=seed)
        if problem := self._problem_with(following):
            log.warning(f"{_name(opening)}: the conversation ends after turn {episode.num_turns}: {problem}")
            self._episodes[index] = replace(episode, finish_reason=FinishReason.REFUSED)
            return None
        self._episodes[index] = episode.with_answer(said, messages)
        return following

    def _messages(self, opening: Conversation, answer: Answer) -> tuple[Message, ...] | None:
        if error := answer.raised:
            if isinstance(error, DescribedError):
                raise SchedulerFailed(f"{self._who} {error} for {_name(opening)}") from error
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}"
            raise SchedulerFailed(
                f"{self._who} raised {type(error).__name__}: {error} for {_name(opening)}, at {where}"
            ) from error
        if problem := problem_with(answer.returned):
            raise UserError(
                f"{self._who} returned {problem} for {_name(opening)}; wanted is a list of messages, "
                '{"role": ..., "content": ...} each, or None to stop'
            )
        if answer.returned is None:
            return None
        return tuple(map(Message.of, answer.returned))

    def _tokens(self, opening: Conversation, episode: Episode, messages: Sequence[Message]) -> list[int]:
        """Return the ids of new messages: after a chat prompt by the chat template, else their contents as
        they are."""
        text = "".join(message.content or "" for message in messages)
        if opening.prompt_messages is not None:
            end = str(self._tokenizer.decode(list(episode.tokens[-1:]), skip_special_tokens=False))
            try:
                text = continuation_text(messages, end, self._tokenizer, self._rendering)
            except UserError:
                raise
            except refusals() as error:
                said = f"what {self._who} returned for {_name(opening)}: {error}"
                raise UserError(f"the policy's chat template refuses {said}") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def problem_with(returned: Any) -> str | None:
    """Return why a value is not what a scheduler may return, in words; None when it is."""
    if returned is None:
        return None
    if not isinstance(returned, list | tuple):
        return shown(returned)
    if not returned:
        return "an empty list"
    for place, message in enumerate(returned):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            return f"{shown(message)} as message {place}"
        for key, value in message.items():
            is_right = is_text(value) if key in ("role", "content") else is_text(key) and is_json(value)
            if not is_right:
                return f"{shown(value)} as {key} of message {place}"
    return None


def is_text(value: Any) -> bool:
    """Whether a value is text that can be written as UTF-8: no half of a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
