"""What staleness costs in reward: examples with rollout.staleness=0 and 1, by PPO and GRPO, several seeds.

    python -m benchmarks.staleness_learning --out FOLDER [--seeds 1 2 ...] [--iterations 24] [--examples ...]
        [--algorithms PPO GRPO]

Both sides of a pair differ in ``rollout.staleness`` alone; both have ``algorithm.correction.level=token``,
which staleness needs. Which policy writes which response follows from the plan, so it makes no difference
that it all runs on one machine. A run that was stopped is resumed when this is called again, and one that is
complete is read. The examples' inputs are made first, where they are not there.

Prints a table in Markdown: mean reward of the last three iterations over seeds, its standard deviation over
seeds, the difference of both sides in standard deviations, and the share of the gain over the first
iteration (which is of the same policy on both sides) that is left. Exit code 1 where a difference is one
standard deviation or more, or less than 90 % of the gain is left.
"""

import argparse
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline import open_run

ROOT = Path(__file__).resolve().parent.parent
LAST = 3
LEAST_OF_GAIN = 0.9
COMMON = ("algorithm.correction.level=token", "tracking=none")
ALGORITHMS = ["PPO", "GRPO"]
GROUPS = ("algorithm=grpo", "rollout.samples_per_prompt=4", "data.prompts_per_iteration=64")


@dataclass(frozen=True)
class Example:
    """A demo that both algorithms run."""

    maker: tuple[str, ...]
    """Arguments of Python with which its inputs are made."""
    inputs: str
    words: tuple[str, ...]
    by_algorithm: dict[str, tuple[str, ...]]
    """With rates at which it learns enough to be compared."""


_LITTLE_PRACTICE = ("--dialogues", "3000")
"""Of the calculator's policy, so that much is left to be learned."""
EXAMPLES = {
    "quickstart": Example(
        ("-m", "stages.demo.make"),
        ".cache/quickstart",
        ("experiment=quickstart",),
        {"PPO": (), "GRPO": GROUPS},
    ),
    "calculator": Example(
        ("examples/calculator/make_calculator.py", *_LITTLE_PRACTICE),
        ".cache/calculator-3000",
        (
            *("--config-dir", "examples/calculator", "experiment=calculator", "evaluate.every=0"),
            *("model.policy=.cache/calculator-3000/policy", "data.heldout=null"),
            "data.prompts=.cache/calculator-3000/prompts.jsonl",
        ),
        {
            "PPO": ("algorithm=ppo", "algorithm.kl.coef=0", "update.learning_rate=3e-4"),
            "GRPO": ("update.learning_rate=3e-4",),
        },
    ),
}


@dataclass(frozen=True)
class Side:
    """Mean rewards of one staleness, a number for each seed."""

    first: list[float]
    last: list[float]

    @property
    def gain(self) -> float:
        return statistics.fmean(self.last) - statistics.fmean(self.first)


def finished(run: Path, words: list[str]) -> Path:
    """Bring a run to its end, from wherever it is. Raises CalledProcessError where it fails."""
    arguments = ["resume", str(run)] if (run / "run.json").is_file() else ["run", *words, f"run_dir={run}"]
    subprocess.run([sys.executable, "-m", "pipeline", *arguments], check=True, stdout=sys.stderr, cwd=ROOT)
    return run


def rewards_of(run: Path) -> tuple[float, float]:
    """Return the mean reward of the first iteration, and of the last three."""
    rows = open_run(run).metrics()["reward/mean"].drop_null().to_pylist()  # none before the first iteration
    return rows[0], statistics.fmean(rows[-LAST:])


def side(out: Path, name: str, algorithm: str, staleness: int, seeds: list[int], iterations: int) -> Side:
    example, found = EXAMPLES[name], []
    for seed in seeds:
        words = [*example.words, *example.by_algorithm[algorithm], *COMMON]
        words += [f"rollout.staleness={staleness}", f"seed={seed}", f"iterations={iterations}"]
        run = out.resolve() / f"{name}-{algorithm.lower()}-{staleness}-{seed}"
        found.append(rewards_of(finished(run, words)))
    return Side([first for first, _ in found], [last for _, last in found])


def compared(now: Side, ahead: Side) -> tuple[list[str], bool]:
    """Return the cells of a line, and whether both goals are met."""
    spread = statistics.stdev(now.last)
    apart = (statistics.fmean(ahead.last) - statistics.fmean(now.last)) / spread
    kept = ahead.gain / now.gain
    cells = [f"{statistics.fmean(now.first):.3f}"]
    cells += [f"{statistics.fmean(s.last):.3f} ± {statistics.stdev(s.last):.3f}" for s in (now, ahead)]
    return [*cells, f"{apart:+.2f}", f"{kept:.0%}"], abs(apart) < 1 and kept >= LEAST_OF_GAIN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--iterations", type=int, default=12, help="of each run")
    parser.add_argument("--examples", nargs="+", choices=list(EXAMPLES), default=list(EXAMPLES))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    given = parser.parse_args()
    if len(given.seeds) < 2:
        parser.error("at least two seeds are needed for a standard deviation")
    print("| example | algorithm | first iteration | last three, 0 | last three, 1 | apart, SD | gain left |")
    print("|---|---|---|---|---|---|---|", flush=True)
    is_held = True
    for name in given.examples:
        example = EXAMPLES[name]
        if not (ROOT / example.inputs).is_dir():
            subprocess.run([sys.executable, *example.maker, "--out", example.inputs], check=True, cwd=ROOT)
        for algorithm in given.algorithms:
            now, ahead = (
                side(given.out, name, algorithm, number, given.seeds, given.iterations) for number in (0, 1)
            )
            cells, is_fine = compared(now, ahead)
            print(f"| {' | '.join([name, algorithm, *cells])} |", flush=True)
            is_held &= is_fine
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
