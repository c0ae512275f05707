"""GRPO by slurm-ppo and by TRL on the same work, in turn: seconds of an iteration by stage, memory, reward.

    python -m benchmarks.peers MODEL [--rounds 5] [--threads 1 2] [--kl 0 0.04] [--given recorded] ...

MODEL is a directory of a small chat model, as examples/arithmetic makes one. Prompts are sums that our
environment of reasoning-gym makes, and its scorer rewards on both sides; the number of prompts, the group
size, the longest response, temperature, learning rate, KL coefficient and loss are the same. With ``--given
recorded`` both sides train on the same responses of the policy, which are sampled once, and every second
group is flat (equal scores); else each samples its own.

TRL runs in .cache/peers/trl, which the first call makes: TRL itself is installed there, by pip, and
everything that it needs and this environment has (torch, transformers, accelerate, datasets) is shared with
it, so that both sides compute with the same versions. Its gradient checkpointing is on, its default, unless a
contestant is named ``trl-fp32-keep``.

Each measurement is a command of its own; iterations after the first count. CPU seconds are those of all
processes of an iteration, from one update's commit to the next; memory is the largest sum of proportional set
sizes. Prints ratios first, then a table, and writes all of it as JSON.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers_ours import RECORDED, half_flat, make_prompts
from benchmarks.process_tree import Sampled, run_sampled
from pipeline.run.commits import require_record
from pipeline.run.directory import load_run
from pipeline.run.tasks import Stage, Task

ROOT = Path(__file__).resolve().parent.parent
TRL = "1.16.0"
RECORDED_GROUPS = 8
"""Groups that are sampled for each that is wanted, to find enough of both kinds."""
CONTESTANTS = {
    "ours-fp32": ("transformers", "fp32"),
    "ours-fp32-vllm": ("vllm", "fp32"),
    "ours-bf16": ("transformers", "bf16"),
    "ours-bf16-vllm": ("vllm", "bf16"),
    "trl-fp32": ("", "fp32"),
    "trl-bf16": ("", "bf16"),
    "trl-fp32-keep": ("", "fp32"),
    "bare-fp32": ("", "fp32"),
    "bare-bf16": ("", "bf16"),
}
STAGES = ("rollout", "reward", "reference", "update", "iteration")


@dataclass(frozen=True)
class Work:
    """What both sides do."""

    model: str
    folder: str
    """Folder of the prompts, and of recorded responses."""
    prompts: int
    group: int
    longest: int
    rows: int
    """Rows of TRL's batches, and of the bare loop's."""
    iterations: int
    kl: float
    recorded: bool
    learning_rate: float = 1e-5

    @property
    def prompt_file(self) -> Path:
        return Path(self.folder, "prompts.jsonl")


@dataclass(frozen=True)
class Measured:
    """One command, by iterations after the first."""

    cpu: Mapping[str, float]
    """Mean CPU seconds by stage; ``iteration`` is all of it."""
    wall: Mapping[str, float]
    peak_gib: float
    update_gib: float
    """Peak of the update's process alone; 0 where it is not a process of its own."""
    reward: float
    flat: float


# the two sides


def ours(work: Work, engine: str, precision: str, threads: int) -> Measured:
    """Run slurm-ppo on this machine, as the command does."""
    with tempfile.TemporaryDirectory(dir=work.folder) as folder:
        run_dir = Path(folder, "run")
        chosen = "benchmarks.peers_ours:make_generator" if work.recorded else engine
        words = [
            "algorithm=grpo",
            f"algorithm.kl.coef={work.kl}",
            "reward=rule",
            "reward.components.rule.function=benchmarks.peers_ours:score",
            "tracking=none",
            f"run_dir={run_dir}",
            f"iterations={work.iterations}",
            f"model.policy={work.model}",
            f"data.prompts={work.prompt_file}",
            "data.id_column=id",
            "data.shuffle=false",
            f"data.prompts_per_iteration={work.prompts}",
            f"rollout.engine={chosen}",
            f"rollout.samples_per_prompt={work.group}",
            f"rollout.max_new_tokens={work.longest}",
            "rollout.num_shards=1",
            "update.minibatches=1",
            f"update.learning_rate={work.learning_rate}",
            *(f"{stage}.num_threads={threads}" for stage in ("rollout", "reward", "update")),
            *precision_words(engine, precision),
        ]
        done = run_sampled([sys.executable, "-m", "pipeline", "run", *words], environment(threads))
        return read_ours(run_dir, work, done)


