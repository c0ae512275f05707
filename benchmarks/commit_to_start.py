"""How long the next rollout waits for its start after a policy is committed, with versions of real size.

    python benchmarks/commit_to_start.py [--gib 1.5] [--iterations 8] [--slurm] [--keep FOLDER]

Light tasks, whose policies have a file of so many GiB beside their weights; everything else of a run is real,
and retention is that of the default (update.keep_last), which removes a version of that size in every
iteration from the fourth on. Counted is from the time of the policy's commit record to the start of the first
rollout that reads it, as both tasks' records have it. ``--slurm``: on a practice cluster, started for it.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.slurm_runs import Runner, noop_words  # noqa: E402
from pipeline.run.commits import require_record  # noqa: E402
from pipeline.run.directory import Run  # noqa: E402
from pipeline.run.plan import policy_maker  # noqa: E402
from pipeline.run.tasks import Stage, Task  # noqa: E402
from slurm.devcluster import PracticeCluster, start  # noqa: E402
from stages.engines.base import PolicyTrainer, takes_ranks, without_torch  # noqa: E402
from tests.support import light, light_training  # noqa: E402

GOAL = 0.2
"""Seconds that the next rollout may wait on one machine."""
PADDING = "PADDED_POLICY_BYTES"
"""Variable: bytes of the file beside a policy's weights."""
_SHARDS = 2
_BLOCK = 1 << 24


@without_torch
@takes_ranks
def make_trainer(config: object) -> PolicyTrainer:
    """Make the light trainer, whose policies are padded."""
    plain = light_training.save_tokenizer

    def padded(context: object, folder: Path) -> None:
        plain(context, folder)
        write_padding(folder / "padding.bin", int(os.environ[PADDING]))

    light_training.save_tokenizer = padded
    return light_training.LightTrainer()


def write_padding(path: Path, size: int) -> None:
    """Write bytes that no filesystem can leave out."""
    block = os.urandom(_BLOCK)
    with path.open("wb") as file:
        for begin in range(0, size, _BLOCK):
            file.write(block[: size - begin])


def gaps_of(run: Run) -> Iterator[tuple[int, float]]:
    """Yield each iteration after the first with the seconds that its first rollout waited."""
    for iteration in range(2, run.plan.iterations + 1):
        committed = require_record(run.paths, policy_maker(iteration - 1)).ended
        tasks = [Task(iteration, Stage.ROLLOUT, shard) for shard in range(run.plan.num_shards)]
        yield iteration, min(require_record(run.paths, task).started for task in tasks) - committed


def words_of(inputs: Path, given: argparse.Namespace) -> list[str]:
    """Return the settings of the run: default retention, and shards that stay as files."""
    words = noop_words(inputs, given.iterations, _SHARDS, 2)
    words += ["update.keep_last=3", "update.engine=benchmarks.commit_to_start:make_trainer"]
    if not given.slurm:
        return words
    told = f"scheduler.environment={{{PADDING}: '{os.environ[PADDING]}'}}"
    return [*words, "scheduler=devcluster", told]


def measure(given: argparse.Namespace, scratch: Path) -> str:
    """Carry out a run, and say how long its rollouts waited."""
    with cluster_for(given, scratch) as cluster:
        run = Runner(cluster).carry_out(
            words_of(light.make_inputs(scratch / "inputs"), given), scratch / "run"
        )
    gaps = dict(gaps_of(run))
    versions = sorted({path.name[:5] for path in run.paths.policies.iterdir()})
    each = ", ".join(f"{iteration}: {seconds:.3f}" for iteration, seconds in gaps.items())
    where = "practice cluster" if given.slurm else "this machine"
    return (
        f"{where}, versions of {given.gib:g} GiB, of which {', '.join(versions)} were kept\n"
        f"seconds from commit to start: {each}\nlargest {max(gaps.values()):.3f} s (goal {GOAL:g} s)"
    )


@contextlib.contextmanager
def cluster_for(given: argparse.Namespace, scratch: Path) -> Iterator[PracticeCluster | None]:
    """Yield a practice cluster, where one is asked for."""
    if not given.slurm:
        yield None
        return
    cluster = start(scratch / "cluster", accounting=False)
    try:
        yield cluster
    finally:
        cluster.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=1.5, help="of each version")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--slurm", action="store_true", help="on a practice cluster")
    parser.add_argument("--keep", type=Path, help="folder for the run, which stays")
    given = parser.parse_args()
    os.environ[PADDING] = str(int(given.gib * 2**30))
    with contextlib.ExitStack() as stack:
        place = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd())))
        place.mkdir(parents=True, exist_ok=True)
        print(measure(given, place.absolute()), flush=True)


if __name__ == "__main__":
    main()
