"""Prompts that scored too low or too high are left out of the next epochs (data.band)."""

import dataclasses
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.reward import RewardConfig
from pipeline.config.schema import BandConfig, Config, DataConfig, ModelConfig
from pipeline.data.band import Standing, band_warnings, outside, standing_after
from pipeline.data.sampler import deal, portions
from pipeline.run.commits import read_record
from pipeline.run.directory import load_run
from pipeline.run.paths import BAND_PART
from pipeline.run.plan import policy_maker
from pipeline.run.schemas import BAND, ROLLOUT
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task
from tests.support import tiny
from tests.support.damage import flip_bit
from tests.support.killing import run_killed_once
from tests.support.light import write_jsonl
from tests.support.tables import sample

RULES = """
from zlib import crc32

def by_level(*, responses, level, **columns):
    return [x if x != 0.5 else 0.2 + 0.6 * (crc32(r.encode()) % 97 / 97) for r, x in zip(responses, level)]
"""
LEVELS = {"hard": 0.0, "mid": 0.5, "easy": 1.0}
ITERATIONS = range(1, 10)
SETTINGS = (
    "reward=rule",
    "reward.components.rule.function=band_rules:by_level",
    "data.prompts_per_iteration=4",
    "data.band={lowest: 0.1, highest: 0.9}",
    "algorithm.correction.level=token",
    f"iterations={len(ITERATIONS)}",
)
"""An epoch of twelve prompts is three iterations."""


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    folder = tmp_path_factory.mktemp("band")
    (folder / "band_rules.py").write_text(RULES)
    levels = [(level, i) for i in range(4) for level in LEVELS]
    rows = [{"id": f"{level}-{i}", "prompt": f"{level} {i}", "level": LEVELS[level]} for level, i in levels]
    write_jsonl(folder / "levels.jsonl", rows)
    return folder


def words(inputs, room, run_dir, *more):
    return tiny.overrides(inputs, run_dir, f"data.prompts={room / 'levels.jsonl'}", *SETTINGS, *more)


def dealt(run_dir, iteration):
    """Ids of the prompts of an iteration, in order."""
    run, seen = load_run(run_dir), []
    for shard in range(run.config.rollout.num_shards):
        record = read_record(run.paths, Task(iteration, Stage.ROLLOUT, shard))
        seen += dict.fromkeys(read_shard(run.paths, record, ROLLOUT)["prompt_id"].to_pylist())
    assert len(set(seen)) == 4
    return seen


def band_of(run_dir, version):
    run = load_run(run_dir)
    return read_shard(run.paths, read_record(run.paths, policy_maker(version)), BAND, BAND_PART).to_pylist()


def assert_same(run_dir, other):
    for iteration in ITERATIONS:
        assert dealt(run_dir, iteration) == dealt(other, iteration)
        assert band_of(run_dir, iteration) == band_of(other, iteration)
    last = f"policy/{len(ITERATIONS):05d}/model.safetensors"
    assert (run_dir / last).read_bytes() == (other / last).read_bytes()


@pytest.fixture(scope="module")
def whole(inputs, slurm_ppo, room):
    """A run that nothing has disturbed: tests copy it and must not change it."""
    run_dir = room / "whole"
    done = slurm_ppo("run", *words(inputs, room, run_dir), cwd=room)
    assert done.returncode == 0, done.stderr
    return run_dir


def test_an_epoch_leaves_out_the_too_hard_and_the_too_easy_and_the_one_after_tries_them_again(whole):
    epochs = [[dealt(whole, iteration) for iteration in ITERATIONS[i : i + 3]] for i in (0, 3, 6)]
    for epoch in (epochs[0], epochs[2]):
        assert len({prompt for prompts in epoch for prompt in prompts}) == 12
    assert all(prompt.startswith("mid") for prompts in epochs[1] for prompt in prompts)
    assert len(set(map(tuple, epochs[1]))) > 1, "each round has an order of its own"
    out = [sum(row["is_out"] for row in band_of(whole, version)) for version in ITERATIONS]
    assert out == [0, 0, 8, 8, 8, 0, 0, 0, 8]
    rows = load_run(whole).paths.root.joinpath("metrics.jsonl").read_text()
    assert rows.count('"epoch_left_out": 8') == 3
    (row,) = [row for row in band_of(whole, 3) if row["epoch"] == 0 and row["prompt_index"] == 0]
    assert row == {"prompt_index": 0, "epoch": 0, "mean_reward": 0.0, "is_out": True}


