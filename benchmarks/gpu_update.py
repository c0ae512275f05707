"""Speed of the update of a policy and a critic with random weights: tokens/s, model FLOP utilisation, memory.

    python benchmarks/gpu_update.py [--size 0.5b] [--zero-stage 1] [--tokens 16384] [--rows 256]
    torchrun --nproc-per-node 4 benchmarks/gpu_update.py --size 1.5b --zero-stage 3
    srun --ntasks-per-node 4 --gpus-per-task 1 python benchmarks/gpu_update.py --size 1.5b --zero-stage 3
    python benchmarks/gpu_update.py --size tiny --rows 16 --longest 64 --tokens 512     (on a CPU)

Models are of Qwen2's shape, in bf16, made here: nothing comes from a network. Responses are random tokens of
ragged length. One update to warm up, then --updates that count: old log-probabilities, values and the steps.

Model FLOPs of a forward pass over a sequence of s tokens: 2 per weight of the layers and token, 2 per weight
of the output layer and response token, and 2 x layers x width x s^2 for causal attention. Backward is twice
that. What activation checkpointing computes again does not count. Utilisation is of the device's bf16 peak.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from update import peak_mib

from pipeline.config.algorithm import Estimator
from pipeline.config.compose import compose
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from pipeline.run.environment import TASK_ENVIRONMENT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stages.ppo.experience import Experience
    from stages.ppo.training import Learner


@dataclass(frozen=True)
class Shape:
    """A model's size."""

    layers: int
    width: int
    inner: int
    heads: int
    key_value_heads: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(2, 64, 128, 4, 2, 512),
    "0.5b": Shape(24, 896, 4864, 14, 2, 151_936),
    "1.5b": Shape(28, 1536, 8960, 12, 2, 151_936),
}
PEAK_TFLOPS = {
    "B200": 2250,
    "MI300X": 1307,
    "GH200": 989,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "L40S": 362,
    "A100": 312,
    "A10": 125,
}
"""Dense bf16, by part of the device's name; the first that fits."""


