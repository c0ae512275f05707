"""Samples for people: what is read of the shards, and which are chosen."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.metrics.responses import read_samples, sample_seed
from pipeline.metrics.samples import Choice, Sample, choose
from pipeline.run.tasks import Stage, Task
from tests.support.reportrun import commit_shard, make_run


def sample(reward: float, index: int = 0) -> Sample:
    return Sample(1, "p", index, "prompt", "response", reward)


def test_everything_about_a_response_is_read(tmp_path):
    run = make_run(tmp_path / "run")
    commit_shard(run, 3, 0, responses=["yes", ""], rewards=[0.5, -1.0], reference=[[-1.0, -2.0, -9.0], []])
    first, second = read_samples(run, 3).rows
    assert (first.iteration, first.prompt_id, first.sample_index) == (3, "3-0-0", 0)
    assert (first.prompt, first.response, first.reward) == ("prompt 0", "yes", 0.5)
    assert first.components == {"rm": 0.5, "brevity": 0.25}
    assert first.kl == pytest.approx(1.0 + 2.0 - 2 * 0.5)  # the third token is a tool's
    assert (first.length, first.finish_reason, first.num_turns) == (3, "stop", 1)
    assert (second.response, second.kl, second.length) == ("", 0.0, 0)


def test_without_reference_there_is_no_kl_and_greedy_responses_are_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    commit_shard(run, 1, 0, responses=["a", "b"], rewards=[1.0, 2.0], sample_index=[0, -1])
    assert [(found.response, found.kl) for found in read_samples(run, 1).rows] == [("a", None)]


def test_of_much_data_some_shards_are_read_the_same_each_time(tmp_path):
    run = make_run(tmp_path / "run", num_shards=8)
    for shard in range(8):
        commit_shard(run, 1, shard, responses=[f"of {shard}"], rewards=[1.0])
    size = run.paths.task(Task(1, Stage.ROLLOUT, 0)).data("one").stat().st_size
    few = read_samples(run, 1, max_bytes=2 * size).rows
    assert len(few) == 2
    assert few == read_samples(run, 1, max_bytes=2 * size).rows
    (drawn,) = read_samples(run, 1, max_bytes=1).rows
    run.paths.task(Task(1, Stage.ROLLOUT, int(drawn.response.split()[-1]))).data("one").unlink()
    (other,) = read_samples(run, 1, max_bytes=1).rows
    assert other.response != drawn.response, "another shard is shown in place of one that is gone"


rewards = st.lists(st.floats(allow_infinity=False), max_size=30)
counts = st.integers(0, 6)


@given(rewards, counts, counts, counts, st.integers(0, 9))
def test_best_worst_and_some_others(values, best, worst, at_random, seed):
    samples = [sample(value, index) for index, value in enumerate(values)]
    chosen = choose(samples, best, worst, at_random, seed)
    assert chosen == choose(samples, best, worst, at_random, seed)
    assert len({found.sample_index for _, found in chosen}) == len(chosen)
    groups = {word: [found.reward for choice, found in chosen if choice is word] for word in Choice}
    numbers = sorted(value for value in values if not math.isnan(value))
    assert groups[Choice.BEST] == numbers[::-1][:best]
    assert groups[Choice.WORST] == numbers[: max(0, min(worst, len(numbers) - best))]
    left = len(values) - len(groups[Choice.BEST]) - len(groups[Choice.WORST])
    assert len(groups[Choice.RANDOM]) == min(at_random, left)


def test_what_is_drawn_depends_on_run_and_iteration(tmp_path):
    run = make_run(tmp_path / "run")
    assert sample_seed(run, 1) == sample_seed(run, 1) != sample_seed(run, 2)
