"""Seconds that a reward task spends on a rule's calls, in a worker that keeps the rule's processes and in one
that starts them for each task.

    python -m benchmarks.rule_calls [--tasks 5] [--rows 64] [--import-seconds 1] [--workers 1]

The rule is trivial, and its module takes ``--import-seconds`` to import, as one that needs a large library.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from pipeline.config.reward import RuleConfig
from pipeline.run.schemas import ROLLOUT, conform
from stages.engines import release_all
from stages.rewards.rules import rule_scores

_RULE = """
import time

time.sleep({seconds})


def length(*, responses, **columns):
    return [float(len(response)) for response in responses]
"""


def responses(count: int) -> pa.Table:
    """Return a rollout table of so many responses."""
    columns = {name: [[]] * count for name in ("prompt_tokens", "response_tokens", "response_mask")}
    texts = {name: ["some text"] * count for name in ("prompt_text", "response_text")}
    none = dict.fromkeys(("prompt_messages", "response_messages"), [None] * count)
    names = {"prompt_id": [f"p{i}" for i in range(count)], "sample_index": [0] * count}
    rest = {"rollout_logprobs": [[]] * count, "finish_reason": ["stop"] * count, "num_turns": [1] * count}
    return conform(columns | texts | none | names | rest, ROLLOUT)


def seconds_of_tasks(config: RuleConfig, rows: pa.Table, tasks: int, stays: bool) -> list[float]:
    """Return the seconds of each task, one after the other."""
    found = []
    for _ in range(tasks):
        began = time.monotonic()
        rule_scores("rule", config, rows, stays=stays)
        found.append(time.monotonic() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--import-seconds", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "slow_rule.py").write_text(_RULE.format(seconds=given.import_seconds))
        sys.path.insert(0, folder)
        config = RuleConfig(function="slow_rule:length", workers=given.workers)
        for name, stays in (("started for each task", False), ("kept", True)):
            first, *later = seconds_of_tasks(config, responses(given.rows), given.tasks, stays)
            middle, low, high = statistics.median(later), min(later), max(later)
            print(
                f"{name:22} first {first:.2f} s, later {middle:.2f} s ({low:.2f} to {high:.2f})", flush=True
            )
        release_all()


if __name__ == "__main__":
    main()
