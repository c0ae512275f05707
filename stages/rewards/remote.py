"""Scores from a service over HTTP: the questions about responses, and the answers that are accepted.

``classify`` and ``chat`` are vLLM's and OpenAI's formats, ``plain`` is our own. A score that is missing or
not a finite number is an error that names the response.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.reward import RemoteApi, RemoteConfig
from pipeline.data.tokens import affixes_of
from pipeline.plugins.called import why_no_score
from stages.context import Context, UserError
from stages.models.tokenizers import tokenizer_of
from stages.rewards.posting import PostRequest, RemoteFailed, Service
from stages.rewards.rows import name_of, rule_inputs, tokenized_conversations

_ROWS_PER_REQUEST = 32


class Unreadable(ValueError):
    """An answer without a score."""

    def __init__(self, text: str, index: int = 0) -> None:
        super().__init__(text)
        self.index = index
        """Index of the row without a score, in its request."""


@dataclass(frozen=True)
class Question:
    """The question about some rows, in the service's format."""

    fields: Callable[[slice], dict[str, Any]]
    """Function that returns the body's fields about a slice of the rows."""
    num_truncated: int = 0
    """Sequences that were cut on the left."""


def remote_scores(
    context: Context, name: str, config: RemoteConfig, rows: pa.Table
) -> tuple[list[float], dict[str, float]]:
    """Return one finite number per row of a rollout table, and metrics. Rows whose prompt the policy's engine
    refused are not asked about and get 0.

    Raises:
        RemoteFailed: the service is down, or a score is missing or no number and unreadable_score not set.
        UserError: the service refuses what it is asked, or its key is not set.
    """
    has_response = pc.greater(pc.list_value_length(rows["response_tokens"]), 0)
    asked = rows.filter(has_response)
    size = config.batch_size or (1 if config.api is RemoteApi.CHAT else _ROWS_PER_REQUEST)
    parts = [slice(i, min(i + size, asked.num_rows)) for i in range(0, asked.num_rows, size)]
    question = QUESTIONS[config.api](context, config, asked)
    requests = [request(config, question.fields(part), asked, part) for part in parts]
    replies = Service(name, config).post(requests)
    found: list[float] = []
    num_unreadable = 0
    for part, reply in zip(parts, replies, strict=True):
        try:
            found += ANSWERS[config.api](config, reply.content, part.stop - part.start)
        except Unreadable as error:
            if config.unreadable_score is None:
                where = name_of(asked, part.start + error.index)
                text = f"reward component {name!r} ({config.url}) gave no score for {where}: {error}"
                raise RemoteFailed(text) from None
            found.append(config.unreadable_score)
            num_unreadable += 1
    scores = iter(found)
    metrics = {f"retries/{name}": float(sum(reply.num_retries for reply in replies))}
    if config.max_model_len is not None:
        metrics[f"truncated/{name}"] = float(question.num_truncated)
    if config.unreadable_score is not None:
        metrics[f"unreadable/{name}"] = float(num_unreadable)
    return [next(scores) if is_asked else 0.0 for is_asked in has_response.to_pylist()], metrics


