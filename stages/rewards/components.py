"""Scores of each reward component for a table of responses."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.reward import Component, NormalizationConfig, RewardModelConfig, RuleConfig
from pipeline.data.prompts import read_prompts, summarize
from pipeline.plugins.called import why_no_score
from pipeline.run.schemas import RESERVED_COLUMNS
from pipeline.run.tasks import PREPARE, Stage
from stages.context import Context, NumericalError, UserError
from stages.logs import log
from stages.models.tokenizers import policy_ends, tokenizer_of
from stages.rewards.failed import rows_judged
from stages.rewards.models import RewardModel
from stages.rewards.rows import name_of, texts_with_special_tokens
from stages.rewards.rules import rule_scores
from stages.rewards.step_models import StepModel
from stages.rewards.steps import SteppedScore, stepped
from stages.rewards.validity import Score


def component_scores(
    context: Context, rows: pa.Table, components: Mapping[str, Component] | None = None
) -> tuple[dict[str, list[Score]], dict[str, float]]:
    """Return one score per row of a rollout table, by component, and metrics of the scoring itself.

    Args:
        components: components to score with, by name. Default: all of the run.
    """
    scores: dict[str, list[Score]] = {}
    metrics: dict[str, float] = {}
    chosen = context.config.reward.components if components is None else components
    for name, component in chosen.items():
        if isinstance(component, RewardModelConfig):
            model = reward_model(context, component)
            with context.computing():
                raw = model.score(rows)
            mean, std = normalization_of(context, name, component.normalization)
            scores[name] = [normalized(score, mean, std) for score in raw]
            metrics[f"truncated/{name}"] = float(model.num_truncated)
            metrics[f"unscored/{name}"] = float(model.num_unscored)
            del model  # the next component's may need its memory
        elif isinstance(component, RuleConfig):
            special = None
            if component.special_tokens:
                tokenizer = tokenizer_of(context, context.config.model.policy)
                special = texts_with_special_tokens(tokenizer, rows, policy_ends(context).unwritten)
            with context.computing():
                num_judged = rows_judged(context.config, context.task, rows.num_rows)
                of_rule, counted = rule_scores(name, component, rows, special, context.stays, num_judged)
            scores[name] = stepped(context, name, component, rows, of_rule)
            metrics |= counted
        else:
            from stages.rewards.remote import remote_scores  # an HTTP client, which most tasks do not need

            found, counted = remote_scores(context, name, component, rows)
            scores[name] = [*found]
            metrics |= counted
        check_finite(f"reward component {name!r}", scores[name], rows)
    return scores, metrics


def load_component(context: Context, components: Mapping[str, Component]) -> str | None:
    """Load the first of these that is a reward model. Returns its engine; None: none is."""
    for component in components.values():
        if isinstance(component, RewardModelConfig):
            reward_model(context, component)
            return component.engine or context.config.reward.engine
    return None


def reward_model(context: Context, config: RewardModelConfig) -> RewardModel:
    """Load the model of a component."""
    return StepModel(context, config) if config.steps else RewardModel(context, config)


def normalized(score: Score, mean: float, std: float) -> Score:
    """Return a raw score, or each step of it, normalised."""
    if isinstance(score, SteppedScore):
        return SteppedScore.of([None if step is None else (step - mean) / std for step in score.steps])
    return None if score is None else (score - mean) / std


def check_finite(name: str, scores: Sequence[Score], rows: pa.Table) -> None:
    """Raise NumericalError naming the first row whose score is no number, or more than single precision
    holds, in which scores are stored."""
    for index, score in enumerate(scores):
        if score is not None and (why := why_no_score(score)):
            raise NumericalError(f"{name} gives {score} {why} for {name_of(rows, index)}")


def normalization_of(context: Context, name: str, config: NormalizationConfig | None) -> tuple[float, float]:
    """Return mean and standard deviation to normalise with; 0 and 1 when the scores stay raw."""
    if config is None:
        return 0.0, 1.0
    if config.mean is not None and config.std is not None:
        return config.mean, config.std
    measured = context.json(PREPARE, "normalization")[name]
    return float(measured["mean"]), float(measured["std"])


def measure_normalization(context: Context) -> dict[str, dict[str, float]]:
    """Return mean and standard deviation of raw scores on reference samples, by component that has any."""
    assert context.task.stage is Stage.PREPARE
    measured = {}
    for name, component in context.config.reward.components.items():
        norm = component.normalization if isinstance(component, RewardModelConfig) else None
        if isinstance(component, RewardModelConfig) and norm and norm.reference_samples:
            measured[name] = statistics(context, name, component, norm)
    return measured


def statistics(
    context: Context, name: str, component: RewardModelConfig, norm: NormalizationConfig
) -> dict[str, float]:
    """Return mean and standard deviation of raw scores on a component's reference samples.

    Raises:
        UserError: the file has no usable responses, or their scores do not differ.
    """
    data, samples = context.config.data, norm.reference_samples
    assert samples is not None
    found = read_prompts(
        Path(samples),
        prompt_column=data.prompt_column,
        id_column=None,
        tools_column=data.tools_column,
        split=data.split,
        columns=None if data.columns is None else [norm.response_column],
        reserved=RESERVED_COLUMNS,
    )
    key = f"reward.components.{name}.normalization.reference_samples={samples}"
    if found.rejected:
        log.warning(f"{key}: {summarize(found.rejected)}")
    if not found.rows:
        raise UserError(f"{key}: has no usable row")
    if norm.response_column not in found.columns.column_names:
        raise UserError(f"{key}: has no column {norm.response_column!r}; see normalization.response_column")
    responses: list[Any] = found.columns[norm.response_column].to_pylist()
    if not all(isinstance(response, str) for response in responses):
        raise UserError(f"{key}: column {norm.response_column!r} must hold text in every row")
    scores = pa.array(RewardModel(context, component).score_texts(found.rows, responses))
    std = pc.stddev(scores).as_py() or 0.0
    if std <= 0:
        raise UserError(f"{key}: its {len(scores)} scores do not differ, so they give no scale")
    return {"mean": pc.mean(scores).as_py(), "std": std, "samples": float(len(scores))}
