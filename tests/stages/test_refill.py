"""Which groups an update learns from and which wait: for any division into shards, any rewards, any order."""

import dataclasses
import functools
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.noop import make_record
from pipeline.config.schema import Config
from pipeline.run.commits import CorruptData, hash_file, publish
from pipeline.run.directory import Run
from pipeline.run.paths import CARRIED_PART
from pipeline.run.plan import policy_maker
from pipeline.run.schemas import CARRIED
from pipeline.run.shards import write_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from stages.context import Context
from stages.ppo.experience import Experience
from stages.ppo.math.shaping import RunningMoments
from stages.ppo.refill import (
    Candidates,
    Intake,
    candidates_of,
    joined,
    pick,
    read_intake,
    refilled,
    save_spare,
    table_of,
)
from stages.ppo.state.learned import PART, Learned, Machine, TrainerState
from tests.support.damage import flip_bit
from tests.support.learning import experience
from tests.support.processes import config_of, make_run
from tests.support.rollouts import reward_table, rollout_table

GROUPS = (
    "algorithm=grpo",
    "algorithm.shaping.filter_groups=true",
    "algorithm.correction.level=token",
    "rollout.samples_per_prompt=2",
    "rollout.oversample=2",
)


@pytest.fixture(scope="module")
def config(models, tmp_path_factory) -> Config:
    return config_of(
        models, tmp_path_factory.mktemp("config") / "run", *GROUPS, "data.prompts_per_iteration=2"
    )


origins = st.lists(st.integers(1, 6), max_size=12)


@settings(max_examples=300, deadline=None)
@given(origins, st.integers(1, 5), st.integers(0, 2))
def test_each_group_is_taken_waits_or_is_dropped_and_none_waits_too_long(found, wanted, carry):
    iteration = 6
    of_group = dict(enumerate(sorted(found, key=lambda one: (one != iteration, one))))
    picked = pick(of_group, iteration, wanted, carry)
    parts = [*picked.taken, *picked.spare, *picked.dropped]
    assert sorted(parts) == sorted(of_group)
    assert list(picked.taken) == list(of_group)[:wanted], "in order, as many as there are"
    assert len(picked.spare) <= wanted
    ages = [iteration + 1 - of_group[group] for group in picked.spare]
    assert all(age <= carry for age in ages), "when the next update takes it"
    assert ages == sorted(ages, reverse=True), "the oldest first"
    if picked.dropped and len(picked.spare) < wanted:
        assert all(iteration + 1 - of_group[group] > carry for group in picked.dropped)


def candidates(rewards: list[float], iteration: int) -> Candidates:
    own = experience(rows=len(rewards), samples=2, rewards=rewards)
    return Candidates(own, [iteration] * len(own))


def names(one: Candidates) -> list[tuple[int, str, int]]:
    return list(zip(one.origins, one.experience.prompt_ids, one.experience.samples, strict=True))


def intake(config: Config, given: Candidates, iteration: int) -> Intake:
    return refilled(config, given, iteration, RunningMoments())


FLAT, MIXED = [0.5, 0.5], [0.0, 1.0]


def test_an_update_takes_its_own_first_then_those_that_waited_of_the_same_prompts_too(config):
    """The third prompt of both iterations is one prompt, and two groups."""
    waited = intake(config, candidates(FLAT + MIXED + MIXED + MIXED, 1), 1)
    assert waited.experience.prompt_ids == ["p1", "p1", "p2", "p2"]
    assert names(waited.spare) == [(1, "p3", 0), (1, "p3", 1)]
    later = joined(
        candidates(FLAT + FLAT + FLAT + MIXED, 2),
        candidates_of(table_of(waited.spare), waited.experience.rewarded),
    )
    found = intake(config, later, 2)
    assert found.experience.prompt_ids == ["p3"] * 4
    assert found.experience.groups.tolist() == [0, 0, 1, 1]
    assert found.metrics["refill/carried"] == found.metrics["refill/taken"] - 1 == 1
    assert found.metrics["refill/flat"] == 3
    assert found.metrics["refill/missing"] == 0
    assert found.metrics["reward/discarded"] == 6
    assert found.scores.tolist() == FLAT * 3 + MIXED, "moments are of the iteration's own rewards, each once"


def test_what_is_still_missing_makes_a_smaller_update_down_to_none(config):
    some = intake(config, candidates(FLAT + MIXED + FLAT + FLAT, 1), 1)
    assert (some.metrics["refill/taken"], some.metrics["refill/missing"]) == (1, 1)
    none = intake(config, candidates(FLAT * 4, 1), 1)
    assert len(none.experience) == 0
    assert none.metrics["refill/missing"] == 2
    assert none.spare is not None
    assert table_of(none.spare).num_rows == 0


@pytest.mark.parametrize("top_k", [None, 2])
def test_a_group_that_waited_is_what_it_was_to_the_bit(top_k):
    given = candidates(MIXED * 4, 1)
    if top_k:
        given = dataclasses.replace(given, experience=with_likeliest(given.experience, top_k))
    again = candidates_of(table_of(given), given.experience.rewarded)
    assert names(again) == names(given)
    for field in dataclasses.fields(given.experience):
        before, after = (getattr(one.experience, field.name) for one in (given, again))
        if isinstance(before, torch.Tensor):
            assert torch.equal(before, after), field.name
        if field.name == "rows":
            tokens = [[(list(row.prompt), list(row.response)) for row in rows] for rows in (before, after)]
            assert tokens[0] == tokens[1]
    assert torch.equal(again.experience.outcome.scores, given.experience.outcome.scores)
    assert torch.equal(again.experience.outcome.has_ended, given.experience.outcome.has_ended)


