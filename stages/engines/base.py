"""The interface of engines: requests in, responses or scores out.

An engine is one module with ``make_generator(config, directory)`` that returns a :class:`Generator`, or
``make_scorer(config, directory)`` that returns a :class:`Scorer`, or both. It is chosen by one line of
configuration, ``rollout.engine=my_engine:make_generator`` or ``reward.engine=my_engine:make_scorer``. What
every engine must do is written here and tested by the contract tests, tests/stages/test_engine_contract.py.

A trainer is chosen in the same way: a module with ``make_trainer(config)`` that returns a
:class:`PolicyTrainer`, and ``update.engine=my_trainer:make_trainer``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from pipeline.run.schemas import FinishReason
from stages.files.policy import CannotAdapt as CannotAdapt  # for engines to raise
from stages.files.routes import Routes

if TYPE_CHECKING:
    from stages.context import Context, StageResult

_Maker = TypeVar("_Maker", bound=Callable[..., object])


def without_torch(maker: _Maker) -> _Maker:
    """Mark a ``make_...`` function as that of an engine that does not use torch; a decorator.

    Tasks that use such engines alone start without it, in tenths of a second instead of seconds.
    """
    maker.__dict__["needs_torch"] = False
    return maker


def takes_ranks(maker: _Maker) -> _Maker:
    """Mark the ``make_trainer`` of a trainer that several ranks may run together; a decorator.

    Every rank calls :meth:`PolicyTrainer.update`, shares the work with the others by :mod:`stages.ranks`, and
    all but one return None. Any other trainer is refused where the update is given several ranks.
    """
    maker.__dict__["takes_ranks"] = True
    return maker


def takes_adapters(maker: _Maker) -> _Maker:
    """Mark a ``make_generator`` that can put the adapter of ``update.lora`` on its model; a decorator.

    It is then called with a third argument where the policy is an adapter: the adapter's directory, of peft's
    files, and before it that of the model which the adapter is for. It may raise :class:`CannotAdapt`. Any
    other gets a directory of the merged model, made for it on the node.
    """
    maker.__dict__["takes_adapters"] = True
    return maker


@dataclass(frozen=True)
class SequenceLimits:
    """Limits of the sequences that an engine's model can take."""

    NONE: ClassVar[int] = 1 << 30
    """The context of a model that names no limit."""
    context: int
    """Most tokens of one sequence, prompt and response together."""
    vocabulary: int
    """Number of token ids: they are 0 to this minus 1."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings for all requests of a call that are not greedy; the stop tokens are for all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens besides the model's own end-of-sequence ids."""


@dataclass(frozen=True)
class Request:
    """One response to generate."""

    prompt_tokens: Sequence[int]
    max_new_tokens: int
    """Most tokens of the response, at least 1; fewer fit where the context ends."""
    seed: int = 0
    """Seed that determines the response, together with the prompt, whatever it is batched with."""
    greedy: bool = False
    """Whether to take the likeliest token each time; seed, temperature, top_p and top_k are then ignored."""


@dataclass(frozen=True)
class Response:
    """A response as the engine wrote it. Its stop token, if any, is the last of ``tokens``."""

    tokens: list[int]
    log_probs: list[float]
    """Log-probability of each token, temperature included, top_p and top_k not; at temperature 1 in a greedy
    response."""
    finish_reason: FinishReason
    routes: Routes | None = None
    """With algorithm.router_replay: the experts of each token of prompt and response but the last
    (:mod:`stages.files.routes`)."""


REFUSED = Response([], [], FinishReason.REFUSED)
"""The answer to a request that the model cannot take, which no engine may see."""


class Stopped(Exception):
    """``should_stop`` holds: unfinished responses are thrown away."""


class Turns(Protocol):
    """The source of what follows each response in its conversation."""

    def ended(self, index: int, response: Response) -> None:
        """Note that a response in the conversation of request ``index`` is finished. What follows may take a
        while."""

    def due(self, wait: bool) -> Mapping[int, Request | None]:
        """Return what follows responses that ended: the conversation's next request, or None when it is over.

        Each ended response is answered once, by one of the calls after it.

        Args:
            wait: whether to block while there are ended responses and no answer to any of them.

        Raises:
            Stopped: there is nothing yet, and ``should_stop`` holds; for :meth:`Generator.stream` to catch.
        """


