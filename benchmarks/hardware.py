"""Which GPUs a model takes, by the forecast of memory: the table of docs/howto/hardware.md.

    python -m benchmarks.hardware [--context 4096] [--new-tokens 2048]

Shapes are those that Qwen2.5's config.json files publish; weights are holes. The update is DeepSpeed in bf16
with ZeRO 3 and activation checkpointing, the rollout vLLM with room for 16 longest sequences. Nothing is
measured here.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.compose import compose
from pipeline.config.schema import Config
from pipeline.forecast.parts import GIB, StageNeed
from pipeline.forecast.stages import stage_needs
from tests.support.large_models import weights_file

MEMORIES = (24, 48, 80)
"""GiB of a GPU."""
COUNTS = (1, 2, 4, 8, 16, 32, 64)
TIGHT, SEQUENCES = 0.9, 16
"""Share of a GPU's memory that may be full, and longest sequences that a cache must hold."""


@dataclass(frozen=True)
class Shape:
    """What a config.json publishes."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    is_tied: bool


SHAPES = (
    Shape("0.5B", 896, 4864, 24, 14, 2, 151_936, True),
    Shape("1.5B", 1536, 8960, 28, 12, 2, 151_936, True),
    Shape("7B", 3584, 18_944, 28, 28, 4, 152_064, False),
    Shape("32B", 5120, 27_648, 64, 40, 8, 152_064, False),
    Shape("72B", 8192, 29_568, 80, 64, 8, 152_064, False),
)


def saved(shape: Shape, folder: Path) -> Path:
    """Return a model directory of headers and a config.json."""
    hidden, inner, keys = shape.hidden, shape.inner, shape.hidden // shape.heads * shape.key_heads
    each = {
        "self_attn.q_proj": [hidden, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, hidden],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
    }
    tensors = {
        f"model.layers.{i}.{name}.weight": size for i in range(shape.layers) for name, size in each.items()
    }
    ends = ["model.embed_tokens"] if shape.is_tied else ["model.embed_tokens", "lm_head"]
    tensors |= {f"{name}.weight": [shape.vocabulary, hidden] for name in ends}
    folder.mkdir()
    weights_file(folder / "model.safetensors", *tensors.values(), names=list(tensors))
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": shape.layers}
    sizes |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.key_heads}
    kind = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": shape.is_tied,
    }
    (folder / "config.json").write_text(
        json.dumps(kind | sizes | {"vocab_size": shape.vocabulary, "max_position_embeddings": 32_768})
    )
    return folder


def configured(policy: Path, algorithm: str, context: int, new_tokens: int) -> Config:
    """The configuration whose needs are asked for."""
    words = [f"algorithm={algorithm}", f"model.policy={policy}", "data.prompts=none", "run_dir=none"]
    words += ["reward=rule", "reward.components.rule.function=numeric_match", "algorithm.kl.coef=0"]
    words += [f"model.context_length={context}", f"rollout.max_new_tokens={new_tokens}"]
    words += [
        "rollout.engine=vllm",
        "rollout.precision=bf16",
        "update.engine=deepspeed",
        "update.precision=bf16",
    ]
    words += [
        "update.zero_stage=3",
        "update.activation_checkpointing=true",
        "update.tokens_per_micro_batch=4096",
    ]
    return compose([*words, *(["rollout.samples_per_prompt=8"] if algorithm == "grpo" else [])])


def need_of(config: Config, stage: str) -> StageNeed:
    return next(one for one in stage_needs(config, lambda _: 1) if one.stage == stage)


def with_ranks(config: Config, number: int) -> StageNeed:
    scheduler = replace(config.scheduler, update=replace(config.scheduler.update, ranks=number))
    return need_of(replace(config, scheduler=scheduler), "update")


def split_over(config: Config, number: int) -> StageNeed:
    vllm = replace(config.rollout.vllm, tensor_parallel_size=number)
    return need_of(replace(config, rollout=replace(config.rollout, vllm=vllm)), "rollout")


def fewest(need: Callable[[int], StageNeed], memory: float, counts: Sequence[int]) -> str:
    """Return the smallest number of GPUs of ``memory`` GiB that suffices; a dash where none does."""
    for number in counts:
        found, size = need(number), memory * GIB
        holds = not found.cache or found.sequences(size) >= SEQUENCES
        if found.peak <= TIGHT * size * found.share and holds:
            return str(number)
    return "-"


def row(shape: Shape, policy: Path, context: int, new_tokens: int) -> str:
    without, critic = (configured(policy, name, context, new_tokens) for name in ("grpo", "ppo"))
    splits = [n for n in COUNTS if n <= 8 and shape.key_heads % n == 0 and shape.heads % n == 0]
    cells = [
        " / ".join(fewest(lambda n: split_over(without, n), memory, splits) for memory in MEMORIES),
        *(
            " / ".join(fewest(lambda n, c=config: with_ranks(c, n), memory, COUNTS) for memory in MEMORIES)
            for config in (without, critic)
        ),
    ]
    return f"| {shape.name} | {' | '.join(cells)} |"


def table(context: int = 4096, new_tokens: int = 2048) -> list[str]:
    """GPUs of 24, 48 and 80 GiB by stage."""
    head = ["| | rollout, vLLM | update, GRPO | update, PPO with a critic |", "|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as folder:
        return head + [row(one, saved(one, Path(folder) / one.name), context, new_tokens) for one in SHAPES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the longest sequence")
    parser.add_argument("--new-tokens", type=int, default=2048)
    given = parser.parse_args()
    print("\n".join(table(given.context, given.new_tokens)))


if __name__ == "__main__":
    main()
