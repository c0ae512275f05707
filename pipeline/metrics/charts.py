"""The table of charts that the report, W&B's workspace and the docs are made from."""

from dataclasses import dataclass
from typing import Literal

from pipeline.metrics.catalogue import Section

FEW = 12
"""Number of iterations up to which each has a marker and a tick."""


@dataclass(frozen=True)
class Chart:
    """Curves over iterations. ``names``: of METRICS, separated by spaces; ``*`` is a curve per match."""

    section: Section
    title: str
    names: str
    lower: str = ""
    """Names of curves of another unit, in a panel below."""
    caption: str = ""
    """Text under the title. Default: the meaning of the first name, and of the first lower one."""
    kind: Literal["lines", "bars", "band"] = "lines"
    """Style: bars are stacked; a band's names are its middle, its two edges, and dots to put on it."""
    from_zero: bool = False


LOW, HIGH = "reward/mean-std", "reward/mean+std"
"""Edges of the reward's band, no metrics: pipeline/report/figures.py computes them."""


_O, _S, _H, _R, _E, _P, _C = Section

_REWARD = "mean total reward and a band of one standard deviation; diamonds: greedy on held-out prompts"
_KL = "KL per response, summed over its tokens (k1); below: its coefficient"
_CLIPPING = "share of tokens clipped at the ratio's bounds, by dual clipping and in the value loss"
_CLIPPED = "policy/clip_fraction_low policy/clip_fraction_high policy/dual_clip_fraction value/clip_fraction"
_LOSSES, _NORMS = "clipped losses, mean over optimizer steps", "norms before clipping, mean over steps"
_LENGTH = "tokens per response, shortest to longest; below: share of responses of max_new_tokens"
_LENGTHS = "response_length/mean response_length/min response_length/max"
_PROMPTS = "data/rejected data/rejected/* data/truncated data/read_as/* data/left_out"

CHARTS: tuple[Chart, ...] = (
    Chart(_O, "Reward", f"reward/mean {LOW} {HIGH} evaluate/reward", "", _REWARD, "band"),
    Chart(_O, "Prompts without spread", "reward/frac_zero_std", from_zero=True),
    Chart(_O, "KL to the reference", "objective/kl", "objective/kl_coef", _KL),
    Chart(_S, "Reward components", "reward/*/mean"),
    Chart(_S, "Spread of reward components", "reward/*/std", from_zero=True),
    Chart(_H, "Entropy", "policy/entropy"),
    Chart(_H, "Clipping", _CLIPPED, "", _CLIPPING, from_zero=True),
    Chart(_H, "Losses", "policy/loss", "value/loss", _LOSSES),
    Chart(_H, "Gradient norms", "policy/grad_norm", "value/grad_norm", _NORMS, from_zero=True),
    Chart(_H, "Explained variance", "value/explained_variance"),
    Chart(_H, "Size of the update", "policy/approx_kl", from_zero=True),
    Chart(_H, "Rollout engine against trainer", "mismatch/kl", "mismatch/max"),
    Chart(_R, "Response length", _LENGTHS, "response_length/clip_ratio", _LENGTH, "band", from_zero=True),
    Chart(_R, "Finish reasons", "finish_reason/*", kind="bars"),
    Chart(_E, "Held-out reward components", "evaluate/reward/*"),
    Chart(_E, "Held-out sets", "evaluate/*/reward"),
    Chart(_E, "Solved held-out prompts", "evaluate/pass@* evaluate/*/pass@*", from_zero=True),
    Chart(_E, "Numbers of evaluate.command", "eval/*"),
    Chart(_E, "Held-out response length", "evaluate/response_length", from_zero=True),
    Chart(_P, "Seconds per stage", "seconds/*", kind="bars"),
    Chart(_P, "Tokens per second", "tokens_per_second/*", from_zero=True),
    Chart(_P, "GPU hours", "slurm/gpu_hours/*", kind="bars"),
    Chart(_P, "Seconds in the queue", "slurm/queue_seconds/*", kind="bars"),
    Chart(_P, "Idle share", "slurm/idle_share/*", from_zero=True),
    Chart(_P, "Idle share of workers", "slurm/worker_idle_share/*", from_zero=True),
    Chart(_P, "Start-up share", "slurm/startup_share/*", from_zero=True),
    Chart(_P, "Wasted share", "slurm/wasted_share", from_zero=True),
    Chart(_P, "Memory (GiB)", "memory_gib/*", from_zero=True),
    Chart(_P, "GPU memory (GiB)", "gpu_memory_gib/*", from_zero=True),
    Chart(_C, "Prompts left out, cut or read otherwise", _PROMPTS, from_zero=True),
)
