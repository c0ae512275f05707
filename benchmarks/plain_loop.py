"""PPO as one would write it down with torch and transformers: what benchmarks/update.py compares with.

Rows in file order, prompts padded on the left and responses on the right, logits of every position, gradients
accumulated over the batches of an optimizer step. Only the formulas are those of :mod:`stages.ppo`.
B rows of a batch, P and R its longest prompt and response; N rows in all, T the longest response of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from pipeline.config.schema import Config
from stages.ppo.math.advantages import gae
from stages.ppo.math.losses import policy_loss, value_loss
from stages.ppo.math.masked import masked_sum, masked_whiten


@dataclass(frozen=True)
class Responses:
    """What is learned from, row by row."""

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    scores: Sequence[float]

    @property
    def mask(self) -> Tensor:
        """[N, T] true at tokens."""
        lengths = torch.tensor([[len(response)] for response in self.responses])
        return torch.arange(int(lengths.max())) < lengths


@dataclass(frozen=True)
class Batch:
    """Padded rows."""

    rows: slice
    input_ids: Tensor
    """[B, P + R]."""
    attention_mask: Tensor
    position_ids: Tensor
    left: int
    """P."""

    @property
    def columns(self) -> slice:
        """Of this batch in [N, T]."""
        return slice(0, self.input_ids.shape[1] - self.left)


def pad(given: Responses, rows: range) -> Batch:
    left, right = (max(len(side[i]) for i in rows) for side in (given.prompts, given.responses))
    ids = torch.zeros(len(rows), left + right, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for line, i in enumerate(rows):
        start, stop = left - len(given.prompts[i]), left + len(given.responses[i])
        ids[line, start:stop] = torch.tensor([*given.prompts[i], *given.responses[i]])
        mask[line, start:stop] = 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return Batch(slice(rows.start, rows.stop), ids, mask, positions, left)


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Logits [B, R, ...] of each response position."""
    logits: Tensor = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    ).logits
    return logits[:, batch.left - 1 : -1].float()


def token_numbers(policy: nn.Module, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy [B, R]."""
    log_probs = torch.log_softmax(forward(policy, batch) / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(2, batch.input_ids[:, batch.left :, None]).squeeze(2), entropy


@dataclass
class PlainLoop:
    """Both models and their optimizers."""

    config: Config
    given: Responses
    batch_rows: int
    policy: PreTrainedModel = field(init=False)
    critic: PreTrainedModel = field(init=False)
    optimizers: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        folder, update = Path(self.config.model.policy), self.config.update
        self.policy = AutoModelForCausalLM.from_pretrained(folder)
        self.critic = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
        self.critic.dropout.p = 0.0
        with torch.no_grad():
            for parameter in self.critic.score.parameters():
                parameter.zero_()
        rates = {self.policy: update.learning_rate, self.critic: update.critic_learning_rate}
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), rate, update.betas, update.epsilon, weight_decay=0.0)
            for model, rate in rates.items()
        ]

    def batches(self) -> list[Batch]:
        """Padded once, for all passes."""
        total = len(self.given.prompts)
        starts = range(0, total, self.batch_rows)
        return [pad(self.given, range(start, min(start + self.batch_rows, total))) for start in starts]

    def update(self) -> tuple[float, float]:
        """All steps. Returns the mean value loss, and the share of real tokens."""
        batches, mask = self.batches(), self.given.mask
        old, values = self.old_numbers(batches, mask)
        advantages, returns = self.targets(values, mask)
        update, losses = self.config.update, []
        size = len(batches) // update.minibatches
        for _ in range(update.epochs):
            for start in range(0, len(batches), size):
                chunk = batches[start : start + size]
                tokens = int(sum(mask[batch.rows].sum() for batch in chunk))
                for batch in chunk:
                    at = batch.rows, batch.columns
                    self.policy_part(batch, mask[at], old[at], advantages[at], tokens)
                    losses.append(self.value_part(batch, mask[at], values[at], returns[at], tokens))
                self.step()
        real = sum(int(batch.attention_mask.sum()) for batch in batches)
        num_steps = update.epochs * update.minibatches
        return sum(losses) / num_steps, real / sum(batch.input_ids.numel() for batch in batches)

    @torch.no_grad()
    def old_numbers(self, batches: Sequence[Batch], mask: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and values [N, T] before the first step."""
        old, values = torch.zeros(mask.shape), torch.zeros(mask.shape)
        for batch in batches:
            at = batch.rows, batch.columns
            old[at] = token_numbers(self.policy, batch, self.config.rollout.temperature)[0]
            values[at] = forward(self.critic, batch)[..., 0]
        return old, values

    def targets(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns [N, T]."""
        rewards = torch.zeros(mask.shape)
        rewards[torch.arange(len(mask)), mask.sum(dim=1) - 1] = torch.tensor(self.given.scores)
        algorithm = self.config.algorithm
        advantages, returns = gae(rewards, values, mask, algorithm.gamma, algorithm.lam)
        return masked_whiten(advantages, mask), returns

    def policy_part(
        self, batch: Batch, mask: Tensor, old: Tensor, advantages: Tensor, num_tokens: int
    ) -> None:
        log_probs, _ = token_numbers(self.policy, batch, self.config.rollout.temperature)
        losses = policy_loss(log_probs, old, advantages, self.config.algorithm).loss
        (masked_sum(losses, mask) / num_tokens).backward()

    def value_part(self, batch: Batch, mask: Tensor, old: Tensor, returns: Tensor, num_tokens: int) -> float:
        values = forward(self.critic, batch)[..., 0]
        losses, _ = value_loss(values, returns, old, self.config.algorithm.value_clip_range)
        loss = masked_sum(losses, mask) / num_tokens
        loss.backward()
        return float(loss.detach())

    def step(self) -> None:
        for model, optimizer in zip((self.policy, self.critic), self.optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), self.config.update.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
