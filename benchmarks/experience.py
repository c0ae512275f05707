"""Memory of an update's first step: an iteration's shards on disk, as the learner's matrices.

    python benchmarks/experience.py [--rows 10000] [--tokens 1000] [--shards 8] [--before CHECKOUT]

Each measurement is a process of its own, in turn with those of another checkout of this project, if one is
given. Memory is what the process has more, at most and at the end, than before it began to read; the kernel
counts it, and what is loaded at first use does not count. The page cache is warm.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.run.commits import Record, publish
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import REWARD, ROLLOUT, conform
from pipeline.run.shards import write_shard
from pipeline.run.tasks import Stage, Task

PROMPT = 100
"""Tokens of a prompt."""
WARM_UP = 2
"""Iteration of a few rows."""
MEASURES = ("read and make", "make, of tables that are there")


def commit(paths: RunPaths, task: Task, table: pa.Table) -> int:
    """Write and publish a shard; return its bytes."""
    entry = write_shard(paths, paths.task(task).data("1-bench"), table)
    assert publish(paths, Record(task, "1-bench", (entry,), {}, 0, 0, table.num_rows, "", 0, 0, "", 0, ""))
    return entry.bytes


def commit_shard(paths: RunPaths, iteration: int, shard: int, rows: int, given: argparse.Namespace) -> int:
    """Write a rollout shard and its reward shard, all responses of one length; return their bytes."""
    tokens = given.tokens
    draw = np.random.default_rng(shard)
    ids = {
        "prompt_id": [f"prompt-{shard}-{i // 4}" for i in range(rows)],
        "sample_index": np.arange(rows, dtype=np.int32) % 4,
    }
    rollout = ids | {
        "prompt_tokens": lists(draw.integers(0, 150_000, rows * PROMPT, dtype=np.int32), PROMPT),
        "response_tokens": lists(draw.integers(0, 150_000, rows * tokens, dtype=np.int32), tokens),
        "response_mask": lists(np.ones(rows * tokens, bool), tokens),
        "rollout_logprobs": lists(-draw.random(rows * tokens, dtype=np.float32), tokens),
        "finish_reason": ["stop"] * rows,
        "num_turns": np.ones(rows, np.int32),
        "prompt_text": ["x" * given.letters * PROMPT] * rows,
        "prompt_messages": pa.nulls(rows, pa.string()),
        "response_text": ["x" * given.letters * tokens] * rows,
        "response_messages": pa.nulls(rows, pa.string()),
    }
    reward = ids | {
        "reward": draw.random(rows, dtype=np.float32),
        "reference_logprobs": lists(-draw.random(rows * tokens, dtype=np.float32), tokens),
        "validity": ["scored"] * rows,
    }
    tasks = (Task(iteration, stage, shard) for stage in (Stage.ROLLOUT, Stage.REWARD))
    tables = conform(rollout, ROLLOUT), conform(reward, REWARD)
    return sum(commit(paths, task, table) for task, table in zip(tasks, tables, strict=True))


def lists(values: np.ndarray, length: int) -> pa.Array:
    offsets = np.arange(0, len(values) + 1, length, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


# --- in a process of its own, of this checkout or another ---


def memory(name: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def measured(call: Callable[[], Any]) -> dict[str, float]:
    """Return by how much memory grew in a call, at most and at its end, in bytes; and seconds."""
    before, start = memory("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    kept = call()
    seconds = time.perf_counter() - start
    assert kept is not None
    return {"peak": memory("VmHWM") - before, "kept": memory("VmRSS") - before, "seconds": seconds}


def measure(root: Path, num_shards: int, what: str) -> dict[str, float]:
    from stages.context import Context
    from stages.ppo import experience
    from stages.training import read_shards

    settings: Any = SimpleNamespace(rollout=SimpleNamespace(num_shards=num_shards))
    context = Context(RunPaths(root), settings, Task(1, Stage.UPDATE), "1-bench")
    if what == MEASURES[1]:
        tables = read_shards(context, 1)
        experience.build_experience(*read_shards(context, WARM_UP))
        return measured(lambda: experience.build_experience(*tables))

    def read(iteration: int) -> Any:
        if hasattr(experience, "read_experience"):
            return experience.read_experience(context, iteration)
        return experience.build_experience(*read_shards(context, iteration))  # older checkouts

    read(WARM_UP)
    return measured(lambda: read(1))


# --- here ---


def in_child(checkout: Path, root: Path, num_shards: int, what: str) -> dict[str, float]:
    command = [
        sys.executable,
        __file__,
        "--measure",
        what,
        "--folder",
        str(root),
        "--shards",
        str(num_shards),
    ]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def report(name: str, found: list[dict[str, float]], num_bytes: int) -> None:
    middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
    told = [f"{key} {middle[key] / 1e6:5.0f} MB ({middle[key] / num_bytes:.2f})" for key in ("peak", "kept")]
    print(f"{name:<40} {', '.join(told)}, {middle['seconds']:5.2f} s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--letters", type=int, default=4, help="of a token's text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = parse()
    if given.measure:
        print(json.dumps(measure(given.folder, given.shards, given.measure)))
        return
    checkouts = {"now": Path(__file__).parents[1]} | ({"before": given.before} if given.before else {})
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        paths = RunPaths(Path(folder))
        rows = given.rows // given.shards
        for shard in range(given.shards):
            commit_shard(paths, WARM_UP, shard, 4, given)
        sizes = [commit_shard(paths, 1, shard, rows, given) for shard in range(given.shards)]
        print(f"{rows * given.shards} responses in {given.shards} shards: {sum(sizes) / 1e6:.0f} MB")
        for what in MEASURES:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
            for _ in range(given.rounds):
                for name, checkout in checkouts.items():
                    found[name].append(in_child(checkout, paths.root, given.shards, what))
            for name, measurements in found.items():
                report(f"{what}, {name}", measurements, sum(sizes))


if __name__ == "__main__":
    main()
