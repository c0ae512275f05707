"""Run the arithmetic example with several seeds and engines, one after the other; print a table in Markdown.

    python examples/arithmetic/seeds.py --out FOLDER [--seeds 1 2 3] [--engines transformers vllm] [WORD ...]

WORDs are settings of all runs. A run that was stopped is resumed when this is called again, and one that is
complete is read. Exit code 1 where a share of right answers has not risen by 0.15.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from evaluations import evaluations
from judge import LEAST_RISE
from processor import words as words_of_processor

from pipeline import open_run

HERE = Path(__file__).parent
HEADER = """\
| engine | precision | seed | right before | right after | rise | iterations | minutes |
|---|---|---|---|---|---|---|---|"""


def done(run: Path, words: list[str]) -> None:
    """Bring a run to its end, from wherever it is. Raises CalledProcessError where it fails."""
    arguments = ["run", "--config-dir", HERE, "experiment=arithmetic", f"run_dir={run}", *words]
    if (run / "run.json").is_file():
        arguments = ["resume", run]
    subprocess.run([sys.executable, "-m", "pipeline", *map(str, arguments)], check=True, stdout=sys.stderr)


def row(run: Path, engine: str, seed: int) -> tuple[str, float]:
    """Return a line of the table, and how much the share of right answers has risen."""
    found, opened = evaluations(run), open_run(run)
    before, after = found[0].share_right, found[-1].share_right
    minutes = max(opened.metrics()["seconds/elapsed"].drop_null().to_pylist()) / 60
    cells = [
        engine,
        opened.config.rollout_precision,
        seed,
        f"{before:.3f}",
        f"{after:.3f}",
        f"{after - before:+.3f}",
    ]
    cells += [opened.config.iterations, f"{minutes:.1f}"]
    return f"| {' | '.join(map(str, cells))} |", after - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("words", nargs="*", help="settings; put -- before them")
    given = parser.parse_args()
    cpu = Path("/proc/cpuinfo")
    fast = words_of_processor(cpu.read_text() if cpu.is_file() else "")
    rises = []
    print(HEADER, flush=True)
    for engine in given.engines:
        for seed in given.seeds:
            run = given.out / f"{engine}-{seed}"
            done(run, [f"rollout.engine={engine}", f"seed={seed}", *fast, *given.words])
            line, rise = row(run, engine, seed)
            print(line, flush=True)
            rises.append(rise)
    return 0 if min(rises) >= LEAST_RISE else 1


if __name__ == "__main__":
    sys.exit(main())
