"""Micro-batches: every row once, within the budget, little padding, and as much for each rank."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.ppo.batching import Row, collate, micro_batches
from stages.ppo.splitting import budgeted, deal_rows, split, split_into

ids = st.integers(1, 9)
rows_of_tokens = st.lists(
    st.builds(Row, st.lists(ids, min_size=1, max_size=9), st.lists(ids, max_size=9)), min_size=1, max_size=12
)
lengths_and_budget = st.tuples(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=20), st.integers(1, 100)
)
some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def padded_size(lengths, batch):
    return len(batch) * (max(lengths[i][0] for i in batch) + max(lengths[i][1] for i in batch))


def row_of(length):
    return Row([5] * max(1, length // 2), [6] * (length - max(1, length // 2)))


def ragged(number, seed):
    """Lengths 8 to 512."""
    draw = random.Random(seed)
    return [draw.randint(8, 512) for _ in range(number)]


# under a budget


@given(lengths_and_budget)
def test_each_row_is_in_exactly_one_batch(given_lengths):
    lengths, budget = given_lengths
    batches = budgeted(lengths, range(len(lengths)), budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))


@given(lengths_and_budget)
def test_a_batch_is_within_the_budget_unless_one_row_alone_exceeds_it(given_lengths):
    lengths, budget = given_lengths
    for batch in budgeted(lengths, range(len(lengths)), budget):
        assert len(batch) == 1 or padded_size(lengths, batch) <= budget


@given(lengths_and_budget, st.randoms())
def test_batches_do_not_depend_on_the_order_of_asking(given_lengths, random):
    lengths, budget = given_lengths
    order = list(range(len(lengths)))
    random.shuffle(order)
    assert budgeted(lengths, order, budget) == budgeted(lengths, range(len(lengths)), budget)


@given(lengths_and_budget)
def test_no_batch_could_have_taken_the_next_row(given_lengths):
    lengths, budget = given_lengths
    batches = budgeted(lengths, range(len(lengths)), budget)
    for batch, following in pairwise(batches):
        assert padded_size(lengths, [*batch, following[0]]) > budget


def test_a_subset_of_rows_is_split_by_their_own_numbers():
    lengths = [(1, 1), (50, 50), (1, 2), (1, 1)]
    assert budgeted(lengths, [3, 0], 4) == [[0, 3]]
    assert budgeted(lengths, [], 4) == []


@given(some_lengths, st.integers(1, 200), st.booleans(), st.integers(0, 8))
def test_batches_of_any_number_stay_within_the_budget(lengths, budget, packed, more):
    """Ranks that need fewer micro-batches than another make more of them."""
    indices = range(len(lengths))
    number = len(split(lengths, indices, budget, packed)) + more
    batches = split_into(lengths, indices, budget, number, packed)
    assert len(batches) == min(number, len(lengths))
    assert sorted(i for batch in batches for i in batch) == list(indices)
    for batch in batches:
        found = [lengths[i] for i in batch]
        assert len(batch) == 1 or (sum(found) if packed else len(batch) * max(found)) <= budget


@given(some_lengths, st.integers(60, 400))
def test_packs_are_full(lengths, budget):
    """With no row over the budget, at most one pack more than the tokens need for every two."""
    batches = split(lengths, range(len(lengths)), budget, packed=True)
    assert len(batches) <= 1 + 2 * sum(lengths) // budget


def test_nothing_gives_no_batches():
    assert split([3, 4], [], 10, packed=False) == split([3, 4], [], 10, packed=True) == []
    assert micro_batches([row_of(4)], [], 10) == []


# over ranks


@given(some_lengths, st.integers(1, 6), st.integers(1, 6), st.integers(10, 200), st.booleans())
def test_any_number_of_ranks_makes_the_micro_batches_of_another_number(
    lengths, num_ranks, num_shares, budget, packed
):
    rows, indices = [row_of(length) for length in lengths], range(len(lengths))

    def by(size: int) -> list[list[list[int]]]:
        given = [micro_batches(rows, indices, budget, packed, rank, size, num_shares) for rank in range(size)]
        assert len({len(own) for own in given}) == 1
        return [[b.rows.tolist() for b in own if not b.is_dummy] for own in given]

    ours, theirs = by(num_ranks), by(num_shares)
    assert sorted(batch for own in ours for batch in own) == sorted(batch for own in theirs for batch in own)
    assert max(map(len, ours)) - min(map(len, ours)) <= max(1, len(theirs)), "none has much more to do"
    plain = [micro_batches(rows, indices, budget, packed, rank, num_shares) for rank in range(num_shares)]
    assert theirs == [[b.rows.tolist() for b in own if not b.is_dummy] for own in plain]


@given(some_lengths, st.integers(1, 6), st.integers(10, 200), st.booleans(), st.data())
def test_rows_are_dealt_once_and_evenly(lengths, num_ranks, budget, packed, data):
    indices = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True, min_size=1))
    shares = deal_rows(lengths, indices, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(i for share in shares for i in share) == sorted(indices)
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths[i] for i in indices)
    rows = [row_of(length) for length in lengths]
    batches = [micro_batches(rows, indices, budget, packed, rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(own) for own in batches}) == 1
    trained = [i for own in batches for b in own if not b.is_dummy for i in b.rows.tolist()]
    assert sorted(trained) == sorted(indices)
    for own, share in zip(batches, shares, strict=True):
        assert sum(b.is_dummy for b in own) == max(0, len(own) - len(share)), "only for want of rows"
        assert all(len(b.rows) == 1 for b in own if b.is_dummy)
    assert any(not own[-1].is_dummy for own in batches), "a pass that is of no use to any rank"


@given(some_lengths, st.integers(1, 6), st.randoms())
def test_a_deal_does_not_depend_on_the_order_of_asking(lengths, num_ranks, random):
    order = list(range(len(lengths)))
    random.shuffle(order)
    assert deal_rows(lengths, order, num_ranks) == deal_rows(lengths, range(len(lengths)), num_ranks)


def longest_first_to_the_lightest(lengths, num_shares):
    """The greedy deal."""
    loads = [0] * num_shares
    for length in sorted(lengths, reverse=True):
        loads[loads.index(min(loads))] += length
    return loads


def excess(loads):
    """By how much the largest load exceeds the mean, in parts of the mean."""
    return max(loads) * len(loads) / sum(loads) - 1


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("rows_per_rank", [4, 8, 16, 32])
def test_ragged_batches_are_dealt_more_evenly_than_by_greed(num_ranks, rows_per_rank):
    pairs = []
    for seed in range(10):
        lengths = ragged(num_ranks * rows_per_rank, seed)
        shares = deal_rows(lengths, range(len(lengths)), num_ranks)
        ours = excess([sum(lengths[i] for i in share) for share in shares])
        pairs.append((ours, excess(longest_first_to_the_lightest(lengths, num_ranks))))
    assert sum(ours for ours, _ in pairs) < 0.8 * sum(theirs for _, theirs in pairs)
    assert rows_per_rank < 16 or all(ours <= theirs for ours, theirs in pairs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ranks_wait_little_for_each_other_in_any_pass(num_ranks, packed):
    """A pass takes as long as the largest micro-batch in it: of all that time ranks work nine tenths."""
    rows = [row_of(length) for length in ragged(64 * num_ranks, seed=0)]
    ranks = [
        micro_batches(rows, range(len(rows)), 2048, packed, rank, num_ranks) for rank in range(num_ranks)
    ]
    passes = [[b.input_ids.numel() for b in batches] for batches in zip(*ranks, strict=True)]
    assert sum(map(sum, passes)) / sum(num_ranks * max(sizes) for sizes in passes) > 0.9


# padding


@given(rows_of_tokens, st.integers(1, 60), st.booleans())
def test_what_is_padded_or_packed_can_be_read_back(rows, budget, packed):
    for batch in micro_batches(rows, range(len(rows)), budget, packed):
        ids, positions = batch.input_ids.flatten().tolist(), batch.position_ids.flatten().tolist()
        start = 0
        for line, index in enumerate(batch.rows.tolist()):
            row = rows[index]
            start = start if packed else line * batch.input_ids.shape[1]
            assert ids[start : start + row.length] == [*row.prompt, *row.response]
            assert positions[start : start + row.length] == list(range(row.length))
            first = start + len(row.prompt) - 1
            mine = batch.cells // batch.num_response_columns == line
            assert batch.predictors[mine].tolist() == list(range(first, first + len(row.response)))
            assert (batch.cells[mine] % batch.num_response_columns).tolist() == list(range(len(row.response)))
            assert batch.tokens[mine].tolist() == list(row.response)
            start += row.length
        assert len(batch.tokens) == sum(len(rows[i].response) for i in batch.rows.tolist())


@given(rows_of_tokens)
def test_a_batch_is_no_wider_than_it_must_be(rows):
    padded, packed = (collate(rows, range(len(rows)), packed) for packed in (False, True))
    total, longest = sum(row.length for row in rows), max(row.length for row in rows)
    assert padded.input_ids.shape == padded.position_ids.shape == (len(rows), longest)
    assert packed.input_ids.shape == packed.position_ids.shape == (1, total)
    for batch in (padded, packed):
        assert batch.num_tokens == total
        assert batch.num_response_columns == max(1, *(len(row.response) for row in rows))
        assert batch.first_predictor == min(len(row.prompt) for row in rows) - 1


@pytest.mark.parametrize(("packed", "goal"), [(False, 0.95), (True, 1.0)])
def test_of_ragged_lengths_almost_all_tokens_are_real(packed, goal):
    rows = [row_of(length) for length in ragged(256, seed=1)]
    batches = micro_batches(rows, range(len(rows)), 2048, packed)
    real, computed = sum(b.num_tokens for b in batches), sum(b.input_ids.numel() for b in batches)
    assert real / computed >= goal
    assert len(batches) <= 1.1 * sum(row.length for row in rows) / 2048 + 1


def test_moving_to_a_device_keeps_everything():
    batch = collate([Row([1, 2], [3]), Row([4], [5, 6])], [1, 0])
    moved = batch.to(torch.device("cpu"))
    assert moved.rows.tolist() == [1, 0]
    assert moved.tokens.tolist() == [5, 6, 3]
    assert (moved.num_response_columns, moved.first_predictor, moved.num_tokens) == (2, 0, 6)
