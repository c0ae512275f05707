"""Which GPUs a model takes: the page has what the forecast says."""

import pytest

from benchmarks.hardware import SHAPES, configured, saved, table, with_ranks
from pipeline.forecast.parts import GIB
from pipeline.forecast.shapes import read_shape
from tests.support import ROOT


def test_the_page_has_the_table_of_the_forecast():
    assert "\n".join(table()) in (ROOT / "docs/howto/hardware.md").read_text()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes_have_the_weights_of_their_names_and_more_ranks_need_less_each(shape, tmp_path):
    policy = saved(shape, tmp_path / "policy")
    assert read_shape(policy).parameters == pytest.approx(float(shape.name.removesuffix("B")) * 1e9, rel=0.1)
    config = configured(policy, "grpo", 4096, 2048)
    one, eight = with_ranks(config, 1).peak, with_ranks(config, 8).peak
    assert one - eight > 0.8 * 16 * read_shape(policy).parameters * 7 / 8
    assert one > 16 * read_shape(policy).parameters > GIB
