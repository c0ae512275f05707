"""A learner of tiny models and an iteration's experience for it, without a run around them."""

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from pipeline.config.algorithm import Estimator
from pipeline.run.schemas import GREEDY_SAMPLE
from stages.context import Stopwatch
from stages.models.loading import load_causal_lm
from stages.ppo.critics import load_critic
from stages.ppo.experience import Experience, build_experience
from stages.ppo.learner import Update, update
from stages.ppo.math.shaping import RunningMoments
from stages.ppo.metrics import update_metrics
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner
from stages.ranks import start_distributed
from tests.support.processes import config_of
from tests.support.rollouts import reward_table, rollout_table


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """DeepSpeed's group of one. It stays for the process, because DeepSpeed holds on to it; what it says in
    the environment does not, because other tests start processes."""
    before, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    start_distributed()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)


def make_learner(inputs: Path, run_dir: Path, *more: str) -> Learner:
    """A learner of the given settings, from the same policy each time."""
    common = ("update.epsilon=1e-3", "update.minibatches=2", "update.epochs=2")
    config = config_of(inputs, run_dir, *common, *more)
    precision = config.update.precision
    policy = load_causal_lm(inputs / "policy", precision, trust_remote_code=False)
    critic = None
    if config.algorithm.estimator is Estimator.GAE:
        model = load_critic(inputs / "policy", precision, trust_remote_code=False)
        critic = Trainer("critic", model, config.update.critic_learning_rate, config.update)
    return Learner(config, Trainer("policy", policy, config.update.learning_rate, config.update), critic)


def experience(
    rows: int = 8,
    samples: int = 1,
    holes: bool = False,
    with_kl: bool = True,
    rewards: list[float] | None = None,
    greedy: bool = False,
    refused: Collection[int] = (),
    mask_truncated: bool = False,
) -> Experience:
    """Ragged rows of random tokens in shards of four; with holes, the middle third of each response is an
    observation; with greedy, the last sample of each prompt is what ReMax compares with; rows that are
    refused have no response, and prompts of tokens that no model has; every fourth is cut, and does not count
    with mask_truncated."""
    draw = torch.Generator().manual_seed(3)
    lengths = [(1 + (5 * i) % 11, 0 if i in refused else 3 + (7 * i) % 10) for i in range(rows)]
    tokens = [torch.randint(2, 258, (p + r,), generator=draw).tolist() for p, r in lengths]
    noise = [(torch.randn(r, generator=draw) / 3 - 5).tolist() for _, r in lengths]
    masks = [[not holes or not r // 3 <= t < 2 * r // 3 for t in range(r)] for _, r in lengths]
    rollout = rollout_table(
        [t[p:] for t, (p, _) in zip(tokens, lengths, strict=True)],
        prompt_id=[f"p{i // samples}" for i in range(rows)],
        sample_index=[
            GREEDY_SAMPLE if greedy and i % samples == samples - 1 else i % samples for i in range(rows)
        ],
        prompt_tokens=[
            [10**6] * p if i in refused else t[:p]
            for i, (t, (p, _)) in enumerate(zip(tokens, lengths, strict=True))
        ],
        response_mask=masks,
        rollout_logprobs=noise,
        finish_reason=[
            "refused" if i in refused else "length" if i % 4 == 3 else "stop" for i in range(rows)
        ],
        num_turns=[int(i not in refused) for i in range(rows)],
    )
    scores = rewards or torch.randn(rows, generator=draw).tolist()
    reference = noise if with_kl else None
    reward = reward_table(rollout, scores, mask_truncated, reference_logprobs=reference, rm=scores)
    return build_experience(rollout, reward, [i // 4 for i in range(rows)])


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {
        f"{trainer.name}.{name}": p.detach().clone()
        for trainer in learner.trainers
        for name, p in trainer.model.named_parameters()
    }


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def updated(learner: Learner, given: Experience, kl_coef: float = 0.05, iteration: int = 1) -> Update:
    moments = RunningMoments().including(given.outcome.scores)
    return update(learner, given, iteration, kl_coef, moments, Stopwatch())


def metrics_of(learner: Learner, given: Experience, kl_coef: float = 0.05) -> dict[str, float]:
    return update_metrics(learner.config, given, updated(learner, given, kl_coef))


def with_scores(given: Experience, scores: torch.Tensor) -> Experience:
    return dataclasses.replace(given, outcome=dataclasses.replace(given.outcome, scores=scores))
