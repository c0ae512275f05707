"""The seam for generation and scoring engines: requests in, responses or scores out.

A new engine is one module with a class of each protocol and one entry in :mod:`stages.engines`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.schemas import FinishReason


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, for all requests of a call."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    greedy: bool = False
    """Take the likeliest token; temperature, top_p and top_k are ignored."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-sequence ids."""


@dataclass(frozen=True)
class Request:
    """One response to generate."""

    prompt_tokens: Sequence[int]
    max_new_tokens: int
    seed: int
    """Decides the response together with the prompt, whatever it is batched with."""


@dataclass(frozen=True)
class Response:
    """What the engine wrote. Its stop token, if any, is the last of ``tokens``."""

    tokens: list[int]
    log_probs: list[float]
    """Of each token, temperature included, top_p and top_k not."""
    finish_reason: FinishReason


class Generator(Protocol):
    """Writes responses."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """One response per request, in order. Every prompt must leave room for max_new_tokens."""


class Scorer(Protocol):
    """Scores token sequences with a reward model."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One raw score per sequence of the reward model's own token ids, in order."""
