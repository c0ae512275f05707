"""What refilling updates is worth: filtering prompts without spread alone, and with rollout.oversample.

    python -m benchmarks.refill [--iterations 60] [--seeds 1 2] [--rates 3e-4 5e-4 8e-4]

A tiny policy of random weights learns to write tokens of the first half of its vocabulary. Three of five
prompts score the same whatever is written; the reward of the others is the share of such tokens, with noise
of several times its spread, which is a function of the tokens. Functions of the stages compute everything,
in one process. Both sides have the same seeds, prompts and settings but for ``rollout.oversample``; each is
shown at the best of the learning rates, since a larger batch bears a higher one: the rate at which it needs
the fewest steps to the target, a mean reward without noise on held-out prompts.

Prints a line of Markdown for each side, rate and seed, and the ratios. Exit code 1 unless refilling has at
least 1.8 times the useful responses for each optimizer step, and needs at most 0.6 of the steps, and no more
responses.
"""

import argparse
import hashlib
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from benchmarks.in_process import Loop, respond, roll_out
from benchmarks.prepared import record_of
from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.run.commits import publish
from pipeline.run.directory import Run, create_run
from pipeline.run.plan import policy_maker
from pipeline.run.schemas import PROMPTS, conform
from pipeline.run.tasks import PREPARE, Stage, Task
from stages import ranks
from stages.engines import make_generator
from stages.models.numerics import set_up_torch
from stages.models.tokenizers import load_tokenizer
from stages.ppo.experience import build_experience
from stages.ppo.learner import update
from stages.ppo.lora import load_policy
from stages.ppo.metrics import update_metrics
from stages.ppo.refill import Candidates, Intake, candidates_of, joined, refilled, table_of
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner
from stages.tasks.reward import reward_table
from tests.support import tiny

PROMPTS_PER_UPDATE, SAMPLES, TOKENS, OVERSAMPLE = 8, 4, 8, 2.5
NUM_PROMPTS, NUM_HELDOUT = 2000, 24
FLAT, OF = 3, 5
"""Prompts without spread, of so many."""
NOISE = 4.0
"""Width of the noise, whose standard deviation is then 1.15; that of the shares of a prompt is below 0.2."""
HALF = 130
"""Ids below are of the first half of the vocabulary."""
LAST = 3
"""Evaluations whose mean is compared with the target."""
LEAST_ROWS, MOST_STEPS, MOST_RESPONSES = 1.8, 0.6, 1.0


@dataclass(frozen=True)
class Point:
    """Where a run is after an iteration: numbers since its begin."""

    steps: int
    responses: int
    useful: int
    """Responses that went through an optimizer step."""
    heldout: float


def noise(text: str) -> float:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return NOISE * (int.from_bytes(digest, "big") / 2**32 - 0.5)


def is_flat(prompt_id: str) -> bool:
    return int(prompt_id) % OF < FLAT


def scored(rows: pa.Table) -> list[float]:
    """Return the reward of each row."""
    pairs = zip(rows["prompt_id"].to_pylist(), rows["response_tokens"].to_pylist(), strict=True)
    return [0.5 if is_flat(one) else value(tokens) + noise(str(tokens)) for one, tokens in pairs]


def value(tokens: Sequence[int]) -> float:
    """Return what is to be learned: the share of tokens of the first half of the vocabulary."""
    return statistics.fmean(token < HALF for token in tokens) if len(tokens) else 0.0


def settings(folder: Path, oversample: float, rate: float, seed: int, iterations: int) -> list[str]:
    return [
        "algorithm=grpo",
        "algorithm.kl.coef=0",
        "algorithm.shaping.filter_groups=true",
        "algorithm.correction.level=token",
        "reward=rule",
        "reward.components.rule.function=unused:scores",
        "tracking=none",
        f"run_dir={folder / f'run-{oversample}-{rate}-{seed}'}",
        f"model.policy={folder / 'policy'}",
        f"data.prompts={folder / 'prompts.jsonl'}",
        f"data.prompts_per_iteration={PROMPTS_PER_UPDATE}",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.max_new_tokens={TOKENS}",
        f"rollout.oversample={oversample}",
        "rollout.num_shards=1",
        "update.minibatches=1",
        f"update.learning_rate={rate}",
        f"iterations={iterations}",
        f"seed={seed}",
    ]


def prompts_of(loop_run: Run, first: int, count: int) -> pa.Table:
    """Return a table of prompts, by number."""
    tokenizer = load_tokenizer(loop_run.config.model.policy, loop_run.config.model)
    texts = [f"say {number}:" for number in range(first, first + count)]
    rows = {
        "prompt_id": [str(number) for number in range(first, first + count)],
        "prompt_text": texts,
        "prompt_messages": [None] * count,
        "prompt_tokens": [tokenizer(text)["input_ids"] for text in texts],
    }
    return conform(rows, PROMPTS)


