"""How likely the policy finds the prompts, for ``slurm-ppo try``: a model that reads the ids of another's
tokenizer finds them less likely than chance would, and is sure of others.

``python -m stages.trials.likelihood`` reads a JSON object from standard input, with ``config``, a
configuration in YAML, and ``prompts``, token ids; and prints a JSON object in one line:
``nll``, ``entropy`` and ``chance``, nats per token, and ``tokens``.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pipeline.config.compose import from_mapping
from pipeline.config.conversion import from_yaml
from pipeline.config.schema import Config
from pipeline.config.update import Precision

MOST_TOKENS = 64
"""Tokens of each prompt that are looked at: the first ones."""
_THREADS = 2


@dataclass(frozen=True)
class Likelihood:
    """Means over the tokens of prompts but the first of each, in nats."""

    nll: float
    """Negative log-probability of the token."""
    entropy: float
    """Entropy of what the policy expects there."""
    chance: float
    """The first of them of a policy that expects all ids alike: log of their number."""
    tokens: int


def likelihood(config: Config, prompts: Sequence[Sequence[int]]) -> Likelihood:
    """Compute how likely the policy finds prompts, given as token ids, on this process's device.

    Raises:
        ValueError: no prompt has two tokens.
    """
    import torch

    from stages.models.devices import device
    from stages.models.loading import load_causal_lm

    precision = Precision.FP32 if device().type == "cpu" else config.rollout_precision
    model = load_causal_lm(config.model.policy, precision, config.model.trust_remote_code)
    nll, entropy, tokens, size = 0.0, 0.0, 0, 1
    with torch.inference_mode():
        for ids in prompts:
            given = torch.tensor([list(ids[:MOST_TOKENS])], device=device())
            if given.shape[1] < 2:
                continue
            log_probs = model(input_ids=given, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            nll -= float(log_probs.gather(1, given[0, 1:, None]).sum())
            entropy -= float((log_probs.exp() * log_probs).sum())
            tokens, size = tokens + len(log_probs), log_probs.shape[1]
    if not tokens:
        raise ValueError("no prompt has two tokens")
    return Likelihood(nll / tokens, entropy / tokens, math.log(size), tokens)


def main() -> None:
    from stages.models.numerics import set_up_torch

    given = json.load(sys.stdin)
    config = from_mapping(from_yaml(given["config"]))
    set_up_torch(_THREADS, seed=0)
    print(json.dumps(asdict(likelihood(config, given["prompts"]))))


if __name__ == "__main__":
    main()
