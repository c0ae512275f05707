"""A look at prompts before any task: as the policy reads them, where a response ends, and whether the policy
knows the ids of its tokenizer at all."""

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.checks.finding import Finding, ok, problem, skipped, warning
from pipeline.checks.prompts import judged_files, known_ends
from pipeline.config.compose import to_yaml
from pipeline.config.model_files import BadModel, read_tensors
from pipeline.config.model_rules import Use, used_models
from pipeline.config.scheduler import SlurmConfig
from pipeline.config.schema import Config
from pipeline.data.tokens import Ends
from pipeline.gpus import has_gpus
from pipeline.process import ask_program

_PROGRAM = "stages.trials.likelihood"
_MOST_PROMPTS = 4
_LEAST_TOKENS = 24
"""Tokens of prompts below which a mean says nothing."""
_SECONDS = 300.0
_MOST_BYTES = {True: 40 << 30, False: 3 << 30}
"""Bytes of weights that are loaded for a look, where there is a GPU and where there is none."""
_AS_CHANCE, _SURE = 0.8, 0.2
"""Shares of what chance gives. Text in its own ids is at 0.6 at most, also in a language that a model hardly
knows, and in another tokenizer's ids at 0.9 and more (SmolLM2-135M); a random model is at 1, and unsure."""
_LEAST_CHANCE = 7.0
"""Nats of a vocabulary of 1,100 ids. Models with fewer are toys, of which random ones may be sure too."""
TITLE = "tokenizer"


@dataclass(frozen=True)
class PromptLook:
    """A prompt as the policy reads it, and what ends a response."""

    text: str
    """Text of the first prompt's ids, special tokens spelled out."""
    tokens: int
    ends: tuple[str, ...]
    """Ids that end a response, with their text and who names them."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Ids of some prompts."""


def look_at_prompts(config: Config) -> PromptLook | None:
    """Read some prompts, and the policy's tokenizer; None where only tasks can."""
    files, tokenizer, _ = judged_files(config)
    if tokenizer is None or not files[0].kept:
        return None
    ids = [tuple(files[0].tokens[i]) for i in files[0].kept]
    chosen = ids[:: max(1, len(ids) // _MOST_PROMPTS)][:_MOST_PROMPTS]
    ends = known_ends(config, tokenizer)
    named = tuple(named_ends(ends, tokenizer.decode)) if ends else ()
    return PromptLook(tokenizer.decode(chosen[0]), len(chosen[0]), named, tuple(chosen))


def named_ends(ends: Ends, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return each id that ends a response, with its text and who names it. Pure."""
    sources = {
        "model": ends.model,
        "tokenizer": {ends.tokenizer},
        "chat template": {ends.template},
        "rollout.stop_token_ids": ends.given,
    }
    return [
        f"{id_} {decode([id_])!r} ({', '.join(name for name, ids in sources.items() if id_ in ids)})"
        for id_ in sorted(ends.ids)
    ]


# --- whether the policy knows its tokenizer's ids ---


def check_likelihood(config: Config, prompts: Sequence[Sequence[int]]) -> Finding:
    """Compare how likely the policy finds prompts with chance, in a process of its own."""
    if why := why_not_looked(config):
        return skipped(TITLE, f"whether the policy knows the ids of its tokenizer ({why})")
    given = json.dumps({"config": to_yaml(config), "prompts": [list(ids) for ids in prompts]})
    try:
        done = ask_program(_PROGRAM, given, _SECONDS)
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return skipped(TITLE, f"whether the policy knows its ids (took longer than {_SECONDS:g} s)")
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:120]
        return skipped(TITLE, f"whether the policy knows the ids of its tokenizer ({said})")
    return judge_likelihood(**answer)


def why_not_looked(config: Config) -> str:
    """Return why the policy is not loaded for a look; empty where it is."""
    policy = next(model for model in used_models(config) if model.use is Use.POLICY)
    if not policy.is_loaded:
        return "an engine of your own loads it"
    try:
        size = sum(tensor.size for tensor in read_tensors(Path(config.model.policy)).values())
    except BadModel as error:
        return str(error)
    is_slurm = isinstance(config.scheduler, SlurmConfig)
    if size > _MOST_BYTES[has_gpus() and not is_slurm]:
        return f"its weights of {size / 2**30:.0f} GiB are too large for this look"
    return ""


def judge_likelihood(nll: float, entropy: float, chance: float, tokens: int) -> Finding:
    """Judge how likely a policy finds prompts, in nats per token. Pure.

    Args:
        entropy: of what it expects: a policy that is sure of other ids reads another's tokenizer; one that is
            unsure of all has random weights.
        chance: what a policy has that expects all ids alike.
    """
    numbers = {"nll": nll, "entropy": entropy, "chance": chance, "tokens": float(tokens)}
    if tokens < _LEAST_TOKENS:
        return skipped(TITLE, f"whether the policy knows its ids (only {tokens} tokens of prompts)")
    facts = f"{nll:.1f} nats per token of prompts; chance has {chance:.1f}"
    if nll <= _AS_CHANCE * chance:
        return ok(TITLE, f"the policy knows its ids ({facts})", **numbers)
    if nll - entropy > _SURE * chance:
        make = problem if chance >= _LEAST_CHANCE else warning
        return make(
            TITLE,
            f"it seems to be another model's: the policy finds prompts as unlikely as random ids ({facts}), "
            f"and is surer of others (entropy {entropy:.1f})",
            "copy tokenizer.json and tokenizer_config.json of model.policy again from where its weights are "
            "from",
            **numbers,
        )
    return warning(
        TITLE,
        f"the policy finds prompts no likelier than chance ({facts}), and expects nothing else",
        "if model.policy is not meant to have random weights, give a trained one",
        **numbers,
    )
