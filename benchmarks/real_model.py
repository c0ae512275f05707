"""The promises of a run, kept with a real language model: killed, gone back, forked, exported.

    python benchmarks/real_model.py [--policy .cache/arithmetic/policy] [--out FOLDER] [WORD ...]

The policy is the one of examples/arithmetic, which its make_model.py makes. An undisturbed run of two small
iterations is compared, byte for byte, with one that is killed at three points and resumed, with the same one
gone back, and with a fork; and greedy answers of exported policies, given by plain transformers, with those
that the run has of its held-out tasks. WORDs are settings of all runs. One line per claim; exit code 1 where
one does not hold. Needs 12 GiB of disk and 8 GiB of memory.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.run.commits import require_record  # noqa: E402
from pipeline.run.directory import load_run  # noqa: E402
from pipeline.run.schemas import ROLLOUT  # noqa: E402
from pipeline.run.shards import read_shard  # noqa: E402
from pipeline.run.tasks import Stage, Task  # noqa: E402
from tests.support.mirrored import family, kill_all  # noqa: E402

LAST = 2
SMALL = (
    "experiment=arithmetic",
    f"iterations={LAST}",
    "data.prompts_per_iteration=4",
    "data.environment.size=100",
    "data.environment.heldout_size=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=16",
    "update.keep_last=null",
    "evaluate.every=1",
    "tracking=none",
)
NOT_COMPARED = ("seconds/", "tokens_per_second/", "model_tokens_per_second/", "memory_gib/")
"""Beginnings of numbers that are measured."""
PATIENCE = 900.0
"""Seconds for a point to be reached, and for a command."""


@dataclass
class Claims:
    """What was claimed, and whether it held."""

    broken: list[str] = field(default_factory=list)

    def check(self, claim: str, differences: Sequence[str]) -> None:
        """Print a claim as a line; ``differences`` are what speaks against it."""
        print(f"{'holds ' if not differences else 'BROKEN'}  {claim}", flush=True)
        for line in differences[:5]:
            print(f"          {line}", flush=True)
        self.broken += [claim] * bool(differences)


def words_of(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "pipeline", *map(str, arguments)]


def command(*arguments: str | Path) -> str:
    """Run a command of slurm-ppo to its end. Raises RuntimeError where it fails."""
    done = subprocess.run(
        words_of(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE
    )
    if done.returncode:
        raise RuntimeError(f"slurm-ppo {' '.join(map(str, arguments))}: {done.stderr[-2000:]}")
    return done.stdout


# --- kills ---


def launched(run: Path, task: str) -> int:
    """How often a task was launched, by the journal."""
    journal = run / "events.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    events = (json.loads(line) for line in lines if line.endswith("}"))
    return sum(event["event"] == "launched" and event["task"] == task for event in events)


def wait_until(is_there: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not is_there():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} has not come within {PATIENCE:.0f} s")
        time.sleep(0.1)


def killed(
    arguments: Sequence[str | Path], run: Path, task: str, victims: Callable[[int], list[int]]
) -> None:
    """Start a command, kill -9 what ``victims`` chooses of its processes a second after a task was launched;
    where the driver is not among them, let it come to its end."""
    with subprocess.Popen(
        words_of(*arguments), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as driver:
        wait_until(lambda: launched(run, task) > 0 or driver.poll() is not None, task)
        time.sleep(1.0)
        if driver.poll() is not None:
            raise RuntimeError(f"{run}: the driver ended before {task}")
        chosen = victims(driver.pid)
        kill_all(chosen, signal.SIGKILL)
        if driver.pid in chosen:
            driver.wait()


def everything(driver: int) -> list[int]:
    return family(driver)


def workers(driver: int) -> list[int]:
    return [pid for pid in family(driver) if pid != driver]


def disturbed(run: Path, words: Sequence[str]) -> None:
    """A run that loses all processes in a rollout, its workers in an update, and its driver in a rollout."""
    killed(["run", *words, f"run_dir={run}"], run, "1/rollout/0", everything)
    with subprocess.Popen(
        words_of("resume", run), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as driver:
        wait_until(lambda: launched(run, "1/update/0") > 0, "update 1")
        time.sleep(1.0)
        kill_all(workers(driver.pid), signal.SIGKILL)
        wait_until(lambda: launched(run, "2/rollout/0") > 0, "rollout 2")
        time.sleep(1.0)
        kill_all([driver.pid], signal.SIGKILL)
        driver.wait()
    command("resume", run)


# --- what is compared ---


def contents(folder: Path) -> dict[str, bytes]:
    place = folder.resolve()
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def differing(one: Path, other: Path, name: str) -> list[str]:
    """Which files of a part of two runs differ."""
    mine, theirs = contents(one / name), contents(other / name)
    names = sorted(mine.keys() | theirs.keys())
    found = [f"{name}/{file} differs" for file in names if mine.get(file) != theirs.get(file)]
    return found if names else [f"{name} is empty"]


def rows(run: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in found]


def ends_apart(run: Path, other: Path, last_row_only: bool = False) -> list[str]:
    """In what the ends of two runs differ: last policy, trainer's state, numbers of the rows."""
    parts = [line for part in ("policy", "state") for line in differing(run, other, f"{part}/{LAST:05d}")]
    mine, theirs = rows(run), rows(other)
    if last_row_only:
        mine, theirs = mine[-1:], theirs[-1:]
    return [*parts, *(["rows of metrics.jsonl differ"] if mine != theirs else [])]