def loop_of(words: Sequence[str]) -> Loop:
    """Make a run, of which prepare is committed, and load its models."""
    run = create_run(resolve(compose(words)))
    publish(run.paths, record_of(PREPARE, ()))
    config, path = run.config, run.config.model.policy
    set_up_torch(1, config.seed)
    ranks.start_distributed()
    policy = Trainer("policy", load_policy(Path(path), config), config.update.learning_rate, config.update)
    tokenizer, generator = load_tokenizer(path, config.model), make_generator(config, path)
    learner = Learner(config, policy, None)
    return Loop(run, prompts_of(run, 0, NUM_PROMPTS), tokenizer, generator, {}, learner, 0.0)


def intake_of(loop: Loop, iteration: int, rows: pa.Table, waiting: Candidates | None) -> Intake:
    """Return what the update learns from, as the stage would."""
    config = loop.run.config
    rewards = reward_table(config, rows, {"rule": scored(rows)}, None)
    own = build_experience(rows, rewards, [0] * rows.num_rows)
    loop.moments = loop.moments.including(own.outcome.scores)
    if not config.is_refilled:
        return Intake(own, own.outcome.scores)
    candidates = Candidates(own, [iteration] * len(own))
    if waiting is not None:
        candidates = joined(
            candidates, replace(waiting, experience=replace(waiting.experience, rewarded=own.rewarded))
        )
    return refilled(config, candidates, iteration, loop.moments)


def run_of(words: Sequence[str]) -> Iterator[Point]:
    """Train, and yield where the run is after each iteration."""
    loop = loop_of(words)
    heldout = prompts_of(loop.run, NUM_PROMPTS, NUM_HELDOUT)
    waiting, steps, responses, useful = None, 0, 0, 0
    for iteration in range(1, loop.run.plan.iterations + 1):
        rows = roll_out(loop, Task(iteration, Stage.ROLLOUT))
        intake = intake_of(loop, iteration, rows, waiting)
        context = loop.context(policy_maker(iteration))
        done = update(loop.learner, intake.experience, iteration, 0.0, loop.moments, context.stopwatch)
        metrics = update_metrics(loop.run.config, intake.experience, done)
        if intake.spare is not None:  # by way of the file's table, as between two updates
            waiting = candidates_of(table_of(intake.spare), intake.experience.rewarded)
        loop.generator._model.load_state_dict(loop.learner.policy.model.state_dict())
        steps += int(metrics["policy/steps"])
        responses += rows.num_rows
        useful += int(metrics.get("policy/computed_responses", 0)) if metrics["policy/steps"] else 0
        written = respond(loop, Task(iteration, Stage.EVALUATE), heldout)["response_tokens"].to_pylist()
        yield Point(steps, responses, useful, statistics.fmean(map(value, written)))


def reached(points: Sequence[Point], target: float) -> Point | None:
    """Return the first point at which the mean of the last evaluations is at the target; None: never."""
    for end in range(LAST, len(points) + 1):
        if statistics.fmean(point.heldout for point in points[end - LAST : end]) >= target:
            return points[end - 1]
    return None


def best(side: Sequence[Sequence[Point | None]]) -> list[Point] | None:
    """Return the points at the target, one for each seed, at the rate with the fewest steps in the mean; None
    where no rate has it with all seeds."""
    whole = [[p for p in points if p is not None] for points in side if None not in points]
    return min(whole, key=lambda points: sum(p.steps for p in points), default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--iterations", type=int, default=60, help="of filtering alone; most of both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 5e-4, 8e-4])
    parser.add_argument("--target", type=float, default=0.75)
    given = parser.parse_args()
    sides: dict[float, list[list[Point | None]]] = {1.0: [], OVERSAMPLE: []}
    per_step: dict[float, list[float]] = {1.0: [], OVERSAMPLE: []}
    print("| oversample | rate | seed | useful/step | steps to target | responses | last held-out |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.make_inputs(folder)
        for oversample, rate in itertools.product(sides, given.rates):
            found: list[Point | None] = []
            for seed in given.seeds:
                points: list[Point] = []
                for point in run_of(settings(folder, oversample, rate, seed, given.iterations)):
                    points.append(point)
                    if reached(points, given.target):
                        break
                at, last = reached(points, given.target), points[-1]
                found.append(at)
                per_step[oversample].append(last.useful / max(1, last.steps))
                steps, responses = (at.steps, at.responses) if at else ("-", "-")
                print(
                    f"| {oversample} | {rate:g} | {seed} | {per_step[oversample][-1]:.1f} | {steps} | "
                    f"{responses} | {last.heldout:.3f} |",
                    flush=True,
                )
            sides[oversample].append(found)
    alone, refill = (best(side) for side in sides.values())
    rows = statistics.fmean(per_step[OVERSAMPLE]) / statistics.fmean(per_step[1.0])
    print(f"useful responses per step: {rows:.2f} times those of filtering alone")
    if alone is None or refill is None:
        print("a side has not reached the target: give more --iterations", file=sys.stderr)
        return 1
    steps = sum(p.steps for p in refill) / sum(p.steps for p in alone)
    responses = sum(p.responses for p in refill) / sum(p.responses for p in alone)
    print(f"to the target: {steps:.2f} of the steps, {responses:.2f} of the responses")
    return int(rows < LEAST_ROWS or steps > MOST_STEPS or responses > MOST_RESPONSES)


if __name__ == "__main__":
    sys.exit(main())
