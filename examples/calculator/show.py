"""Print conversations of a run with their rewards.

python examples/calculator/show.py RUN [--iteration 1] [--count 8]
"""

import argparse
import json
from pathlib import Path

from pipeline.run.commits import require_record
from pipeline.run.directory import load_run
from pipeline.run.schemas import REWARD, ROLLOUT
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task


def main() -> None:
    parser = argparse.ArgumentParser(description="Print conversations of a run with their rewards.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--iteration", type=int, default=1)
    parser.add_argument("--count", type=int, default=8)
    given = parser.parse_args()
    run = load_run(given.run)
    rollout, reward = (Task(given.iteration, stage) for stage in (Stage.ROLLOUT, Stage.REWARD))
    rows = (
        read_shard(run.paths, require_record(run.paths, rollout), ROLLOUT).slice(0, given.count).to_pylist()
    )
    rewards = read_shard(run.paths, require_record(run.paths, reward), REWARD)["reward"].to_pylist()
    for row, score in zip(rows, rewards, strict=False):
        print(f"{row['prompt_id']}, sample {row['sample_index']}: {row['num_turns']} turns, ", end="")
        print(f"{row['finish_reason']}, reward {score:g}")
        for message in [*json.loads(row["prompt_messages"]), *json.loads(row["response_messages"])]:
            print(f"  {message['role']:>9}: {message['content']}")


if __name__ == "__main__":
    main()
