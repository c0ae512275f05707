"""Peak memory of real updates and generations on a CPU, beside what `pipeline/forecast` says they need.

    python -m benchmarks.memory [--sizes small medium large] [--only TEXT]

Models are random Llamas of three sizes with different vocabularies. Each case is a process of its own:
imports and a small case to warm up, then the case itself; its peak is what the process takes beyond that.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.algorithm import Estimator
from pipeline.config.compose import compose
from pipeline.config.schema import Config
from pipeline.forecast.parts import GIB, peak_of
from pipeline.forecast.serving import generating, scoring_tokens
from pipeline.forecast.shapes import read_shape
from pipeline.forecast.training import BatchSize, Ranks, update_parts, width_of
from pipeline.run.environment import TASK_ENVIRONMENT

if TYPE_CHECKING:
    import torch

    from stages.ppo.experience import Experience
    from stages.ppo.training import Learner


@dataclass(frozen=True)
class Case:
    """Something to measure."""

    kind: str
    """update, rollout or reference."""
    width: int
    layers: int
    vocabulary: int
    words: tuple[str, ...] = ()
    """Settings of the configuration."""
    rows: int = 4
    """Rows of a micro-batch."""
    prompt: int = 32
    response: int = 96


SIZES = {"small": (512, 8, 8_000), "medium": (640, 10, 24_000), "large": (896, 11, 32_000)}
"""Width, layers and vocabulary of policies of 30, 80 and 163 million parameters."""
_NO_PACKING = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
"""Processors with bf16 instructions (avx512_bf16, AMX) pack the weights of a product in bf16 into a copy,
which no card does."""
ALONE = "algorithm.estimator=reinforce++"
"""Without a critic."""
UPDATES = {
    "fp32, critic": ("update.zero_stage=0",),
    "fp32": ("update.zero_stage=0", ALONE),
    "fp32, checkpointing": ("update.zero_stage=0", ALONE, "update.activation_checkpointing=true"),
    "bf16, ZeRO 1, critic": ("update.zero_stage=1", "update.precision=bf16"),
    "bf16, ZeRO 2": ("update.zero_stage=2", "update.precision=bf16", ALONE),
    "bf16, ZeRO 3": ("update.zero_stage=3", "update.precision=bf16", ALONE),
    "fp32, ZeRO 1": ("update.zero_stage=1", ALONE),
    "fp32, ZeRO 2": ("update.zero_stage=2", ALONE),
    "fp32, ZeRO 3": ("update.zero_stage=3", ALONE),
}
ROLLOUTS = {"fp32": (), "bf16": ("rollout.precision=bf16",)}
REFERENCES = {"fp32": (), "bf16": ("reward.precision=bf16",)}
WARM_UP = {"width": 64, "layers": 1, "vocabulary": 256, "rows": 2, "prompt": 4, "response": 4}


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(asdict(measured_here(Case(**json.loads(sys.argv[2]))))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--rows", type=int, default=4, help="rows of 128 tokens in a micro-batch or batch")
    given = parser.parse_args()
    print(f"{'case':<38}{'parameters':>12}{'measured':>10}{'formula':>10}{'off':>8}")
    for size in given.sizes:
        for name, case in cases(size).items():
            if given.only in name:
                show(f"{size}: {name}", measure(replace(case, rows=given.rows)))


def cases(size: str) -> dict[str, Case]:
    """Return the cases of one size, by name."""
    shape = SIZES[size]
    of_kind = {"update": UPDATES, "rollout": ROLLOUTS, "reference": REFERENCES}
    return {
        f"{kind}, {name}": Case(kind, *shape, words=words)
        for kind, found in of_kind.items()
        for name, words in found.items()
    }


@dataclass(frozen=True)
class Measured:
    """One case; in bytes."""

    parameters: int
    measured: float
    predicted: float

    @property
    def off(self) -> float:
        """What the formula says, relative to what was measured, less 1."""
        return self.predicted / self.measured - 1


def show(name: str, found: Measured) -> None:
    sizes = f"{found.measured / GIB:>10.2f}{found.predicted / GIB:>10.2f}"
    print(f"{name:<38}{found.parameters / 1e6:>11.1f}M{sizes}{found.off:>+8.1%}", flush=True)


def measure(case: Case) -> Measured:
    """Measure a case in a process of its own, which gives back what it frees."""
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-m", "benchmarks.memory", "--worker", json.dumps(asdict(case))]
    environment = os.environ | TASK_ENVIRONMENT | settings | _NO_PACKING | {"PYTHONPATH": root}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


# --- in a process of its own ---


def measured_here(case: Case) -> Measured:
    """Measure what a case takes beyond a small one, and compute it."""
    from stages import ranks
    from stages.models.numerics import import_deepspeed, set_up_torch
    from stages.rehearsal.peaks import taken_by

    set_up_torch(1, seed=0)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        if case.kind == "update":
            import_deepspeed()
            ranks.start_distributed()
        run = {"update": update, "rollout": rollout, "reference": reference}[case.kind]
        small, large = Path(folder) / "small", Path(folder) / "large"
        save_model(replace(case, **WARM_UP), small)
        save_model(case, large)
        run(replace(case, **WARM_UP), small)
        found = taken_by(lambda: run(case, large))
        return Measured(read_shape(large).parameters, found, predicted(case, large))


def predicted(case: Case, folder: Path) -> float:
    """Return the bytes that the formulas give."""
    config, shape = config_of(case, folder), read_shape(folder)
    if case.kind == "update":
        critic = read_shape(folder, gives_number=True) if has_critic(config) else None
        tokens = case.rows * (case.prompt + case.response)
        batch = BatchSize(tokens, case.rows * (case.response + 1), case.prompt + case.response)
        return peak_of(update_parts(config.update, shape, critic, None, batch, Ranks(1, have_gpus=False)))
    tokens = case.rows * (case.prompt + case.response)
    if case.kind == "reference":
        width = width_of(config.reward_precision)
        return peak_of(scoring_tokens("reference", shape, width, tokens, spread=1, has_gpu=False))
    return peak_of(generating(shape, width_of(config.rollout_precision), tokens, case.response, gpus=1))


def has_critic(config: Config) -> bool:
    return config.algorithm.estimator is Estimator.GAE


def update(case: Case, folder: Path) -> None:
    """Take an optimizer step of two micro-batches."""
    from stages.context import Stopwatch
    from stages.ppo.learner import update as learn
    from stages.ppo.math.shaping import RunningMoments

    learner, given = learner_of(config_of(case, folder)), experience_of(case)
    moments = RunningMoments().including(given.outcome.scores)
    learn(learner, given, 1, 0.0, moments, Stopwatch())


def rollout(case: Case, folder: Path) -> None:
    """Generate one batch."""
    from stages.engines.base import Request, Sampling
    from stages.engines.transformers import TransformersGenerator
    from stages.models.loading import load_causal_lm

    config, draw = config_of(case, folder), random.Random(0)
    model = load_causal_lm(str(folder), config.rollout_precision, trust_remote_code=False)
    generator = TransformersGenerator(model, case.rows * (case.prompt + case.response))
    requests = [
        Request([draw.randrange(case.vocabulary) for _ in range(case.prompt)], case.response, seed)
        for seed in range(case.rows)
    ]
    generator.generate(requests, Sampling())


def reference(case: Case, folder: Path) -> None:
    """Compute log-probabilities of two batches as the reward stage does."""
    import torch

    from stages.models.loading import load_causal_lm
    from stages.ppo.batching import micro_batches
    from stages.ppo.forward import response_log_probs

    config, rows = config_of(case, folder), experience_of(case).rows
    model = load_causal_lm(str(folder), config.reward_precision, trust_remote_code=False)
    with torch.inference_mode():
        for batch in micro_batches(rows, range(len(rows)), config.reward.tokens_per_batch):
            response_log_probs(model, batch, config.rollout.temperature)


def save_model(case: Case, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    given = LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        intermediate_size=case.width * 8 // 3,
        num_hidden_layers=case.layers,
        num_attention_heads=case.width // 64,
        num_key_value_heads=max(1, case.width // 128),
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(given).to(dtype_of(case)).save_pretrained(folder)


def dtype_of(case: Case) -> "torch.dtype":
    """Return the number format that the case computes in, in which a run writes its policies."""
    from stages.models.loading import DTYPES

    config = config_of(case, Path())
    served = {"rollout": config.rollout_precision, "reference": config.reward_precision}
    return DTYPES[served.get(case.kind, config.update.precision)]


def config_of(case: Case, folder: Path) -> Config:
    return compose(
        [
            "reward=rule",
            "reward.components.rule.function=unused:scores",
            "tracking=none",
            "run_dir=unused",
            f"model.policy={folder}",
            "data.prompts=unused",
            f"data.prompts_per_iteration={2 * case.rows}",
            f"rollout.max_new_tokens={case.response}",
            "algorithm.kl.coef=0",
            "update.minibatches=1",
            f"update.tokens_per_micro_batch={case.rows * (case.prompt + case.response)}",
            f"reward.tokens_per_batch={case.rows * (case.prompt + case.response)}",
            "rollout.engine=transformers",
            "update.precision=fp32",
            *case.words,
        ]
    )


def learner_of(config: Config) -> "Learner":
    from stages.models.loading import load_causal_lm
    from stages.ppo.critics import load_critic
    from stages.ppo.trainer import Trainer
    from stages.ppo.training import Learner

    u, directory = config.update, config.model.policy
    policy = Trainer("policy", load_causal_lm(directory, u.precision, False), u.learning_rate, u)
    critic = None
    if has_critic(config):
        critic = Trainer("critic", load_critic(directory, u.precision, False), u.critic_learning_rate, u)
    return Learner(config, policy, critic)


def experience_of(case: Case) -> "Experience":
    """Rows that are all as long, of two micro-batches."""
    from stages.rehearsal.models import even_experience

    return even_experience(2 * case.rows, case.vocabulary, case.prompt, case.response)


if __name__ == "__main__":
    main()
