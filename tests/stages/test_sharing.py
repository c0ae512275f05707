"""One copy of a prompt, several responses behind it: the numbers are those of rows of their own."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, MistralConfig

from stages.ppo.batching import Row, collate, collate_shared, line_length, micro_batches, shared_lines
from stages.ppo.forward import policy_outputs, response_values
from stages.ppo.sharing import can_share, has_whole_attention
from tests.stages.test_forward import SIZE, VOCABULARY, critic, model, policy
from tests.support.learning import difference, experience, metrics_of, weights

pytestmark = pytest.mark.usefixtures("one_thread")


def groups(seed: int = 0, number: int = 5, size: int = 4) -> list[Row]:
    """Ragged responses to a few prompts, in any order; of some prompts one is of no token."""
    draw = random.Random(seed)
    rows = []
    for _ in range(number):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))]
        lengths = [draw.randint(0, 9) for _ in range(size)]
        rows += [Row(prompt, [draw.randrange(VOCABULARY) for _ in range(length)]) for length in lengths]
    draw.shuffle(rows)
    return rows


def outputs_and_gradient(made, rows, shared, budget=60):
    """Log-probabilities and entropies by row, and the gradient of a sum with a weight for each token."""
    width = max(len(row.response) for row in rows)
    found, total = torch.zeros(2, len(rows), width), 0.0
    weights = torch.arange(len(rows) * width).view(len(rows), width).cos()
    for batch in micro_batches(rows, range(len(rows)), budget, shared=shared):
        one = policy_outputs(made, batch, 0.7, entropy=True, entropy_grad=True)
        columns = slice(0, one.log_probs.shape[1])
        found[0, batch.rows, columns], found[1, batch.rows, columns] = one.log_probs, one.entropy
        total = total + ((one.log_probs + one.entropy) * weights[batch.rows, columns]).sum()
    made.zero_grad()
    total.backward()
    return found.detach(), torch.cat([p.grad.flatten() for p in made.parameters()])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "learned positions"])
def test_numbers_and_gradients_are_those_of_rows_of_their_own(name, attention):
    made = policy(name, attention)
    assert can_share(made)
    for seed in range(4):
        rows = groups(seed)
        (shared, slope), (apart, expected) = (outputs_and_gradient(made, rows, how) for how in (True, False))
        assert (shared - apart).abs().max() < 2e-5
        assert (slope - expected).norm() < 1e-4 * expected.norm()


def test_values_are_those_of_rows_of_their_own():
    made, rows = critic("llama", "sdpa"), groups()[:8]
    assert can_share(made)
    lines = list(shared_lines(rows, range(8), 100).values())
    batch = collate_shared(rows, lines)
    expected = response_values(made, collate(rows, range(8)))[batch.rows]
    assert (response_values(made, batch) - expected[:, : batch.num_response_columns]).abs().max() < 1e-5


def test_each_row_is_in_one_line_of_its_own_prompt_within_the_budget():
    for seed in range(20):
        rows, budget = groups(seed, number=6, size=5), 30
        lines = shared_lines(rows, range(len(rows)), budget)
        assert sorted(i for line in lines.values() for i in line) == list(range(len(rows)))
        for first, line in lines.items():
            assert first == line[0]
            assert len({tuple(rows[i].prompt) for i in line}) == 1
            assert len(line) == 1 or line_length(rows, line) <= budget
        computed = sum(b.num_tokens for b in micro_batches(rows, range(len(rows)), budget, shared=True))
        assert computed == sum(line_length(rows, line) for line in lines.values())


def test_a_prompt_is_computed_once_unless_attention_would_cost_more():
    short = [Row([1] * 50, [2] * 20) for _ in range(4)]
    assert list(shared_lines(short, range(4), 4096).values()) == [[0, 1, 2, 3]]
    (batch,) = micro_batches(short, range(4), 4096, shared=True)
    assert batch.input_ids.shape == (1, 49 + 4 * 21)
    long = [Row([1] * 50, [2] * 3000) for _ in range(4)]
    assert list(shared_lines(long, range(4), 1 << 20).values()) == [[0], [1], [2], [3]]


def test_what_is_dealt_does_not_depend_on_the_number_of_ranks():
    rows = groups(3, number=8)
    given = [
        micro_batches(rows, range(len(rows)), 60, False, rank, size, 4, shared=True)
        for size in (1, 2, 4)
        for rank in range(size)
    ]
    seen = [
        sorted(b.rows.tolist() for batches in of_size for b in batches if not b.is_dummy)
        for of_size in (given[:1], given[1:3], given[3:])
    ]
    assert seen[0] == seen[1] == seen[2]


def test_rows_without_a_common_prompt_are_batched_as_ever():
    rows = [Row([i, 3], [4] * i) for i in range(1, 9)]
    alike, expected = (micro_batches(rows, range(8), 20, shared=shared) for shared in (True, False))
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(alike, expected, strict=True))
    assert {batch.sees for batch in alike} == {None}


def test_models_that_look_through_a_window_are_not_given_lines():
    assert not can_share(policy("sliding window"))
    assert not has_whole_attention(model(AutoModelForCausalLM, "llama", "flex_attention").config)
    unused = MistralConfig(**SIZE, sliding_window=None, attn_implementation="sdpa")
    assert has_whole_attention(unused)


def test_a_model_that_counts_positions_by_itself_is_found():
    made = policy("learned positions")
    forward = made.transformer.forward
    made.transformer.forward = lambda *given, position_ids=None, **named: forward(*given, **named)
    assert not can_share(made)


def test_a_model_that_takes_no_mask_of_pairs_is_found():
    made = model(AutoModelForTokenClassification, "llama")
    made.register_forward_pre_hook(
        lambda module, given, named: (given, {k: v for k, v in named.items() if k != "attention_mask"}),
        with_kwargs=True,
    )
    assert not can_share(made)


def test_an_update_learns_what_it_learns_with_a_prompt_for_each_response(make, monkeypatch):
    words = ("algorithm=grpo", "rollout.samples_per_prompt=4", "data.prompts_per_iteration=2")
    given, seen = experience(samples=4), []
    rows = [Row(given.rows[i // 4 * 4].prompt, row.response) for i, row in enumerate(given.rows)]
    for shares in (True, False):
        monkeypatch.setattr("stages.ppo.learner.can_share", lambda engine, shares=shares: shares)
        learner = make(*words, "update.epochs=1", "algorithm.kl.placement=reward")
        metrics = metrics_of(learner, replace(given, rows=rows))
        assert metrics["policy/ratio_error_first"] == 0.0
        seen.append((weights(learner), metrics))
    (one, measured), (other, expected) = seen
    assert 0 < difference(one, other) < 1e-4
    names = ("policy/loss", "policy/grad_norm", "policy/entropy", "objective/kl", "mismatch/k3")
    assert [measured[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-4)
