"""What an update writes and the next one reads, of a random Llama of about 100 million parameters.

    python -m benchmarks.state [--hidden 640] [--layers 10] [--rounds 3] [--folder DIR] [--stage 1]

Policy and critic; fp32 and bf16; one rank and two. Bytes written and read per parameter; seconds from the
last optimizer step to a durable policy, to a durable state too, and until the same ranks have verified both
and loaded the state; rates against a plain write (with fsync) and read of as many bytes by as many processes
on the same disk; the most memory of the host that saving takes beyond the model, relative to what a rank
writes. Medians.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.prepared import prepared_run, record_of
from pipeline.forecast.shapes import read_shape
from pipeline.run.commits import publish
from pipeline.run.directory import Run, load_run
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.plan import state_of
from pipeline.run.tasks import Stage, Task

if TYPE_CHECKING:
    from stages.context import Context
    from stages.ppo.training import Learner

VOCABULARY = 32_000
CHUNK = 1 << 26
COLUMNS = ("written", "read", "policy", "saved", "loaded", "GB/s", "plain", "w/plain", "r/plain", "memory")


@dataclass
class Measured:
    """One rank's part of one round. Seconds, bytes."""

    policy: float = 0.0
    """From the last optimizer step until the policy's files are durable."""
    state: float = 0.0
    """From then until the state's are."""
    load: float = 0.0
    """Until everything is verified, and what the optimizers had is in their memory again."""
    written: int = 0
    read: int = 0
    own: int = 0
    """Bytes of the files that this rank wrote, policy and state."""
    peak: int = 0
    """Most memory of this process beyond what it had before."""
    plain_write: float = 0.0
    plain_read: float = 0.0


# the run


def make_run(folder: Path, given: argparse.Namespace, precision: str) -> Path:
    """A run of which prepare is committed: models, and nothing else."""
    save_models(folder / "policy", given.hidden, given.layers)
    settings = [
        "rollout.max_new_tokens=8",
        "iterations=2",
        f"update.zero_stage={given.stage}",
        f"update.precision={precision}",
    ]
    return prepared_run(folder, 8, settings).paths.root


def save_models(folder: Path, hidden: int, layers: int) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, "<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


# one rank


def measure(run: Run, rank: int, rounds: int) -> list[Measured]:
    """Save the learner of a fresh run as an update does, load it as the next one does, and compare."""
    from stages import ranks
    from stages.context import Context
    from stages.ppo.resuming import load_learner
    from stages.ppo.state.slices import MOMENTS

    ranks.start_distributed()
    found = []
    learner = load_learner(Context(run.paths, run.config, Task(1, Stage.UPDATE), "bench"), 0)
    for trainer in learner.trainers:
        for one in trainer.own():
            for kind in MOMENTS:
                one.parts[kind].normal_()
    for number in range(rounds + 1):
        found.append(save_and_load(run, learner, f"bench{number}"))
        plain(run.paths.root / f"plain-{rank}", found[-1])
        ranks.share(None)
        if ranks.is_first():
            shutil.rmtree(run.paths.policies)
            shutil.rmtree(run.paths.states)
    return found[1:]


def save_and_load(run: Run, learner: "Learner", attempt: str) -> Measured:
    """Save as an update does, and load as the next one does."""
    from stages import ranks
    from stages.context import Context

    done, context = Measured(), Context(run.paths, run.config, Task(1, Stage.UPDATE), attempt)
    context.files.folder.mkdir(parents=True, exist_ok=True)
    before, written = memory(reset=True), transferred("wchar")
    ranks.share(None)
    policy, state = save(context, learner, done)
    done.peak = memory(peak=True) - before
    done.written = done.own = transferred("wchar") - written
    if ranks.is_first():
        commit(run, attempt, policy, state)
    ranks.share(None)
    load(Context(run.paths, run.config, Task(2, Stage.UPDATE), attempt), learner, done)
    return done


def save(context: "Context", learner: "Learner", done: Measured) -> tuple[Sequence[object], Sequence[object]]:
    """Return the files of policy and state, on the first rank."""
    from stages import ranks
    from stages.ppo.math.shaping import RunningMoments
    from stages.ppo.state.learned import TrainerState
    from stages.ppo.state.writer import LearnerState
    from stages.ppo.training import Steps
    from stages.ppo.update import learned, save_policy

    numbers = TrainerState(1, 0.0, 8, RunningMoments(), 0)
    with timing() as seconds:
        policy = save_policy(context, learner, learned(learner, numbers, Steps()))
        ranks.share(None)
    done.policy = seconds[0]
    with timing() as seconds:
        writer = LearnerState(context, learner)
        writer.detach()
        state = writer.write(is_wanted=True)
        ranks.share(None)
    done.state = seconds[0]
    return policy, state


def commit(run: Run, attempt: str, policy: Sequence[object], state: Sequence[object]) -> None:
    """Publish what was written, in the place of what an earlier round did."""
    for task, files in ((Task(1, Stage.UPDATE), policy), (state_of(1), state)):
        paths = run.paths.task(task)
        paths.folder.mkdir(parents=True, exist_ok=True)
        paths.record.unlink(missing_ok=True)
        publish(run.paths, record_of(task, files, attempt))


