"""Tokens that go through models, and the padding between them."""

import pytest

from stages.models.passes import PassedTokens, count_pass, counted_passes, forget_passes, uncounted
from stages.ppo.batching import Row, micro_batches

ROWS = [Row([1, 2], [3]), Row([1], [2, 3, 4, 5]), Row([1, 2, 3], [4])]


@pytest.fixture(autouse=True)
def begun():
    forget_passes()
    yield
    forget_passes()


@pytest.mark.parametrize(("packed", "positions"), [(False, 15), (True, 12)])
def test_a_micro_batch_counts_its_tokens_and_its_padding(packed, positions):
    for batch in micro_batches(ROWS, [0, 1, 2], 15, packed):
        batch.count_pass()
    assert counted_passes() == PassedTokens(12, positions)


def test_a_dummy_is_padding():
    (dummy,) = micro_batches(ROWS, [0], 15, rank=1, num_ranks=2)
    dummy.count_pass()
    assert dummy.is_dummy
    assert counted_passes() == PassedTokens(0, 3)


def test_what_is_done_again_is_not_counted():
    count_pass(3)
    with uncounted():
        count_pass(100, 200)
    count_pass(2, 4)
    assert counted_passes() == PassedTokens(5, 7)


def test_counts_come_back_from_a_record():
    assert PassedTokens.of(PassedTokens(5, 7).metrics()) == PassedTokens(5, 7)
    assert PassedTokens().metrics() == {}, "an engine that counts nothing"
