"""Memory and seconds of a micro-batch's forward and backward pass by the size of the vocabulary, with logits
that stand whole and with some of them at a time (stages/ppo/head.py).

    python -m benchmarks.vocabulary [--sizes 32768 49152 151936 262144] [--precision fp32] [--tokens 1024]

The model is a Llama of random weights, of two narrow layers; each measurement is a process of one thread. Its
peak is what the process takes beyond weights and gradients, which are there before; the output layer's
gradient of this micro-batch, as large as the layer, is in both.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

SIZES = (32_768, 49_152, 151_936, 262_144)
ROWS, PROMPT = 4, 32


@dataclass(frozen=True)
class Measured:
    """One process."""

    peak_mib: float
    seconds: float
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of responses in the micro-batch")
    parser.add_argument("--width", type=int, default=256, help="of the model; a multiple of 64")
    parser.add_argument("--worker", choices=["whole", "split"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        found = measured_here(given, given.worker == "whole")
        print(json.dumps(asdict(found)))
        return
    print(f"{given.precision}, {given.tokens} response tokens in {ROWS} rows")
    print("vocabulary  whole, MiB  split, MiB  layer, MiB  whole, s  split, s")
    layers: list[float] = []
    peaks: dict[str, list[float]] = {"whole": [], "split": []}
    for size in given.sizes:
        both = {how: measure(size, given, how) for how in peaks}
        layers.append(size * given.width * (4 if given.precision == "fp32" else 2) / 2**20)
        for how, found in both.items():
            peaks[how].append(found.peak_mib)
        whole, split = both["whole"], both["split"]
        assert abs(whole.loss - split.loss) <= 1e-3 * abs(whole.loss), (whole, split)
        print(
            f"{size:>10}{whole.peak_mib:>12.0f}{split.peak_mib:>12.0f}{layers[-1]:>12.0f}"
            f"{whole.seconds:>10.1f}{split.seconds:>10.1f}",
            flush=True,
        )
    slopes = {
        how: slope(given.sizes, [peak - layer for peak, layer in zip(found, layers, strict=True)])
        for how, found in peaks.items()
    }
    told = ", ".join(f"{how} {value * 1024:.2f} KiB" for how, value in slopes.items())
    print(f"per id, without the layer's gradient: {told}; ratio {slopes['split'] / slopes['whole']:.3f}")


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of the line through some points, by least squares."""
    x, y = sum(sizes) / len(sizes), sum(values) / len(values)
    both = list(zip(sizes, values, strict=True))
    return sum((a - x) * (b - y) for a, b in both) / max(1e-9, sum((a - x) ** 2 for a, _ in both))


def measure(size: int, given: argparse.Namespace, how: str) -> Measured:
    """Measure in a process of its own."""
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-m", "benchmarks.vocabulary", "--worker", how, "--sizes", str(size)]
    command += ["--precision", given.precision, "--tokens", str(given.tokens), "--width", str(given.width)]
    environment = os.environ | settings | {"PYTHONPATH": root}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


# --- in a process of its own ---


def measured_here(given: argparse.Namespace, is_whole: bool) -> Measured:
    """Measure the second of two micro-batches, the first of which is small and makes the gradients."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from stages.ppo import head

    torch.set_num_threads(1)
    torch.manual_seed(0)
    (size,), length = given.sizes, given.tokens // ROWS
    shape = LlamaConfig(
        vocab_size=size,
        hidden_size=given.width,
        intermediate_size=given.width * 8 // 3,
        num_hidden_layers=2,
        num_attention_heads=given.width // 64,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(shape).to(torch.float32 if given.precision == "fp32" else torch.bfloat16)
    if is_whole:
        head._HEADS[model] = None
    learn(model, size, 1)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    begin = time.process_time()
    loss = learn(model, size, length)
    return Measured((status("VmHWM") - before) / 1024, time.process_time() - begin, loss)


def learn(model: "nn.Module", size: int, length: int) -> float:
    """Go forward and backward over rows of random tokens."""
    import torch

    from stages.ppo.batching import Row, collate
    from stages.ppo.forward import policy_outputs

    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, size, (ROWS, PROMPT + length), generator=draw).tolist()
    batch = collate([Row(tokens[:PROMPT], tokens[PROMPT:]) for tokens in drawn], range(ROWS))
    loss = -policy_outputs(model, batch, 1.0, entropy=True).log_probs.mean()
    loss.backward()
    return float(loss.detach())


def status(name: str) -> int:
    """Return a number of /proc/self/status, in KiB."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


if __name__ == "__main__":
    main()