class SingleTurn:
    """Conversations that are over after one response."""

    def __init__(self) -> None:
        self._over: dict[int, None] = {}

    def ended(self, index: int, response: Response) -> None:
        self._over[index] = None

    def due(self, wait: bool) -> Mapping[int, Request | None]:
        over, self._over = self._over, {}
        return over


def problem_of(tokens: Sequence[int], limits: SequenceLimits, new_tokens: int) -> str | None:
    """Return why a model cannot take a sequence and write ``new_tokens`` more; None when it can."""
    if not tokens:
        return "it has no token"
    if len(tokens) + new_tokens > limits.context:
        room = f" and leaves no room for {new_tokens}" if new_tokens else ""
        return f"it has {len(tokens)} tokens{room} in a context of {limits.context}"
    if min(tokens) < 0 or max(tokens) >= limits.vocabulary:
        wrong = next(t for t in tokens if not 0 <= t < limits.vocabulary)
        return f"token id {wrong} is outside the model's vocabulary of {limits.vocabulary}"
    return None


class BadSequence(ValueError):
    """A sequence that a reward model cannot take."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(f"sequence {index} cannot be scored: {problem}")
        self.index = index
        self.problem = problem


class BadAnswer(RuntimeError):
    """An engine's answer is not what was asked for."""


def answered(index: int, response: Response, limits: SequenceLimits, engine: str) -> Response:
    """Return the response if it is well-formed. Raises BadAnswer naming the engine and the request."""
    problem = None
    if not isinstance(response, Response):
        problem = f"gave {response!r}"
    elif len(response.tokens) != len(response.log_probs):
        problem = f"gave {len(response.tokens)} tokens and {len(response.log_probs)} log-probabilities"
    elif not response.tokens and response.finish_reason is not FinishReason.REFUSED:
        problem = "gave no token"
    elif any(not isinstance(x, int) or not 0 <= x < limits.vocabulary for x in response.tokens):
        problem = "gave token ids outside the vocabulary"
    elif any(not isinstance(x, float) for x in response.log_probs):
        problem = "gave log-probabilities that are not numbers"
    if problem:
        raise BadAnswer(f"{engine} {problem} for request {index}")
    return response


@dataclass(frozen=True)
class EngineFacts:
    """How an engine has computed, for the record of a task that it was used in."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    """By names of the engine's own; they become ``engine/NAME/ROLE``."""
    memory_gib: float = 0.0
    """Peak of host memory in processes of its own."""
    gpu_memory_gib: float = 0.0
    """Peak of memory on one GPU, where torch in this process does not know of it."""


