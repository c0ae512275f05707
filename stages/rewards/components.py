"""Scores of each reward component for a table of responses."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.engine_rules import vllm_in
from pipeline.config.engines import Engine
from pipeline.config.reward import Component, NormalizationConfig, RewardModelConfig, RuleConfig
from pipeline.data.chat import refusals
from pipeline.data.prompts import Prompt, read_prompts, summarize
from pipeline.data.rendering import prompt_text
from pipeline.data.tokens import affixes_of, text_ids
from pipeline.plugins.called import why_no_score
from pipeline.run.schemas import RESERVED_COLUMNS
from pipeline.run.tasks import PREPARE, Stage
from stages.context import Context, NumericalError, UserError
from stages.engines import Wanted, engine, make_scorer
from stages.engines.base import Scorer, problem_of
from stages.generation.chat import messages_json, tools_json
from stages.logs import log
from stages.models.tokenizers import policy_ends, same_tokenizer, tokenizer_of
from stages.process.kept import kept_value
from stages.rewards.failed import rows_judged
from stages.rewards.rows import conversation_ids, name_of, texts_with_special_tokens, tokenized_conversations
from stages.rewards.rules import rule_scores
from stages.rewards.steps import stepped
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
            model = RewardModel(context, component)
            with context.computing():
                raw = model.score(rows)
            mean, std = normalization_of(context, name, component.normalization)
            scores[name] = [None if score is None else (score - mean) / std for score in raw]
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
            RewardModel(context, component)
            return component.engine or context.config.reward.engine
    return None


def check_finite(name: str, scores: Sequence[Score], rows: pa.Table) -> None:
    """Raise NumericalError naming the first row whose score is no number, or more than single precision
    holds, in which scores are stored."""
    for index, score in enumerate(scores):
        if score is not None and (why := why_no_score(score)):
            raise NumericalError(f"{name} gives {score} {why} for {name_of(rows, index)}")


class RewardModel:
    """A reward model with its own tokenizer and chat template."""

    def __init__(self, context: Context, config: RewardModelConfig) -> None:
        context.source(config.path)
        self._config = config
        self._rendering = context.rendering
        self._context = context
        self._tokenizer = tokenizer_of(context, config.path)
        self._affixes = affixes_of(self._tokenizer)
        self._shares_tokens = shares_tokens(context, config.path)
        name, fingerprint = config.engine or context.config.reward.engine, context.fingerprint_of(config.path)
        whole, vllm = context.config, None
        if name == Engine.VLLM:
            vllm = vllm_in(whole, "reward", context.task.job_kind)
            whole = replace(whole, reward=replace(whole.reward, vllm=vllm))
        wanted = Wanted("scorer", context.attempt, (config.path, whole), (fingerprint,), name, vllm)
        self._scorer: Scorer = engine(wanted, lambda: make_scorer(whole, name, config.path))
        self._limit = self._scorer.limits.context
        self.num_truncated = 0
        """Sequences that were cut to fit the reward model's context: behind the tokens that begin a text."""
        self.num_unscored = 0
        """Rows that this model has not scored."""

    def score(self, rows: pa.Table) -> list[Score]:
        """Return raw scores, one per row of a rollout table. 0 for a row without a response, None for one
        that this model cannot take; both are counted."""
        has_response = pc.greater(pc.list_value_length(rows["response_tokens"]), 0)
        scored = rows.filter(has_response)
        sequences = self._cut(self._sequences(scored))
        problems = [problem_of(sequence, self._scorer.limits, new_tokens=0) for sequence in sequences]
        self.num_unscored = rows.num_rows - problems.count(None)
        if unfit := [i for i, problem in enumerate(problems) if problem]:
            first = f"the first of them {name_of(scored, unfit[0])}: {problems[unfit[0]]}"
            log.warning(f"{self._config.path} cannot score {len(unfit)} rows, {first}")
        fitting = [sequence for sequence, problem in zip(sequences, problems, strict=True) if not problem]
        found = iter(self._scorer.score(fitting))
        scores = iter([None if problem else next(found) for problem in problems])
        return [next(scores) if is_scored else 0.0 for is_scored in has_response.to_pylist()]

    def _sequences(self, rows: pa.Table) -> list[list[int]]:
        """Return this model's ids of each row."""
        if self._shares_tokens:
            columns = rows["prompt_tokens"].to_pylist(), rows["response_tokens"].to_pylist()
            return [p + r for p, r in zip(*columns, strict=True)]
        own = self._rendering.without_arguments()
        return tokenized_conversations(self._tokenizer, rows, f"reward model {self._config.path}", own)

    def score_texts(self, prompts: Sequence[Prompt], responses: list[str]) -> list[float]:
        """Return raw scores of texts (prompts and responses), over the tokens that a rollout of them has."""
        tokens = []
        for index, texts in enumerate(zip(prompts, responses, strict=True)):
            try:
                tokens.append(self._sample_ids(*texts))
            except refusals() as error:
                raise UserError(
                    f"the chat template of {self._config.path} refuses reference sample {index}: {error}"
                ) from error
        if not all(tokens):
            raise UserError(f"the tokenizer of {self._config.path} gives no token for a response")
        return self._scorer.score(self._cut(tokens))

    def _sample_ids(self, prompt: Prompt, response: str) -> list[int]:
        if self._shares_tokens:
            return self._as_rolled_out(prompt, response)
        own = self._rendering.without_arguments()
        if isinstance(prompt.prompt, str):
            return conversation_ids(self._tokenizer, own, prompt.prompt, None, response)
        messages, tools = messages_json(prompt.prompt), tools_json(prompt.tools)
        return conversation_ids(self._tokenizer, own, "", messages, response, tools=tools)

    def _as_rolled_out(self, prompt: Prompt, response: str) -> list[int]:
        """Return the policy's own ids: prompt, response and the token that ends it."""
        is_chat = not isinstance(prompt.prompt, str)
        text, affixes = prompt_text(prompt, self._tokenizer, self._rendering), self._affixes
        made = partial(text_ids, self._tokenizer, ends=False, affixes=affixes)
        (begun,), (written,) = made([text], special=not is_chat), made([response], special=False)
        end = policy_ends(self._context).of_answer(is_chat)
        return [*begun, *written, *(() if end is None else (end,))]

    def _cut(self, sequences: list[list[int]]) -> list[list[int]]:
        self.num_truncated = sum(len(sequence) > self._limit for sequence in sequences)
        return [self._affixes.cut(sequence, self._limit) for sequence in sequences]


def shares_tokens(context: Context, directory: str) -> bool:
    """Whether the tokenizer of a reward model is the policy's own."""
    policy = context.config.model.policy
    key = (directory, *map(context.fingerprint_of, (directory, policy)), context.config.model)

    def compare() -> bool:
        return same_tokenizer(tokenizer_of(context, directory), tokenizer_of(context, policy))

    return bool(kept_value(f"shares_tokens {directory}", key, compare))


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
