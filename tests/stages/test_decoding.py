"""Generation that computes a prompt once, and lets rows leave that have ended."""

import copy

import pytest

from stages.engines.base import Request, Sampling, SequenceLimits
from stages.engines.decoding import can_go_on
from stages.engines.transformers import TransformersGenerator
from stages.models.passes import counted_passes, forget_passes
from tests.support.families import CONTEXT, VOCABULARY, family

pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = SequenceLimits(CONTEXT, VOCABULARY)


def asked(prompts: int = 3, samples: int = 4, longest: int = 40) -> list[Request]:
    tokens = [[(7 * i + k) % VOCABULARY for k in range(5 + 4 * i)] for i in range(prompts)]
    return [
        Request(prompt, longest - 9 * k, seed=10 * i + k, greedy=k == 3)
        for i, prompt in enumerate(tokens)
        for k in range(samples)
    ]


def tokens_through(model, work):
    """Tokens that go through the model, padding included, and what ``work`` returns."""
    counted = []
    handle = model.register_forward_pre_hook(
        lambda module, given, named: counted.append(named["input_ids"].numel()), with_kwargs=True
    )
    try:
        return work(), sum(counted)
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "bloom"])
def test_responses_are_those_of_each_request_alone(name):
    generator = TransformersGenerator(family(name), 1 << 20, CONTEXT)
    together = generator.generate(asked(), Sampling(1.3))
    assert generator._goes_on
    for request, response in zip(asked(), together, strict=True):
        (alone,) = generator.generate([request], Sampling(1.3))
        assert (response.tokens, response.finish_reason) == (alone.tokens, alone.finish_reason)
        assert response.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


def test_each_prompt_is_computed_once_and_rows_leave_when_they_have_ended():
    model = family("llama")
    generator = TransformersGenerator(model, 1 << 20, CONTEXT)
    generator.batching()
    forget_passes()
    found, fewer = tokens_through(model, lambda: generator.generate(asked(), Sampling()))
    assert counted_passes().positions == fewer
    generator._goes_on = False
    forget_passes()
    expected, more = tokens_through(model, lambda: generator.generate(asked(), Sampling()))
    assert counted_passes().positions == more + 12, "each row's last token is counted, and not computed"
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    longest = max(len(request.prompt_tokens) for request in asked())
    prompts, written = 3 * longest + 12, sum(len(one.tokens) for one in found)
    assert more >= 12 * longest + 12 * (max(len(one.tokens) for one in found) - 1)
    assert prompts < fewer <= prompts + written + 12 * 10 < more  # a row stays for at most ten tokens more


def test_a_cache_of_more_than_keys_and_values_is_left_to_transformers():
    assert can_go_on(family("llama"), LIMITS)
    for name in ("mamba", "gemma3_text"):
        assert not can_go_on(family(name), LIMITS)


def test_a_model_that_does_not_go_on_from_a_cache_is_found():
    model = copy.deepcopy(family("llama"))
    whole = model.model.forward

    def forgetful(*given, past_key_values=None, **named):
        if past_key_values is not None and past_key_values.get_seq_length() > 28:
            past_key_values.reset()
        return whole(*given, past_key_values=past_key_values, **named)

    model.model.forward = forgetful
    assert not can_go_on(model, LIMITS)


def test_rows_that_stay_keep_their_own_seeds():
    """Which rows leave, and when, does not change what the others write."""
    generator = TransformersGenerator(family("llama"), 1 << 20, CONTEXT)
    several = asked(longest=60)
    some = [request for request in several if request.max_new_tokens > 40]
    by_seed = {
        r.seed: x.tokens for r, x in zip(several, generator.generate(several, Sampling()), strict=True)
    }
    for request, response in zip(some, generator.generate(some, Sampling()), strict=True):
        assert response.tokens == by_seed[request.seed]