def with_likeliest(given: Experience, top_k: int) -> Experience:
    """Teachers' likeliest tokens at each place, zeros after a response's end."""
    numbers = torch.arange(given.mask.numel() * top_k, dtype=torch.int32).view(*given.mask.shape, top_k)
    ids = torch.where(given.mask.unsqueeze(2), numbers + 1, 0)
    return dataclasses.replace(given, teacher_top_tokens=ids, teacher_top_log_probs=-ids.float())


# --- files: updates of one run, whatever its shards ---


def commit(run: Run, iteration: int, rewards: list[float]) -> None:
    """Commit an iteration's responses, two to a prompt, dealt to shards in their order."""
    draw = torch.Generator().manual_seed(iteration)
    tokens = [torch.randint(2, 258, (3 + i % 5,), generator=draw).tolist() for i in range(len(rewards))]
    rollout = rollout_table(
        tokens,
        prompt_id=[f"{iteration}-{i // 2}" for i in range(len(rewards))],
        sample_index=[i % 2 for i in range(len(rewards))],
        rollout_logprobs=[[-token / 99 for token in row] for row in tokens],
    )
    reward = reward_table(rollout, rewards, rm=rewards, reference_logprobs=[[-1.0] * len(r) for r in tokens])
    size = len(rewards) // run.plan.num_shards
    for shard in range(run.plan.num_shards):
        for stage, table in ((Stage.ROLLOUT, rollout), (Stage.REWARD, reward)):
            task = Task(iteration, stage, shard)
            entry = write_shard(
                run.paths, run.paths.task(task).data("1-noop"), table.slice(shard * size, size)
            )
            assert publish(run.paths, replace(make_record(task), outputs=(entry,), rows=size))


def learn(run: Run, iteration: int) -> tuple[Intake, pa.Table]:
    """Commit an update that learns nothing from what it takes. Returns that, and what is left for later."""
    task = policy_maker(iteration)
    context = Context(run.paths, run.config, task, "1-noop")
    intake = read_intake(context, iteration)
    state = TrainerState(iteration, 0.05, 0, RunningMoments(), 0)
    learned = Learned(state, (), 0, 0, False, {}, Machine(1, 0, 1, "cpu", {}))
    path = context.files.data("1-noop", PART, "json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(learned.to_json())
    outputs = (hash_file(run.paths, path), *save_spare(context, intake))
    assert publish(run.paths, replace(make_record(task), outputs=outputs))
    return intake, context.table(task, CARRIED, CARRIED_PART)


REWARDS = [
    MIXED + FLAT + MIXED + MIXED + MIXED + FLAT + MIXED + MIXED,
    FLAT * 4 + MIXED + FLAT * 3,
    FLAT * 2 + MIXED + FLAT * 3 + MIXED + MIXED,
]
"""Of three iterations of eight prompts, of which an update takes four."""


@pytest.fixture(scope="module")
def updates(models, tmp_path_factory):
    """What three updates take and leave, by the number of shards."""

    def make(shards: int) -> tuple[Run, list[tuple[Intake, pa.Table]]]:
        more = (*GROUPS, "data.prompts_per_iteration=4", f"rollout.num_shards={shards}", "iterations=3")
        run = make_run(models, tmp_path_factory.mktemp("run") / "run", *more)
        assert publish(run.paths, make_record(PREPARE))
        for iteration, rewards in enumerate(REWARDS, 1):
            commit(run, iteration, rewards)
        return run, [learn(run, iteration) for iteration in (1, 2, 3)]

    return functools.cache(make)


def test_a_full_update_is_made_of_groups_that_waited_until_they_are_too_old(updates):
    _, found = updates(1)
    assert [list(dict.fromkeys(one.experience.prompt_ids)) for one, _ in found] == [
        ["1-0", "1-2", "1-3", "1-4"],
        ["2-4", "1-6", "1-7"],
        ["3-2", "3-6", "3-7"],
    ]
    assert [left["prompt_id"].to_pylist() for _, left in found] == [["1-6"] * 2 + ["1-7"] * 2, [], []]
    assert [one.metrics["refill/missing"] for one, _ in found] == [0, 1, 1]


@pytest.mark.parametrize("shards", [2, 4])
def test_the_same_groups_are_learned_from_however_they_are_divided_into_shards(updates, shards):
    for (one, left), (other, right) in zip(updates(1)[1], updates(shards)[1], strict=True):
        assert one.metrics == other.metrics
        assert left.drop_columns(["shard"]).equals(right.drop_columns(["shard"]))
        taken = (Candidates(each.experience, [0] * len(each.experience)) for each in (one, other))
        tables = [table_of(one).drop_columns(["shard"]) for one in taken]
        assert tables[0].equals(tables[1])
        assert torch.equal(one.experience.groups, other.experience.groups)


def test_a_file_of_groups_with_a_flipped_bit_is_noticed_and_names_the_update_that_wrote_it(updates):
    run, _ = updates(4)
    (path,) = run.paths.task(policy_maker(1)).folder.glob(f"*.{CARRIED_PART}.*")
    flip_bit(path)
    with pytest.raises(CorruptData) as caught:
        read_intake(Context(run.paths, run.config, policy_maker(2), "2-x"), 2)
    assert caught.value.task == policy_maker(1)
    flip_bit(path)  # back again