def request(config: RemoteConfig, fields: dict[str, Any], rows: pa.Table, part: slice) -> PostRequest:
    """Build a request. Raises UserError where a column of the prompt file cannot be written as JSON."""
    names = name_of(rows, part.start)
    if part.stop > part.start + 1:
        names += f" to {name_of(rows, part.stop - 1)}"
    model = {"model": config.model} if config.model else {}
    try:
        body = json.dumps({**model, **fields, **config.parameters}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{config.url} cannot be asked about {names}: {error}") from None
    return PostRequest(body.encode(), names)


# questions


def classify_question(context: Context, config: RemoteConfig, rows: pa.Table) -> Question:
    """Ask with token ids where the service's tokenizer is known, as for a reward model here; else text."""
    if config.tokenizer is None:
        pairs = zip(rows["prompt_text"].to_pylist(), rows["response_text"].to_pylist(), strict=True)
        texts = [prompt + response for prompt, response in pairs]
        return Question(lambda part: {"input": texts[part], "use_activation": False})
    context.source(config.tokenizer)
    tokenizer = tokenizer_of(context, config.tokenizer)
    own, key = context.rendering.without_arguments(), f"tokenizer={config.tokenizer} of {config.url}"
    ids = tokenized_conversations(tokenizer, rows, key, own)
    limit = config.max_model_len
    affixes = affixes_of(tokenizer)
    cut = [affixes.cut(row, limit) if limit else row for row in ids]
    num_truncated = sum(len(row) > len(kept) for row, kept in zip(ids, cut, strict=True))
    return Question(lambda part: {"input": cut[part], "use_activation": False}, num_truncated)


def chat_question(context: Context, config: RemoteConfig, rows: pa.Table) -> Question:
    """Ask with one message to the judge. Raises UserError where the template names an absent column."""
    inputs = rule_inputs(rows)
    named = {**inputs, "prompt": inputs["prompts"], "response": inputs["responses"]}

    def fields(part: slice) -> dict[str, Any]:
        values = {name: column[part.start] for name, column in named.items()}
        try:
            text = str(config.template).format_map(values)
        except KeyError as error:
            raise UserError(
                f"the template for {config.url} names {error}, no column of the prompt file"
            ) from None
        return {"messages": [{"role": "user", "content": text}], "temperature": 0}

    return Question(fields)


def plain_question(context: Context, config: RemoteConfig, rows: pa.Table) -> Question:
    inputs = rule_inputs(rows)
    prompts, responses = inputs.pop("prompts"), inputs.pop("responses")
    return Question(
        lambda part: {
            "prompts": prompts[part],
            "responses": responses[part],
            "columns": {name: values[part] for name, values in inputs.items()},
        }
    )


QUESTIONS = {
    RemoteApi.CLASSIFY: classify_question,
    RemoteApi.CHAT: chat_question,
    RemoteApi.PLAIN: plain_question,
}


# answers


def classify_answer(config: RemoteConfig, content: Any, num_rows: int) -> list[float]:
    """Return the last logit of each row. Rows are identified by ``index``, not by their order."""
    by_index: dict[Any, Any] = {}
    for entry in listed(content, "data"):
        index = entry.get("index") if isinstance(entry, dict) else None
        if type(index) is not int or index in by_index or not 0 <= index < num_rows:
            raise Unreadable(f"an entry of its answer has index {index!r}, twice or not of {num_rows} rows")
        by_index[index] = entry
    scores = []
    for i in range(num_rows):
        if i not in by_index:
            raise Unreadable(f"its answer has {len(by_index)} of {num_rows} rows", i)
        probs = by_index[i].get("probs")
        if not isinstance(probs, list) or not probs:
            raise Unreadable(f"probs is {probs!r:.100}", i)
        scores.append(number(probs[-1], i))
    return scores


def chat_answer(config: RemoteConfig, content: Any, num_rows: int) -> list[float]:
    """Return the score in the judge's reply."""
    choices = listed(content, "choices")
    message = choices[0].get("message") if choices and isinstance(choices[0], dict) else None
    text = message.get("content") if isinstance(message, dict) else None
    if not isinstance(text, str):
        raise Unreadable(f"its answer has no text, but {content!r:.200}")
    matches = re.findall(config.score_pattern, text) if config.score_pattern else [text]
    try:
        return [number(float(matches[-1].strip()), 0)]
    except (IndexError, ValueError):
        wanted = (
            f"score_pattern={config.score_pattern}" if config.score_pattern else "a number and nothing else"
        )
        raise Unreadable(f"the reply {text!r:.200} is not {wanted}") from None


def plain_answer(config: RemoteConfig, content: Any, num_rows: int) -> list[float]:
    scores = listed(content, "scores")
    if len(scores) != num_rows:
        index = min(len(scores), num_rows - 1)
        raise Unreadable(f"its answer has {len(scores)} scores for {num_rows} rows", index)
    return [number(score, index) for index, score in enumerate(scores)]


ANSWERS = {RemoteApi.CLASSIFY: classify_answer, RemoteApi.CHAT: chat_answer, RemoteApi.PLAIN: plain_answer}


def listed(content: Any, field: str) -> list[Any]:
    found = content.get(field) if isinstance(content, dict) else None
    if not isinstance(found, list):
        raise Unreadable(f"its answer has no list {field!r}, but is {content!r:.200}")
    return found


def number(value: Any, index: int) -> float:
    """Return a number as a float. Raises Unreadable for text, truth values and what is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or why_no_score(value):
        raise Unreadable(f"{value!r:.100} is not a finite number, or too large a one", index)
    return float(value)
