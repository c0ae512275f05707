"""Make the quickstart's input in the form a user brings it: a policy, a reward model and prompts.

    python -m stages.demo.make --out DIR [--seed 0] [--reviews 4500] [--prompts 2000]

Everything is trained here, from random weights and in well under a minute on two CPU cores: a small Llama
learns to write film reviews of mixed sentiment, and a second one, with a tokenizer of its own, learns from
noisy preferences which reviews people like. DIR is complete or absent: it is built beside its place and then
renamed at the end.
"""

import argparse
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from stages.demo.review_grammar import DemoPrompt, distinct_prompts, write_reviews

if TYPE_CHECKING:
    from stages.demo.policy_sft import TrainedPolicy
    from stages.demo.reward_fit import TrainedRewardModel

# Raise it when a change makes other files from the same seed: a demo of another version is made again.
GENERATOR_VERSION = 1
NUM_HELDOUT_REVIEWS, NUM_HELDOUT_PROMPTS, NUM_HELDOUT_PAIRS = 256, 64, 400
NUM_THREADS = 2
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class DemoSize:
    """What another demo follows from."""

    seed: int
    reviews: int
    """That the policy learns to write from."""
    prompts: int
    """To train on; the reward model learns from a pair of responses to each."""


@dataclass(slots=True)
class Timer:
    """Seconds per part, for demo.json."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        print(f"{name} ...", file=sys.stderr, flush=True)
        yield
        self.seconds[name] = round(time.perf_counter() - started, 2)
        print(f"{name}: {self.seconds[name]:.1f} s", file=sys.stderr, flush=True)


def write_json_lines(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prompt_rows(prompts: Sequence[DemoPrompt], name: str) -> list[dict[str, str]]:
    return [
        {"id": f"{name}-{index:05d}", "prompt": prompt.prompt, "subject": prompt.subject}
        for index, prompt in enumerate(prompts)
    ]


def is_made(out: Path, choice: DemoSize) -> bool:
    """True when `out` is this version's demo of this choice; refuses a directory that is no demo at all."""
    summary = out / "demo.json"
    if not summary.exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} is there, and is no demo (it has no demo.json): move it away")
        return False
    try:
        made = json.loads(summary.read_text(encoding="utf-8"))
        sizes = made["sizes"]
        found = DemoSize(made["seed"], sizes["reviews"], sizes["prompts"])
    except (ValueError, KeyError, TypeError):  # damaged: it is made again
        return False
    return made.get("generator_version") == GENERATOR_VERSION and found == choice


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A private sibling to build in; it becomes `out` if the body ends well, else it is removed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unique = uuid.uuid4().hex[:8]
    building, old = (out.with_name(f".{out.name}.{word}-{unique}") for word in ("making", "old"))
    building.mkdir()
    try:
        yield building
        if out.exists():  # a directory that holds files cannot be renamed over
            out.rename(old)
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def make_policy(num_reviews: int, rng: Random) -> "TrainedPolicy":
    from stages.demo.policy_sft import train_policy

    reviews = write_reviews(rng, num_reviews + NUM_HELDOUT_REVIEWS)
    texts = [review.text for review in reviews]
    return train_policy(texts[:num_reviews], texts[num_reviews:], rng)


def correlation(first: Any, second: Any) -> float:
    """Pearson's, of two tensors of the same number of scores."""
    import torch

    return torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1].item()


def make_reward_model(
    policy: "TrainedPolicy", prompts: Sequence[DemoPrompt], unseen: Sequence[DemoPrompt], rng: Random
) -> tuple["TrainedRewardModel", dict[str, float]]:
    """The reward model and how well it does on pairs whose prompts it never saw."""
    from stages.demo.reward_fit import (
        make_pairs,
        pair_accuracy,
        pair_texts,
        rule_scores,
        score_texts,
        train_reward_model,
    )

    pairs, heldout = make_pairs(policy, prompts, rng), make_pairs(policy, unseen, rng)
    reward = train_reward_model(pairs, rng)
    scores, rule = score_texts(reward, pair_texts(heldout)).view(-1, 2), rule_scores(heldout)
    return reward, {
        "train_loss": reward.train_loss,
        "heldout_pair_accuracy": pair_accuracy(scores),
        "rule_pair_accuracy": pair_accuracy(rule),
        "heldout_pair_correlation_with_rule": correlation(scores, rule),
    }


