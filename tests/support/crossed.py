"""One rollout of a tiny policy with a tokenizer of :mod:`tests.support.forty_tokenizers`, and all that reads
it: reward models of the same tokenizer and of another, rules, the reference, training, evaluation, samples.

    PYTHONPATH=. python -m tests.support.crossed [--engine vllm] [--cases NAME...]

checks all forty tokenizers with prompts of text and of messages, and prints a line for each.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.data.checks import judge, read_file
from pipeline.run.directory import create_run
from pipeline.run.schemas import FinishReason
from pipeline.run.tasks import PREPARE
from stages.context import Context
from stages.engines import make_generator, release_all
from stages.engines.base import Sampling
from stages.generation.episodes import Episode
from stages.generation.responding import requests_of, rollout_table
from stages.ppo.batching import Row, collate
from stages.ppo.forward import response_log_probs
from stages.ppo.lora import load_policy
from stages.rewards.components import RewardModel, component_scores
from stages.rewards.reference import reference_log_probs
from stages.rewards.rows import rule_inputs
from stages.tasks.prepare import prompt_table
from stages.tokenizers import policy_ends, stop_ids_of
from tests.support import tiny
from tests.support.forty_tokenizers import CASES, Variant, make_models

PROMPTS = ("a cat, and 3 more", "what", "x y z", "one an 12")
CLOSE = 2e-4
NEW_TOKENS = 16


@dataclass(frozen=True)
class Crossed:
    """A rollout, and the context that it was made in."""

    context: Context
    rows: pa.Table
    is_chat: bool


def rolled_out(folder: Path, case: str, engine: str, is_chat: bool) -> Crossed:
    """Roll out with a policy whose head has rows that no token of its tokenizer has."""
    kind, variant = CASES[case]
    make_models(folder, kind, variant)
    tiny.make_reward_model(folder / "another")
    given = [{"role": "user", "content": text} for text in PROMPTS] if is_chat else PROMPTS
    rows = [{"prompt": [row] if is_chat else row} for row in given]
    tiny.write_jsonl(folder / "prompts.jsonl", rows)
    config = resolve(
        compose(
            [
                "reward=model",
                f"model.policy={folder / 'policy'}",
                f"reward.components.rm.path={folder / 'own'}",
                f"+reward.components.another={{kind: model, path: '{folder / 'another'}'}}",
                f"data.prompts={folder / 'prompts.jsonl'}",
                f"run_dir={folder / f'run-{engine}'}",
                "data.prompts_per_iteration=4",
                "rollout.samples_per_prompt=4",
                f"rollout.engine={engine}",
                "rollout.precision=fp32",
                "rollout.vllm.enforce_eager=true",
                f"rollout.max_new_tokens={NEW_TOKENS}",
                "update.minibatches=1",
                "tracking=none",
            ]
        )
    )
    run = create_run(config)
    context = Context(run.paths, config, PREPARE, "test")
    tokenizer = AutoTokenizer.from_pretrained(config.model.policy)
    found = read_file(config, config.data.prompts)
    judged = judge("data.prompts", config.data.prompts, found, config, context.rendering, tokenizer)
    prompts = prompt_table(judged)
    repeated, samples = prompts.take([i for i in range(prompts.num_rows) for _ in range(4)]), range(4)
    generator = make_generator(config, config.model.policy)
    asked = requests_of(context, repeated, samples)
    found = generator.generate(asked, Sampling(stop_token_ids=stop_ids_of(context)))
    generator.close()
    unwritten = policy_ends(context).unwritten
    rows = rollout_table(repeated, [Episode.of(one) for one in found], samples, tokenizer, unwritten)
    return Crossed(context, rows, is_chat)


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
    assert metrics == dict.fromkeys(metrics, 0.0)
    ids = [
        p + r
        for p, r in zip(rows["prompt_tokens"].to_pylist(), rows["response_tokens"].to_pylist(), strict=True)
    ]
    own = context.config.reward.components["rm"]
    assert scores["rm"] == pytest.approx(scores_of(own.path, ids), abs=CLOSE)
    texts, prompts = rows["response_text"].to_pylist(), rows["prompt_text"].to_pylist()
    messages = rows["prompt_messages"].to_pylist()
    another = context.config.reward.components["another"].path
    tokenizer = AutoTokenizer.from_pretrained(another)
    whole = [
        p + t if m is None else f"{json.loads(m)[0]['content']}\n{t}"
        for p, m, t in zip(prompts, messages, texts, strict=True)
    ]
    assert scores["another"] == pytest.approx(scores_of(another, tokenizer(whole)["input_ids"]), abs=CLOSE)
    check_samples(made, RewardModel(context, own), scores["rm"])


def check_samples(made: Crossed, model: RewardModel, scores: list[float]) -> None:
    """A reference sample of what was rolled out has the ids of the rollout, and so the score; where the ids
    of its text are those that were written, and it ended as answers do."""
    from pipeline.data.prompts import Message

    tokenizer = AutoTokenizer.from_pretrained(made.context.config.model.policy)
    end = policy_ends(made.context).of_answer(made.is_chat)
    for row, score in zip(made.rows.to_pylist(), scores, strict=True):
        written = tokenizer([row["response_text"]], add_special_tokens=False)["input_ids"][0]
        if row["response_tokens"] != [*written, *([] if end is None else [end])]:
            continue
        given = row["prompt_messages"]
        prompt = tuple(Message(**m) for m in json.loads(given)) if given else row["prompt_text"]
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
    model = load_policy(Path(context.config.model.policy), context.config)
    for row, wanted, referred in zip(rows.to_pylist(), rollout, of_reference, strict=True):
        batch = collate([Row(row["prompt_tokens"], row["response_tokens"])], [0])
        trained = response_log_probs(model, batch, context.config.rollout.temperature)[0].tolist()
        assert trained == pytest.approx(wanted, abs=CLOSE)
        assert referred == pytest.approx(wanted, abs=CLOSE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    given = parser.parse_args()
    for case in given.cases:
        for is_chat in (False, True) if CASES[case][1].template else (False,):
            with tempfile.TemporaryDirectory() as folder:
                made = rolled_out(Path(folder), case, given.engine, is_chat)
                check(made, CASES[case][1])
                stopped = made.rows["finish_reason"].to_pylist().count(FinishReason.STOP)
                kind = "messages" if is_chat else "text"
                print(f"{case} {kind}: {made.rows.num_rows} responses agree, {stopped} ended", flush=True)
                release_all()


if __name__ == "__main__":
    main()
