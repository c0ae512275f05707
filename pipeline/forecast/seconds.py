"""Seconds that an iteration will take: by those of an earlier run, or by FLOPs over a card's peak. Pure.

Model FLOPs are 2 for each weight and token of a forward pass, and twice that for a backward pass; those of
attention, which long contexts add, are left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.config.algorithm import Estimator, ReferenceStage
from pipeline.config.correction_rules import passes_for_old_log_probs
from pipeline.config.engine_rules import has_reference_in
from pipeline.config.engines import Engine
from pipeline.config.schema import Config

_BACKWARD = 2
"""Forward passes that a backward pass is worth."""
UPDATE, SCORING = 0.28, 0.28
"""Shares of a card's peak that updates and scoring are assumed to reach: an update of 1.5 billion weights did
on an H200 (docs/explanation/benchmarks.md). Not measured on other cards, models or stages."""
GENERATING = {Engine.VLLM: 0.08, Engine.TRANSFORMERS: 0.01}
"""Shares that generation is assumed to reach, which reads all weights for each token. Not measured."""


@dataclass(frozen=True)
class IterationWork:
    """Size of an iteration."""

    responses: int
    prompt: float
    """Mean tokens of a prompt."""
    response: float
    """Mean tokens of a response."""
    update_passes: float
    """Forward passes of the update that its tokens are worth."""

    @property
    def tokens(self) -> float:
        """Tokens of all prompts and responses, each response with a prompt of its own."""
        return self.responses * (self.prompt + self.response)


@dataclass(frozen=True)
class EarlierRun:
    """Medians over the newest iterations of a run like the one at hand."""

    name: str
    iterations: int
    """Iterations that the medians are of."""
    work: IterationWork
    seconds: Mapping[str, float]
    """Wall seconds of each stage."""
    iteration: float
    """Seconds of an iteration."""


@dataclass(frozen=True)
class StageFlops:
    """Model FLOPs of one stage of an iteration, and what computes them."""

    stage: str
    flops: float
    peak: float
    """FLOP/s of all cards that compute it together, by their makers."""
    share: float
    """Share of the peak that is reached."""
    why: str
    """Source of the share, in words."""


@dataclass(frozen=True)
class SecondsForecast:
    """Seconds that a run will take, as far as there is ground for them."""

    stages: Mapping[str, float]
    """Wall seconds of each stage in an iteration."""
    iteration: float
    run: float
    ground: str
    """What the numbers are derived from, in words."""
    left_out: tuple[str, ...] = ()
    """Stages of which nothing is known, and that ``iteration`` lacks."""


def work_of(config: Config, prompt: float, response: float) -> IterationWork:
    """Return the size of an iteration, by mean tokens of prompts and responses."""
    learned = config.responses_per_update / config.responses_per_iteration
    return IterationWork(config.responses_per_iteration, prompt, response, learned * update_passes(config))


def update_passes(config: Config) -> float:
    """Return how many forward passes of one model an update is worth: the reference's, old log-probabilities
    and values, and of each epoch a forward and a backward pass of policy and critic."""
    algorithm, update = config.algorithm, config.update
    models = 2 if algorithm.estimator is Estimator.GAE else 1
    before = models if passes_for_old_log_probs(config) else models - 1
    reference = int(has_reference_in(config, ReferenceStage.UPDATE))
    return reference + before + update.epochs * models * (1 + _BACKWARD)


def by_earlier(config: Config, work: IterationWork, earlier: EarlierRun) -> SecondsForecast:
    """Scale the seconds of an earlier run: with the tokens of an iteration, the update's with its passes too.
    What lay between the stages stays as it was; where they overlapped, the share that they did."""
    more = work.tokens / earlier.work.tokens
    passes = work.update_passes / earlier.work.update_passes
    stages = {
        stage: seconds * more * (passes if stage == "update" else 1.0)
        for stage, seconds in earlier.seconds.items()
    }
    total = sum(earlier.seconds.values())
    rest = earlier.iteration - total
    if rest < 0:
        rest *= sum(stages.values()) / total
    ground = (
        f"measured in {earlier.name}, median of {earlier.iterations} iterations, times {more:.2f} the tokens"
    )
    return _forecast(config, stages, rest, ground)


def by_flops(config: Config, work: Iterable[StageFlops], left_out: Iterable[str]) -> SecondsForecast | None:
    """Return what FLOPs say; None where there are none."""
    known = list(work)
    if not known:
        return None
    stages = {one.stage: one.flops / (one.peak * one.share) for one in known}
    shares = ", ".join(f"{one.stage} {one.share:.0%} ({one.why})" for one in known)
    return _forecast(config, stages, 0.0, f"FLOPs over the card's stated peak, of which: {shares}", left_out)


def _forecast(
    config: Config, stages: Mapping[str, float], rest: float, ground: str, left_out: Iterable[str] = ()
) -> SecondsForecast:
    iteration = sum(stages.values()) + rest
    return SecondsForecast(dict(stages), iteration, iteration * config.iterations, ground, tuple(left_out))
