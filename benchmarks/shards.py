"""Shard write + commit and verified read, against bare pyarrow on the same bytes, in turn, in one run.

    python benchmarks/shards.py [--megabytes 256] [--rounds 7] [--folder DIR]

Prints GB/s (10^9 bytes) as medians and the median of the ratios pair by pair. The page cache is warm for
reads; "durable" means flushed with fsync. Then a rollout's prompts, from a file of that size, against reading
all of it.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.run.commits import Record, publish
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import PROMPTS, ROLLOUT, conform
from pipeline.run.shards import listed, listing, read_rows, read_shard, write_in_chunks, write_shard
from pipeline.run.tasks import PREPARE, Stage, Task


def make_table(num_bytes: int) -> pa.Table:
    """A rollout shard of about this size: responses of 512 tokens after prompts of 128."""
    generator = np.random.default_rng(0)
    rows = max(1, num_bytes // (640 * 4 + 512 * 4 + 512 // 8 + 64))
    return conform(
        {
            "prompt_id": [f"prompt-{i}" for i in range(rows)],
            "sample_index": np.zeros(rows, np.int32),
            "prompt_tokens": lists(generator.integers(0, 150_000, rows * 128, dtype=np.int32), 128),
            "response_tokens": lists(generator.integers(0, 150_000, rows * 512, dtype=np.int32), 512),
            "response_mask": lists(np.ones(rows * 512, bool), 512),
            "rollout_logprobs": lists(-generator.random(rows * 512, dtype=np.float32), 512),
            "finish_reason": ["stop"] * rows,
            "num_turns": np.ones(rows, np.int32),
            "prompt_text": [""] * rows,
            "prompt_messages": pa.nulls(rows, pa.string()),
            "response_text": [""] * rows,
            "response_messages": pa.nulls(rows, pa.string()),
        },
        ROLLOUT,
    )


def lists(values: np.ndarray, length: int) -> pa.Array:
    offsets = np.arange(0, len(values) + 1, length, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def bare_write(table: pa.Table, path: Path, durable: bool) -> None:
    path.unlink(missing_ok=True)  # a new file each time, as a shard is
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    if durable:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def bare_read(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
        return reader.read_all()


def commit_shard(paths: RunPaths, table: pa.Table, shard: int) -> Record:
    """Write and publish as a task does."""
    task = Task(1, Stage.ROLLOUT, shard)
    entry = write_shard(paths, paths.task(task).data("1-bench"), table)
    record = Record(task, "1-bench", (entry,), {}, 0, 0, table.num_rows, "rollout/2", 0, 0, "", 0, "")
    assert publish(paths, record)
    return record


def remove(paths: RunPaths, record: Record) -> None:
    for entry in record.outputs:
        (paths.root / entry.path).unlink()


def prompt_table(num_bytes: int) -> pa.Table:
    """Prompts of 128 tokens and 500 letters, about so many bytes."""
    rows = max(64, num_bytes // (128 * 4 + 520))
    tokens = np.random.default_rng(0).integers(0, 150_000, rows * 128, dtype=np.int32)
    columns = {"prompt_id": [f"prompt-{i}" for i in range(rows)], "prompt_text": ["x" * 500] * rows}
    return conform(
        columns | {"prompt_messages": pa.nulls(rows, pa.string()), "prompt_tokens": lists(tokens, 128)},
        PROMPTS,
    )


def compare_prompts(paths: RunPaths, num_bytes: int, rounds: int, wanted: int = 64) -> None:
    """Print what it takes to read ``wanted`` prompts, anywhere in the file, by their chunks and from all."""
    table = prompt_table(num_bytes)
    entry, chunks = write_in_chunks(paths, paths.task(PREPARE).data("1-bench"), table)
    said = json.dumps(listing(chunks))
    record = Record(PREPARE, "1-bench", (entry,), {}, 0, 0, table.num_rows, "", 0, 0, "", 0, "")
    indices = np.sort(np.random.default_rng(1).choice(table.num_rows, wanted, replace=False)).tolist()
    pairs = []
    for _ in range(rounds + 1):
        mine = seconds(lambda: read_rows(paths, record, PROMPTS, listed(json.loads(said)), indices))
        pairs.append((mine, seconds(lambda: read_shard(paths, record, PROMPTS).take(indices))))
    ours, whole = (statistics.median(column) * 1e3 for column in zip(*pairs[1:], strict=True))
    size = len(said) + sum(chunks[i].bytes for i in {0, *(index // chunks[0].rows for index in indices)})
    print(
        f"{wanted} of {table.num_rows} prompts: {size / 1e6:.1f} of {entry.bytes / 1e6:.0f} MB read, ", end=""
    )
    print(f"{ours:.1f} ms, from all {whole:.1f} ms")


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(name: str, num_bytes: int, pairs: list[tuple[float, float]], goal: float) -> None:
    ours, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(theirs / mine for mine, theirs in pairs)
    speeds = f"{num_bytes / ours / 1e9:8.2f} GB/s {num_bytes / bare / 1e9:8.2f} GB/s"
    print(f"{name:<44} {speeds} {ratio:8.2f}   (goal {goal})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    given = parser.parse_args()
    table = make_table(given.megabytes * 1_000_000)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        paths, bare = RunPaths(Path(folder) / "run"), Path(folder) / "bare.arrow"
        durable, plain, reads = [], [], []
        for i in range(given.rounds + 1):
            records: list[Record] = []
            mine = seconds(lambda i=i, kept=records: kept.append(commit_shard(paths, table, i)))
            remove(paths, records[0])
            durable.append((mine, seconds(lambda: bare_write(table, bare, durable=True))))
            plain.append((mine, seconds(lambda: bare_write(table, bare, durable=False))))
        record = commit_shard(paths, table, given.rounds + 1)
        for _ in range(given.rounds + 1):
            mine = seconds(lambda: read_shard(paths, record, ROLLOUT))
            reads.append((mine, seconds(lambda: bare_read(bare))))
        num_bytes = record.outputs[0].bytes
        print(f"{num_bytes / 1e6:.0f} MB, {given.rounds} rounds after one to warm up")
        print(f"{'':<44} {'ours':>13} {'bare pyarrow':>13} {'ratio':>8}")
        compare("write + commit, against write + fsync", num_bytes, durable[1:], 0.5)
        compare("write + commit, against write without fsync", num_bytes, plain[1:], 0.5)
        compare("verified read, against read", num_bytes, reads[1:], 0.8)
        compare_prompts(paths, given.megabytes * 1_000_000, given.rounds)


if __name__ == "__main__":
    main()
