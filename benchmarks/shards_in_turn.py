"""One engine, the same responses in 1, 2, 4 or 8 shards that it makes one after the other, with vLLM.

    python benchmarks/shards_in_turn.py [--responses 256] [--slots 256] [--rounds 3] [--sigma 0.95]

Lengths are lognormal; the model is random and has no end of sequence, so that each response has the length
that was drawn for it. Each shard has a tail in which few responses run. Prints seconds, steps and how many
responses run in a step, and what a least-squares line says of a step: its time, and that of each response.
"""

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.environment import TASK_ENVIRONMENT

SHARDS = (1, 2, 4, 8)
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Passed:
    """All shards, one after the other."""

    seconds: float
    cpu: float
    """CPU seconds of the process, which other work on the machine changes little."""
    steps: int
    tokens: int

    @property
    def running(self) -> float:
        """Responses that run in a step, on average."""
        return self.tokens / self.steps


def main() -> None:
    given = parse()
    if os.environ.get("SHARDS_IN_TURN") is None:  # what tasks have must stand before torch is imported
        os.environ |= TASK_ENVIRONMENT | {"SHARDS_IN_TURN": "1"}
        os.execv(sys.executable, [sys.executable, *sys.argv])
    lengths = drawn(given)
    found: dict[int, list[Passed]] = {shards: [] for shards in SHARDS}
    with tempfile.TemporaryDirectory() as folder:
        engine = make(given, saved(Path(folder)))
        one_after_the_other(engine, lengths, 1)
        for number in range(given.rounds):
            for shards in SHARDS if number % 2 == 0 else reversed(SHARDS):
                found[shards].append(one_after_the_other(engine, lengths, shards))
        engine.close()
    print(f"{sum(lengths)} tokens, longest {max(lengths)}, median {statistics.median(lengths):.0f}")
    report(found, given.slots)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--slots", type=int, default=256, help="rollout.vllm.max_num_seqs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mean", type=int, default=128, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=0.95)
    parser.add_argument("--longest", type=int, default=896)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def drawn(given: argparse.Namespace) -> list[int]:
    draw = random.Random(0)
    mean = math.log(given.mean) - given.sigma**2 / 2
    return [
        max(1, min(given.longest, int(draw.lognormvariate(mean, given.sigma))))
        for _ in range(given.responses)
    ]


def saved(folder: Path) -> Path:
    """A random model of four million weights without an end of sequence."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from stages.rehearsal.models import byte_tokenizer

    torch.manual_seed(0)
    tokenizer = byte_tokenizer(("<pad>", "<eos>"))
    sizes = {"hidden_size": 256, "intermediate_size": 682, "num_hidden_layers": 4, "num_attention_heads": 4}
    no_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=1024, head_dim=64, **sizes, **no_ids
    )
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    return folder / "policy"


def make(given: argparse.Namespace, policy: Path):
    import torch

    from pipeline.config.compose import compose
    from stages.engines import make_generator

    torch.set_num_threads(given.threads)
    words = ["reward=rule", "reward.components.rule.function=none:none", f"model.policy={policy}"]
    words += [f"model.context_length={PROMPT_TOKENS + given.longest}", "data.prompts=none", "run_dir=none"]
    words += ["rollout.engine=vllm", "rollout.precision=fp32", "rollout.vllm.enforce_eager=true"]
    return make_generator(compose([*words, f"rollout.vllm.max_num_seqs={given.slots}"]), str(policy))


def one_after_the_other(engine, lengths: Sequence[int], shards: int) -> Passed:
    """What a worker does: a shard's responses, reset, the next shard."""
    from stages.engines.base import Request, Sampling

    draw = random.Random(1)
    prompts = [[draw.randrange(engine.limits.vocabulary) for _ in range(PROMPT_TOKENS)] for _ in lengths]
    requests = [
        Request(prompt, length, seed)
        for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    steps = tokens = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return False

    began, worked = time.perf_counter(), time.process_time()
    for shard in range(shards):
        for finished in engine.stream(requests[shard::shards], Sampling(), should_stop=count):
            tokens += sum(len(response.tokens) for response in finished.values())
        engine.reset()
    assert tokens == sum(lengths), (tokens, sum(lengths))
    return Passed(time.perf_counter() - began, time.process_time() - worked, steps, tokens)


def line(passed: Sequence[Passed]) -> tuple[float, float]:
    """CPU milliseconds of a step, and of each response in it, by least squares over all passes."""
    import numpy as np

    columns = np.array([[one.steps, one.tokens] for one in passed], float)
    fitted, *_ = np.linalg.lstsq(columns, np.array([one.cpu for one in passed]), rcond=None)
    return float(fitted[0] * 1e3), float(fitted[1] * 1e3)


def report(found: dict[int, list[Passed]], slots: int) -> None:
    print("| shards | seconds | CPU seconds | times one shard | steps | responses in a step | of the slots |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for shards, rounds in found.items():
        wall, cpu = (statistics.median(getattr(one, name) for one in rounds) for name in ("seconds", "cpu"))
        ratio = statistics.median(mine.cpu / one.cpu for mine, one in zip(rounds, found[1], strict=True))
        first = rounds[0]
        print(f"| {shards} | {wall:.1f} | {cpu:.1f} | {ratio:.2f} | {first.steps} ", end="")
        print(f"| {first.running:.0f} | {first.running / slots:.0%} |")
    step, each = line([one for rounds in found.values() for one in rounds])
    print(f"a step takes {step:.1f} ms and {each:.3f} ms for each response in it")


if __name__ == "__main__":
    main()
