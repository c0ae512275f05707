"""Catalogue of the numbers of an iteration's row, with their meanings, and of the charts that show them.

Every number that :func:`iteration_row` writes is described by one entry of :data:`METRICS`; report, W&B's
workspace and the docs take names, sections and :data:`CHARTS` from here.
"""

import fnmatch
import functools
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Section(StrEnum):
    """Part of a dashboard."""

    OBJECTIVE = "objective"
    """Quantities that are optimised."""
    REWARDS = "reward components"
    """Parts of the reward."""
    HEALTH = "PPO health"
    """Signs of whether the update behaves."""
    ROLLOUT = "rollout"
    """Properties of the policy's responses."""
    EVALUATION = "evaluation"
    """Results on held-out prompts."""
    PIPELINE = "pipeline"
    """Time, speed, memory."""
    PROGRESS = "progress"
    """Counters."""


SAMPLE_TABLE = "sample_responses"
"""Key of the table of responses in W&B's rows; no number of the row has this name."""


@dataclass(frozen=True)
class Metric:
    """A number of the row. ``name`` may end in or contain ``*`` for one number per component or stage."""

    name: str
    section: Section
    meaning: str


_O, _S, _H, _R, _E, _P, _C = Section

METRICS: tuple[Metric, ...] = (
    Metric("iteration", _C, "1-based number of the iteration"),
    Metric("policy_version", _C, "version of the policy that the iteration committed"),
    Metric("epoch", _C, "0-based pass over the prompt file; of several with weights the least"),
    Metric("epoch/*", _C, "0-based pass over one of several prompt files that have weights"),
    Metric("epoch_left_out", _C, "prompts that the epoch leaves out (data.band)"),
    Metric("samples", _C, "responses rolled out since the run began"),
    Metric("data/prompts", _C, "prompts of data.prompts that can be used"),
    Metric("data/prompts/*", _C, "those of them that are of one of several files"),
    Metric("data/rejected", _C, "rows of the prompt files, held-out ones included, that cannot be used"),
    Metric("data/rejected/*", _C, "those of them that cannot be used for this reason, such as too_long"),
    Metric("data/truncated", _C, "prompts that are cut to data.max_prompt_tokens"),
    Metric("data/read_as/*", _C, "rows read otherwise than they are written, such as numbers as text"),
    Metric("data/left_out", _C, "parts of prompts, such as name, that a chat template does not write"),
    Metric("data/masked_ids", _C, "ids of the policy that its tokenizer has no token for: never written"),
    Metric("records_lost", _C, "commit records that could not be read any more when the row was written"),
    Metric("reward/mean", _O, "mean total reward"),
    Metric("reward/std", _O, "standard deviation of the total reward"),
    Metric("reward/min", _O, "lowest total reward"),
    Metric("reward/max", _O, "highest total reward"),
    Metric("reward/frac_zero_std", _O, "share of prompts whose samples all have the same reward"),
    Metric(
        "reward/discarded",
        _O,
        "responses left out: cut (mask_truncated), refused, or of prompts whose samples all score the same",
    ),
    Metric("refill/taken", _O, "prompts that the update learned from (rollout.oversample)"),
    Metric("refill/carried", _O, "those of them that earlier updates had left"),
    Metric("refill/flat", _O, "prompts of the iteration whose samples all score the same, or are alone"),
    Metric("refill/spare", _O, "prompts left for later updates (rollout.carry)"),
    Metric("refill/dropped", _O, "prompts with a spread of rewards that no update learns from"),
    Metric("refill/missing", _O, "prompts by which the update was smaller than data.prompts_per_iteration"),
    Metric("reward/shaped/mean", _O, "mean score after shaping, of the responses trained on"),
    Metric(
        "reward/unscored", _O, "responses that have no reward, or no baseline: the update leaves them out"
    ),
    Metric("validity/scored", _O, "responses that count: the update learns from them"),
    Metric("validity/abstained", _O, "responses left out: no rule gave them a score"),
    Metric("validity/unscorable", _O, "responses left out: a reward model could not take them"),
    Metric("validity/no_baseline", _O, "responses left out: the greedy one to their prompt has no reward"),
    Metric("validity/refused", _O, "responses left out: the model cannot take their prompt"),
    Metric("validity/truncated", _O, "responses left out: cut, with algorithm.mask_truncated"),
    Metric("reward/greedy/mean", _O, "mean reward of the greedy responses that ReMax compares with"),
    Metric("reward/mean/*", _S, "mean total reward of responses to prompts of one of several files"),
    Metric("validity/*/*", _S, "those of the responses counted so whose prompts are of one of several files"),
    Metric("environment/*/reward", _S, "mean total reward of responses to one of several environments"),
    Metric("reward/*/mean", _S, "mean of one reward component"),
    Metric("reward/*/std", _S, "standard deviation of one reward component"),
    Metric("reward/*/truncated", _S, "responses cut to fit the reward model's context"),
    Metric("reward/*/unscored", _S, "responses that the reward model could not take, or that were refused"),
    Metric("reward/*/abstained", _S, "responses of which the rule gave no score: it returned None"),
    Metric("reward/*/late", _S, "responses that took longer than the rule's time_limit"),
    Metric("reward/*/failed", _S, "responses at which the rule failed, and that got its error_score"),
    Metric("reward/*/unreadable", _S, "responses whose judge's reply held no score"),
    Metric("reward/*/retries", _P, "requests to the remote service that were sent again"),
    Metric("objective/kl", _O, "KL to the reference per response, summed over its tokens (k1)"),
    Metric("objective/kl_per_token", _O, "KL to the reference per token (k1)"),
    Metric("objective/kl_coef", _O, "KL coefficient of this iteration"),
    Metric("teacher/kl", _O, "KL to the teachers per response that has one, summed over its tokens (k1)"),
    Metric("teacher/kl_per_token", _O, "KL to the teachers per token (k1)"),
    Metric("teacher/responses", _O, "responses that have a teacher"),
    Metric("policy/loss", _H, "clipped policy loss, mean over optimizer steps"),
    Metric("policy/entropy", _H, "entropy of the next-token distribution, nats per token"),
    Metric("policy/ratio", _H, "mean probability ratio new/old"),
    Metric("policy/ratio_error_first", _H, "largest |ratio - 1| before the first step; 0 is right"),
    Metric("policy/approx_kl", _H, "KL(old || new) per token (k3), mean over all steps"),
    Metric("policy/kl_loss", _H, "KL term of the loss per token, before its coefficient"),
    Metric(
        "policy/router_loss", _H, "loss of a mixture's routers, before its coefficient; top_k if balanced"
    ),
    Metric(
        "policy/replayed_differ",
        _H,
        "share of replayed choices of experts (router_replay) that routers make otherwise, over all steps",
    ),
    Metric("policy/advantage_mean", _H, "mean advantage per token"),
    Metric("policy/advantage_std", _H, "standard deviation of the advantages"),
    Metric("policy/steps", _H, "optimizer steps taken"),
    Metric(
        "policy/is_warmup", _H, "1 where only the critic learns (critic_warmup): the policy stays as it is"
    ),
    Metric("policy/skipped_steps", _H, "steps skipped because a loss or gradient was not finite"),
    Metric("policy/overflow_steps", _H, "steps at which fp16 lowered its loss scale"),
    Metric("policy/stopped_early", _H, "1 if target_kl ended the training of this iteration"),
    Metric("policy/padding_efficiency", _H, "share of real tokens in the micro-batches"),
    Metric("policy/computed_responses", _H, "responses that went through the policy: those with a gradient"),
    Metric("policy/clip_fraction_low", _H, "share of tokens clipped at the lower bound"),
    Metric("policy/clip_fraction_high", _H, "share of tokens clipped at the upper bound"),
    Metric("policy/dual_clip_fraction", _H, "share of tokens held by dual clipping"),
    Metric("policy/grad_norm", _H, "gradient norm before clipping, mean over steps"),
    Metric("policy/learning_rate", _H, "learning rate of the last step"),
    Metric("value/loss", _H, "clipped value loss, mean over steps"),
    Metric("value/clip_fraction", _H, "share of tokens whose value was clipped"),
    Metric("value/grad_norm", _H, "critic's gradient norm before clipping, mean over steps"),
    Metric("value/explained_variance", _H, "share of the returns' variance that the critic foresaw"),
    Metric("value/mean", _H, "mean value before the update"),
    Metric("value/returns_mean", _H, "mean return"),
    Metric("mismatch/kl", _H, "mean log-probability gap, rollout engine minus trainer, per token"),
    Metric("mismatch/k3", _H, "KL(engine || trainer) per token (k3)"),
    Metric("mismatch/max", _H, "largest gap of a token's log-probability"),
    Metric(
        "mismatch/ppl_ratio", _H, "perplexity of the trainer over that of the engine, mean over responses"
    ),
    Metric("mismatch/chi2_token", _H, "chi-square divergence of the engine from the trainer, per token"),
    Metric("mismatch/chi2_sequence", _H, "the same per response"),
    Metric("mismatch/effective_samples", _H, "effective sample size of the tokens, as a share"),
    Metric("staleness/lag", _H, "updates by which the responses' policy is older than the newest one before"),
    Metric(
        "staleness/effective_samples", _H, "mismatch/effective_samples over its median at lag 0 in this run"
    ),
    Metric("correction/weight_mean", _H, "mean importance weight of the policy loss"),
    Metric("correction/weight_max", _H, "largest importance weight"),
    Metric("correction/masked_share", _H, "share of tokens of weight 0"),
    Metric("correction/effective_samples", _H, "effective sample size under these weights, as a share"),
    Metric(
        "correction/second_moment", _H, "m2po: mean squared log-ratio of the tokens that it may leave out"
    ),
    Metric("correction/second_moment_kept", _H, "m2po: the same of those that it keeps"),
    Metric("response_length/mean", _R, "tokens per response, those between the policy's turns included"),
    Metric("response_length/min", _R, "shortest response, tokens"),
    Metric("response_length/max", _R, "longest response, tokens"),
    Metric(
        "response_length/clip_ratio",
        _R,
        "share of responses that were cut: they have not ended by themselves",
    ),
    Metric("finish_reason/*", _R, "share of responses that ended for this reason"),
    Metric("num_turns/mean", _R, "turns of the policy per conversation"),
    Metric(
        "rollout/refused", _R, "responses whose prompt, or what was said to a turn, the model cannot take"
    ),
    Metric("evaluate/reward", _E, "mean reward of responses to held-out prompts, greedy unless sampled"),
    Metric("evaluate/reward/*", _E, "mean of one component on held-out prompts"),
    Metric("evaluate/reward/*/truncated", _E, "held-out responses cut to fit the reward model's context"),
    Metric("evaluate/reward/*/unscored", _E, "held-out responses that the reward model could not take"),
    Metric("evaluate/reward/*/abstained", _E, "held-out responses of which the rule gave no score"),
    Metric("evaluate/reward/*/late", _E, "held-out responses that took longer than the rule's time_limit"),
    Metric("evaluate/reward/*/failed", _E, "held-out responses at which the rule failed"),
    Metric("evaluate/reward/*/unreadable", _E, "held-out responses whose judge's reply held no score"),
    Metric("evaluate/reward/*/retries", _P, "requests of an evaluation that were sent again"),
    Metric("evaluate/mean@*", _E, "mean reward of so many samples to each held-out prompt"),
    Metric("evaluate/pass@*", _E, "probability that one of k samples is solved, unbiased, mean over prompts"),
    Metric("evaluate/*/reward", _E, "mean reward on one of several held-out sets, or environments"),
    Metric("evaluate/*/reward/*", _E, "mean of one component on one set"),
    Metric("evaluate/*/mean@*", _E, "mean reward of so many samples on one set"),
    Metric("evaluate/*/pass@*", _E, "pass@k on one set"),
    Metric("evaluate/refused", _E, "held-out responses whose prompt, or what was said to a turn, is refused"),
    Metric("evaluate/response_length", _E, "tokens per response to held-out prompts"),
    Metric("evaluate/num_turns", _E, "turns of the policy per conversation on held-out prompts"),
    Metric("eval/*", _E, "number that evaluate.command wrote of the policy"),
    Metric("seconds/update/*", _P, "wall seconds of a part of the update task"),
    Metric(
        "seconds/state/*",
        _P,
        "of the trainer's state before this update: wall seconds of write, where a thread wrote it, and "
        "those for which the update was held_up",
    ),
    Metric("seconds/*", _P, "wall seconds of a stage, first start to last end"),
    Metric("seconds/compute/*", _P, "model compute of a stage, summed over its tasks"),
    Metric(
        "seconds/iteration",
        _P,
        "wall seconds from the previous policy, or its own first task, to this policy",
    ),
    Metric("seconds/elapsed", _P, "seconds since the run was made"),
    Metric("seconds/remaining", _P, "expected seconds to the run's end at the recent pace"),
    Metric("tokens_per_second/*", _P, "response tokens per wall second of a stage"),
    Metric(
        "model_tokens_per_second/*",
        _P,
        "prompt and response tokens through models per wall second of a stage, once for each pass: rollout, "
        "scoring, reference, old log-probabilities and values, each epoch's steps of policy and critic",
    ),
    Metric("padding/*", _P, "share of padding among the positions that a stage's models computed"),
    Metric("memory_gib/*", _P, "largest peak memory of a stage's tasks"),
    Metric("gpu_memory_gib/*", _P, "largest peak GPU memory of a stage's tasks"),
    Metric("halvings/*", _P, "times that a task's batch budget was halved, of the one with most, if any was"),
    Metric("engine/model_runner/*", _P, "vLLM's model runner, 1 or 2, in the generator and the scorer"),
    Metric("engine/async_scheduling/*", _P, "1 where vLLM prepares a step while it computes another"),
    Metric("engine/own_process/*", _P, "1 where vLLM has a process of its own"),
    Metric("engine/unreturned_gib/*", _P, "memory that did not come back when vLLM was closed"),
    Metric("slurm/job_id/*", _C, "job whose task was the last of its stage to be committed"),
    Metric("slurm/gpu_hours/*", _P, "GPU-hours held for a stage's attempts, with the waits of workers"),
    Metric("slurm/cpu_hours/*", _P, "CPU-hours held for a stage's attempts, with the waits of workers"),
    Metric("slurm/queue_seconds/*", _P, "seconds that a stage's attempts waited though they could start"),
    Metric("slurm/run_seconds/*", _P, "seconds that a stage's attempts ran, summed"),
    Metric("slurm/attempts/*", _P, "attempts at a stage that started, requeued jobs once for every start"),
    Metric(
        "slurm/startup_share/*",
        _P,
        "share of a stage's job time before the first model compute, of attempts that committed",
    ),
    Metric(
        "slurm/idle_share/*",
        _P,
        "share of a stage's job time in which its resources were held, but no model computed or started up",
    ),
    Metric(
        "slurm/worker_idle_share/*",
        _P,
        "share of their time so far that the workers of a stage of this iteration waited for inputs",
    ),
    Metric("slurm/wasted_share", _P, "share of GPU-hours (else CPU-hours) of attempts without a result"),
)


