"""Our side of benchmarks/peers.py: the rule that both sides score with, recorded responses as an engine,
their recording, and the bare loop that the update is compared with."""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.run.schemas import FinishReason
from stages.engines.base import Generator, Response, SequenceLimits, without_torch
from stages.rewards.gym import ReasoningGym

TASKS: dict[str, Any] = {
    "dataset": "basic_arithmetic",
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 2,
    "operators": ["+"],
    "allow_negation": False,
    "allow_parentheses": False,
    "instruction": "Answer with the number alone.",
}
"""Arguments of the environment: sums of two numbers of one or two digits."""
RECORDED = "recorded.json"
"""Name of the file of recorded responses, beside the prompts."""


def environment() -> ReasoningGym:
    """Return the environment that makes the prompts and scores the responses."""
    return ReasoningGym(**TASKS)


def make_prompts(number: int) -> list[dict[str, Any]]:
    """Return so many prompts, no two alike, as lines of a prompt file."""
    lines: dict[str, dict[str, Any]] = {}
    for task in environment().tasks(50 * number, seed=1):
        messages = task["prompt"]
        entry = json.dumps(task["metadata"])
        lines.setdefault(messages[-1]["content"], {"id": str(len(lines)), "prompt": messages, "entry": entry})
        if len(lines) == number:
            return list(lines.values())
    raise ValueError(f"the environment makes fewer than {number} prompts that differ")


_environment: ReasoningGym | None = None


def score(*, responses: Sequence[str], entry: Sequence[str], **columns: Any) -> list[float]:
    """Score responses by the environment: the rule of both sides."""
    global _environment
    _environment = _environment or environment()
    scorer = _environment
    return [scorer.score(text, json.loads(task)) for text, task in zip(responses, entry, strict=True)]


# recorded responses


@without_torch
def make_generator(config: Any, directory: str) -> Generator:
    """Return an engine that gives the recorded responses to each prompt, in their order."""
    recorded = json.loads(Path(config.data.prompts).with_name(RECORDED).read_text())
    described = json.loads(Path(directory, "config.json").read_text())
    limits = SequenceLimits(described["max_position_embeddings"], described["vocab_size"])
    return RecordedGenerator(recorded, limits)


class RecordedGenerator(Generator):
    """Responses from a file."""

    def __init__(self, recorded: Sequence[Mapping[str, Any]], limits: SequenceLimits) -> None:
        self._responses = {tuple(one["prompt_tokens"]): one["responses"] for one in recorded}
        self.limits = limits

    def reset(self) -> bool:
        return True

    def reload(self, directory: str, adapter: str | None = None) -> bool:
        return True

    def _stream(
        self, requests: Any, sampling: Any, done: Collection[int], should_stop: Any, turns: Any
    ) -> Iterator[Mapping[int, Response]]:
        seen: dict[tuple[int, ...], int] = defaultdict(int)
        for index, request in enumerate(requests):
            prompt = tuple(request.prompt_tokens)
            given = self._responses[prompt][seen[prompt]]
            seen[prompt] += 1
            if index not in done:
                yield {index: Response(given["tokens"], given["log_probs"], FinishReason(given["finish"]))}


def record(
    model: str, prompts: Sequence[Mapping[str, Any]], group: int, longest: int
) -> list[dict[str, Any]]:
    """Sample ``group`` responses of the policy to each prompt, and score them."""
    from transformers import AutoTokenizer

    from pipeline.config.update import Precision
    from stages.engines.base import Request, Sampling
    from stages.engines.transformers import TransformersGenerator
    from stages.models.loading import load_causal_lm

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ids = [
        tokenizer.apply_chat_template(one["prompt"], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for one in prompts
    ]
    requests = [Request(tokens, longest, 100 * i + k) for i, tokens in enumerate(ids) for k in range(group)]
    generator = TransformersGenerator(load_causal_lm(model, Precision.FP32, False), 4096)
    responses = generator.generate(requests, Sampling(stop_token_ids=(tokenizer.eos_token_id,)))
    found = []
    for place, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True)):
        some = responses[group * place : group * (place + 1)]
        texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in some]
        scores = score(responses=texts, entry=[prompt["entry"]] * group)
        kept = [
            {"tokens": one.tokens, "log_probs": one.log_probs, "finish": str(one.finish_reason)}
            for one in some
        ]
        found.append({**prompt, "prompt_tokens": tokens, "responses": kept, "scores": scores})
    return found


def half_flat(recorded: Sequence[dict[str, Any]], iterations: int, groups: int) -> list[dict[str, Any]]:
    """Return ``groups`` groups for each iteration, every second of which has equal scores.

    Raises:
        ValueError: too few of one kind were recorded.
    """
    flat = [one for one in recorded if len(set(one["scores"])) == 1]
    mixed = [one for one in recorded if len(set(one["scores"])) > 1]
    wanted = iterations * groups // 2
    if len(flat) < wanted or len(mixed) < wanted:
        raise ValueError(f"{len(flat)} flat and {len(mixed)} other groups, and {wanted} of each are needed")
    return [one for pair in zip(flat[:wanted], mixed[:wanted], strict=True) for one in pair]


# the bare loop


def bare_steps(model: str, batches: Sequence[Sequence[Mapping[str, Any]]], rows: int, precision: str) -> None:
    """Take one step of GRPO on each batch of recorded rows with as little as PyTorch needs, and print a line
    of CPU seconds each: rows sorted by length, ``rows`` at a time padded to the longest, logits of response
    positions, AdamW.

    Args:
        batches: rows that have a prompt, a response, an advantage.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-6, weight_decay=0.0)
    for batch in batches:
        cpu, wall = time.process_time(), time.perf_counter()
        ordered = sorted(batch, key=lambda row: len(row["prompt"]) + len(row["response"]))
        for start in range(0, len(ordered), rows):
            _bare_loss(policy, ordered[start : start + rows], len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}), flush=True)


def _bare_loss(policy: Any, rows: Sequence[Mapping[str, Any]], total: int) -> Any:
    import torch

    sequences = [torch.tensor([*row["prompt"], *row["response"]]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    first = min(len(row["prompt"]) for row in rows) - 1
    logits = policy(input_ids=ids, logits_to_keep=ids.shape[1] - first, use_cache=False).logits[:, :-1]
    log_probs = torch.log_softmax(logits.float(), -1).gather(2, ids[:, first + 1 :, None]).squeeze(2)
    loss = torch.zeros(())
    for line, row in zip(log_probs, rows, strict=True):
        start = len(row["prompt"]) - 1 - first
        mine = line[start : start + len(row["response"])]
        loss = loss - row["advantage"] * (mine - mine.detach()).exp().mean() / total
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["record", "bare"])
    parser.add_argument("given", type=Path, help="JSON of the arguments")
    asked = parser.parse_args()
    arguments = json.loads(asked.given.read_text())
    if asked.what == "record":
        print(json.dumps(record(**arguments)))
    else:
        bare_steps(**arguments)


if __name__ == "__main__":
    main()
