"""How many workers of each kind there are to be: what each further one saves."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.orchestrate.places import Need
from pipeline.orchestrate.sharing import Work, worthwhile

GPU = Need(frozenset({"gpu"}), gpus=1)
SECONDS = st.floats(0.01, 10_000)


def work(seconds: float | None, share: float = 1.0) -> Work:
    return Work(GPU, wanted=64, seconds=seconds, coming_back=None, share=share)


def test_short_stages_of_long_iterations_have_few_workers_and_long_ones_all():
    works = {"rollout": work(15), "reward": work(900), "update": work(600)}
    assert worthwhile(works, {"rollout": 8, "reward": 4, "update": 1}) == {
        "rollout": 1,
        "reward": 4,
        "update": 1,
    }


def test_where_it_is_not_known_what_tasks_take_nobody_is_left_out():
    most = {"rollout": 8, "update": 1}
    assert worthwhile({"rollout": work(None), "update": work(600)}, most) == most


@given(st.lists(st.tuples(SECONDS, st.integers(1, 64)), min_size=1, max_size=5))
def test_an_iteration_is_hardly_longer_than_with_all_who_could_be_there(kinds):
    works = {str(number): work(seconds) for number, (seconds, _) in enumerate(kinds)}
    most = {str(number): places for number, (_, places) in enumerate(kinds)}
    found = worthwhile(works, most)
    longest = sum(seconds / places for seconds, places in kinds)
    assert all(1 <= found[kind] <= most[kind] for kind in works)
    assert sum(seconds / found[str(n)] for n, (seconds, _) in enumerate(kinds)) <= longest * (
        1.0001 + 0.02 * len(kinds)
    )
