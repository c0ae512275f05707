"""How fast a GPU is with whole runs and larger models; whether its numbers are right: slurm-ppo rehearse.

    python benchmarks/gpu_checks.py [CHECK ...] [--demo .cache/quickstart] [--work .cache/gpu] [--limit 120]

Each check is a process of its own; its verdict is one line of JSON. Models other than the demo's are random,
of Qwen2's shape with half a billion weights, and made here. Runs on one GPU; without one it says so and ends.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.api.opened import open_run
from pipeline.config.compose import compose
from pipeline.config.schema import Config
from pipeline.run.environment import TASK_ENVIRONMENT

Facts = dict[str, Any]


def card(given: argparse.Namespace) -> Facts:
    """The card, the versions, and which accelerator DeepSpeed takes."""
    import torch

    from stages.models.numerics import choose_accelerator
    from stages.rehearsal.engines import free_gib

    choose_accelerator()
    import deepspeed

    return {
        "card": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "free_gib": round(free_gib(), 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "deepspeed": deepspeed.__version__,
        "accelerator": os.environ["DS_ACCELERATOR"],
    }


def run_transformers(given: argparse.Namespace) -> Facts:
    """Two iterations of the quickstart with transformers' generate."""
    return whole_run(given, "run_transformers", "experiment=quickstart", "iterations=2", "evaluate.every=2")


def run_vllm(given: argparse.Namespace) -> Facts:
    """Two iterations of the quickstart with vLLM for rollout and reward."""
    return whole_run(
        given,
        "run_vllm",
        "experiment=quickstart_vllm",
        "iterations=2",
        "evaluate.every=2",
        "scheduler.slots=1",
        "rollout.vllm.gpu_memory_utilization=0.3",
        "reward.vllm.gpu_memory_utilization=0.3",
    )


def whole_run(given: argparse.Namespace, name: str, *overrides: str) -> Facts:
    run = given.work / name
    places = ["tracking=none", f"run_dir={run}", *demo_places(given.demo)]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "run", *overrides, *places],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        return {"exit_code": done.returncode, "said": done.stdout[-3000:]}
    kept = ("mismatch", "peak_gpu", "reward/mean", "seconds/")
    row = open_run(run).metrics().to_pylist()[-1]
    last = {name: value for name, value in row.items() if any(part in name for part in kept)}
    return {"exit_code": 0, "seconds": round(seconds, 1), "last_row": last}


def demo_places(demo: Path) -> list[str]:
    return [
        f"model.policy={demo / 'policy'}",
        f"data.prompts={demo / 'prompts.jsonl'}",
        f"data.heldout={demo / 'heldout.jsonl'}",
        f"reward.components.rm.path={demo / 'reward_model'}",
    ]


def vllm_speed(given: argparse.Namespace) -> Facts:
    """Our generator against vLLM's own offline class on the same requests, compiled, in bf16."""
    from stages.rehearsal.engines import responses, runner_of
    from stages.rehearsal.models import random_prompts
    from stages.rehearsal.speed import bare_loop, saved_model, timed

    model = saved_model(given.work / "half_billion")
    compiled = ("rollout.vllm.enforce_eager=false", "rollout.vllm.gpu_memory_utilization=0.5")
    config = half_billion_config(model, "vllm", *compiled)
    began = time.perf_counter()
    engine = generator(config, model)
    start = time.perf_counter() - began
    prompts = random_prompts(1024, 151_000, 128)
    responses(engine, prompts[:8], 1.0, longest=8)
    ours = [timed(lambda: responses(engine, prompts, 1.0, longest=512)) for _ in range(3)]
    inner = engine._engine._engine
    theirs = [timed(lambda: bare_loop(inner, prompts, 512)) for _ in range(3)]
    tokens = 1024 * 512
    return {
        "start_s": round(start, 1),
        "engine": runner_of(engine),
        "tokens_per_s": [round(tokens / s) for s in ours],
        "bare_tokens_per_s": [round(tokens / s) for s in theirs],
    }


