"""Words of a sweep: which runs they ask for, and what those are called."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sweep.grid import MOST_POINTS, SweepError, fixed_differences, parse_grid
from pipeline.sweep.naming import in_words, limited, point_name, short_keys, tags_of

GROUPS = {"algorithm": ["grpo", "ppo", "reinforce_plus_plus", "remax"]}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def values(word: str, **more) -> tuple[str, ...]:
    return parse_grid([word], GROUPS, **more).axes[0].values


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("update.learning_rate=1e-6,3e-06", ("1e-6", "3e-6")),
        ("seed=choice(3,1,2)", ("3", "1", "2")),
        ("seed=range(0,10,5)", ("0", "5")),
        ("rollout.temperature=range(0.5,1,0.25)", ("0.5", "0.75")),
        ("algorithm=glob(re*)", ("reinforce_plus_plus", "remax")),
        ("data.prompts=/data/a.jsonl,/data/b.jsonl", ("/data/a.jsonl", "/data/b.jsonl")),
        ("rollout.stop=['a,b'],[c]", ("['a,b']", "[c]")),
        ("seed=1,1,2", ("1", "2")),
    ],
)
def test_words_of_hydra_say_which_values(word, expected):
    assert values(word) == expected


def test_the_grid_is_every_combination_and_seeds_are_the_fastest():
    grid = parse_grid(["a.x=1,2", "experiment=first", "b=3,4"], GROUPS, num_seeds=2)
    assert grid.fixed == ("experiment=first",)
    points = list(grid.points())
    assert len(points) == 8
    assert points[1] == ({"a.x": "1", "b": "3", "seed": "1"}, ["a.x=1", "b=3", "seed=1"])


def test_seeds_count_on_from_the_one_that_is_given():
    grid = parse_grid(["seed=7"], GROUPS, num_seeds=3)
    assert (grid.fixed, grid.axes[0].values) == ((), ("7", "8", "9"))


def test_one_value_of_a_key_that_is_swept_already_adds_a_run():
    grid = parse_grid(["a=3"], GROUPS, swept=("a",))
    assert grid.axes[0].values == ("3",)
    assert [settings for settings, _ in grid.points()] == [{"a": "3"}]


@pytest.mark.parametrize(
    ("words", "seeds", "said"),
    [
        (["a=1"], None, "nothing to sweep"),
        (["a=1,2", "a=3"], None, "a is given twice"),
        (["a=3", "a=1,2"], None, "a is given twice"),
        (["a=interval(0,1)"], None, "not a list of values"),
        (["a=glob(*)"], None, "glob is for groups"),
        (["algorithm=glob(x*)"], None, "matches no option of algorithm"),
        (["a=range(3,1)"], None, "no values"),
        (["name=a,b"], None, "names the whole sweep"),
        (["run_dir=a,b"], None, "names the whole sweep"),
        (["seed=1,2"], 2, "leave one out"),
        (["seed=x"], 2, "a whole number"),
        (["a=range(0,100000)"], None, f"more than {MOST_POINTS} runs"),
        (["a=range(0,40)", "b=range(0,40)"], None, f"more than {MOST_POINTS} runs"),
        (["a=b=,c"], None, "is not KEY=VALUE"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_write(words, seeds, said):
    with pytest.raises(SweepError, match=said) as error:
        parse_grid(words, GROUPS, num_seeds=seeds)
    assert "\n" not in str(error.value)


def test_which_fixed_settings_differ():
    assert fixed_differences(["a=1", "b=2"], ["b=2", "a=1"], []) == []
    assert fixed_differences(["a=1", "b=2"], ["b=3", "+a=1", "c=1"], ["c"]) == ["b"]


# --- names ---


def test_short_names_are_as_long_as_they_have_to_be():
    found = short_keys(["update.learning_rate", "update.critic_learning_rate", "a.b.weight", "a.c.weight"])
    assert list(found.values()) == ["learning_rate", "critic_learning_rate", "b.weight", "c.weight"]
    assert in_words({"update.epochs": "2", "seed": "0"}) == "epochs=2, seed=0"
    assert tags_of({"update.epochs": "2"}, 5) == ["epoch"]


def test_short_names_differ_from_those_of_keys_that_other_runs_have():
    settings, keys = {"rollout.temperature": "1"}, ["evaluate.temperature"]
    assert in_words(settings, keys) == "rollout.temperature=1"
    assert tags_of(settings, 64, keys) == ["rollout.temperature=1"]


def test_long_texts_that_begin_alike_stay_different_when_they_are_cut():
    one, other = limited("prompts=/data/first", 16), limited("prompts=/data/other", 16)
    assert (len(one), len(other), one[:9]) == (16, 16, "prompts=/")
    assert one != other
    assert limited("seed=0", 16) == "seed=0"


def test_names_say_the_settings():
    settings = {"update.learning_rate": "1e-6", "model.policy": "/models/my-sft", "seed": "0"}
    assert point_name(settings, (), 90) == "learning_rate_1e-6-policy_my-sft-seed_0"


texts = st.text(min_size=1, max_size=60)
settings = st.dictionaries(st.from_regex(r"[a-z]{1,9}(\.[a-z]{1,9}){0,3}", fullmatch=True), texts, min_size=1)


@given(
    st.lists(settings, min_size=1, max_size=6, unique_by=lambda s: repr(sorted(s.items()))),
    st.integers(40, 99),
)
def test_whatever_the_settings_runs_have_names_of_their_own(points, longest):
    taken: list[str] = []
    for point in points:
        name = point_name(point, taken, longest)
        assert NAME.fullmatch(name)
        assert len(name) <= longest
        assert name not in taken
        taken.append(name)


def test_a_name_that_may_not_be_given_is_followed_by_others_always_the_same():
    settings, given = {"seed": "0"}, []
    for _ in range(4):
        given.append(point_name(settings, given[:1], 40, lambda name: name not in given[1:]))
    assert given[0] == "seed_0"
    assert len({*given}) == 4
    assert given[1:] == [f"seed_0-{name[-6:]}" for name in given[1:]]
    assert point_name(settings, given[:1], 40) == given[1]
