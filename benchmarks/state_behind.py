"""What saving the trainer's state of each update adds to the time from one policy to the next.

    python -m benchmarks.state_behind [--hidden 512] [--layers 8] [--rows 48] [--updates 6] [--share 1.0]
        [--rounds 2] [--threads 2] [--light 6] [--folder DIR]

Updates of a random Llama and its critic in one process that stays, one after the other, with all responses
there: an update never waits, as with staleness where it is the slowest stage. In turn, each in a process of
its own: no state is saved but the last; each is written by a thread while the next update computes; each is
written before the next update begins, as where there is no room for a copy. The files of states, and no
others, are written no faster than takes ``--share`` times an update without saving: as on a storage of that
bandwidth. With ``--light SECONDS`` the trainer of the tests is used instead, whose update sleeps for so long
and whose state for ``--share`` times that: what is left is what waits for what, also on a machine that others
use. Seconds from policy to policy, of which the first is left out; medians over all rounds.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.prepared import prepared_run, record_of
from benchmarks.state import VOCABULARY, save_models
from pipeline.run.commits import publish, read_record
from pipeline.run.directory import load_run
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.shards import write_shard
from pipeline.run.tasks import Stage, Task
from stages.rehearsal.models import ragged_responses
from tests.support import light, light_training

LONGEST = 128
NONE, BEHIND, BETWEEN = "no state saved", "in a thread", "in between"


def make_run(folder: Path, given: argparse.Namespace, save_every: int) -> Path:
    """A run of which every update can be done."""
    vocabulary, longest = (256, 32) if given.light else (VOCABULARY, LONGEST)
    if given.light:
        light.make_directory(folder / "policy", 0)
    else:
        save_models(folder / "policy", given.hidden, given.layers)
        save_tokenizer(folder / "policy")
    settings = [
        f"rollout.max_new_tokens={longest - 1}",
        "rollout.num_shards=1",
        f"iterations={given.updates}",
        "update.epochs=1",
        "update.minibatches=2",
        f"update.save_every={save_every}",
        *([word for word in light.WORDS if word.startswith(("update", "model"))] if given.light else ()),
    ]
    run = prepared_run(folder, given.rows, settings)
    rollout, reward = ragged_responses(given.rows, vocabulary, longest)
    for iteration in range(1, given.updates + 1):
        for stage, table in ((Stage.ROLLOUT, rollout), (Stage.REWARD, reward)):
            task = Task(iteration, stage, 0)
            entry = write_shard(run.paths, run.paths.task(task).data("bench"), table)
            publish(run.paths, record_of(task, [entry]))
    return run.paths.root


def save_tokenizer(folder: Path) -> None:
    """One that knows every id of the model: others are never sampled, nor learned from."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
    tokenizer.save_pretrained(folder)


def slow_down(rate: float) -> None:
    """Write the files of states at so many bytes a second at most."""
    from stages.ppo.state import tensor_files

    write_all, free_at = tensor_files._write_all, 0.0

    def written(file: object, data: memoryview) -> None:
        nonlocal free_at
        begun = time.monotonic()
        write_all(file, data)
        if "/state/" in str(file.name):
            free_at = max(free_at, begun) + len(data) / rate
            time.sleep(max(0.0, free_at - time.monotonic()))

    tensor_files._write_all = written


def do_updates(root: Path, way: str, rate: float) -> None:
    """All updates of a run, in this process."""
    from stages import preload  # noqa: F401
    from stages.attempts.arguments import Arguments
    from stages.attempts.execution import execute
    from stages.ppo.state import copying
    from stages.workers.kept_trainer import finish_state

    if rate:
        slow_down(rate)
    if way == BETWEEN:
        copying.free_bytes = lambda: 0.0
        os.environ[light_training.ROOM] = "1"
    for iteration in range(1, load_run(root).plan.iterations + 1):
        execute(
            Arguments(Task(iteration, Stage.UPDATE), root, f"1-{iteration}", None, stays=True), time.time()
        )
    finish_state()


def periods(root: Path) -> list[float]:
    """Seconds from each policy to the next, but for the first: what is loaded comes before it."""
    run = load_run(root)
    ends = [read_record(run.paths, policy_maker(i)).ended for i in range(2, run.plan.iterations + 1)]
    return [after - before for before, after in itertools.pairwise(ends)]


def measure(given: argparse.Namespace, way: str, rate: float) -> tuple[list[float], float, float]:
    """Return the periods, the median seconds that a state took to be written, and the bytes of one."""
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        root = make_run(Path(name), given, 1000 if way == NONE else 1)
        environment = os.environ | TASK_ENVIRONMENT | {"OMP_NUM_THREADS": str(given.threads)}
        if given.light:
            took = 0.0 if way == NONE else given.share * given.light
            environment |= {light.SECONDS: str(given.light), light_training.STATE_SECONDS: str(took)}
        words = ["--do", str(root), way, str(rate)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.state_behind", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(done.stderr)
        paths = load_run(root).paths
        last = given.updates
        states = [read_record(paths, state_of(i)) for i in range(2, last + (way == NONE))]
        states = [state for state in states if state is not None]
        size = sum(entry.bytes for entry in states[-1].outputs)
        return periods(root), statistics.median(s.ended - s.started for s in states), size


def report(found: dict[str, list[float]], writing: dict[str, list[float]], size: float) -> None:
    plain = statistics.median(found[NONE])
    print(f"{size / 1e6:.0f} MB of state", flush=True)
    for way, values in found.items():
        middle = statistics.median(values)
        print(
            f"{way:<16}{middle:7.2f} s ({min(values):.2f} to {max(values):.2f}, n={len(values)})  "
            f"{middle / plain - 1:+7.1%}   writing takes {statistics.median(writing[way]):.2f} s",
            flush=True,
        )
    print(json.dumps({way: [round(v, 3) for v in values] for way, values in found.items()}))


def main(words: Sequence[str]) -> None:
    if words[:1] == ["--do"]:
        do_updates(Path(words[1]), words[2], float(words[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--share", type=float, default=1.0, help="of an update that writing a state takes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--light", type=float, default=0.0, help="seconds of an update that only sleeps")
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    given = parser.parse_args(words)
    found: dict[str, list[float]] = {NONE: [], BEHIND: [], BETWEEN: []}
    writing: dict[str, list[float]] = {NONE: [], BEHIND: [], BETWEEN: []}
    rate, size = 0.0, 0.0
    for _ in range(given.rounds):
        for way in found:
            values, seconds, size = measure(given, way, 0.0 if way == NONE or given.light else rate)
            found[way] += values
            writing[way].append(seconds)
            rate = size / (given.share * statistics.median(found[NONE]))
    report(found, writing, size)


if __name__ == "__main__":
    main(sys.argv[1:])