@functools.cache
def describe(name: str) -> Metric | None:
    """Find the entry that describes a number, or None for one that has no entry."""
    exact = [metric for metric in METRICS if metric.name == name]
    patterns = [m for m in METRICS if "*" in m.name and fnmatch.fnmatchcase(name, m.name)]
    return next(iter([*exact, *sorted(patterns, key=lambda m: -len(m.name))]), None)


# --- charts ----------------------------------------------------------------------------------------------

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


_REWARD = "mean total reward and a band of one standard deviation; diamonds: greedy on held-out prompts"
_KL = "KL per response, summed over its tokens (k1); below: its coefficient"
_CLIPPING = "share of tokens clipped at the ratio's bounds, by dual clipping and in the value loss"
_CLIPPED = "policy/clip_fraction_low policy/clip_fraction_high policy/dual_clip_fraction value/clip_fraction"
_LOSSES, _NORMS = "clipped losses, mean over optimizer steps", "norms before clipping, mean over steps"
_LENGTH = "tokens per response, shortest to longest; below: share of responses of max_new_tokens"
_LENGTHS = "response_length/mean response_length/min response_length/max"
_SAMPLES = "mismatch/effective_samples correction/effective_samples"
_LEFT_OUT = "validity/abstained validity/unscorable validity/no_baseline validity/refused validity/truncated"
_REFILLED = "refill/taken refill/carried refill/missing refill/spare"
_REFILL = "prompts of each update, those carried from earlier ones, and those missing; prompts left for later"
_UNCOUNTED = "responses that the update leaves out, by the reason"
_PROMPTS = "data/rejected data/rejected/* data/truncated data/read_as/* data/left_out"

