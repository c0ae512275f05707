"""Has the run learnt to calculate? Judges a finished run by its greedy answers to held-out tasks.

    python examples/arithmetic/judge.py RUN [--picture FILE.svg]

Prints the share of right answers of the policy that the run began with and of its last one, and answers of
both to the same tasks; draws the curve beside the run (RUN.svg). Exit code 1 unless it has risen by 0.15.
"""

import argparse
import sys
from pathlib import Path

from evaluations import Evaluation, evaluations, picture, training_scores

from pipeline.run.commits import BadCommit
from pipeline.run.identity import RunError

LEAST_RISE = 0.15
NUM_SHOWN = 6


def shown(before: Evaluation, after: Evaluation) -> list[str]:
    """Lines of answers to the same tasks: half of them right in the end only, as far as there are such."""
    pairs = list(zip(before.answers, after.answers, strict=True))
    solved = [pair for pair in pairs if pair[1].score >= after.solved_at > pair[0].score]
    others = [pair for pair in pairs if pair not in solved]
    chosen = [*solved[: NUM_SHOWN // 2], *others]
    lines = [f"{'task':<28}{'right':>6}  before -> after"]
    for one, other in chosen[:NUM_SHOWN]:
        lines.append(f"{one.question:<28}{one.right:>6}  {one.said!r} -> {other.said!r}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--picture", type=Path, help="default: RUN.svg, beside the run directory")
    given = parser.parse_args()
    try:
        found = evaluations(given.run)
    except (RunError, BadCommit) as error:
        print(f"error: {given.run}: {error}; slurm-ppo resume goes on with it", file=sys.stderr)
        return 2
    if len(found) < 2:
        parser.error("the run has no evaluation before and after training; set evaluate.every")
    before, after = found[0], found[-1]
    print("\n".join(shown(before, after)))
    file = given.picture or given.run.with_name(f"{given.run.resolve().name}.svg")
    solved = [(one.iteration, one.share_right) for one in found]
    file.write_text(picture(f"{given.run.resolve().name}: right answers", solved, training_scores(given.run)))
    rise = after.share_right - before.share_right
    shares = f"{before.share_right:.3f} before, {after.share_right:.3f} after {after.iteration} iterations"
    print(f"\nshare of right answers to {len(after.answers)} held-out tasks: {shares}, {rise:+.3f}")
    print(f"the curve: {file}")
    if rise >= LEAST_RISE:
        return 0
    print(f"the run has not learned: the share was to rise by {LEAST_RISE}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