def make_model(shape: Shape, longest: int, is_critic: bool, attention: str | None) -> "PreTrainedModel":
    """Random weights on this rank's device."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

    from stages.models.devices import device

    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        num_labels=1,
        attn_implementation=attention,
    )
    torch.manual_seed(0)  # the same on all ranks
    with device():
        model = (Qwen2ForTokenClassification if is_critic else Qwen2ForCausalLM)(config)
    return model.to(torch.bfloat16)


def make_config(given: argparse.Namespace) -> Config:
    optional = {"attention": given.attention, "remove_padding": given.remove_padding}
    return compose(
        [
            "reward=rule",
            "reward.components.rule.function=unused:scores",
            "tracking=none",
            "run_dir=unused",
            "model.policy=unused",
            "data.prompts=unused",
            f"data.prompts_per_iteration={given.rows}",
            f"rollout.max_new_tokens={given.longest}",
            f"algorithm.estimator={Estimator.GAE if given.critic else Estimator.REINFORCE_PLUS_PLUS}",
            "algorithm.kl.coef=0",
            f"update.precision={Precision.BF16}",
            f"update.minibatches={given.minibatches}",
            f"update.zero_stage={given.zero_stage}",
            f"update.tokens_per_micro_batch={given.tokens}",
            f"update.activation_checkpointing={given.checkpointing}",
            f"update.offload_optimizer={given.offload}",
            *(f"update.{name}={value}" for name, value in optional.items() if value is not None),
        ]
    )


def make_learner(config: Config, shape: Shape, longest: int) -> "Learner":
    from stages.ppo.trainer import Trainer
    from stages.ppo.training import Learner

    def trainer(name: str, rate: float) -> Trainer:
        model = make_model(shape, longest, name == "critic", config.update.attention)
        return Trainer(name, model, rate, config.update)

    policy, critic = trainer("policy", config.update.learning_rate), None
    if config.algorithm.estimator is Estimator.GAE:
        critic = trainer("critic", config.update.critic_learning_rate)
    return Learner(config, policy, critic)


def forward_flops(shape: Shape, rows: Sequence[tuple[int, int]], is_critic: bool) -> float:
    """Of one pass over sequences of (prompt, response) tokens."""
    head = shape.width // shape.heads
    attention = 2 * shape.width * (shape.width + shape.key_value_heads * head)
    weights = shape.layers * (attention + 3 * shape.width * shape.inner)
    totals = [prompt + response for prompt, response in rows]
    outputs = 0 if is_critic else shape.width * shape.vocabulary * sum(response for _, response in rows)
    squares = sum(total**2 for total in totals)
    return 2 * weights * sum(totals) + 2 * outputs + 2 * shape.layers * shape.width * squares


def update_flops(shape: Shape, rows: Sequence[tuple[int, int]], epochs: int, has_critic: bool) -> float:
    """Of old log-probabilities and values, and forward and backward of each epoch."""
    passes = 1 + 3 * epochs
    flops = forward_flops(shape, rows, is_critic=False)
    return passes * (flops + (forward_flops(shape, rows, is_critic=True) if has_critic else 0))


def timed_updates(learner: "Learner", experience: "Experience", number: int) -> list[float]:
    """Seconds of each update after the first."""
    import torch

    from stages.context import Stopwatch
    from stages.ppo.learner import update
    from stages.ppo.math.shaping import RunningMoments

    seconds = []
    moments = RunningMoments().including(experience.outcome.scores)
    for iteration in range(1, number + 2):
        begin = time.perf_counter()
        update(learner, experience, iteration, 0.0, moments, Stopwatch())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def peak_tflops(name: str) -> float | None:
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def report(
    given: argparse.Namespace, experience: "Experience", seconds: list[float], parameters: int
) -> None:
    """On the first rank. Every rank must call this."""
    import torch

    from stages import ranks

    has_gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() / 2**20 if has_gpu else peak_mib()
    peak = float(ranks.max_over_ranks(torch.tensor(peak)))
    if not ranks.is_first():
        return
    name = torch.cuda.get_device_name() if has_gpu else "CPU"
    rows = [(len(row.prompt), len(row.response)) for row in experience.rows]
    tokens, median = sum(map(sum, rows)), statistics.median(seconds)
    flops = update_flops(SHAPES[given.size], rows, 1, given.critic) / median / ranks.size()
    limit = given.peak_tflops or peak_tflops(name)
    share = f"{flops / limit / 1e12:.1%} of {limit:g}" if limit else "of an unknown peak; see --peak-tflops"
    print(f"{ranks.size()} x {name}, {parameters / 1e6:.1f}M parameters, critic {given.critic}")
    print(
        f"{len(rows)} rows, {tokens} tokens; update {median:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
    )
    print(f"{tokens / median:.0f} tokens/s, {tokens / median / ranks.size():.0f} per rank")
    print(f"{flops / 1e12:.3f} model TFLOP/s per rank, {share}")
    print(f"peak memory of a rank {peak:.0f} MiB" + (" (allocated by torch)" if has_gpu else ""))


def take_slurm_names(environment: "os._Environ[str]") -> None:
    """Under srun, say what a launcher of ranks would."""
    if "SLURM_PROCID" not in environment or "RANK" in environment:
        return
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    environment.update({name: environment[theirs] for name, theirs in names.items()})
    step = f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '0')}"
    environment.setdefault("RENDEZVOUS_FILE", str(Path.cwd() / f".gpu_update.{step}"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--rows", type=int, default=256, help="responses of an update, of all ranks")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest prompt and response")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch of a rank")
    parser.add_argument("--minibatches", type=int, default=2)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--attention", help="transformers' attn_implementation")
    parser.add_argument("--remove-padding", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--critic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of the device")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    os.environ.update(TASK_ENVIRONMENT)
    take_slurm_names(os.environ)
    import torch

    from stages import ranks
    from stages.rehearsal.models import random_experience

    ranks.start_distributed()
    shape = SHAPES[given.size]
    experience = random_experience(given.rows, shape.vocabulary, given.longest)
    learner = make_learner(make_config(given), shape, given.longest)
    seconds = timed_updates(learner, experience, given.updates)
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in learner.policy.model.parameters())
    report(given, experience, seconds, parameters)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
