"""Micro-batches: every row once, within the budget, padded so that masks and positions say what is real."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.ppo.batching import Row, budgeted, collate, micro_batches

ids = st.integers(1, 9)
rows_of_tokens = st.lists(
    st.builds(Row, st.lists(ids, min_size=1, max_size=9), st.lists(ids, min_size=1, max_size=9)),
    min_size=1,
    max_size=12,
)
lengths_and_budget = st.tuples(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=20), st.integers(1, 100)
)


def padded_size(lengths, batch):
    return len(batch) * (max(lengths[i][0] for i in batch) + max(lengths[i][1] for i in batch))


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


@given(rows_of_tokens, st.integers(1, 60))
def test_what_is_padded_in_can_be_read_back(rows, budget):
    for batch in micro_batches(rows, range(len(rows)), budget):
        for line, index in enumerate(batch.rows.tolist()):
            row, real = rows[index], batch.attention_mask[line].bool()
            assert batch.input_ids[line][real].tolist() == [*row.prompt, *row.response]
            assert batch.position_ids[line][real].tolist() == list(range(row.length))
            assert batch.response_tokens[line, : len(row.response)].tolist() == list(row.response)
            # One run of real tokens: prompts end and responses begin at the same column everywhere.
            assert real.long().diff().abs().sum() <= 2
            first_response_column = batch.input_ids.shape[1] - batch.num_response_columns
            assert int(real[:first_response_column].sum()) == len(row.prompt)


@given(rows_of_tokens)
def test_a_batch_is_no_wider_than_it_must_be(rows):
    batch = collate(rows, range(len(rows)))
    assert batch.input_ids.shape == (
        len(rows),
        max(len(row.prompt) for row in rows) + max(len(row.response) for row in rows),
    )
    assert batch.num_response_columns == max(len(row.response) for row in rows)
    assert batch.input_ids[~batch.attention_mask.bool()].sum() == 0
    assert batch.position_ids.min() == 0


def test_moving_to_a_device_keeps_everything():
    batch = collate([Row([1, 2], [3]), Row([4], [5, 6])], [1, 0])
    moved = batch.to(torch.device("cpu"))
    assert moved.rows.tolist() == [1, 0]
    assert torch.equal(moved.response_tokens, torch.tensor([[5, 6], [3, 0]]))
