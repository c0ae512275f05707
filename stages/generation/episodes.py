"""Episodes: conversations from the prompt to the end, each of which becomes a row of a rollout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.data.messages import Message
from pipeline.run.schemas import FinishReason
from stages.engines.base import Response
from stages.files.routes import Routes


@dataclass(frozen=True)
class Episode:
    """The continuation of a prompt. ``tokens``, ``mask`` and ``log_probs`` have one entry per token."""

    tokens: Sequence[int]
    mask: Sequence[bool]
    """Mask: true where the policy wrote the token, false where a tool or an environment did."""
    log_probs: Sequence[float]
    """Log-probabilities; 0 where the policy did not write the token."""
    finish_reason: FinishReason
    num_turns: int
    """Turns of the policy; 0 where the prompt was refused."""
    messages: tuple[Message, ...] | None = None
    """Messages after the prompt, turn by turn; None where conversations have one turn only."""
    routes: Routes | None = None
    """Experts of each token of prompt and ``tokens`` but the last, of the turn that computed it first."""

    @staticmethod
    def of(response: Response) -> "Episode":
        """Return the episode of a single turn."""
        num_turns = 0 if response.finish_reason is FinishReason.REFUSED else 1
        mask = [True] * len(response.tokens)
        given = response.tokens, mask, response.log_probs, response.finish_reason, num_turns
        return Episode(*given, routes=response.routes)

    def with_turn(self, response: Response, text: str) -> "Episode":
        """Return the episode with one more turn of the policy."""
        routes = response.routes
        if routes is not None and self.routes is not None:
            routes = np.concatenate([self.routes, routes[len(self.routes) :]])
        return Episode(
            [*self.tokens, *response.tokens],
            [*self.mask, *[True] * len(response.tokens)],
            [*self.log_probs, *response.log_probs],
            response.finish_reason,
            self.num_turns + 1,
            (*(self.messages or ()), Message("assistant", text)),
            routes,
        )

    def with_answer(self, tokens: Sequence[int], messages: Sequence[Message]) -> "Episode":
        """Return the episode with the reply of a tool or an environment to the last turn."""
        return replace(
            self,
            tokens=[*self.tokens, *tokens],
            mask=[*self.mask, *[False] * len(tokens)],
            log_probs=[*self.log_probs, *[0.0] * len(tokens)],
            messages=(*(self.messages or ()), *messages),
        )


BEFORE_THE_FIRST_TURN = Episode([], [], [], FinishReason.REFUSED, 0, ())
"""Initial episode of a conversation; also its last if the model cannot take the prompt."""
