"""Published stage times of gangs, as ``benchmarks/gang.py`` takes them, and what it assumes of each.

Published are GPUs, seconds of a step and of its stages, the longest response, and what an asynchronous gang
on as many GPUs takes. Sources: verl, docs/advance/fully_async.md (edition of January 2026; an earlier one
has the training times of its first comparison the other way round) and docs/advance/one_step_off.md;
OpenRLHF, README of 2025 and arXiv 2405.11143.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """A published asynchronous gang on as many GPUs."""

    kind: str
    """``one step off`` or ``fully async``."""
    rollout_gpus: int
    seconds: float
    """Of a step."""


@dataclass(frozen=True)
class Case:
    """A published gang, and what is assumed of it."""

    name: str
    gpus: int
    step: float
    """Seconds, as the three that follow; published, but for the parts of the last two cases."""
    generation: float
    log_probs: float
    training: float
    peer: Peer | None
    billions: float
    """Parameters; of the critic as well."""
    has_critic: bool
    responses: int
    mean_tokens: int
    """Of a lognormal distribution, cut at ``longest_tokens``: assumed, as ``sigma`` is."""
    sigma: float
    longest_tokens: int
    replica_gpus: int = 1
    """GPUs of one engine: assumed, as the following are."""
    step_seconds: float = 0.010
    per_running: float = 0.00018
    most_running: int = 512
    reward_seconds: float = 0.0
    """Of a reward model on ``reward_gpus`` of its own, beside ``gpus``."""
    reward_gpus: int = 0


def openrlhf(name: str, gpus: int, step: float, billions: float, **assumed: float) -> Case:
    """A step of PPO on 1024 prompts, of which about 80 % is published to be generation.

    How the rest divides is assumed. In the published layout each model has GPUs of its own; here it is
    taken as if all GPUs did all in turn.
    """
    shares = {"generation": 0.8 * step, "log_probs": 0.04 * step, "training": 0.16 * step}
    common = {"peer": None, "has_critic": True, "responses": 1024, "mean_tokens": 500, "sigma": 0.6}
    running = {"longest_tokens": 1024, "most_running": 256, "reward_gpus": 8}
    given = shares | common | running | assumed
    return Case(name, gpus, step, billions=billions, **given)


CASES = (
    Case(
        "7B 10k, 16 H20", 16, 484.6, 52.9, 0.0, 430.3,
        Peer("fully async", 8, 490.0), 7.6, False, 1024, 1500, 0.8, 10240,
    ),
    Case(
        "7B 20k, 16 H20", 16, 749.0, 321.0, 88.0, 286.0,
        Peer("one step off", 4, 520.0), 7.6, False, 8192, 2000, 0.95, 20480,
    ),
    Case(
        "7B 28k, 32 H20", 32, 790.1, 357.4, 107.7, 269.8,
        Peer("fully async", 16, 294.8), 7.6, False, 8192, 4000, 0.95, 28672,
    ),
    Case(
        "7B 28k, 128 H20", 128, 356.3, 177.9, 53.9, 113.8,
        Peer("fully async", 64, 150.6), 7.6, False, 8192, 4000, 0.95, 28672,
    ),
    Case(
        "7B turns, 32 H20", 32, 375.5, 228.0, 35.2, 111.8,
        Peer("fully async", 16, 221.4), 7.6, False, 1024, 4500, 0.8, 16384,
    ),
    Case(
        "30B MoE 8k, 128 H20", 128, 497.9, 348.1, 49.6, 86.3,
        Peer("fully async", 96, 282.8), 30.5, False, 8192, 2500, 0.75, 8192, 4, 0.014, 0.00012, 1024,
    ),
    openrlhf("7B PPO, 16 A800", 16, 471.1, 7.0, per_running=0.00012, reward_seconds=30.0),
    openrlhf(
        "70B PPO, 32 A800", 32, 4488.5, 70.0, replica_gpus=8, step_seconds=0.035,
        per_running=0.0004, reward_seconds=200.0,
    ),
)  # fmt: skip
PUBLISHED_REWARD_GPUS = (2, 4)
"""GPUs of the reward model in the published layouts of the last two cases, part of their 16 and 32."""