def generation_transformers(given: argparse.Namespace) -> Facts:
    """transformers' generate with the half billion, bf16."""
    from stages.rehearsal.engines import responses
    from stages.rehearsal.models import random_prompts
    from stages.rehearsal.speed import saved_model, timed

    model = saved_model(given.work / "half_billion")
    config = half_billion_config(model, "transformers")
    engine = generator(config, model)
    prompts = random_prompts(256, 151_000, 128)
    responses(engine, prompts[:8], 1.0, longest=8)
    seconds = timed(lambda: responses(engine, prompts, 1.0, longest=128))
    return {"tokens_per_s": round(256 * 128 / seconds), "peak_gib": peak_gib()}


def update_half_billion(given: argparse.Namespace) -> Facts:
    """benchmarks/gpu_update.py as it is shipped."""
    return speed_of_update("--size", "0.5b")


def update_unpadded(given: argparse.Namespace) -> Facts:
    return speed_of_update("--size", "0.5b", "--remove-padding")


def update_larger(given: argparse.Namespace) -> Facts:
    return speed_of_update("--size", "1.5b", "--tokens", "16384")


def update_checkpointed(given: argparse.Namespace) -> Facts:
    return speed_of_update("--size", "1.5b", "--tokens", "32768", "--checkpointing")


def update_offloaded(given: argparse.Namespace) -> Facts:
    return speed_of_update("--size", "0.5b", "--offload", "--updates", "1")


def update_sharded(given: argparse.Namespace) -> Facts:
    return speed_of_update("--size", "0.5b", "--zero-stage", "3", "--updates", "2")


def speed_of_update(*arguments: str) -> Facts:
    path = Path(__file__).with_name("gpu_update.py")
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    return {"exit_code": done.returncode, "said": lines[-6:] if done.returncode == 0 else lines[-40:]}


CHECKS: dict[str, Callable[[argparse.Namespace], Facts]] = {
    check.__name__: check
    for check in (
        card,
        run_transformers,
        generation_transformers,
        update_half_billion,
        update_unpadded,
        update_larger,
        update_checkpointed,
        update_sharded,
        update_offloaded,
        run_vllm,
        vllm_speed,
    )
}


def half_billion_config(model: Path, engine: str, *more: str) -> Config:
    return compose(
        [
            "reward=rule",
            "reward.components.rule.function=unused:scores",
            f"model.policy={model}",
            "model.context_length=768",
            "data.prompts=none",
            "run_dir=none",
            f"rollout.engine={engine}",
            "rollout.precision=bf16",
            *more,
        ]
    )


def generator(config: Config, policy: Path) -> Any:
    from stages.engines import make_generator

    return make_generator(config, str(policy))


def peak_gib() -> float:
    import torch

    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


def main() -> None:
    given = arguments()
    os.environ.update(TASK_ENVIRONMENT)
    if given.one:
        print(json.dumps({"check": given.one, **CHECKS[given.one](given)}))
        return
    given.work.mkdir(parents=True, exist_ok=True)
    for name in given.checks or CHECKS:
        print(in_process(given, name), flush=True)


def in_process(given: argparse.Namespace, name: str) -> str:
    command = [sys.executable, __file__, "--one", name, "--demo", given.demo, "--work", given.work]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=given.limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")[-3000:]
        return json.dumps({"check": name, "failed": f"not done in {given.limit} s", "said": said})
    seconds = round(time.perf_counter() - began, 1)
    if done.returncode:
        return json.dumps({"check": name, "failed": done.stdout[-4000:], "wall_s": seconds})
    return json.dumps(json.loads(done.stdout.splitlines()[-1]) | {"wall_s": seconds})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checks", nargs="*", choices=[*CHECKS, []], metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--demo", type=Path, default=Path(".cache/quickstart"))
    parser.add_argument("--work", type=Path, default=Path(".cache/gpu"))
    parser.add_argument("--limit", type=float, default=120, help="seconds of a check")
    parser.add_argument("--one", choices=list(CHECKS), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
