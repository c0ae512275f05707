"""Measure a model directory with lm-evaluation-harness, and write the results as numbers.

    python lm_eval_numbers.py POLICY OUTPUT --tasks arc_easy,gsm8k [--program "lm_eval"] [-- MORE ...]

What follows ``--`` is given to lm_eval as it is, such as ``--include_path my_tasks --limit 100``. Results
become ``TASK/METRIC`` (of filters other than none, ``TASK/METRIC@FILTER``); those that are no finite number,
such as a standard error that is not known, are left out. A command for evaluate.command.
"""

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def numbers_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return lm_eval's ``results``, task -> ``METRIC,FILTER`` -> value, as numbers by name."""
    found = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and math.isfinite(value):
                name = f"{task}/{metric}" + ("" if kind in ("", "none") else f"@{kind}")
                found[re.sub(r"[^A-Za-z0-9_.,@:=+/-]", "_", name)] = float(value)
    return found


def newest_results(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """Read the results file that lm_eval wrote below a folder. Ends the program where there is none."""
    files = sorted(folder.rglob("results*.json"))
    if not files:
        sys.exit(f"lm_eval wrote no results*.json below {folder}")
    results: Mapping[str, Mapping[str, Any]] = json.loads(files[-1].read_text())["results"]
    return results


def command(program: str, policy: str, tasks: str, folder: Path, more: Sequence[str]) -> list[str]:
    """Return the words that call lm_eval."""
    words = [*shlex.split(program), "--model", "hf", "--model_args", f"pretrained={policy}"]
    return [*words, "--tasks", tasks, "--output_path", str(folder), *more]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("policy", help="model directory")
    parser.add_argument("output", type=Path, help="file to write the numbers to")
    parser.add_argument("--tasks", required=True, help="names of lm_eval's tasks, with commas between them")
    parser.add_argument(
        "--program", default=f"{shlex.quote(sys.executable)} -m lm_eval", help="how to call it"
    )
    # by hand, as argparse takes words behind -- for positional ones, and has had them all by then
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, more = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        words = command(given.program, given.policy, given.tasks, Path(folder), more)
        code = subprocess.run(words).returncode
        if code:
            sys.exit(code if code > 0 else 1)
        found = numbers_of(newest_results(Path(folder)))
    given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
