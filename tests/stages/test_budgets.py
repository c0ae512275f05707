"""What a smaller batch budget changes with real models on a CPU: no token, and last digits alone."""

import pytest

from pipeline.config.schema import Config
from pipeline.decide.budgets import halved
from stages.engines.base import Request, Response, Sampling
from stages.engines.transformers import make_generator, make_scorer
from tests.support import tiny
from tests.support.processes import config_of

WORDS = ("rollout.tokens_per_batch=400", "reward.tokens_per_batch=128", "model.context_length=64")
REQUESTS = [Request(tokens, 12, seed=index) for index, tokens in enumerate(tiny.prompts(12))]


def responses(config: Config, models) -> tuple[int, list[Response]]:
    """How many batches there are, and what they give."""
    generator = make_generator(config, str(models / "policy"))
    return len(generator.plan(REQUESTS)), generator.generate(REQUESTS, Sampling())


def scores(config: Config, models) -> list[float]:
    return make_scorer(config, str(models / "reward_model")).score([r.prompt_tokens for r in REQUESTS])


def test_generation_with_half_of_the_budget(models, tmp_path):
    config = config_of(models, tmp_path / "run", *WORDS)
    (few, whole), (more, half) = (responses(halved(config, n), models) for n in (0, 1))
    assert more > few
    assert responses(halved(config, 1), models) == (more, half), "a repetition has the same bytes"
    assert [one.tokens for one in half] == [one.tokens for one in whole]
    assert [one.log_probs for one in half] == [pytest.approx(one.log_probs, abs=1e-5) for one in whole]


def test_scoring_with_half_of_the_budget(models, tmp_path):
    config = config_of(models, tmp_path / "run", *WORDS)
    whole, half, again = (scores(halved(config, n), models) for n in (0, 1, 1))
    assert half == again
    assert half == pytest.approx(whole, abs=1e-5)