def precision_words(engine: str, precision: str) -> list[str]:
    """Return the words that set a number format for every stage."""
    words = [
        f"update.precision={precision}",
        f"rollout.precision={precision}",
        f"reward.precision={precision}",
    ]
    if precision == "bf16":
        words.append("update.zero_stage=1")
    if engine == "vllm":
        words += ["rollout.vllm.gpu_memory_utilization=0.2"]
    return words


def read_ours(run_dir: Path, work: Work, done: Sampled) -> Measured:
    """Return what the run's records say, with the CPU seconds of their time."""
    run = load_run(run_dir)
    stages = (Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE)
    cpu: dict[str, list[float]] = {str(stage): [] for stage in stages} | {"iteration": []}
    wall: dict[str, list[float]] = {name: [] for name in cpu}
    rewards, flat, peaks = [], [], []
    for iteration in range(2, work.iterations + 1):
        begin = require_record(run.paths, Task(iteration - 1, Stage.UPDATE)).ended
        records = {stage: require_record(run.paths, _task(iteration, stage)) for stage in stages}
        spans = {str(stage): (record.started, record.ended) for stage, record in records.items()}
        for name, (start, end) in (spans | {"iteration": (begin, records[Stage.UPDATE].ended)}).items():
            cpu[name].append(done.cpu_between(start, end))
            wall[name].append(end - start)
        metrics = records[Stage.UPDATE].metrics
        rewards.append(metrics["reward/mean"])
        flat.append(metrics["reward/frac_zero_std"])
        peaks.append(metrics["peak_memory_gib"])
    means = [{name: statistics.mean(values) for name, values in kind.items()} for kind in (cpu, wall)]
    return Measured(
        means[0], means[1], done.peak_gib, max(peaks), statistics.mean(rewards), statistics.mean(flat)
    )


def _task(iteration: int, stage: Stage) -> Task:
    return Task(iteration, stage) if stage is Stage.UPDATE else Task(iteration, stage, 0)


def trl(work: Work, precision: str, threads: int, checkpointing: bool) -> Measured:
    """Run TRL in its environment."""
    with tempfile.TemporaryDirectory(dir=work.folder) as folder:
        given = Path(folder, "given.json")
        arguments = {
            "model": work.model,
            "prompts": str(work.prompt_file),
            "folder": folder,
            "prompts_per_iteration": work.prompts,
            "precision": precision,
            "checkpointing": checkpointing,
        }
        of_work = {name: value for name, value in asdict(work).items() if name not in ("prompts", "folder")}
        given.write_text(json.dumps(of_work | arguments))
        command = [str(trl_python()), "-m", "benchmarks.peers_trl", str(given)]
        done = run_sampled(command, environment(threads))
    lines = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"seconds"')][1:]
    mean = {
        kind: {
            stage: statistics.mean(line["seconds"].get(stage, {kind: 0.0})[kind] for line in lines)
            for stage in {name for line in lines for name in line["seconds"]}
        }
        for kind in ("cpu", "wall")
    }
    rewards, flat = (statistics.mean(line[name] for line in lines) for name in ("reward", "flat"))
    return Measured(mean["cpu"], mean["wall"], done.peak_gib, 0.0, rewards, flat)


def bare(work: Work, precision: str, threads: int) -> Measured:
    """Run the bare loop over the recorded rows that have a gradient."""
    recorded = json.loads(Path(work.folder, RECORDED).read_text())
    batches = [
        [row for one in recorded[start : start + work.prompts] for row in taught_rows(one, work.kl > 0)]
        for start in range(0, work.iterations * work.prompts, work.prompts)
    ]
    arguments = {"model": work.model, "batches": batches, "rows": work.rows, "precision": precision}
    done = side_by_file("bare", arguments, threads)
    lines = [json.loads(line) for line in done.output.splitlines()][1:]
    cpu, wall = (statistics.mean(line[kind] for line in lines) for kind in ("cpu", "wall"))
    return Measured({"update": cpu}, {"update": wall}, done.peak_gib, done.peak_gib, 0.0, 0.0)


def taught_rows(group: Mapping[str, Any], all_rows: bool) -> list[dict[str, Any]]:
    """Return a recorded group's rows with their advantages, those of 0 only if all rows are wanted."""
    scores = group["scores"]
    mean, spread = statistics.mean(scores), statistics.stdev(scores)
    rows = [
        {
            "prompt": group["prompt_tokens"],
            "response": one["tokens"],
            "advantage": (x - mean) / (spread + 1e-6),
        }
        for one, x in zip(group["responses"], scores, strict=True)
    ]
    return rows if all_rows or spread else []


