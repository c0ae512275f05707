"""The engines side by side: one shard generated and scored by each, from the demo's models.

    python benchmarks/engines.py [--models .cache/quickstart] [--rows 512] [--rounds 3] [--new-tokens 64]

Each measurement is a process of its own, in turn: import, start of the engine, first answer, then the shard.
Prints tokens/s and sequences/s of the shard alone, what a task pays before, and how far apart the engines are
in log-probabilities and scores. Runs on the GPU of a machine that has one; --models takes any folder with
policy/ and reward_model/.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.run.environment import TASK_ENVIRONMENT

ENGINES = ("transformers", "vllm")


@dataclass(frozen=True)
class Measured:
    """One process."""

    start: float
    """Seconds until the engine is there: imports, model, caches."""
    first: float
    """Seconds of the first answer, of one token."""
    shard: float
    """Seconds of the shard."""
    count: int
    """Tokens written, or sequences scored."""
    difference: float
    """Largest, from what transformers computes on the CPU for the same tokens."""


def main() -> None:
    given = parse()
    if given.one:
        print(json.dumps(asdict(measure(given, *given.one.split("/")))))
        return
    for work in ("generate", "score"):
        found = {engine: [] for engine in ENGINES}
        for _ in range(given.rounds):
            for engine in ENGINES:
                found[engine].append(in_process(work, engine))
        report(work, found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path(".cache/quickstart"))
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_process(work: str, engine: str) -> Measured:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", f"{work}/{engine}"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | TASK_ENVIRONMENT
    )
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def measure(given: argparse.Namespace, work: str, engine: str) -> Measured:
    import torch

    torch.set_num_threads(given.threads)
    began = time.perf_counter()
    made = make(given, work, engine)
    start = time.perf_counter() - began
    measured = generated(given, made, start) if work == "generate" else scored(given, made, start)
    made.close()
    return measured


def make(given: argparse.Namespace, work: str, engine: str):
    from pipeline.config.compose import compose
    from stages.engines import make_generator, make_scorer

    policy, reward_model = given.models / "policy", given.models / "reward_model"
    config = compose(
        [
            "reward=model",
            f"model.policy={policy}",
            f"model.context_length={128 + given.new_tokens}",
            f"reward.components.rm.path={reward_model}",
            "data.prompts=none",
            "run_dir=none",
            f"rollout.precision={given.precision}",
            f"reward.precision={given.precision}",
            *(f"{stage}.vllm.enforce_eager={not given.compile}".lower() for stage in ("rollout", "reward")),
        ]
    )
    if work == "generate":
        return make_generator(_with_engine(config, engine), str(policy))
    return make_scorer(config, engine, str(reward_model))


def _with_engine(config, engine: str):
    from dataclasses import replace

    return replace(config, rollout=replace(config.rollout, engine=engine))


def sequences(rows: int, vocabulary: int, longest: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(2, vocabulary) for _ in range(draw.randint(4, longest))] for _ in range(rows)]


def generated(given: argparse.Namespace, engine, start: float) -> Measured:
    from stages.engines.base import Request, Sampling

    prompts = sequences(given.rows, engine.limits.vocabulary, 48)
    asked = [Request(prompt, given.new_tokens, seed) for seed, prompt in enumerate(prompts)]
    began = time.perf_counter()
    engine.generate([Request(prompts[0], 1)], Sampling())
    first = time.perf_counter() - began
    began = time.perf_counter()
    found = engine.generate(asked, Sampling())
    shard = time.perf_counter() - began
    checked = zip(prompts[:32], found[:32], strict=True)
    difference = largest_difference(given, [(prompt, r.tokens, r.log_probs) for prompt, r in checked])
    return Measured(start, first, shard, sum(len(r.tokens) for r in found), difference)


def largest_difference(given: argparse.Namespace, rows) -> float:
    """Of log-probabilities, from a forward pass in full precision on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(given.models / "policy", dtype=torch.float32)
    worst = 0.0
    for prompt, tokens, log_probs in rows:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(log_probs)).abs().max()))
    return worst


def scored(given: argparse.Namespace, engine, start: float) -> Measured:
    import torch
    from transformers import AutoModelForSequenceClassification

    rows = sequences(given.rows, engine.limits.vocabulary, 48 + given.new_tokens)
    rows = [row[: engine.limits.context] for row in rows]
    began = time.perf_counter()
    engine.score(rows[:1])
    first = time.perf_counter() - began
    began = time.perf_counter()
    scores = engine.score(rows)
    shard = time.perf_counter() - began
    path = given.models / "reward_model"
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = [float(model(torch.tensor([row])).logits) for row in rows[:32]]
    difference = max(abs(a - b) for a, b in zip(expected, scores[:32], strict=True))
    return Measured(start, first, shard, len(rows), difference)


def report(work: str, found: dict[str, list[Measured]]) -> None:
    unit = "tokens/s" if work == "generate" else "sequences/s"
    print(f"{work:<12}{unit:>14}{'start s':>10}{'first s':>10}{'difference':>13}")
    for engine, rounds in found.items():
        speed = statistics.median(one.count / one.shard for one in rounds)
        start, first = (
            statistics.median(getattr(one, name) for one in rounds) for name in ("start", "first")
        )
        worst = max(one.difference for one in rounds)
        print(f"{engine:<12}{speed:>14,.0f}{start:>10.1f}{first:>10.2f}{worst:>13.1e}")
    pairs = zip(found["vllm"], found["transformers"], strict=True)
    ratios = [ours.count / ours.shard / (theirs.count / theirs.shard) for ours, theirs in pairs]
    print(f"vllm / transformers: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})\n")


if __name__ == "__main__":
    main()
