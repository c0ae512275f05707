"""Scores of steps: the outputs of a reward model's head at the tokens that end them, in one pass."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.config.model_classes import SEQUENCES, scoring_class
from pipeline.config.model_files import read_json
from pipeline.config.reward import StepScore
from pipeline.config.schema import Config
from stages.context import UserError
from stages.engines.decoding import padded
from stages.engines.in_place import Unused
from stages.engines.padding import Batching, in_batches, scoring_batching_of
from stages.engines.transformers import limits_of
from stages.models.loading import load_step_model


def make_token_scorer(config: Config, directory: str, how: StepScore) -> "TokenScorer":
    """Load the reward model of ``directory`` to score steps. Raises UserError when it cannot."""
    reward, trust = config.reward, config.model.trust_remote_code
    loaded = load_step_model(directory, config.reward_precision, trust, reward.device_map)
    settings = read_json(Path(directory) / "config.json") or {}
    return TokenScorer(loaded, reward.tokens_per_batch, how, scoring_class(settings, True) == SEQUENCES)


class TokenScorer:
    """A reward model read at each token, over length-sorted batches under a token budget.

    Rows are padded on the right, unless the model gives them other scores then: see
    :mod:`stages.engines.padding`.

    Args:
        how: score by the head's outputs.
        scores_sequences: whether the model gives its head's output at the last token only: then the head,
            ``score``, is put on what its backbone gives at each.
    """

    def __init__(
        self, model: PreTrainedModel, token_budget: int, how: StepScore, scores_sequences: bool
    ) -> None:
        self._model = model
        self._token_budget, self._how = token_budget, how
        self._scores_sequences = scores_sequences
        self.limits = limits_of(model.config)
        self._unused = Unused.of(model)
        self._batching: Batching | None = None

    def reset(self) -> bool:
        """Forget what earlier tasks left behind, as scorers do."""
        self._unused.restore()
        return True

    def score(self, sequences: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the score at each place of each sequence.

        Args:
            sequences: the model's own token ids, which it can take.
            places: indices into each sequence.
        """
        batching = self._found_batching() if len(sequences) > 1 else Batching.ALONE
        rows = in_batches(sequences, batching, self._token_budget, self._score_batch)
        return [[row[place] for place in own] for row, own in zip(rows, places, strict=True)]

    @torch.inference_mode()
    def _score_batch(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the score at each token, of a row's own tokens first."""
        found: list[list[float]] = scores_of(self._logits(*padded(sequences, "right", 0)), self._how).tolist()
        return found

    def _logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the head's outputs [B, T, 1 or 2]."""
        device = self._model.device
        given = {"input_ids": input_ids.to(device), "attention_mask": attention_mask.to(device)}
        logits: Tensor | None
        if self._scores_sequences:
            logits = self._model.score(self._model.base_model(**given).last_hidden_state)  # type: ignore[operator]
        else:
            logits = getattr(self._model(**given), "logits", None)
        if logits is None or logits.shape[:2] != input_ids.shape:
            name = type(self._model).__name__
            raise UserError(f"{name} gives no outputs for each token; leave steps out, or give another model")
        return logits

    def _found_batching(self) -> Batching:
        """Return how rows may be batched: tried once."""
        if self._batching is None:

            def last_scores(rows: list[list[int]]) -> list[float]:
                scores = self._score_batch(rows)
                return [own[len(row) - 1] for own, row in zip(scores, rows, strict=True)]

            self._batching = scoring_batching_of(last_scores, self.limits, self._model.dtype, None, ())
            self._unused.restore()
        return self._batching


def scores_of(logits: Tensor, how: StepScore) -> Tensor:
    """Return the scores [B, T] of outputs [B, T, 1 or 2], in single precision."""
    logits = logits.float()
    if how is StepScore.LOGIT:
        return logits[..., 0]
    return logits[..., 0].sigmoid() if logits.shape[-1] == 1 else logits.softmax(dim=-1)[..., 1]