def load(context: "Context", learner: "Learner", done: Measured) -> None:
    from stages import ranks
    from stages.ppo.resuming import load_learner
    from stages.ppo.state.saved_state import is_hashed_here

    context.hashes, context.agree = is_hashed_here, ranks.first_of
    read = transferred("rchar")
    with timing() as seconds:
        context.policy_directory(1)
        folder = context.state_directory(1)
        for trainer in learner.trainers:
            trainer.load_state(folder)
        ranks.share(None)
    done.load, done.read = seconds[0], transferred("rchar") - read
    load_learner(context, 1)  # compares what it has loaded with what was learned


def plain(path: Path, done: Measured) -> None:
    """Write and read as many bytes as this rank did, at once with the others."""
    from stages import ranks

    data = os.urandom(CHUNK)
    ranks.share(None)
    with timing() as seconds, path.open("wb") as file:
        for start in range(0, done.own, CHUNK):
            file.write(data[: done.own - start])
        file.flush()
        os.fsync(file.fileno())
        ranks.share(None)
    done.plain_write = seconds[0]
    with timing() as seconds, path.open("rb", buffering=0) as file:
        buffer = bytearray(CHUNK)
        while file.readinto(buffer):
            pass
        ranks.share(None)
    done.plain_read = seconds[0]
    path.unlink()


@contextmanager
def timing() -> Iterator[list[float]]:
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - start)


def memory(reset: bool = False, peak: bool = False) -> int:
    """Resident bytes of this process, now or at most since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    name = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def transferred(name: str) -> int:
    """Bytes that this process has written or read through system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


# all


def by_ranks(run_dir: Path, size: int, rounds: int) -> list[list[Measured]]:
    """By round and rank."""
    folder = run_dir.parent
    started = []
    for rank in range(size):
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        environment = os.environ | TASK_ENVIRONMENT | place
        environment |= {"PYTHONPATH": str(Path(__file__).parent.parent)}
        environment |= {"RENDEZVOUS_FILE": str(folder / f"meeting-{size}"), "OMP_NUM_THREADS": "1"}
        output = folder / f"measured-{size}-{rank}.json"
        words = [__file__, "--as-rank", str(run_dir), str(rounds), str(output)]
        with (folder / f"log-{size}-{rank}").open("w") as log:
            process = subprocess.Popen([sys.executable, *words], env=environment, stdout=log, stderr=log)
        started.append((process, output))
    for rank, (process, _) in enumerate(started):
        if process.wait():
            sys.exit((folder / f"log-{size}-{rank}").read_text())
    told = [[Measured(**one) for one in json.loads(output.read_text())] for _, output in started]
    return [list(one) for one in zip(*told, strict=True)]


def report(name: str, parameters: int, rounds: list[list[Measured]]) -> None:
    median = statistics.median
    total = [sum(one.own for one in ranks) for ranks in rounds]
    saving = [max(one.policy + one.state for one in ranks) for ranks in rounds]
    loading = [max(one.load for one in ranks) for ranks in rounds]
    writes = [max(one.plain_write for one in ranks) for ranks in rounds]
    reads = [max(one.plain_read for one in ranks) for ranks in rounds]
    numbers = {
        "written": total[0] / parameters,
        "read": median([sum(one.read for one in ranks) for ranks in rounds]) / parameters,
        "policy": median([max(one.policy for one in ranks) for ranks in rounds]),
        "saved": median(saving),
        "loaded": median(loading),
        "GB/s": median([t / s / 1e9 for t, s in zip(total, saving, strict=True)]),
        "plain": median([t / s / 1e9 for t, s in zip(total, writes, strict=True)]),
        "w/plain": median([w / s for w, s in zip(writes, saving, strict=True)]),
        "r/plain": median([r / s for r, s in zip(reads, loading, strict=True)]),
        "memory": median([max(one.peak / one.own for one in ranks) for ranks in rounds]),
    }
    assert list(numbers) == list(COLUMNS)
    print(f"{name:<16}" + "".join(f"{value:>9.2f}" for value in numbers.values()), flush=True)


def count(directory: Path) -> int:
    """Parameters of policy and critic, which has one row instead of the output layer's."""
    shape = read_shape(directory)
    return 2 * shape.parameters - (VOCABULARY - 1) * shape.hidden


def main() -> None:
    if sys.argv[1:2] == ["--as-rank"]:
        run_dir, rounds, output = sys.argv[2:]
        found = measure(load_run(Path(run_dir)), int(os.environ["RANK"]), int(rounds))
        Path(output).write_text(json.dumps([asdict(one) for one in found]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stage", type=int, default=1, help="ZeRO stage")
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    given = parser.parse_args()
    print(" " * 16 + "".join(f"{column:>9}" for column in COLUMNS))
    for precision in ("fp32", "bf16"):
        for size in (1, 2):
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                run_dir = make_run(Path(folder), given, precision)
                rounds = by_ranks(run_dir, size, given.rounds)
                report(f"{precision}, {size} rank(s)", count(Path(folder) / "policy"), rounds)


if __name__ == "__main__":
    main()