POINTS = [
    "after-link:iterations/00003/update/shard-00000.json",
    "before-link:iterations/00004/rollout/shard-00001.json",
    "before-fsync:iterations/00005/update/shard-00000.band",
    "before-link:iterations/00006/update/shard-00000.json",
    "driver:31",
]


@pytest.mark.parametrize("point", sample(POINTS, 1 / len(POINTS)))
def test_killed_and_resumed_the_same_prompts_are_dealt(
    point, inputs, room, whole, slurm_ppo, environment, tmp_path
):
    run_killed_once(slurm_ppo, words(inputs, room, tmp_path / "run"), point, environment, room, tmp_path)
    assert_same(tmp_path / "run", whole)


DAMAGES = ["bit", "absent", "back"]


@pytest.mark.parametrize("damage", sample(DAMAGES, 1 / len(DAMAGES)))
def test_going_back_and_a_damaged_table_end_in_the_same_prompts(damage, whole, room, slurm_ppo, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir, symlinks=True)
    (path,) = (run_dir / "iterations/00003/update").glob("*.band.*")
    if damage == "bit":
        flip_bit(path)
    elif damage == "absent":
        path.unlink()
    done = slurm_ppo("resume", run_dir, "--from", "rollout@4", cwd=room)
    assert done.returncode == 0, done.stderr
    assert_same(run_dir, whole)


def test_with_older_policies_and_in_a_fork_an_epoch_goes_by_what_is_committed_then(
    inputs, room, slurm_ppo, tmp_path
):
    run_dir, fork = tmp_path / "run", tmp_path / "fork"
    done = slurm_ppo("run", *words(inputs, room, run_dir, "rollout.staleness=1"), cwd=room)
    assert done.returncode == 0, done.stderr
    unknown = set(dealt(run_dir, 3))  # whose scores came after iteration 4 was dealt
    for iteration in (4, 5, 6):
        assert all(prompt.startswith("mid") or prompt in unknown for prompt in dealt(run_dir, iteration))
    assert [row["is_out"] for row in band_of(run_dir, 2)].count(True) == len(
        {one for k in (1, 2) for one in dealt(run_dir, k) if not one.startswith("mid")}
    )
    done = slurm_ppo("fork", f"{run_dir}@4", fork, "iterations=6", cwd=room)
    assert done.returncode == 0, done.stderr
    done = slurm_ppo("resume", fork, cwd=room)
    assert done.returncode == 0, done.stderr
    assert not list(fork.glob("iterations/00004/update/*.band.*"))
    assert len(band_of(fork, 5)) == 4


def test_a_band_upside_down_is_refused_and_one_that_comes_too_late_is_said(inputs, room, slurm_ppo, tmp_path):
    given = words(inputs, room, tmp_path / "run", "iterations=3")
    done = slurm_ppo("validate", *given, "data.band.lowest=0.95", cwd=room)
    assert done.returncode == 2
    assert "data.band.lowest=0.95: must be at most data.band.highest=0.9" in done.stderr
    done = slurm_ppo("validate", *given, cwd=room)
    assert done.returncode == 0, done.stderr
    assert "warning: data.band leaves no prompt out: the first epoch, which has all, takes 3 " in done.stdout


@pytest.mark.parametrize(
    ("more", "counts", "longest"),
    [({}, {"a": 9, "b": 3}, 3), ({"weights": {"a": 3, "b": 1}}, {"a": 9, "b": 5}, 3), ({}, {"": 19}, 4)],
)
def test_a_run_is_too_short_for_a_band_up_to_the_shortest_epoch_of_its_files(more, counts, longest):
    for iterations in (longest, longest + 1):
        data = DataConfig(prompts_per_iteration=4, band=BandConfig(lowest=0.1), **more)
        model, reward = ModelConfig(policy="p"), RewardConfig(components={})
        config = Config(model=model, reward=reward, data=data, iterations=iterations)
        assert bool(list(band_warnings(config, counts))) == (iterations == longest)
        without = dataclasses.replace(config, data=dataclasses.replace(data, band=BandConfig()))
        assert not list(band_warnings(without, counts))