def answers_apart(run: Path, iteration: int, exported: Path) -> list[str]:
    """Which answers of an exported policy, in plain transformers and one by one, are not those of the run."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    opened = load_run(run)
    record = require_record(opened.paths, Task(iteration, Stage.EVALUATE))
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    limit, found = opened.config.rollout.max_new_tokens, []
    for row in read_shard(opened.paths, record, ROLLOUT).to_pylist():
        messages = json.loads(row["prompt_messages"])
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**given, max_new_tokens=limit, do_sample=False)[0].tolist()
        if made != [*row["prompt_tokens"], *row["response_tokens"]]:
            said = tokenizer.decode(made[len(row["prompt_tokens"]) :], skip_special_tokens=True)
            found.append(f"{row['prompt_id']}: {said!r}, in the run {row['response_text']!r}")
    return found


def best_of(run: Path) -> int:
    return int(json.loads((run / "best.json").read_text())["iteration"])


def check_all(folder: Path, policy: Path, more: Sequence[str]) -> Claims:
    claims = Claims()
    words = ["--config-dir", str(ROOT / "examples/arithmetic"), *SMALL, f"model.policy={policy}", *more]
    whole, broken, forked = (folder / name for name in ("whole", "broken", "forked"))
    command("run", *words, f"run_dir={whole}")
    disturbed(broken, words)
    claims.check(
        "killed in a rollout, an update and a rollout, and resumed: the same bytes", ends_apart(broken, whole)
    )
    command("resume", broken, "--from", f"reward@{LAST}")
    claims.check(f"gone back to reward@{LAST}: the same bytes", ends_apart(broken, whole))
    command("fork", f"{whole}@{LAST - 1}", forked)
    command("resume", forked)
    claims.check(
        f"a fork of iteration {LAST - 1}: the same bytes", ends_apart(forked, whole, last_row_only=True)
    )
    for word, iteration in (("best", best_of(whole)), (str(LAST), LAST)):
        exported = folder / f"exported-{word}"
        command("export", f"{whole}@{word}", exported)
        claim = f"exported @{word} (policy {iteration}): plain transformers answers as in the run"
        claims.check(claim, answers_apart(whole, iteration, exported))
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", type=Path, default=Path(".cache/arithmetic/policy"))
    parser.add_argument("--out", type=Path, help="new folder for the runs, which is kept")
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    if not (given.policy / "config.json").is_file():
        parser.error(f"{given.policy} is no model directory; make it: examples/arithmetic/make_model.py")
    folder = given.out or Path(tempfile.mkdtemp(prefix="real-model-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        claims = check_all(folder.resolve(), given.policy.resolve(), given.words)
    finally:
        if given.out is None:
            shutil.rmtree(folder)
    return 1 if claims.broken else 0


if __name__ == "__main__":
    sys.exit(main())
