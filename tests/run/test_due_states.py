"""Which updates save the trainer's state: never more of them are to be learned again than asked for."""

from dataclasses import replace
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.schema import Config
from pipeline.run.states import is_due, longest_replay, too_rare
from tests.support.processes import config_of


@cache
def base(models) -> Config:
    return config_of(models, models / "run")


def asked(models, save_every, **update) -> Config:
    config = base(models)
    return replace(config, iterations=40, update=replace(config.update, save_every=save_every, **update))


@given(
    save_every=st.sampled_from([1, 2, 3, 7, 1000]),
    lost=st.sets(st.integers(1, 40)),
)
def test_learning_again_never_takes_more_updates_than_asked_for_but_where_states_were_lost(
    models, save_every, lost
):
    config, newest = asked(models, save_every), 0
    for version in range(1, config.iterations + 1):
        due = is_due(config, version, newest, seconds=1.0)
        if due and version not in lost:
            newest = version
        tries = [v for v in range(newest + 1, version + 1) if v - newest >= save_every]
        assert set(tries) <= lost, "one that was lost is made up for by the next update"
    assert is_due(config, config.iterations, newest, seconds=0.0)


def test_states_that_are_to_be_kept_for_long_are_always_saved(models):
    config = asked(models, 1000, keep_last=3, keep_every=10)
    assert [v for v in range(1, 40) if is_due(config, v, 0, 1.0)] == [10, 20, 30]


def test_a_quarter_of_the_time_limit_is_the_longest_replay(models):
    config = asked(models, 1000)
    config = replace(config, scheduler=replace(config.scheduler, time_limit=400))
    assert longest_replay(config) == 100
    assert not is_due(config, 3, 0, seconds=99.0)
    assert is_due(config, 3, 0, seconds=101.0)


@given(every=st.integers(1, 12), seconds=st.integers(1, 500))
def test_states_are_too_rare_where_learning_again_takes_more_than_half_of_the_time_limit(
    models, every, seconds
):
    config = asked(models, every)
    config = replace(config, scheduler=replace(config.scheduler, time_limit=400))
    until_due = next(v for v in range(1, config.iterations) if is_due(config, v, 0, float(v * seconds)))
    problem = too_rare(config, float(seconds))
    assert (problem is not None) is (every > 1 and until_due * seconds > 200)
    assert problem is None or f"learning {until_due} again takes {until_due * seconds} s, more" in problem


def test_nothing_is_too_rare_without_a_time_limit_or_for_updates_that_take_no_time(models):
    config = asked(models, 1000)
    assert too_rare(config, 0.0) is None
    assert too_rare(replace(config, scheduler=replace(config.scheduler, time_limit=10**9)), 3600.0) is None
