"""The formulas beside the peak memory of real updates and generations."""

import pytest

from benchmarks.memory import SIZES, cases, measure
from tests.support.tables import IS_SOAK, sample

_SIZES = list(SIZES) if IS_SOAK else ["small"]
_TRIED = [(size, name) for size in _SIZES for name in cases(size)]


@pytest.mark.parametrize(("size", "name"), sample(_TRIED, 1 / len(_TRIED)))
def test_a_formula_is_within_15_percent_of_what_is_measured(size, name):
    found = measure(cases(size)[name])
    assert abs(found.off) < 0.15, found
