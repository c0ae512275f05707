"""Seeds are a function of what is being done: the same for ever, and unrelated between tasks."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.run.seeds import derive_seed

parts = st.lists(st.integers(-(10**9), 10**9) | st.text(alphabet="ab0/:.-", max_size=6), max_size=5)


def test_seeds_never_change():
    """A run that is resumed with a newer version must go on with the same numbers."""
    assert derive_seed(0, 1, "rollout", 0) == 8428102517505243424
    assert derive_seed(0, 1, "rollout", 1) == 2530913146613359616


def test_every_task_of_a_run_has_a_seed_of_its_own():
    seeds = {
        derive_seed(seed, iteration, stage, shard)
        for seed in range(4)
        for iteration in range(50)
        for stage in ("rollout", "reward", "update", "evaluate")
        for shard in range(20)
    }
    assert len(seeds) == 4 * 50 * 4 * 20


@given(parts)
def test_a_seed_fits_where_torch_and_numpy_take_it(given_parts):
    assert 0 <= derive_seed(*given_parts) < 2**63
    assert derive_seed(*given_parts) == derive_seed(*given_parts)


@given(parts, parts)
def test_different_parts_give_different_seeds(one, two):
    assert (derive_seed(*one) == derive_seed(*two)) is (one == two)


def test_parts_are_typed_and_separated():
    alike: list[tuple[int | str, ...]] = [(1, "2"), ("1", 2), (12,), ("12",), (1, 2)]
    assert len({derive_seed(*parts) for parts in alike}) == len(alike)
