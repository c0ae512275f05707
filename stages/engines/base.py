"""The seam for generation and scoring engines: requests in, responses or scores out.

A new engine is one module with a class of each protocol and one entry in :mod:`stages.engines`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.schemas import FinishReason


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, for all requests of a call that are not greedy; the stop tokens are for all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-sequence ids."""


@dataclass(frozen=True)
class Request:
    """One response to generate."""

    prompt_tokens: Sequence[int]
    max_new_tokens: int
    seed: int = 0
    """Decides the response together with the prompt, whatever it is batched with."""
    greedy: bool = False
    """Take the likeliest token each time; seed, top_p and top_k are ignored."""


@dataclass(frozen=True)
class Response:
    """What the engine wrote. Its stop token, if any, is the last of ``tokens``."""

    tokens: list[int]
    log_probs: list[float]
    """Of each token, temperature included, top_p and top_k not; also of a greedy response's."""
    finish_reason: FinishReason


def never() -> bool:
    """The ``should_stop`` of a call that is not to be stopped."""
    return False


class Generator(Protocol):
    """Writes responses. An implementation derives from this and inherits :meth:`generate`."""

    def plan(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Indices of the requests whose responses depend on each other's company, group by group.

        Padding changes float sums, so what is left of a call gives the same bytes only if it is computed in
        the same groups. An engine whose responses do not show what they were batched with has groups of one.
        """

    def stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        done: Collection[int] = (),
        should_stop: Callable[[], bool] = never,
    ) -> Iterator[Mapping[int, Response]]:
        """Responses by the index of their request, as they finish, in any order.

        Args:
            requests: all of them, also those that are done: the plan is made of all. Every prompt must leave
                room for max_new_tokens.
            done: indices that need no response; those of a group that is not wholly done may come again.
            should_stop: asked between token steps. Once it holds, what is not finished is thrown away and
                the iterator ends.
        """

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """One response per request, in order."""
        responses: dict[int, Response] = {}
        for finished in self.stream(requests, sampling):
            responses |= finished
        return [responses[i] for i in range(len(requests))]


class Scorer(Protocol):
    """Scores token sequences with a reward model."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One raw score per sequence of the reward model's own token ids, in order."""
