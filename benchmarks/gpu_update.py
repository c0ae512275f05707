"""Speed of the update of a policy and a critic with random weights: tokens/s, model FLOP utilisation, memory.

    python benchmarks/gpu_update.py [--size 0.5b] [--zero-stage 1] [--tokens 16384] [--rows 256]
    torchrun --nproc-per-node 4 benchmarks/gpu_update.py --size 1.5b --zero-stage 3
    srun --ntasks-per-node 4 --gpus-per-task 1 python benchmarks/gpu_update.py --size 1.5b --zero-stage 3
    python benchmarks/gpu_update.py --size tiny --rows 16 --longest 64 --tokens 512     (on a CPU)

Models are of Qwen2's shape, in bf16, made here: nothing comes from a network. Responses are random tokens of
ragged length. One update to warm up, then --updates that count: old log-probabilities, values and the steps.

Model FLOPs and utilisation: stages/rehearsal/speed.py.
"""

import argparse
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from update import peak_mib

from pipeline.config.algorithm import Estimator
from pipeline.config.compose import compose
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from pipeline.run.environment import TASK_ENVIRONMENT

if TYPE_CHECKING:
    from stages.ppo.experience import Experience


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


def report(
    given: argparse.Namespace, experience: "Experience", seconds: list[float], parameters: int
) -> None:
    """On the first rank. Every rank must call this."""
    import torch

    from stages import ranks
    from stages.rehearsal.speed import SHAPES, lengths_of, peak_tflops, update_flops

    has_gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() / 2**20 if has_gpu else peak_mib()
    peak = float(ranks.max_over_ranks(torch.tensor(peak)))
    if not ranks.is_first():
        return
    name = torch.cuda.get_device_name() if has_gpu else "CPU"
    rows = lengths_of(experience)
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
    parser.add_argument("--size", choices=("tiny", "0.5b", "1.5b"), default="0.5b")
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
    from stages.ppo.timing import timed_updates
    from stages.rehearsal.models import random_experience
    from stages.rehearsal.speed import SHAPES, make_learner

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
