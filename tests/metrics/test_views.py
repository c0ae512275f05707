"""Terminal views: they fit, they line up, and they cope with rows that lack numbers."""

import math

import pytest

from pipeline.metrics.terminal import (
    COLUMNS,
    even_ticks,
    iteration_table,
    means_of,
    reward_curve,
    sparkline,
    together,
)
from pipeline.text import duration, number

ROWS = [
    {
        "iteration": i,
        "reward/mean": -0.5 + 0.03 * i,
        "reward/std": 0.4,
        "objective/kl": 0.1 * i,
        "policy/entropy": 2.0 - 0.01 * i,
        "policy/clip_fraction_low": 0.04,
        "policy/clip_fraction_high": 0.06,
        "response_length/mean": 90.0,
        "seconds/iteration": 88.4,
        "tokens_per_second/rollout": 571.0,
        **({"evaluate/reward": -0.3 + 0.03 * i} if i % 5 == 0 else {}),
    }
    for i in range(1, 41)
]


def test_the_table_has_every_column_at_80_characters():
    lines = iteration_table(ROWS, 80).splitlines()
    assert len(lines) == 41
    assert all(column.title in lines[0] for column in COLUMNS)
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines[0]) <= 80
    assert " ".join(lines[5].split()) == "5 -0.350 0.400 0.50 1.95 10.0 90.0 -0.150 88.4 571"


@pytest.mark.parametrize("width", [20, 30, 40, 60, 200])
def test_a_narrow_table_leaves_columns_out_but_never_iteration_and_reward(width):
    lines = iteration_table(ROWS, width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split()[:2] == ["iter", "reward"]


def test_absent_numbers_are_dashes():
    lines = iteration_table([{"iteration": 7}], 80).splitlines()
    assert lines[1].split() == ["7", *["-"] * (len(COLUMNS) - 1)]
    assert len(iteration_table([], 80).splitlines()) == 1


@pytest.mark.parametrize(("width", "height"), [(80, 16), (30, 8), (120, 30)])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_curve_fits_and_has_axes(width, height, count):
    lines = reward_curve(ROWS[:count], width, height).splitlines()
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert lines[-1].split()[-1] in {"2", "40"}
    assert "\x1b" not in "".join(lines)


def test_the_curve_shows_evaluations_as_dots():
    assert reward_curve(ROWS[:4]).count("●") == 0
    assert reward_curve(ROWS[:12], 80, 16).count("●") == 3  # two of them, and the key


def noisy(count: int, gain: float, deviation: float = 0.6) -> list[dict[str, float]]:
    """Rows of 64 responses each whose mean reward goes up and down by a standard error."""
    error = deviation / 8
    return [
        {
            "iteration": i,
            "samples": 64 * i,
            "reward/mean": gain * i / count + error * (-1) ** i,
            "reward/std": deviation,
        }
        for i in range(1, count + 1)
    ]


def test_the_curve_joins_nothing_and_shows_what_chance_alone_does():
    lines = reward_curve(noisy(12, 0.0), 80, 15).splitlines()
    assert lines[0].strip() == "mean reward ┼  2 standard errors │"
    plot = [line.partition("┤")[2] or line.partition("│")[2] for line in lines[2:-2]]
    columns = ["".join(column) for column in zip(*(line.ljust(80) for line in plot), strict=True)]
    marked = [column for column in columns[:73] if "┼" in column]
    assert len(marked) == sum("│" in column for column in columns[:73]) == 12, "a whisker to each point"
    shared = [i for i, line in enumerate(plot) if sum(letter in "│┼" for letter in line[:73]) == 12]
    assert shared, "a level line goes through all whiskers: there is no trend"


@pytest.mark.parametrize("first", [1, 8])
def test_whiskers_are_two_standard_errors_of_the_mean(first):
    """Also of the first row of a fork, which counts its parent's responses."""
    for spread in means_of(noisy(12, 1.0)[first - 1 :]):
        assert spread.high - spread.value == pytest.approx(2 * 0.6 / 8)
        assert spread.value - spread.low == pytest.approx(2 * 0.6 / 8)
    (alone,) = means_of([{"iteration": 1, "reward/mean": 0.5, "reward/std": 0.6}])
    assert (alone.low, alone.high) == (0.5, 0.5), "of how many responses is not known"


def test_of_a_long_run_neighbours_are_shown_together_from_lowest_to_highest():
    text = reward_curve(noisy(200, 1.0), 80, 15)
    assert text.splitlines()[0].strip() == "mean reward of 3 iterations ┼  lowest to highest │"
    assert max(map(len, text.splitlines())) <= 80
    (joined,) = together(means_of(noisy(3, 0.0)), 3)
    assert (joined.at, joined.low, joined.high) == (2.0, pytest.approx(-0.075), pytest.approx(0.075))
    assert joined.value == pytest.approx(-0.025)


def test_a_curve_does_not_remember_the_one_before():
    first = reward_curve(ROWS)
    reward_curve(ROWS[:3])
    assert reward_curve(ROWS) == first


def test_a_curve_of_nothing_or_of_equal_or_broken_numbers():
    assert reward_curve([]) == "no reward yet"
    assert reward_curve([{"iteration": 1, "reward/mean": math.nan}]) == "no reward yet"
    same = [{"iteration": i, "reward/mean": 0.0} for i in (1, 2)]
    assert len(reward_curve(same, 80, 10).splitlines()) == 10


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7, 0], "█▁"),
        ([3, 3, 3], "▄▄▄"),
        ([0, None, 7, math.nan], "▁ █ "),
        ([None], " "),
        ([], ""),
    ],
)
def test_a_sparkline_goes_from_lowest_to_highest(values, line):
    assert sparkline(values) == line


def test_a_long_sparkline_is_averaged_down():
    assert sparkline(list(range(1000)), 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(41)), 40)) == 40


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, None, "-"),
        (0.0, 3, "0"),
        (12345, None, "12345"),
        (-0.61234, None, "-0.612"),
        (99.999, 1, "100.0"),
        (12345.6, 1, "12.3k"),
        (999_960.0, None, "1.00M"),
        (0.00004, 3, "4e-05"),
        (3e12, None, "3e+12"),
        (math.nan, 2, "nan"),
        (-math.inf, None, "-inf"),
    ],
)
def test_numbers_are_short(value, digits, text):
    assert number(value, digits) == text


def test_ticks_are_round_and_inside():
    assert even_ticks(1, 40, 8, whole=True) == [5, 10, 15, 20, 25, 30, 35, 40]
    assert even_ticks(1, 2, 8, whole=True) == [1, 2]
    assert even_ticks(-0.6, 1.1, 4) == pytest.approx([-0.5, 0.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(42.4, "42 s"), (125, "2 min 5 s"), (3600, "1 h 0 min"), (11520, "3 h 12 min"), (183600, "2 d 3 h")],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text
