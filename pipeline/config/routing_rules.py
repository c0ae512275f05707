"""Which policies and engines algorithm.router_replay takes. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.engines import Engine
from pipeline.config.issue import ConfigIssue
from pipeline.config.schema import Config

REPLAYED = (
    *("deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss", "mixtral", "olmoe"),
    *("qwen2_moe", "qwen3_moe", "qwen3_next"),
)
"""Kinds of models (model_type of config.json) whose routers are known."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_k")
_KEY = "algorithm.router_replay"


def num_experts_in(settings: Mapping[str, Any]) -> int:
    """Return the number of experts that a layer's router chooses from; 0 where config.json names none."""
    given = (settings.get(name) for name in _EXPERTS)
    return next((number for number in given if isinstance(number, int) and number > 0), 0)


def experts_per_token_in(settings: Mapping[str, Any]) -> int:
    """Return the number of experts that a token goes through in a layer; 0 where config.json names none."""
    given = (settings.get(name) for name in _PER_TOKEN)
    return next((number for number in given if isinstance(number, int) and number > 0), 0)


def replay_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield engines that do not say which experts they have chosen."""
    if config.algorithm.router_replay and config.rollout.engine == Engine.VLLM:
        why = (
            "vLLM is not asked for the experts of its tokens; set rollout.engine=transformers, or leave it "
            "out (algorithm.correction weighs the mismatch)"
        )
        yield ConfigIssue(_KEY, True, why)


def why_not_replayed(settings: Mapping[str, Any]) -> str | None:
    """Return why the experts of a policy cannot be replayed, by the part of its config.json about text; None
    where they can."""
    kind = settings.get("model_type")
    if kind in REPLAYED and num_experts_in(settings):
        return None
    what = f"its routers ({kind}) are not known" if num_experts_in(settings) else "it has no experts"
    return f"the policy cannot replay: {what}; leave it out (known: {', '.join(REPLAYED)})"