def side_by_file(what: str, arguments: Mapping[str, Any], threads: int) -> Sampled:
    """Run a command of peers_ours.py."""
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "given.json")
        given.write_text(json.dumps(arguments))
        command = [sys.executable, "-m", "benchmarks.peers_ours", what, str(given)]
        return run_sampled(command, environment(threads))


def environment(threads: int) -> dict[str, str]:
    number = str(threads)
    return {
        "OMP_NUM_THREADS": number,
        "MKL_NUM_THREADS": number,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def trl_python() -> Path:
    """Return the Python of TRL's environment, which is made if it is not there."""
    folder = ROOT / ".cache" / "peers" / "trl"
    python = folder / "bin" / "python"
    mark = folder / f"trl-{TRL}"
    if not mark.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        here = next(path for path in sys.path if path.endswith("site-packages"))
        (folder / "lib" / version / "site-packages" / "shared.pth").write_text(here + "\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*install, f"trl=={TRL}"], check=True)
        mark.touch()
    return python


# measuring


def measure(name: str, work: Work, threads: int) -> Measured:
    """Run one contestant once."""
    engine, precision = CONTESTANTS[name]
    if name.startswith("ours"):
        return ours(work, engine, precision, threads)
    if name.startswith("bare"):
        return bare(work, precision, threads)
    return trl(work, precision, threads, checkpointing=not name.endswith("keep"))


def prepare(work: Work) -> None:
    """Write the prompts, and with recorded responses those as well."""
    total = work.iterations * work.prompts
    if not work.recorded:
        lines = make_prompts(total)
    else:
        asked = {"model": work.model, "prompts": make_prompts(RECORDED_GROUPS * total), "group": work.group}
        output = side_by_file("record", asked | {"longest": work.longest}, threads=2).output
        lines = half_flat(json.loads(output.splitlines()[-1]), work.iterations, work.prompts)
        Path(work.folder, RECORDED).write_text(json.dumps(lines))
    kept = [{name: line[name] for name in ("id", "prompt", "entry")} for line in lines]
    work.prompt_file.write_text("".join(json.dumps(line) + "\n" for line in kept))


def compare(work: Work, names: Sequence[str], threads: int, rounds: int) -> dict[str, list[Measured]]:
    """Run every contestant in each round, in turn."""
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(rounds):
        for name, measured in found.items():
            measured.append(measure(name, work, threads))
            of = measured[-1]
            print(f"# round {number + 1} {name}: {of}", file=sys.stderr, flush=True)
    return found


def report(found: Mapping[str, Sequence[Measured]], kind: str) -> None:
    """Print ratios of the iterations, then a line for each contestant; medians over the rounds."""
    peers = [name for name in found if name.startswith("trl")]
    for name in (name for name in found if name.startswith("ours")):
        for peer in peers:
            pairs = zip(found[name], found[peer], strict=True)
            ratios = [getattr(a, kind)["iteration"] / getattr(b, kind)["iteration"] for a, b in pairs]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"{name} / {peer}: {statistics.median(ratios):.2f} ({spread})")
    print(f"{'':16}" + "".join(f"{stage:>11}" for stage in STAGES) + "   GiB  update  reward   flat")
    for name, measured in found.items():
        seconds = [statistics.median(getattr(m, kind).get(stage, 0.0) for m in measured) for stage in STAGES]
        others = [
            statistics.median(values)
            for values in zip(*((m.peak_gib, m.update_gib, m.reward, m.flat) for m in measured), strict=True)
        ]
        print(f"{name:16}" + "".join(f"{s:11.2f}" for s in seconds) + "".join(f"{x:8.2f}" for x in others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="1: CPU seconds; 2: wall")
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--given", choices=["live", "recorded"], default="recorded")
    parser.add_argument("--kl", type=float, nargs="+", default=[0.0, 0.04])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--longest", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / ".cache" / "peers" / "found.json")
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for kl in given.kl:
            work = Work(
                str(given.model.resolve()),
                folder,
                given.prompts,
                given.group,
                given.longest,
                given.rows,
                given.iterations,
                kl,
                given.given == "recorded",
            )
            if not work.prompt_file.exists():
                prepare(work)
            for threads in given.threads:
                kind = "cpu" if threads == 1 else "wall"
                print(
                    f"\n{given.given} responses, KL {kl}, {threads} threads, {kind} seconds of an iteration"
                )
                found = compare(work, given.contestants, threads, given.rounds)
                report(found, kind)
                rows = {name: [asdict(m) for m in measured] for name, measured in found.items()}
                results.append({"work": asdict(work), "threads": threads, "found": rows})
                given.json.parent.mkdir(parents=True, exist_ok=True)
                given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