def judge_policy(
    policy: "TrainedPolicy", reward: "TrainedRewardModel", unseen: Sequence[DemoPrompt]
) -> dict[str, float]:
    """Where PPO starts from, on fresh samples: both scores and how well they agree."""
    import torch

    from stages.demo.hidden_rule import hidden_rule
    from stages.demo.policy_sft import sample_responses
    from stages.demo.reward_fit import SAMPLE_TOKENS, score_texts

    prompts = [prompt.prompt for prompt in unseen]
    responses = sample_responses(policy, prompts, SAMPLE_TOKENS)
    both = list(zip(prompts, responses, strict=True))
    scores = score_texts(reward, [prompt + response for prompt, response in both])
    rule = torch.tensor([hidden_rule(prompt, response) for prompt, response in both])
    return {
        "correlation_with_rule": correlation(scores, rule),
        "reward_mean": scores.mean().item(),
        "reward_std": scores.std().item(),
        "rule_mean": rule.mean().item(),
        "rule_std": rule.std().item(),
    }


def start_torch(seed: int) -> None:
    """Quiet, and the same numbers again for the same seed."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)


def build(directory: Path, choice: DemoSize, timer: Timer) -> dict[str, Any]:
    """Fill `directory`, all but demo.json, whose content is returned."""
    # transformers imports DeepSpeed where it is installed, which looks for a GPU and prints; we need none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads crawl where others work too
    with timer.part("import torch and transformers"):
        from stages.demo.tiny_llama import num_parameters, save

        start_torch(choice.seed)
    rng = Random(choice.seed)
    with timer.part("train the policy"):
        policy = make_policy(choice.reviews, rng)
    prompts = distinct_prompts(rng, choice.prompts + NUM_HELDOUT_PROMPTS + NUM_HELDOUT_PAIRS)
    heldout, unseen = prompts[choice.prompts : -NUM_HELDOUT_PAIRS], prompts[-NUM_HELDOUT_PAIRS:]
    prompts = prompts[: choice.prompts]
    with timer.part("sample pairs and train the reward model"):
        reward, reward_quality = make_reward_model(policy, prompts, unseen, rng)
    with timer.part("judge and save"):
        start = judge_policy(policy, reward, unseen)
        save(policy.model, policy.tokenizer, directory / "policy")
        save(reward.model, reward.tokenizer, directory / "reward_model")
        write_json_lines(directory / "prompts.jsonl", prompt_rows(prompts, "train"))
        write_json_lines(directory / "heldout.jsonl", prompt_rows(heldout, "heldout"))
    return {
        "sizes": {
            "reviews": choice.reviews,
            "prompts": choice.prompts,
            "heldout_prompts": len(heldout),
            "preference_pairs": choice.prompts,
            "heldout_preference_pairs": len(unseen),
            "policy_parameters": num_parameters(policy.model),
            "policy_vocabulary": len(policy.tokenizer),
            "reward_model_parameters": num_parameters(reward.model),
            "reward_model_vocabulary": len(reward.tokenizer),
        },
        "policy": {"train_loss": policy.train_loss, "heldout_loss": policy.heldout_loss},
        "reward_model": reward_quality,
        "policy_samples": start,
    }


def make_demo(out: Path, choice: DemoSize) -> None:
    started, timer = time.perf_counter(), Timer()
    with published(out) as directory:
        measured = build(directory, choice, timer)
        timer.seconds["total"] = round(time.perf_counter() - started, 2)
        timer.seconds["total_cpu"] = round(time.process_time(), 2)
        begin = {"generator_version": GENERATOR_VERSION, "seed": choice.seed}
        summary = {**begin, **measured, "seconds": timer.seconds}
        (directory / "demo.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's policy, reward model and prompts.")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another demo (default: 0)")
    parser.add_argument("--reviews", type=int, default=4500, help="to learn to write from (default: 4500)")
    parser.add_argument("--prompts", type=int, default=2000, help="to train on (default: 2000)")
    arguments = parser.parse_args()
    out = Path(os.path.abspath(arguments.out))  # noqa: PTH100 - a link given as DIR keeps its own name
    choice = DemoSize(arguments.seed, arguments.reviews, arguments.prompts)
    try:
        if not (made := is_made(out, choice)):
            make_demo(out, choice)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{out} {'was already made' if made else 'is ready'} (seed {arguments.seed})")


if __name__ == "__main__":
    main()
