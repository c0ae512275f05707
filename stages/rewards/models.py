"""Reward models: a score of each response, over the ids that the model reads it as."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.engine_rules import vllm_in
from pipeline.config.engines import Engine
from pipeline.config.reward import RewardModelConfig
from pipeline.config.schema import Config
from pipeline.data.chat import refusals
from pipeline.data.prompts import Prompt
from pipeline.data.rendering import prompt_text
from pipeline.data.tokens import Affixes, affixes_of, text_ids
from stages.context import Context, UserError
from stages.engines import Wanted, engine, make_scorer
from stages.engines.base import Scorer, SequenceLimits, problem_of
from stages.generation.chat import messages_json, tools_json
from stages.logs import log
from stages.models.tokenizers import policy_ends, same_tokenizer, tokenizer_of
from stages.process.kept import kept_value
from stages.rewards.rows import conversation_ids, name_of, tokenized_conversations
from stages.rewards.validity import Score


@dataclass(frozen=True)
class ReadText:
    """A response as a reward model reads it."""

    ids: list[int]
    places: tuple[int, ...] = ()
    """Indices into ``ids`` at which steps are scored, ascending; -1 of one that was cut off."""
    ends: tuple[int, ...] = ()
    """For each of them, the response's token at which the step ends."""
    num_tokens: int = 0
    """Tokens of the response."""
    problem: str = ""
    """Reason why it cannot be scored; empty where none is known."""

    def cut(self, affixes: Affixes, limit: int) -> "ReadText":
        """Return the last of it, behind the ids that begin a text: at most ``limit`` in all."""
        ids = affixes.cut(self.ids, limit)
        shift, head = len(self.ids) - len(ids), affixes.num_leading(ids)
        places = (place - shift for place in self.places)
        kept = replace(self, ids=ids, places=tuple(p if p >= head else -1 for p in places))
        if kept.places and kept.places[0] < 0:
            return replace(kept, problem=f"its steps do not fit into a context of {limit}")
        return kept


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
        self._limits = self._load(context.config, context.fingerprint_of(config.path))
        self.num_truncated = 0
        """Sequences that were cut to fit the reward model's context: behind the tokens that begin a text."""
        self.num_unscored = 0
        """Rows that this model has not scored."""

    def _load(self, whole: Config, fingerprint: str) -> SequenceLimits:
        """Get the engine, and return its limits."""
        path, name, vllm = self._config.path, self._config.engine or whole.reward.engine, None
        if name == Engine.VLLM:
            vllm = vllm_in(whole, "reward", self._context.task.job_kind)
            whole = replace(whole, reward=replace(whole.reward, vllm=vllm))
        wanted = Wanted("scorer", self._context.attempt, (path, whole), (fingerprint,), name, vllm)
        self._scorer: Scorer = engine(wanted, lambda: make_scorer(whole, name, path))
        return self._scorer.limits

    def score(self, rows: pa.Table) -> list[Score]:
        """Return raw scores, one per row of a rollout table. 0 for a row without a response, None for one
        that this model cannot take; both are counted."""
        has_response = pc.greater(pc.list_value_length(rows["response_tokens"]), 0)
        scored = rows.filter(has_response)
        readings = self._cut(self._readings(scored))
        problems = [self._problem(reading) for reading in readings]
        self.num_unscored = rows.num_rows - problems.count(None)
        if unfit := [i for i, problem in enumerate(problems) if problem]:
            first = f"the first of them {name_of(scored, unfit[0])}: {problems[unfit[0]]}"
            log.warning(f"{self._config.path} cannot score {len(unfit)} rows, {first}")
        fitting = [reading for reading, problem in zip(readings, problems, strict=True) if not problem]
        found = iter(self._scores(fitting))
        scores = iter([None if problem else next(found) for problem in problems])
        return [next(scores) if is_scored else 0.0 for is_scored in has_response.to_pylist()]

    def _readings(self, rows: pa.Table) -> list[ReadText]:
        """Return what this model reads of each row."""
        if self._shares_tokens:
            columns = rows["prompt_tokens"].to_pylist(), rows["response_tokens"].to_pylist()
            return [ReadText(p + r) for p, r in zip(*columns, strict=True)]
        own = self._rendering.without_arguments()
        key = f"reward model {self._config.path}"
        return list(map(ReadText, tokenized_conversations(self._tokenizer, rows, key, own)))

    def _scores(self, readings: Sequence[ReadText]) -> Sequence[Score]:
        """Return the raw score of each."""
        return self._scorer.score([reading.ids for reading in readings])

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
        return self._scorer.score([reading.ids for reading in self._cut(list(map(ReadText, tokens)))])

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

    def _cut(self, readings: Sequence[ReadText]) -> list[ReadText]:
        limit = self._limits.context
        self.num_truncated = sum(len(reading.ids) > limit for reading in readings)
        return [reading.cut(self._affixes, limit) for reading in readings]

    def _problem(self, reading: ReadText) -> str | None:
        """Return why the model cannot score what is left of a row, if it cannot."""
        return reading.problem or problem_of(reading.ids, self._limits, new_tokens=0)


def shares_tokens(context: Context, directory: str) -> bool:
    """Whether the tokenizer of a reward model is the policy's own."""
    policy = context.config.model.policy
    key = (directory, *map(context.fingerprint_of, (directory, policy)), context.config.model)

    def compare() -> bool:
        return same_tokenizer(tokenizer_of(context, directory), tokenizer_of(context, policy))

    return bool(kept_value(f"shares_tokens {directory}", key, compare))
