"""What becomes a row of a rollout: a conversation from its prompt to its end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.data.prompts import Message
from pipeline.run.schemas import FinishReason
from stages.engines.base import Response


@dataclass(frozen=True)
class Episode:
    """What follows a prompt. ``tokens``, ``mask`` and ``log_probs`` have one entry per token."""

    tokens: Sequence[int]
    mask: Sequence[bool]
    """True where the policy wrote the token, false where a tool or an environment did."""
    log_probs: Sequence[float]
    """0 where the policy did not write the token."""
    finish_reason: FinishReason
    num_turns: int
    """Turns of the policy; 0 where the prompt was refused."""
    messages: tuple[Message, ...] | None = None
    """What followed the prompt, turn by turn; None where conversations have one turn only."""

    @staticmethod
    def of(response: Response) -> "Episode":
        """The episode of a single turn."""
        num_turns = 0 if response.finish_reason is FinishReason.REFUSED else 1
        mask = [True] * len(response.tokens)
        return Episode(response.tokens, mask, response.log_probs, response.finish_reason, num_turns)

    def with_turn(self, response: Response, text: str) -> "Episode":
        """With one turn of the policy more."""
        return Episode(
            [*self.tokens, *response.tokens],
            [*self.mask, *[True] * len(response.tokens)],
            [*self.log_probs, *response.log_probs],
            response.finish_reason,
            self.num_turns + 1,
            (*(self.messages or ()), Message("assistant", text)),
        )

    def with_answer(self, tokens: Sequence[int], messages: Sequence[Message]) -> "Episode":
        """With what a tool or an environment said to the last turn."""
        return replace(
            self,
            tokens=[*self.tokens, *tokens],
            mask=[*self.mask, *[False] * len(tokens)],
            log_probs=[*self.log_probs, *[0.0] * len(tokens)],
            messages=(*(self.messages or ()), *messages),
        )


BEFORE_THE_FIRST_TURN = Episode([], [], [], FinishReason.REFUSED, 0, ())
"""Of a conversation; it stays so if the model cannot take the prompt."""
