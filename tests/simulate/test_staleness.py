"""With places for all stages a run with staleness takes the least that it can, and holds little more."""

import pytest

from pipeline.simulate.overlap import judge_overlap, least_period, overlap_plant_of
from tests.support.tables import SEED, sample

PLANTS = range(20)


@pytest.mark.parametrize("number", sample(PLANTS, 1 / 10))
def test_an_iteration_takes_the_least_that_it_can_and_little_more_is_held(number):
    verdict = judge_overlap(SEED, number)
    assert verdict.wrong == ()


def test_the_least_is_what_the_longest_stage_takes_or_all_of_them_by_the_iterations_at_once():
    plants = [overlap_plant_of("a", number) for number in range(200)]
    assert {plant.plan.staleness for plant in plants} == {1, 2}
    longest = [max(kind.seconds for kind in plant.kinds.values()) for plant in plants]
    assert all(least_period(plant) >= one for plant, one in zip(plants, longest, strict=True))
    assert any(
        least_period(plant) > one + plant.load_seconds for plant, one in zip(plants, longest, strict=True)
    )