CHARTS: tuple[Chart, ...] = (
    Chart(_O, "Reward", f"reward/mean {LOW} {HIGH} evaluate/reward", "", _REWARD, "band"),
    Chart(_O, "Prompts without spread", "reward/frac_zero_std", from_zero=True),
    Chart(_O, "Prompts learned from", _REFILLED, "", _REFILL, from_zero=True),
    Chart(_O, "Responses that do not count", _LEFT_OUT, "", _UNCOUNTED, "bars"),
    Chart(_O, "KL to the reference", "objective/kl", "objective/kl_coef", _KL),
    Chart(_O, "KL to the teachers", "teacher/kl", from_zero=True),
    Chart(_S, "Reward components", "reward/*/mean"),
    Chart(_S, "Reward by prompt file", "reward/mean/*"),
    Chart(_S, "Reward by environment", "environment/*/reward"),
    Chart(_S, "Spread of reward components", "reward/*/std", from_zero=True),
    Chart(_H, "Entropy", "policy/entropy"),
    Chart(_H, "Clipping", _CLIPPED, "", _CLIPPING, from_zero=True),
    Chart(_H, "Losses", "policy/loss", "value/loss", _LOSSES),
    Chart(_H, "Gradient norms", "policy/grad_norm", "value/grad_norm", _NORMS, from_zero=True),
    Chart(_H, "Explained variance", "value/explained_variance"),
    Chart(_H, "Size of the update", "policy/approx_kl", from_zero=True),
    Chart(_H, "Rollout engine against trainer", "mismatch/kl", "mismatch/max"),
    Chart(_H, "Effective samples", _SAMPLES, "mismatch/k3", from_zero=True),
    Chart(_H, "Staleness", "staleness/lag", "staleness/effective_samples", from_zero=True),
    Chart(_R, "Response length", _LENGTHS, "response_length/clip_ratio", _LENGTH, "band", from_zero=True),
    Chart(_R, "Finish reasons", "finish_reason/*", kind="bars"),
    Chart(_E, "Held-out reward components", "evaluate/reward/*"),
    Chart(_E, "Held-out sets", "evaluate/*/reward"),
    Chart(_E, "Solved held-out prompts", "evaluate/pass@* evaluate/*/pass@*", from_zero=True),
    Chart(_E, "Numbers of evaluate.command", "eval/*"),
    Chart(_E, "Held-out response length", "evaluate/response_length", from_zero=True),
    Chart(_P, "Seconds per stage", "seconds/*", kind="bars"),
    Chart(_P, "Tokens per second", "tokens_per_second/*", from_zero=True),
    Chart(_P, "Tokens through models per second", "model_tokens_per_second/*", from_zero=True),
    Chart(_P, "Padding", "padding/*", from_zero=True),
    Chart(_P, "GPU hours", "slurm/gpu_hours/*", kind="bars"),
    Chart(_P, "Seconds in the queue", "slurm/queue_seconds/*", kind="bars"),
    Chart(_P, "Idle share", "slurm/idle_share/*", from_zero=True),
    Chart(_P, "Idle share of workers", "slurm/worker_idle_share/*", from_zero=True),
    Chart(_P, "Start-up share", "slurm/startup_share/*", from_zero=True),
    Chart(_P, "Wasted share", "slurm/wasted_share", from_zero=True),
    Chart(_P, "Memory (GiB)", "memory_gib/*", from_zero=True),
    Chart(_P, "GPU memory (GiB)", "gpu_memory_gib/*", from_zero=True),
    Chart(_P, "Batch budgets halved for lack of GPU memory", "halvings/*", from_zero=True),
    Chart(_C, "Prompts left out, cut or read otherwise", _PROMPTS, from_zero=True),
)
