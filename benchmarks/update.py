"""The update stage against a plain PyTorch PPO loop: same rows, models, losses and number of optimizer steps.

    python -m benchmarks.update [--rows 512] [--rounds 3] [--threads 1 2] [--budget 2048] [--loop-rows 8]

The responses are random tokens of ragged length, 8 to 512 with their prompt. Policy and critic have half a
million parameters each and fresh weights. The loop is plain_loop.py. Each measurement is a process of its
own, in turn. Prints tokens/s of old log-probabilities, values and steps together (each token once per epoch),
peak memory beyond that of the imports, the share of real tokens, how the update stage spends its time, and
what more threads gain (by the fastest round of each).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from benchmarks.prepared import prepared_run, record_of
from pipeline.run.commits import publish
from pipeline.run.directory import load_run
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.shards import write_shard
from pipeline.run.tasks import Stage, Task
from stages.rehearsal.models import ragged_responses

VOCABULARY = 512
LONGEST = 512
DEFAULT_LOOP_ROWS = 8
"""What transformers' Trainer takes unless told."""
UPDATE = Task(1, Stage.UPDATE)


@dataclass(frozen=True)
class Measured:
    """One process."""

    seconds: float
    """Old log-probabilities and values, and steps."""
    peak_mib: float
    """Beyond what the imports take."""
    value_loss: float
    parts: Mapping[str, float]
    """Of the update stage: seconds."""
    efficiency: float
    """Share of real tokens among those that go through the models."""


# the inputs of both


def make_run(folder: Path, rows: int, budget: int) -> Path:
    """A run of which everything before its first update is committed."""
    save_models(folder / "policy")
    settings = [
        f"rollout.max_new_tokens={LONGEST - 1}",
        "rollout.num_shards=1",
        "iterations=1",
        "update.epochs=1",
        "update.minibatches=2",
        f"update.tokens_per_micro_batch={budget}",
    ]
    run = prepared_run(folder, rows, settings)
    rollout, reward = ragged_responses(rows, VOCABULARY, LONGEST)
    for stage, table in ((Stage.ROLLOUT, rollout), (Stage.REWARD, reward)):
        task = Task(1, stage, 0)
        entry = write_shard(run.paths, run.paths.task(task).data("bench"), table)
        publish(run.paths, record_of(task, [entry]))
    return run.paths.root


def save_models(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LONGEST,
        pad_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ours


def run_stage(root: Path, threads: int) -> Measured:
    """The update stage, to the point where its result would be published."""
    from stages import preload  # noqa: F401
    from stages.context import Context
    from stages.models.numerics import set_up_torch
    from stages.tasks import update

    set_up_torch(threads, seed=0)
    run, imports = load_run(root), peak_mib()
    context = Context(run.paths, run.config, UPDATE, f"{os.getpid()}")
    context.files.folder.mkdir(parents=True, exist_ok=True)
    result = update.run(UPDATE, context)
    assert result is not None
    parts = {
        name.removeprefix("seconds/update/"): value
        for name, value in result.metrics.items()
        if name.startswith("seconds/update/")
    }
    return Measured(
        seconds=parts["old_log_probs"] + parts["steps"],
        peak_mib=peak_mib() - imports,
        value_loss=result.metrics["value/loss"],
        parts=parts,
        efficiency=result.metrics["policy/padding_efficiency"],
    )


def run_loop(root: Path, threads: int, batch_rows: int) -> Measured:
    """The same update by the plain loop."""
    import torch
    from plain_loop import PlainLoop, Responses

    torch.set_num_threads(threads)
    run, imports = load_run(root), peak_mib()
    rollout, reward = ragged_responses(run.config.data.prompts_per_iteration, VOCABULARY, LONGEST)
    columns = (rollout["prompt_tokens"], rollout["response_tokens"], reward["reward"])
    loop = PlainLoop(run.config, Responses(*(column.to_pylist() for column in columns)), batch_rows)
    begin = time.perf_counter()
    loss, efficiency = loop.update()
    return Measured(time.perf_counter() - begin, peak_mib() - imports, loss, {}, efficiency)


# measuring


def peak_mib() -> float:
    """Of this process since it began; ``ru_maxrss`` would also count the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(root: Path, threads: int, batch_rows: int | None) -> Measured:
    """In a process of its own: the update stage, or the loop with batches of so many rows."""
    command = [sys.executable, __file__, "--worker", str(root), "--threads", str(threads)]
    if batch_rows is not None:
        command += ["--loop-rows", str(batch_rows)]
    settings = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        command, env=os.environ | TASK_ENVIRONMENT | settings, stdout=subprocess.PIPE, check=True, text=True
    )
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def work(root: Path, threads: int, loop_rows: Sequence[int] | None) -> Measured:
    """What :func:`measure` has asked this process for."""
    return run_loop(root, threads, loop_rows[0]) if loop_rows else run_stage(root, threads)


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def report(
    threads: int, tokens: int, ours: Sequence[Measured], loops: Mapping[int, Sequence[Measured]]
) -> None:
    """One line per contestant; ratios are of each round's pair."""
    for name, measured in (("update stage", ours), *((f"loop, {n} rows", m) for n, m in loops.items())):
        ratios = [a.seconds / b.seconds for a, b in zip(measured, ours, strict=True)]
        print(
            f"{threads} threads  {name:<14} {tokens / median(m.seconds for m in measured):8.0f} tok/s"
            f"  peak {median(m.peak_mib for m in measured):6.0f} MiB"
            f"  real tokens {measured[0].efficiency:6.1%}  value loss {measured[0].value_loss:.4f}"
            f"  update stage is {median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    parts = {name: median(m.parts[name] for m in ours) for name in ours[0].parts}
    shares = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
    print(f"{threads} threads  split of the update stage: {shares}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--budget", type=int, default=2048, help="tokens of a micro-batch of the update stage"
    )
    parser.add_argument("--loop-rows", type=int, nargs="+", help="rows of a batch of the loop")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        done = work(given.worker, given.threads[0], given.loop_rows)
        print(json.dumps(asdict(done)))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = make_run(Path(folder), given.rows, given.budget)
        epochs = load_run(root).config.update.epochs
        tokens = epochs * sum(map(len, chain(*token_columns(given.rows))))
        print(f"{given.rows} rows, {tokens} tokens in {epochs} epochs, {given.rounds} rounds", flush=True)
        loop_rows = given.loop_rows or [DEFAULT_LOOP_ROWS]
        compare(root, given.threads, given.rounds, loop_rows, tokens)


def compare(root: Path, threads: Sequence[int], rounds: int, loop_rows: Sequence[int], tokens: int) -> None:
    """The update stage and the loop with each number of threads, in turn."""
    contestants = [None, *loop_rows]
    found: dict[tuple[int, int | None], list[Measured]] = {(t, n): [] for t in threads for n in contestants}
    for _ in range(rounds):
        for (number, rows), measured in found.items():
            measured.append(measure(root, number, rows))
    for number in threads:
        report(number, tokens, found[number, None], {rows: found[number, rows] for rows in loop_rows})
    for number in threads[1:]:
        for rows in contestants:
            once, more = (min(m.seconds for m in found[t, rows]) for t in (threads[0], number))
            name = "update stage" if rows is None else f"loop, {rows} rows"
            print(f"{name:<14} with {number} threads is {once / more:.2f} times as fast as with {threads[0]}")


def token_columns(rows: int) -> list[list[list[int]]]:
    rollout, _ = ragged_responses(rows, VOCABULARY, LONGEST)
    return [rollout[name].to_pylist() for name in ("prompt_tokens", "response_tokens")]


if __name__ == "__main__":
    main()
