"""One rollout of a tiny policy with a tokenizer of :mod:`tests.support.forty_tokenizers`, and all that reads
it: reward models of the same tokenizer and of another, rules, the reference, training, evaluation, samples.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.data.checks import judge, read_file
from pipeline.data.prompts import Prompt
from pipeline.run.directory import create_run
from pipeline.run.schemas import GREEDY_SAMPLE, FinishReason
from pipeline.run.tasks import PREPARE
from stages.context import Context
from stages.engines import make_generator
from stages.engines.base import Generator, Sampling
from stages.generation.chat import messages_of
from stages.generation.episodes import Episode
from stages.generation.responding import requests_of, rollout_table
from stages.models.tokenizers import policy_ends, stop_ids_of
from stages.ppo.batching import Row, collate
from stages.ppo.forward import response_log_probs
from stages.ppo.lora import load_policy
from stages.rewards.components import Score, component_scores
from stages.rewards.models import RewardModel
from stages.rewards.reference import reference_log_probs
from stages.rewards.rows import rule_inputs
from stages.tasks.prepare import prompt_table
from tests.support import tiny
from tests.support.forty_tokenizers import CASES, CONTEXT, Variant, save_tokenizer
from tests.support.tables import LONG, sample

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ("a cat, and 3 more", "what", "x y z", "one an 12")
CLOSE = 2e-4
NEW_TOKENS = 16
RULE = "kind: rule, function: regex_match, arguments: {pattern: '.*[a-m].*'}"
"""A rule that finds one of these letters in some responses, and in others not."""


@dataclass(frozen=True)
class Crossed:
    """A rollout, and the context that it was made in."""

    context: Context
    rows: pa.Table
    is_chat: bool


def make_models(folder: Path, kind: str, variant: Variant) -> None:
    """A policy whose head has more rows than its tokenizer has ids, and a reward model and a reference of the
    same tokenizer that have not."""
    torch.manual_seed(0)
    for name, made, more in (
        ("policy", LlamaForCausalLM, 7),
        ("reference", LlamaForCausalLM, 0),
        ("own", LlamaForSequenceClassification, 0),
    ):
        size = save_tokenizer(folder / name, kind, variant)
        config = LlamaConfig(
            vocab_size=size + more,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=CONTEXT,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
            initializer_range=0.3,
            num_labels=1,
        )
        made(config).save_pretrained(folder / name)


def rolled_out(folder: Path, case: str, kinds: Sequence[bool]) -> list[Crossed]:
    """Roll out with a policy whose head has rows that no token of its tokenizer has.

    Args:
        kinds: for each rollout, whether its prompts are messages. They share an engine.
    """
    make_models(folder, *CASES[case])
    tiny.make_reward_model(folder / "another")
    contexts = [context_of(folder, is_chat) for is_chat in kinds]
    generator = make_generator(contexts[0].config, contexts[0].config.model.policy)
    made = [
        Crossed(context, responses_of(context, generator), is_chat)
        for context, is_chat in zip(contexts, kinds, strict=True)
    ]
    generator.close()
    return made


def context_of(folder: Path, is_chat: bool) -> Context:
    given = [{"role": "user", "content": text} for text in PROMPTS] if is_chat else PROMPTS
    rows = [{"prompt": [row] if is_chat else row} for row in given]
    kind = "messages" if is_chat else "text"
    prompts = tiny.write_jsonl(folder / f"{kind}.jsonl", rows)
    config = resolve(
        compose(
            [
                "reward=model",
                f"model.policy={folder / 'policy'}",
                f"reward.components.rm.path={folder / 'own'}",
                f"+reward.components.another={{kind: model, path: '{folder / 'another'}'}}",
                f"+reward.components.rule={{{RULE}}}",
                f"data.prompts={prompts}",
                f"run_dir={folder / f'run-{kind}'}",
                "data.prompts_per_iteration=4",
                "rollout.samples_per_prompt=4",
                "rollout.precision=fp32",
                f"rollout.max_new_tokens={NEW_TOKENS}",
                "update.minibatches=1",
                "tracking=none",
            ]
        )
    )
    return Context(create_run(config).paths, config, PREPARE, "test")


def responses_of(context: Context, generator: Generator) -> pa.Table:
    config = context.config
    tokenizer = AutoTokenizer.from_pretrained(config.model.policy)
    found = read_file(config, "data.prompts", config.data.prompts)
    judged = judge("data.prompts", config.data.prompts, found, config, context.rendering, tokenizer)
    prompts = prompt_table(judged)
    repeated, samples = prompts.take([i for i in range(prompts.num_rows) for _ in range(4)]), range(4)
    asked = requests_of(context, repeated, samples)
    answered = generator.generate(asked, Sampling(stop_token_ids=stop_ids_of(context)))
    unwritten = policy_ends(context).unwritten
    return rollout_table(repeated, [Episode.of(one) for one in answered], samples, tokenizer, unwritten)


def check(made: Crossed, variant: Variant) -> None:
    """Check that all who read the rollout read what was written."""
    check_ids_and_texts(made, variant)
    check_scores(made)
    check_log_probs(made)


def check_ids_and_texts(made: Crossed, variant: Variant) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made.context.config.model.policy)
    ends, begin = policy_ends(made.context), tokenizer.convert_tokens_to_ids("<s>")
    special = {*tokenizer.all_special_ids, *ends.ids}
    columns = ("prompt_tokens", "response_tokens", "response_text", "finish_reason")
    for prompt, response, text, reason in zip(*(made.rows[c].to_pylist() for c in columns), strict=True):
        assert max(*prompt, *response) < len(tokenizer)
        assert not ends.ids & set(response[:-1])
        assert (response[-1] in ends.ids) == (reason == FinishReason.STOP)
        assert text == tokenizer.decode([i for i in response if i not in special])
        has_begin = variant.template and variant.template.startswith("<s>")
        if has_begin if made.is_chat else variant.adds_begin:
            assert prompt[0] == begin
            assert prompt.count(begin) == 1
        assert made.is_chat or tokenizer.convert_tokens_to_ids("</s>") not in prompt[1:]
    assert rule_inputs(made.rows)["responses"] == made.rows["response_text"].to_pylist()


def check_scores(made: Crossed) -> None:
    """Rollouts, evaluations and samples are scored by the same numbers."""
    context, rows = made.context, made.rows
    scores, metrics = component_scores(context, rows)
    counted = {name: count for name, count in metrics.items() if not name.startswith("seconds/")}
    assert counted == dict.fromkeys(counted, 0.0)
    check_evaluation(context, rows, scores)
    ids = [
        p + r
        for p, r in zip(rows["prompt_tokens"].to_pylist(), rows["response_tokens"].to_pylist(), strict=True)
    ]
    own = context.config.reward.components["rm"]
    assert scores["rm"] == pytest.approx(scores_of(own.path, ids), abs=CLOSE)
    texts, prompts = rows["response_text"].to_pylist(), rows["prompt_text"].to_pylist()
    assert scores["rule"] == [float(re.search("[a-m]", text) is not None) for text in texts]
    messages = rows["prompt_messages"].to_pylist()
    another = context.config.reward.components["another"].path
    tokenizer = AutoTokenizer.from_pretrained(another)
    whole = [
        p + t if m is None else f"{json.loads(m)[0]['content']}\n{t}"
        for p, m, t in zip(prompts, messages, texts, strict=True)
    ]
    assert scores["another"] == pytest.approx(scores_of(another, tokenizer(whole)["input_ids"]), abs=CLOSE)
    check_samples(made, RewardModel(context, own), scores["rm"])


def check_evaluation(context: Context, rows: pa.Table, scores: Mapping[str, Sequence[Score]]) -> None:
    """Evaluated responses, which are scored beside others, have the numbers that they have in training."""
    alone = pa.array([GREEDY_SAMPLE] * 3, rows.schema.field("sample_index").type)
    place = rows.schema.get_field_index("sample_index")
    evaluated, _ = component_scores(context, rows.slice(5, 3).set_column(place, "sample_index", alone))
    for name, values in scores.items():
        assert evaluated[name] == pytest.approx(values[5:8], abs=CLOSE)


def check_samples(made: Crossed, model: RewardModel, scores: list[float]) -> None:
    """A reference sample of what was rolled out has the ids of the rollout, and so the score; where the ids
    of its text are those that were written, and it ended as answers do."""
    tokenizer = AutoTokenizer.from_pretrained(made.context.config.model.policy)
    end = policy_ends(made.context).of_answer(made.is_chat)
    for row, score in zip(made.rows.to_pylist(), scores, strict=True):
        written = tokenizer([row["response_text"]], add_special_tokens=False)["input_ids"][0]
        if row["response_tokens"] != [*written, *([] if end is None else [end])]:
            continue
        given = row["prompt_messages"]
        prompt = Prompt(0, row["prompt_id"], messages_of(given) or row["prompt_text"], "line 1")
        assert model.score_texts([prompt], [row["response_text"]]) == pytest.approx([score], abs=CLOSE)


def scores_of(directory: str, sequences: list[list[int]]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in sequences]


@torch.no_grad()
def check_log_probs(made: Crossed) -> None:
    """The reference and the trainer mean the distribution that was sampled from: the same model gives the
    same numbers."""
    context, rows = made.context, made.rows
    rollout = rows["rollout_logprobs"].to_pylist()
    of_reference = reference_log_probs(context, rows).to_pylist()
    check_another_reference(context, rows)
    model = load_policy(Path(context.config.model.policy), context.config)
    for row, wanted, referred in zip(rows.to_pylist(), rollout, of_reference, strict=True):
        batch = collate([Row(row["prompt_tokens"], row["response_tokens"])], [0])
        trained = response_log_probs(model, batch, context.config.rollout.temperature)[0].tolist()
        assert trained == pytest.approx(wanted, abs=CLOSE)
        assert referred == pytest.approx(wanted, abs=CLOSE)


def check_another_reference(context: Context, rows: pa.Table) -> None:
    """A reference of other weights, and without the rows that no token has, reads the same ids."""
    directory = str(Path(context.config.model.policy).parent / "reference")
    config = replace(context.config, model=replace(context.config.model, reference=directory))
    found = reference_log_probs(Context(context.paths, config, PREPARE, "test"), rows).to_pylist()
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for row, referred in zip(rows.to_pylist(), found, strict=True):
        prompt, response = row["prompt_tokens"], row["response_tokens"]
        logits = plain(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        wanted = torch.log_softmax(logits / config.rollout.temperature, -1)
        assert referred == pytest.approx(wanted[range(len(response)), response].tolist(), abs=CLOSE)


@LONG
@pytest.mark.parametrize("case", sample(CASES, 1 / 20))
def test_everyone_who_reads_a_rollout_reads_what_was_written(case, tmp_path):
    variant = CASES[case][1]
    kinds = (False, True) if variant.template else (False,)
    for made in rolled_out(tmp_path, case, kinds):
        check(made, variant)
