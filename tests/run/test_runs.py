"""Run directories: made by one call, whole, whoever else tries at the same time."""

import dataclasses
import multiprocessing
from pathlib import Path

import pytest

from pipeline.config.schema import Config
from pipeline.run.directory import claimed_run, create_run, load_run
from pipeline.run.identity import RunError
from tests.support import processes


@pytest.fixture
def config(inputs, tmp_path) -> Config:
    return processes.config_of(inputs, tmp_path / "run")


def other(config: Config, seed: int) -> Config:
    return dataclasses.replace(config, seed=seed)


def test_while_one_call_makes_a_run_another_is_refused(config):
    with claimed_run(config) as (run, _):
        with pytest.raises(RunError, match="already holds a run"):
            create_run(other(config, 7))
        assert load_run(run.paths.root).config == config
    assert load_run(run.paths.root).config == config


def test_a_call_that_was_killed_in_between_leaves_room_for_the_next(config):
    run = create_run(config)
    run.paths.config_yaml.unlink()
    assert load_run(create_run(other(config, 7)).paths.root).config.seed == 7


def make(config: Config, barrier, answers) -> None:
    barrier.wait(60)
    try:
        with claimed_run(config):
            answers.put(config.seed)
            barrier.wait(60)
    except RunError:
        barrier.wait(60)


def test_of_calls_at_the_same_moment_one_wins_and_its_run_is_whole(config):
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        given = dataclasses.replace(config, run_dir=str(Path(config.run_dir).with_name(f"run-{attempt}")))
        barrier, answers = context.Barrier(4), context.Queue()
        calls = [
            context.Process(target=make, args=(other(given, seed), barrier, answers)) for seed in range(4)
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join(60)
        assert [call.exitcode for call in calls] == [0] * 4
        assert load_run(Path(given.run_dir)).config.seed == answers.get(timeout=10)
        assert answers.empty()


@pytest.mark.parametrize("place", ["run/inner", "run/policy/deep/inner", "link/inner", "run/away/inner"])
def test_no_run_begins_inside_the_directory_of_another(config, tmp_path, place):
    """Also where a link leads into it, or a link in it leads away."""
    outer = create_run(config).paths.root
    (tmp_path / "link").symlink_to(outer / "logs")
    (tmp_path / "elsewhere").mkdir()
    (outer / "away").symlink_to(tmp_path / "elsewhere")
    (outer / "logs").mkdir(exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        RunError, match=f"lies inside the directory of another run, {outer}; choose"
    ) as refused:
        create_run(dataclasses.replace(config, run_dir=str(tmp_path / place)))
    assert str(outer.with_name("inner")) in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_beside_a_run_another_begins(config, tmp_path):
    create_run(config)
    beside = create_run(dataclasses.replace(config, run_dir=str(tmp_path / "beside/run")))
    assert beside.paths.run_json.exists()
