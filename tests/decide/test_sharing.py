"""How many workers of each kind there are to be: what each further one saves."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pipeline.decide.places import Need
from pipeline.decide.sharing import Work, worthwhile

GPU = Need(frozenset({"gpu"}), gpus=1)
SECONDS = st.floats(0.01, 10_000)


def work(seconds: float | None, tasks: int = 64) -> Work:
    return Work(GPU, wanted=tasks, tasks=tasks, seconds=seconds, coming_back=None)


def seconds_of(works: dict[str, Work], numbers: dict[str, int]) -> float:
    """Return what an iteration takes: each worker does one task after the other."""
    rounds = {kind: math.ceil(work.tasks / numbers[kind]) for kind, work in works.items()}
    return sum(rounds[kind] * work.seconds / work.tasks for kind, work in works.items())


def test_short_stages_of_long_iterations_have_few_workers_and_long_ones_all():
    works = {"rollout": work(15), "reward": work(900), "update": work(600, tasks=1)}
    assert worthwhile(works, {"rollout": 8, "reward": 4, "update": 1}) == {
        "rollout": 1,
        "reward": 4,
        "update": 1,
    }


def test_where_it_is_not_known_what_tasks_take_nobody_is_left_out():
    most = {"rollout": 8, "update": 1}
    assert worthwhile({"rollout": work(None), "update": work(600)}, most) == most


def test_a_round_more_is_never_hardly_longer():
    """64 places for as many tasks of five minutes: with 63 workers the last task would have a round alone."""
    works = {"rollout": work(64 * 300), "reward": work(64 * 100), "update": work(200, tasks=1)}
    most = {"rollout": 64, "reward": 64, "update": 1}
    assert worthwhile(works, most) == most
    assert worthwhile(works, {**most, "rollout": 48})["rollout"] == 32, "two rounds anyway"


@given(st.lists(st.tuples(SECONDS, st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=5))
def test_an_iteration_is_hardly_longer_than_with_all_who_could_be_there(kinds):
    works = {str(number): work(seconds, tasks) for number, (seconds, tasks, _) in enumerate(kinds)}
    most = {str(number): min(tasks, places) for number, (_, tasks, places) in enumerate(kinds)}
    found = worthwhile(works, most)
    assert all(1 <= found[kind] <= most[kind] for kind in works)
    assert seconds_of(works, found) <= seconds_of(works, most) * (1.0001 + 0.02 * len(kinds))
