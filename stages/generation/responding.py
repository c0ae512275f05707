"""Generation of response rows from prompts, shared by rollout and evaluate."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.engine_rules import vllm_in
from pipeline.config.engines import Engine
from pipeline.config.model_files import text_settings
from pipeline.config.routing_rules import num_experts_in
from pipeline.config.schema import Config
from pipeline.data.tokens import written_text
from pipeline.run.schemas import (
    GREEDY_SAMPLE,
    PROMPTS,
    ROLLOUT,
    ROUTED_EXPERTS,
    FinishReason,
    columns_besides,
    conform,
)
from pipeline.run.seeds import derive_seed
from pipeline.run.tasks import Stage, Task
from pipeline.run.wide import repeat
from stages.context import Context, NumericalError
from stages.engines import Wanted, engine, make_generator, reload_generator
from stages.engines.base import BadAnswer, Generator, Request, Sampling
from stages.files.policy import PolicyFiles
from stages.files.routes import routes_column
from stages.generation.chat import messages_json
from stages.generation.conversations import Conversations, TokenBudget, open_conversations
from stages.generation.episodes import Episode
from stages.generation.progress import SAVE_SECONDS, Progress, origin_of
from stages.models.tokenizers import policy_ends, tokenizer_of, unknown_ids
from stages.process.preemption import StoppedOnWarning, warned

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def respond(
    context: Context,
    prompts: pa.Table,
    version: int,
    sampling: Sampling,
    samples: Sequence[int],
    save_every: float = SAVE_SECONDS,
) -> pa.Table:
    """Generate responses of policy ``version`` as a rollout table, continuing what earlier attempts saved.

    Args:
        samples: ``sample_index`` of each response of a prompt, in the order that they have in the table.
        save_every: seconds from one save to the next.

    Raises:
        StoppedOnWarning: the process was warned; what is finished is saved.
    """
    config = context.config
    files = context.policy_files(version)
    tokenizer = tokenizer_of(context, config.model.policy)
    repeated = repeat(prompts, len(samples), plain=PROMPTS.names)
    requests = requests_of(context, repeated, samples)
    if warned():  # loading a large model would outlast what is left of the time
        raise StoppedOnWarning(0, 0, len(requests))
    generator = generator_of(context, files)
    origin = origin_of(context, version, requests, sampling, generator.plan(requests))
    progress = Progress(context, origin, len(requests), save_every)
    unwritten = policy_ends(context).unwritten
    with open_conversations(
        config, repeated, samples, requests, tokenizer, generator, context.rendering, warned, unwritten
    ) as conversations:
        responses = finish(context, progress, generator, requests, sampling, conversations)
    check_finite(responses, repeated, version)
    check_known(context, responses, repeated)
    table = rollout_table(repeated, responses, samples, tokenizer, unwritten)
    return with_routes(context, table, responses)


def generator_of(context: Context, files: PolicyFiles) -> Generator:
    """Return the task's engine with a policy: a new one, or one that the process has kept."""
    config = context.config
    adapter = None if files.adapter is None else str(files.adapter)
    threads = (config.evaluate if context.task.stage is Stage.EVALUATE else config.rollout).num_threads
    settings = (config, threads)
    name = config.rollout.engine
    vllm = vllm_in(config, "rollout", context.task.job_kind) if name == Engine.VLLM else None
    wanted = Wanted("generator", context.attempt, settings, files.weights, name, vllm)
    found: Generator = engine(
        wanted,
        make=partial(make_generator, config, str(files.base), adapter),
        reload=lambda generator, had: reload_generator(config, generator, files, had),
    )
    return found


def requests_of(context: Context, prompts: pa.Table, samples: Sequence[int]) -> list[Request]:
    """Return one request per row of ``prompts``, which has each prompt once per sample. Seeds derive from
    prompt and sample."""
    config = context.config
    columns = prompts["prompt_id"].to_pylist(), prompts["prompt_tokens"].to_pylist()
    return [
        Request(
            tokens,
            room(config, tokens),
            seed_of(config, context.task, prompt_id, sample),
            greedy=sample == GREEDY_SAMPLE,
        )
        for prompt_id, tokens, sample in zip(*columns, cycle(samples), strict=False)
    ]


def seed_of(config: Config, task: Task, prompt_id: str, sample: int) -> int:
    """Return the seed of one response. Samples of an evaluation have the same for every policy."""
    if task.stage is Stage.EVALUATE and sample != GREEDY_SAMPLE:
        given = config.seed if config.evaluate.seed is None else config.evaluate.seed
        return derive_seed(given, "samples of evaluate", prompt_id, sample)
    return derive_seed(config.seed, task.iteration, str(task.stage), prompt_id, sample)


