"""pass@k and mean@k: against the definition, counted out over all choices of k samples."""

import itertools
import statistics as stats

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.tasks.evaluate import Sampled, evaluation_numbers, pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_a_solved_one(solved, data):
    k = data.draw(st.integers(1, len(solved)))
    choices = [any(choice) for choice in itertools.combinations(solved, k)]
    assert pass_at_k(len(solved), sum(solved), k) == pytest.approx(stats.fmean(choices))


@pytest.mark.parametrize("k", [0, 5])
def test_no_k_beyond_the_samples(k):
    with pytest.raises(ValueError, match="from 1 to 4"):
        pass_at_k(4, 2, k)


def test_many_samples_cost_nothing():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
    assert pass_at_k(10_000, 9_901, 100) == 1.0


def test_greedy_responses_have_means_only():
    scores = {"reward": [1.0, 0.0], "reward/rm": [2.0, 4.0]}
    assert evaluation_numbers(scores, (), None) == {"evaluate/reward": 0.5, "evaluate/reward/rm": 3.0}


def test_each_set_has_numbers_of_its_own():
    scores = {"reward": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]}
    found = evaluation_numbers(scores, ["a", "a", "b", "b", "b", "b"], Sampled(2, (1, 2), solved_at=1.0))
    assert found == {
        "evaluate/reward": 0.5,
        "evaluate/mean@2": 0.5,
        "evaluate/pass@1": pytest.approx((0.5 + 0 + 1) / 3),
        "evaluate/pass@2": pytest.approx(2 / 3),
        "evaluate/a/reward": 0.5,
        "evaluate/a/mean@2": 0.5,
        "evaluate/a/pass@1": 0.5,
        "evaluate/a/pass@2": 1.0,
        "evaluate/b/reward": 0.5,
        "evaluate/b/mean@2": 0.5,
        "evaluate/b/pass@1": 0.5,
        "evaluate/b/pass@2": 0.5,
    }