# --- the arithmetic ----------------------------------------------------------------------------------------


@st.composite
def standings(draw):
    number = draw(st.integers(1, 30))
    epochs = draw(st.lists(st.integers(-1, 5), min_size=number, max_size=number))
    rewards = draw(st.lists(st.floats(-1, 1), min_size=number, max_size=number))
    rewards = [np.nan if epoch < 0 else reward for epoch, reward in zip(epochs, rewards, strict=True)]
    return Standing(np.array(epochs), np.array(rewards), np.zeros(number, dtype=bool))


@given(standings(), st.integers(0, 6), st.floats(-1, 0), st.floats(0, 1), st.integers(1, 3), st.data())
def test_those_outside_the_band_rest_and_enough_stay(found, later, lowest, highest, rest, data):
    least = data.draw(st.integers(1, len(found.epochs)))
    epoch, band = max(found.epochs) + later, BandConfig(lowest=lowest, highest=highest, rest=rest)
    out = outside(found.epochs, found.rewards, epoch, least, band)
    assert np.count_nonzero(~out) >= least
    far = np.maximum(lowest - found.rewards, found.rewards - highest)
    may_rest = (found.epochs >= 0) & (epoch - found.epochs <= rest) & (far > 0)
    assert not (out & ~may_rest).any()
    if np.count_nonzero(~may_rest) >= least:
        assert (out == may_rest).all()
    elif out.any():
        assert far[out].min() >= far[may_rest & ~out].max(), "the nearest stay"
        assert np.count_nonzero(~out) == least


@given(standings())
def test_a_table_holds_what_is_known(found):
    read = Standing.of(found.table(), len(found.epochs))
    for name, values in vars(found).items():
        np.testing.assert_array_equal(vars(read)[name], values)


@given(st.integers(0, 2**40), st.integers(1, 12), st.booleans(), st.data())
def test_a_shortened_epoch_is_as_long_and_deals_its_prompts_equally_often(seed, size, shuffle, data):
    number = data.draw(st.integers(size, 40))
    left_out = np.array(sorted(data.draw(st.sets(st.integers(0, number - 1), max_size=number - size))))
    turns = number // size
    counts = np.zeros(number, dtype=int)
    for iteration in range(turns + 1, 2 * turns + 1):
        given = {"iteration": iteration, "prompts_per_iteration": size, "num_shards": 1, "shard": 0}
        found = deal(number, **given, seed=seed, shuffle=shuffle, left_out=left_out.astype(np.int64))
        assert found.epoch == 1
        assert len(set(found.indices)) == size
        counts[list(found.indices)] += 1
    assert not counts[left_out.astype(int)].any()
    rounds = -(-turns // ((number - len(left_out)) // size))
    assert counts.max() <= rounds


def test_each_file_has_epochs_of_its_own():
    parts = portions([("short", 4), ("long", 8)], {"short": 2, "long": 2})
    known = Standing(np.full(12, -1), np.full(12, np.nan), np.zeros(12, dtype=bool))
    band = BandConfig(lowest=0.5)
    first = standing_after(known, {0: 0.0, 1: 1.0, 4: 0.0, 5: 1.0}, 1, 2, parts, band)
    assert not first.left_out.size, "no epoch begins with iteration 2"
    second = standing_after(first, {2: 1.0, 3: 1.0, 6: 0.0, 7: 1.0}, 2, 3, parts, band)
    assert second.left_out.tolist() == [0], "one of the short file does, not of the long one"
    fourth = standing_after(second, {1: 1.0, 2: 1.0}, 4, 5, parts, band)
    assert fourth.left_out.tolist() == [4, 6]