def finish(
    context: Context,
    progress: Progress,
    generator: Generator,
    requests: Sequence[Request],
    sampling: Sampling,
    conversations: Conversations | None,
) -> list[Episode]:
    """Return all responses in the requests' order: those of ``progress``, and the rest, which is generated.

    Raises:
        StoppedOnWarning: the process was warned; what is finished is saved.
    """
    done = frozenset(progress.responses)
    to_episode = conversations.episode if conversations else lambda _, response: Episode.of(response)
    stream = iter(generator.stream(requests, sampling, done, warned, conversations))
    try:
        while True:
            with context.computing():
                finished = next(stream, None)
            if finished is None:
                break
            progress.add({index: to_episode(index, response) for index, response in finished.items()})
    except Exception as error:
        progress.save()  # whatever broke, what is finished is good for the next attempt
        if warned():  # an engine's worker processes may have died of the warning
            raise StoppedOnWarning(progress.num_found, len(progress.responses), progress.total) from error
        raise
    if not progress.is_complete:
        progress.save()
        raise StoppedOnWarning(progress.num_found, len(progress.responses), progress.total)
    return [progress.responses[i] for i in range(progress.total)]


def check_finite(responses: Sequence[Episode], prompts: pa.Table, version: int) -> None:
    """Raise NumericalError naming the first prompt with a log-probability that is not finite."""
    for index, response in enumerate(responses):
        if not all(map(math.isfinite, response.log_probs)):
            raise NumericalError(
                f"policy {version} gives log-probabilities that are not finite for prompt_id "
                f"{prompts['prompt_id'][index]}; its weights or their number format are at fault"
            )


def check_known(context: Context, responses: Sequence[Episode], prompts: pa.Table) -> None:
    """Raise BadAnswer naming the first prompt after which an engine wrote an id that is no token's: no text
    has it, and other models may have no embedding for it. Our own engines never write one."""
    config = context.config
    size = text_settings(Path(config.model.policy)).get("vocab_size")
    unknown = frozenset(unknown_ids(config, size) if isinstance(size, int) else ())
    for index, response in enumerate(responses if unknown else ()):
        if wrong := unknown.intersection(response.tokens):
            raise BadAnswer(
                f"rollout.engine={config.rollout.engine} wrote id {min(wrong)}, which the policy's tokenizer "
                f"has no token for, for prompt_id {prompts['prompt_id'][index]}"
            )


def with_routes(context: Context, table: pa.Table, responses: Sequence[Episode]) -> pa.Table:
    """Return a rollout table with the column routed_experts, where the update is to replay them.

    Raises:
        BadAnswer: the engine did not give the experts of every token.
    """
    config = context.config
    if not config.algorithm.router_replay or context.task.stage is not Stage.ROLLOUT:
        return table
    lengths = pc.list_value_length(table["prompt_tokens"]).to_pylist()
    for index, (length, response) in enumerate(zip(lengths, responses, strict=True)):
        found = 0 if response.routes is None else len(response.routes)
        wanted = length + len(response.tokens) - 1
        if response.tokens and found != wanted:
            raise BadAnswer(
                f"rollout.engine={config.rollout.engine} gave the experts of {found} tokens instead of "
                f"{wanted} for prompt_id {table['prompt_id'][index]}; set algorithm.router_replay=false"
            )
    num_experts = num_experts_in(text_settings(Path(config.model.policy)))
    column = routes_column([response.routes for response in responses], num_experts)
    return table.append_column(ROUTED_EXPERTS, column)


def room(config: Config, prompt_tokens: Sequence[int]) -> int:
    """Return how many tokens the first turn may have; prepare has ensured at least 1."""
    context = config.model.context_length
    assert context is not None
    left = TokenBudget.of(config.rollout, context).of_turn(len(prompt_tokens), 0)
    assert left >= 1, f"a prompt of {len(prompt_tokens)} tokens leaves no room in {context}"
    return left


def rollout_table(
    prompts: pa.Table,
    responses: Sequence[Episode],
    samples: Sequence[int],
    tokenizer: "PreTrainedTokenizerBase",
    unwritten: frozenset[int],
) -> pa.Table:
    """Return one row per response, with the prompt's columns. ``prompts`` has a row per response too.

    Args:
        unwritten: end tokens, which are no part of a response's text.
    """
    texts = [written_text(tokenizer, r.tokens, r.mask, unwritten) for r in responses]
    return conform(
        {
            "prompt_id": prompts["prompt_id"],
            "sample_index": [samples[i % len(samples)] for i in range(len(responses))],
            "prompt_tokens": prompts["prompt_tokens"],
            "response_tokens": [r.tokens for r in responses],
            "response_mask": [r.mask for r in responses],
            "rollout_logprobs": [r.log_probs for r in responses],
            "finish_reason": [r.finish_reason for r in responses],
            "num_turns": [r.num_turns for r in responses],
            "prompt_text": prompts["prompt_text"],
            "prompt_messages": prompts["prompt_messages"],
            "response_text": texts,
            "response_messages": [messages_json(r.messages) for r in responses],
        },
        ROLLOUT,
        extra=columns_besides(prompts, PROMPTS),
    )


def response_metrics(rows: pa.Table) -> dict[str, float]:
    """Return counts that add up over shards."""
    reasons = rows["finish_reason"].to_pylist()
    return {
        "responses": float(rows.num_rows),
        "response_tokens": num_tokens(rows),
        "stopped": float(reasons.count(FinishReason.STOP)),
        "refused": float(reasons.count(FinishReason.REFUSED)),
        "turns": float(sum(rows["num_turns"].to_pylist())),
    }


def num_tokens(rows: pa.Table) -> float:
    """Return the number of response tokens of all rows."""
    return float(pc.sum(pc.list_value_length(rows["response_tokens"])).as_py() or 0)
