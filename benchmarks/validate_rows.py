"""``slurm-ppo validate`` of a large prompt file, as JSON Lines and as Parquet: what it takes of wall time, of
processors, and of memory in all its processes together.

    python -m benchmarks.validate_rows [--rows 1000000] [--demo .cache/quickstart] [--folder DIR]

Prompts are questions of some 100 characters with an answer, a number in most rows and text in every tenth;
the reward is the rule numeric_match, which looks at all answers. ``--demo`` has the policy that
python -m stages.demo.make makes. The file is written first, which is not counted.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_LOOK_SECONDS = 0.1


def rows(count: int) -> Iterator[dict[str, object]]:
    """Yield prompts with answers."""
    for i in range(count):
        a, b = i, 7 * i % 1000
        answer = str(a + b) if i % 10 == 0 else a + b
        yield {
            "prompt": f"In lesson {i} a child has {a} marbles and finds {b} more. How many? ",
            "answer": answer,
        }


def write_files(folder: Path, count: int) -> tuple[Path, Path]:
    """Write the same prompts as JSON Lines, and as Parquet with answers that are text."""
    lines, parquet = folder / "prompts.jsonl", folder / "prompts.parquet"
    with lines.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(count))
    prompts = pa.array((row["prompt"] for row in rows(count)), pa.string(), size=count)
    answers = pa.array((str(row["answer"]) for row in rows(count)), pa.string(), size=count)
    pq.write_table(pa.table({"prompt": prompts, "answer": answers}), parquet)
    return lines, parquet


def memory_of(pid: int) -> int:
    """Return the bytes of a process and all its descendants, pages that they share counted once."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    pss = next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
    return pss * 1024 + sum(memory_of(int(child)) for child in children)


@dataclass(frozen=True)
class Measured:
    """What a command took, and said of the prompts."""

    seconds: float
    cpu_seconds: float
    gib: float
    said: str


def cpu_seconds() -> float:
    """Return the seconds of processors that all processes took that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(words: list[str]) -> Measured:
    """Carry out a command."""
    began, before, most = time.monotonic(), cpu_seconds(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, "-m", "pipeline", *words], stdout=output, stderr=output)
        while process.poll() is None:
            most = max(most, memory_of(process.pid))
            time.sleep(_LOOK_SECONDS)
        seconds = time.monotonic() - began
        output.seek(0)
        said = output.read()
    if process.returncode:
        raise SystemExit(said)
    line = next(line for line in said.splitlines() if line.startswith("data.prompts"))
    return Measured(seconds, cpu_seconds() - before, most / 2**30, line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--demo", type=Path, default=Path(".cache/quickstart"))
    parser.add_argument("--folder", type=Path, help="where the files are written. Default: a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as text:
        folder = Path(text)
        for path in write_files(folder, given.rows):
            words = [f"model.policy={given.demo / 'policy'}", f"data.prompts={path}", "reward=rule"]
            words += ["reward.components.rule.function=numeric_match", f"run_dir={folder / 'run'}"]
            words += ["reward.components.rule.arguments.column=answer", "tracking=none"]
            found, size = measure(["validate", *words]), path.stat().st_size / 1e6
            took = f"{found.seconds:6.1f} s, {found.cpu_seconds:.1f} s of processors, {found.gib:.2f} GiB"
            print(f"{path.suffix[1:]:8} {size:6.0f} MB {took}  {found.said}", flush=True)


if __name__ == "__main__":
    main()
