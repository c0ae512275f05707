"""Dealing prompts to iterations is a pure function that gives each prompt at most once per epoch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.sampler import deal


@st.composite
def dealings(draw):
    num_shards = draw(st.integers(1, 4))
    prompts_per_iteration = num_shards * draw(st.integers(1, 5))
    return {
        "num_prompts": prompts_per_iteration + draw(st.integers(0, 40)),
        "prompts_per_iteration": prompts_per_iteration,
        "num_shards": num_shards,
        "seed": draw(st.integers(0, 2**40)),
        "shuffle": draw(st.booleans()),
    }


def iteration_of(dealing, iteration):
    """Epoch and indices of all shards of an iteration, in order."""
    deals = [deal(**dealing, iteration=iteration, shard=shard) for shard in range(dealing["num_shards"])]
    assert len({one.epoch for one in deals}) == 1
    assert len({len(one.indices) for one in deals}) == 1
    return deals[0].epoch, [index for one in deals for index in one.indices]


@given(dealing=dealings(), epoch=st.integers(0, 3))
def test_an_epoch_deals_each_prompt_at_most_once(dealing, epoch):
    per_epoch = dealing["num_prompts"] // dealing["prompts_per_iteration"]
    iterations = range(1 + epoch * per_epoch, 1 + (epoch + 1) * per_epoch)
    dealt = []
    for iteration in iterations:
        its_epoch, indices = iteration_of(dealing, iteration)
        assert its_epoch == epoch
        assert len(indices) == dealing["prompts_per_iteration"]
        dealt += indices
    assert iteration_of(dealing, iterations.stop)[0] == epoch + 1
    assert len(set(dealt)) == len(dealt)
    assert set(dealt) <= set(range(dealing["num_prompts"]))
    assert len(dealt) > dealing["num_prompts"] - dealing["prompts_per_iteration"]
    if not dealing["shuffle"]:
        assert dealt == list(range(len(dealt)))


@given(dealing=dealings(), iteration=st.integers(1, 50))
def test_shards_only_cut_what_an_iteration_has(dealing, iteration):
    whole = deal(**{**dealing, "num_shards": 1}, iteration=iteration, shard=0)
    assert iteration_of(dealing, iteration) == (whole.epoch, list(whole.indices))
    assert iteration_of(dealing, iteration) == iteration_of(dealing, iteration)


@given(seed=st.integers(0, 2**40))
def test_other_seeds_and_other_epochs_have_other_orders(seed):
    dealing = {"num_prompts": 64, "prompts_per_iteration": 64, "num_shards": 1, "shard": 0, "shuffle": True}
    first, second = (deal(**dealing, seed=seed, iteration=iteration) for iteration in (1, 2))
    other = deal(**dealing, seed=seed + 1, iteration=1)
    assert len({first.indices, second.indices, other.indices}) == 3


def test_the_order_is_fixed_forever():
    dealing = {"num_prompts": 8, "prompts_per_iteration": 8, "num_shards": 1, "shard": 0, "shuffle": True}
    assert deal(**dealing, seed=0, iteration=1).indices == (7, 6, 3, 5, 1, 4, 0, 2)


def test_too_few_prompts_say_how_many_and_what_to_set():
    dealing = {"prompts_per_iteration": 8, "num_shards": 2, "shard": 0, "seed": 0, "shuffle": True}
    with pytest.raises(ValueError, match=r"7 usable prompts .* 8 of one .*data\.prompts_per_iteration"):
        deal(7, iteration=1, **dealing)
