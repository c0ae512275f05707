"""What algorithm.mask_truncated is worth: the length of a policy that is cut half the time.

    python -m benchmarks.overlong [--iterations 30] [--seeds 1 2 3] [--rate 2e-3]

A tiny policy is first fitted to texts of random letters that end after each letter with the same chance, so
that half of its responses are cut at rollout.max_new_tokens. The reward of a response is the share of its
letters that are of the first half of the alphabet, whatever its length; one that was cut has no answer and
scores 0. Then it learns by GRPO, with ``algorithm.mask_truncated`` and without, else by the same settings,
prompts and seeds. Functions of the stages compute everything, in one process.

Prints a line of Markdown for each side and seed: mean length before and after, where responses may be four
times as long, the share that is cut, and the mean share of such letters. Exit code 1 unless, as a mean over
the seeds, the length after training is at least 0.95 of that before with the mask, and below it without.

With seeds 1 to 3, on CPUs: 0.12 of the length is left without the mask. With it responses grow to 2.57 times
their length, until 94 % are longer than the limit: nothing pulls the length either way, and of the responses
that count short ones are as good as long ones.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pyarrow as pa
import torch
from transformers import LlamaForCausalLM

from benchmarks import tiny_runs
from benchmarks.in_process import Loop, iterate, respond
from benchmarks.tiny_runs import BY_RULE, NUM_PROMPTS, loop_of, prompts_of
from pipeline.run.schemas import FinishReason
from pipeline.run.tasks import Stage, Task
from stages.demo.policy_sft import next_token_loss
from stages.demo.tiny_llama import fit, pad_right, save
from tests.support import tiny

PROMPTS_PER_UPDATE, SAMPLES, TOKENS = 8, 8, 12
LONG = 4 * TOKENS
"""Limit of the responses that are measured."""
NUM_HELDOUT = 96
FIRST, LETTERS = 2 + ord("a"), 26
"""Id of the letter a, and the number of letters that follow it; half of them are to be written."""
END_CHANCE = 1 - 0.5 ** (1 / TOKENS)
"""Of each token, to be the end: then half of the texts are longer than TOKENS."""
STEPS, BATCH = 150, 64
LEAST = 0.95
"""Share of the length before training that is no fall."""


FORMS = {"length": ".1f", "cut": ".2f", "right": ".3f"}
"""How numbers of :class:`Measured` are printed."""


@dataclass(frozen=True)
class Measured:
    """What a policy writes to held-out prompts."""

    length: float
    """Mean tokens of a response of at most LONG."""
    cut: float
    """Share longer than TOKENS."""
    right: float
    """Mean share of letters that are to be written, of responses with a letter."""


def share(tokens: Sequence[int]) -> float | None:
    """Return the share of letters of the first half of the alphabet; None without letters."""
    letters = [FIRST <= token < FIRST + LETTERS // 2 for token in tokens if token >= FIRST]
    return statistics.fmean(letters) if letters else None


def scored(rows: pa.Table) -> list[float]:
    """Return the reward of each row: 0 where it was cut."""
    pairs = zip(rows["finish_reason"].to_pylist(), rows["response_tokens"].to_pylist(), strict=True)
    return [0.0 if reason == FinishReason.LENGTH else share(tokens) or 0.0 for reason, tokens in pairs]


def make_policy(folder: Path, seed: int) -> Path:
    """Fit a policy to prompts and texts of random letters, half of which are longer than TOKENS."""
    torch.manual_seed(seed)
    draw, tokenizer = Random(seed), tiny.byte_tokenizer(("<pad>", "<eos>"))
    pad, texts = tokenizer.pad_token_id, []
    for _ in range(STEPS * BATCH):
        length = next((n for n in range(LONG) if draw.random() < END_CHANCE), LONG)
        letters = [FIRST + draw.randrange(LETTERS) for _ in range(length)]
        ends = [tokenizer.eos_token_id] if length < LONG else []
        texts.append([*tokenizer(f"say {draw.randrange(NUM_PROMPTS)}:")["input_ids"], *letters, *ends])

    def loss_of(batch: list[int]) -> torch.Tensor:
        return next_token_loss(model, pad_right([texts[i] for i in batch], pad), pad)

    model = LlamaForCausalLM(tiny.llama_config(tokenizer))
    batches = [list(range(start, start + BATCH)) for start in range(0, len(texts), BATCH)]
    fit(model, [batches], loss_of, 1e-2, folder.name)
    save(model, tokenizer, folder)
    return folder


def settings(policy: Path, is_masked: bool, rate: float, seed: int, iterations: int) -> list[str]:
    return [
        *tiny_runs.settings(policy, f"run-{is_masked}-{seed}", seed, iterations),
        *BY_RULE,
        "algorithm=grpo",
        f"algorithm.mask_truncated={is_masked}",
        f"data.prompts_per_iteration={PROMPTS_PER_UPDATE}",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.max_new_tokens={TOKENS}",
        f"update.learning_rate={rate}",
    ]


def measure(loop: Loop) -> Measured:
    """Measure responses to held-out prompts that may have LONG tokens, of the same seeds each time."""
    config = loop.run.config
    longer = replace(config, rollout=replace(config.rollout, max_new_tokens=LONG))
    heldout = prompts_of(loop.run, NUM_PROMPTS, NUM_HELDOUT)
    rows = respond(replace(loop, run=replace(loop.run, config=longer)), Task(1, Stage.EVALUATE), heldout)
    written = rows["response_tokens"].to_pylist()
    return Measured(
        statistics.fmean(map(len, written)),
        statistics.fmean(len(tokens) > TOKENS for tokens in written),
        statistics.fmean(found for tokens in written if (found := share(tokens)) is not None),
    )


def trained(words: Sequence[str]) -> tuple[Measured, Measured]:
    """Train. Returns what the policy writes before and after."""
    loop = loop_of(words, {"rule": scored})
    before = measure(loop)
    for iteration in range(1, loop.run.plan.iterations + 1):
        iterate(loop, iteration)
    return before, measure(loop)


def line_of(is_masked: bool, seed: int, before: Measured, after: Measured) -> str:
    pairs = (
        f"{getattr(before, name):{form}} | {getattr(after, name):{form}}" for name, form in FORMS.items()
    )
    return f"| {'yes' if is_masked else 'no'} | {seed} | {' | '.join(pairs)} |"


def is_held(sides: Mapping[bool, Sequence[tuple[Measured, Measured]]]) -> bool:
    """Print what is left of the lengths, and return whether the goal is met. ``sides`` has what policies of
    the same seeds write before and after, with the mask and without."""
    left = {}
    for is_masked, runs in sides.items():
        shares = [after.length / before.length for before, after in runs]
        left[is_masked] = statistics.fmean(shares)
        by_seed = ", ".join(f"{share:.2f}" for share in shares)
        print(f"mask_truncated={is_masked}: {left[is_masked]:.2f} of the length is left; by seed {by_seed}")
    return left[True] >= LEAST > left[False]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rate", type=float, default=2e-3)
    given = parser.parse_args()
    sides: dict[bool, list[tuple[Measured, Measured]]] = {True: [], False: []}
    print("| masked | seed | length before | after | cut before | after | right letters before | after |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        tiny.write_prompts(Path(name))
        for seed in given.seeds:
            policy = make_policy(Path(name) / f"policy-{seed}", seed)
            for is_masked, found in sides.items():
                found.append(trained(settings(policy, is_masked, given.rate, seed, given.iterations)))
                print(line_of(is_masked, seed, *found[-1]), flush=True)
    print()
    return 0 if is_held(sides) else 1


if __name__ == "__main__":
    sys.exit(main())