class Generator(ABC):
    """An engine that writes responses."""

    limits: SequenceLimits

    def stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        done: Collection[int] = (),
        should_stop: Callable[[], bool] = lambda: False,
        turns: Turns | None = None,
    ) -> Iterator[Mapping[int, Response]]:
        """Yield responses by the index of their request, as they finish, in any order.

        A request that the model cannot take is answered with :data:`REFUSED`; the others go on.

        Args:
            requests: all of them, also those that are done: the plan is made of all.
            done: indices that need no response; those of a group that is not wholly done may come again.
            should_stop: asked between token steps. Once it holds, what is not finished is thrown away and
                the iterator ends.
            turns: says what follows each response; an index is yielded when its conversation is over, with
                the last response. Default: every conversation is one response.

        Raises:
            BadAnswer: the engine left a request without an answer, or gave one that is not whole.
        """
        refused = {i: REFUSED for i, request in enumerate(requests) if not self._takes(request)}
        if new := {i: response for i, response in refused.items() if i not in done}:
            yield new
        unwanted, engine = {*done, *refused}, type(self).__name__
        missing = set(range(len(requests))) - unwanted
        try:
            for part in self._stream(requests, sampling, unwanted, should_stop, turns or SingleTurn()):
                missing -= part.keys()
                yield {i: answered(i, response, self.limits, engine) for i, response in part.items()}
        except Stopped:
            return
        if missing and not should_stop():
            raise BadAnswer(
                f"{engine} ended without an answer to {len(missing)} of {len(requests)} requests, the first "
                f"of them request {min(missing)}"
            )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """Return one response per request, in order."""
        responses: dict[int, Response] = {}
        for finished in self.stream(requests, sampling):
            responses |= finished
        return [responses[i] for i in range(len(requests))]

    def plan(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Return groups of requests, by index, whose responses depend on being computed together.

        Padding changes float sums, so what is left of a call gives the same bytes only if it is computed in
        the same groups. An engine whose responses do not depend on the batch has groups of one.
        Requests that are refused are in no group.
        """
        return [[i] for i, request in enumerate(requests) if self._takes(request)]

    def problem_with(self, request: Request) -> str | None:
        """Return why the model cannot take a request; None when it can."""
        return problem_of(request.prompt_tokens, self.limits, new_tokens=1)

    def _takes(self, request: Request) -> bool:
        return self.problem_with(request) is None

    def room(self, request: Request) -> int:
        """Return how many tokens the response may have, at least 1."""
        return max(1, min(request.max_new_tokens, self.limits.context - len(request.prompt_tokens)))

    @abstractmethod
    def _stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        done: Collection[int],
        should_stop: Callable[[], bool],
        turns: Turns,
    ) -> Iterator[Mapping[int, Response]]:
        """Yield as :meth:`stream` does, for requests that the model can take; all others are in ``done``."""

    def reset(self) -> bool:
        """Forget all that earlier requests left behind: what follows has the bytes of a new engine.

        Called before another task uses the engine. False, the default: it cannot, and a new one is made.
        """
        return False

    def reload(self, directory: str, adapter: str | None = None) -> bool:
        """Take other weights: those of the model in ``directory``, or of that and an adapter. Called after
        :meth:`reset`; what follows has the bytes of a new engine.

        Args:
            adapter: only given to engines that take adapters (:func:`takes_adapters`). Then, and where it has
                one now and is to have none, ``directory`` holds the model that the engine has.

        Returns:
            Whether it has. False, the default: it cannot, and a new one is made. So it is after an exception.
        """
        return False

    def facts(self) -> EngineFacts:
        """Return how it computes. Default: nothing that is worth a record."""
        return EngineFacts()

    def close(self) -> None:  # noqa: B027  most engines hold nothing but memory of their own
        """Release what the process holds for the engine: GPU memory, worker processes."""


class Scorer(ABC):
    """An engine that scores token sequences with a reward model."""

    limits: SequenceLimits

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return one raw score per sequence of the reward model's own token ids, in order.

        Raises:
            BadSequence: the model cannot take a sequence. Nothing was scored then.
            BadAnswer: the engine did not give one number for each.
        """
        for index, sequence in enumerate(sequences):
            if problem := problem_of(sequence, self.limits, new_tokens=0):
                raise BadSequence(index, problem)
        scores = list(self._score(sequences))
        if len(scores) != len(sequences):
            raise BadAnswer(f"the engine gave {len(scores)} scores for {len(sequences)} sequences")
        for index, score in enumerate(scores):
            if not isinstance(score, float):
                raise BadAnswer(f"the engine gave {score!r} for sequence {index}, not a number")
        return scores

    @abstractmethod
    def _score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return scores as :meth:`score` does, for sequences that the model can take."""

    def reset(self) -> bool:
        """Forget what earlier tasks left behind, as generators do. Default: False."""
        return False

    def facts(self) -> EngineFacts:
        """Return how it computes, as generators do."""
        return EngineFacts()

    def close(self) -> None:  # noqa: B027  as of generators
        """Release what the process holds for the engine."""


class PolicyTrainer(ABC):
    """A trainer: it makes the next policy from the previous policy's responses and their rewards."""

    @abstractmethod
    def update(self, context: "Context", iteration: int) -> "StageResult | None":
        """Learn from an iteration's shards; write policy ``iteration`` and all that learning needs to go on.

        Inputs are read through the context, which verifies them and notes where they came from:
        :func:`stages.training.read_shards`, ``context.policy_directory(iteration - 1)``, ``critic_directory``
        and ``trainer_directory``. Outputs go to folders of this attempt's own,
        ``context.files.policy(context.attempt)``, ``critic`` and ``trainer`` alike; a policy folder stands
        alone, with the tokenizer. :func:`stages.training.hash_folders` makes them durable.

        Returns:
            The result to commit. None on all ranks but one, if the task has several: see :func:`takes_ranks`.
        """

    def load(self, context: "Context", version: int) -> None:  # noqa: B027  # trainers need not have it
        """Load what :meth:`update` will go on with, before its shards are there: what made policy
        ``version``. For a process that waits; does nothing unless a trainer can."""
