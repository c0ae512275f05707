"""What an iteration, and the run, would take, by the seconds of a small run. Pure.

What a task does once (start, load, write) is kept apart from what grows with its rows. Where the growth is
not known, as a fuller batch may take hardly longer on a GPU and a worker that stays loads nothing again,
there is a range.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.engines import Engine
from pipeline.config.schema import Config
from pipeline.run.plan import Plan
from pipeline.run.tasks import Stage
from pipeline.tryout.result import TriedStage, TryResult

_GROWING = ("read", "reference", "old_log_probs", "steps")
"""Parts of an update that grow with the rows."""


@dataclass(frozen=True)
class SecondsRange:
    """At least, and at most so many seconds."""

    low: float
    high: float

    def plus(self, other: "SecondsRange") -> "SecondsRange":
        return SecondsRange(self.low + other.low, self.high + other.high)

    def times(self, factor: float) -> "SecondsRange":
        return SecondsRange(self.low * factor, self.high * factor)


@dataclass(frozen=True)
class StageOutlook:
    """What the tasks of a job kind would take in an iteration of the run."""

    job_kind: str
    tasks: int
    at_once: int
    """Tasks that run side by side."""
    seconds: SecondsRange | None
    """From the first start to the last end; None where the small run does not show it."""


@dataclass(frozen=True)
class TryOutlook:
    """What the run would take."""

    stages: tuple[StageOutlook, ...]
    prepare: float
    iterations: int
    overlaps: bool = False
    """Whether iterations are rolled out while updates compute."""

    @property
    def iteration(self) -> SecondsRange | None:
        """Seconds of an iteration, whose stages follow each other, or at best all overlap with other
        iterations'; None where one is not known."""
        known = [stage.seconds for stage in self.stages if stage.seconds is not None]
        if len(known) < len(self.stages):
            return None
        lows = [seconds.low for seconds in known]
        low = max(lows) if self.overlaps else sum(lows)
        return SecondsRange(low, sum(seconds.high for seconds in known))

    @property
    def run(self) -> SecondsRange | None:
        """Seconds of the whole run, evaluations and waits in a queue left out."""
        one = self.iteration
        once = SecondsRange(self.prepare, self.prepare)
        return None if one is None else one.times(self.iterations).plus(once)


def outlook(result: TryResult, places: Mapping[str, int]) -> TryOutlook:
    """Say what the run would take.

    Args:
        places: most tasks of each job kind at once; of those that are not named all of an iteration.
    """
    config, plan = result.config, Plan.of(result.config)
    stages = []
    for job_kind in plan.job_kinds:
        tasks = plan.tasks_of_kind(job_kind)
        at_once = max(1, min(tasks, places.get(job_kind, tasks)))
        stages.append(StageOutlook(job_kind, tasks, at_once, _seconds(result, job_kind, tasks, at_once)))
    prepare, overlaps = result.stage(Stage.PREPARE).seconds, config.rollout.staleness > 0
    return TryOutlook(tuple(stages), prepare, config.iterations, overlaps)


def _seconds(result: TryResult, job_kind: str, tasks: int, at_once: int) -> SecondsRange | None:
    config, tried = result.config, result.stage(job_kind)
    is_update = job_kind == Stage.UPDATE
    prompts = config.data.prompts_per_iteration if is_update else config.prompts_per_rollout
    scale = prompts / tasks / result.prompts
    if is_update:
        return _of_update(result, tried, scale)
    computing = _computing(result, tried, scale)
    return computing.times(math.ceil(tasks / at_once)).plus(SecondsRange(0.0, tried.start))


def _computing(result: TryResult, tried: TriedStage, scale: float) -> SecondsRange:
    """Return the seconds of one task without its start."""
    if not tried.compute:  # rules alone: what they took was for each row
        return SecondsRange(tried.other * scale, tried.other * scale)
    now, then = _batches(result, tried.job_kind, 1.0), _batches(result, tried.job_kind, scale)
    high = tried.compute * scale
    low = min(high, tried.compute * then / now)
    return SecondsRange(low + tried.other, high + tried.other)


def _batches(result: TryResult, job_kind: str, scale: float) -> int:
    """Return how many batches of a generating or scoring engine a multiple of the tried responses takes."""
    config, count = result.config, len(result.samples)
    if job_kind == Stage.ROLLOUT:
        return max(1, math.ceil(count * scale / batch_rows(result)))
    return max(1, math.ceil(_num_tokens(result) * scale / config.reward.tokens_per_batch))


def _num_tokens(result: TryResult) -> int:
    """Return the tokens of all responses with their prompts."""
    return sum(result.prompt_lengths[sample.prompt_id] + sample.length for sample in result.samples)


def batch_rows(result: TryResult) -> int:
    """Return how many responses the rollout engine generates at once, prompts of median length."""
    config = result.config
    if config.rollout.engine == Engine.VLLM:
        return config.rollout.vllm.max_num_seqs
    prompt = sorted(result.prompt_lengths.values())[len(result.prompt_lengths) // 2]
    return max(1, config.rollout.tokens_per_batch // (prompt + config.rollout.max_new_tokens))


def _of_update(result: TryResult, tried: TriedStage, scale: float) -> SecondsRange | None:
    """Return the seconds of an update; None where nothing was trained on."""
    parts = result.update_parts
    if result.update.get("policy/computed_responses") == 0:
        return None
    if not parts:  # a trainer of the user's
        return SecondsRange(tried.seconds, tried.seconds * max(1.0, scale))
    growing, load = sum(parts.get(name, 0.0) for name in _GROWING), parts.get("load", 0.0)
    once = max(0.0, tried.seconds - growing - load)
    factor = _passes(result, scale, result.config.update.minibatches) / _passes(
        result, 1.0, result.minibatches
    )
    low = growing * min(scale, factor)
    return SecondsRange(low + min(once, parts.get("save", 0.0)), growing * scale + once + load)


def _passes(result: TryResult, scale: float, minibatches: int) -> int:
    """Return the micro-batches of an epoch over a multiple of the tried responses."""
    each = _num_tokens(result) * scale / minibatches
    return minibatches * max(1, math.ceil(each / result.config.update.micro_batch_tokens))


def is_scaled_down(config: Config, result: TryResult) -> bool:
    """Whether the run's iterations have more prompts than were tried."""
    return config.prompts_per_rollout > result.prompts
