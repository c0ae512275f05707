"""From shards to the learner's matrices: every number where it belongs, and none of them in memory twice."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import experience as benchmark
from pipeline.run.commits import StaleData, publish, require_record
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import GREEDY_SAMPLE, REWARD, ROLLOUT
from pipeline.run.shards import read_shard, write_shard
from pipeline.run.tasks import Stage, Task
from stages.context import Context, UserError
from stages.ppo.experience import Experience, build_experience, padded, read_experience
from stages.training import read_shards
from tests.support.records import make_record
from tests.support.rollouts import reward_table, rollout_table

NUMBER = st.floats(-9, 0, width=32)


@st.composite
def responses(draw, num_shards: int, has_greedy: bool, has_reference: bool) -> list[list[dict]]:
    """Rows of each shard: ragged, some without a token, each greedy one after the samples of its prompt."""
    shards = []
    for shard in range(num_shards):
        rows = []
        for prompt in range(draw(st.integers(1, 3))):
            samples = [*range(draw(st.integers(1, 2))), *([GREEDY_SAMPLE] if has_greedy else [])]
            for sample in samples:
                length = draw(st.integers(0, 4))
                numbers = st.lists(NUMBER, min_size=length, max_size=length)
                has_numbers = has_reference and sample != GREEDY_SAMPLE
                rows.append(
                    {
                        "prompt_id": f"{shard}-{prompt}",
                        "sample_index": sample,
                        "prompt_tokens": draw(st.lists(st.integers(0, 99), min_size=1, max_size=3)),
                        "response_tokens": draw(
                            st.lists(st.integers(0, 99), min_size=length, max_size=length)
                        ),
                        "response_mask": draw(st.lists(st.booleans(), min_size=length, max_size=length)),
                        "rollout_logprobs": draw(numbers),
                        "finish_reason": draw(st.sampled_from(["stop", "length"])),
                        "reward": draw(NUMBER),
                        "reference_logprobs": draw(numbers) if has_numbers else None,
                    }
                )
        shards.append(rows)
    return shards


def tables(rows: list[dict]) -> tuple[pa.Table, pa.Table]:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    rewards, reference = columns.pop("reward"), columns.pop("reference_logprobs")
    rollout = rollout_table(columns.pop("response_tokens"), **columns)
    return rollout, reward_table(rollout, rewards, reference_logprobs=reference, rm=rewards)


def committed(folder, shards: list[list[dict]]) -> Context:
    """An update that has these shards to learn from."""
    paths = RunPaths(folder)
    for shard, rows in enumerate(shards):
        for stage, table in zip((Stage.ROLLOUT, Stage.REWARD), tables(rows), strict=True):
            task = Task(1, stage, shard)
            entry = write_shard(paths, paths.task(task).data("1-aa"), table)
            assert publish(paths, make_record(task, outputs=(entry,)))
    config = SimpleNamespace(rollout=SimpleNamespace(num_shards=len(shards), staleness=0))
    return Context(paths, config, Task(1, Stage.UPDATE), "1-aa")


def check(found: Experience, shards: list[list[dict]], has_greedy: bool, has_reference: bool) -> None:
    """Compare with the rows, one number after the other."""
    rows = [(s, row) for s, rows in enumerate(shards) for row in rows if row["sample_index"] >= 0]
    width = max(len(row["response_tokens"]) for _, row in rows)

    def matrix(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[name] + [0] * (width - len(row[name])) for _, row in rows], dtype=dtype)

    assert [(list(r.prompt), list(r.response)) for r in found.rows] == [
        (row["prompt_tokens"], row["response_tokens"]) for _, row in rows
    ]
    assert found.prompt_ids == [row["prompt_id"] for _, row in rows]
    assert list(found.shards) == [shard for shard, _ in rows]
    assert_same(found.mask, matrix("response_mask", torch.bool))
    assert_same(found.rollout_log_probs, matrix("rollout_logprobs", torch.float32))
    assert (found.reference_log_probs is not None) == has_reference
    if has_reference:
        assert_same(found.reference_log_probs, matrix("reference_logprobs", torch.float32))
    scores = [row["reward"] for _, row in rows]
    assert_same(found.outcome.scores, torch.tensor(scores, dtype=torch.float32))
    assert found.outcome.lengths.tolist() == [len(row["response_tokens"]) for _, row in rows]
    assert found.outcome.has_ended.tolist() == [row["finish_reason"] == "stop" for _, row in rows]
    ids = list(dict.fromkeys(found.prompt_ids))
    assert [ids[group] for group in found.groups] == found.prompt_ids
    best = {row["prompt_id"]: row["reward"] for some in shards for row in some if row["sample_index"] < 0}
    assert (found.greedy is not None) == has_greedy
    if has_greedy:
        assert found.greedy.scores.tolist() == [best[prompt_id] for prompt_id in found.prompt_ids]
    assert found.samples == [row["sample_index"] for _, row in rows]
    of_all = found.rewarded
    assert of_all.responses["finish_reason"].to_pylist() == [row["finish_reason"] for _, row in rows]
    assert_same(torch.tensor(of_all.rewards["reward/rm"].to_numpy()), found.outcome.scores)
    assert_same(of_all.outcome.scores, found.outcome.scores)
    assert_same(of_all.groups, found.groups)


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype
    assert torch.equal(one, other)


@settings(max_examples=40)
@given(
    data=st.data(),
    num_shards=st.integers(1, 3),
    has_greedy=st.booleans(),
    has_reference=st.booleans(),
    batch_bytes=st.sampled_from([1, 200, 400, 4 << 20]),
)
def test_every_number_of_any_shards_is_where_it_belongs(
    tmp_path_factory, data, num_shards, has_greedy, has_reference, batch_bytes
):
    """Read batch by batch, of which a rollout has others than its rewards, or made of whole tables."""
    shards = data.draw(responses(num_shards, has_greedy, has_reference))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.run.shards._BATCH_BYTES", batch_bytes)
        context = committed(tmp_path_factory.mktemp("run"), shards)
    check(read_experience(context, 1), shards, has_greedy, has_reference)
    together = [row for rows in shards for row in rows]
    numbers = [shard for shard, rows in enumerate(shards) for _ in rows]
    check(build_experience(*tables(together), numbers), shards, has_greedy, has_reference)


def test_an_iteration_without_a_response_is_nothing_to_learn_from(tmp_path):
    paths = RunPaths(tmp_path)
    for stage, schema in ((Stage.ROLLOUT, ROLLOUT), (Stage.REWARD, REWARD)):
        task = Task(1, stage)
        entry = write_shard(paths, paths.task(task).data("1-aa"), schema.empty_table())
        assert publish(paths, make_record(task, outputs=(entry,)))
    config = SimpleNamespace(rollout=SimpleNamespace(num_shards=1, staleness=0))
    with pytest.raises(UserError, match="iteration 1 has no response"):
        read_experience(Context(paths, config, Task(1, Stage.UPDATE), "1-aa"), 1)


@pytest.mark.parametrize("change", ["fewer", "more", "others", "none"])
def test_rewards_of_other_rows_are_stale(tmp_path, monkeypatch, change):
    """Wherever among the batches they differ."""
    monkeypatch.setattr("pipeline.run.shards._BATCH_BYTES", 300)
    paths, given = RunPaths(tmp_path), SimpleNamespace(tokens=4, letters=1)
    benchmark.commit_shard(paths, 1, 0, 40, given)
    reward = Task(1, Stage.REWARD)
    table = read_shard(paths, require_record(paths, reward), REWARD)
    changed = {
        "fewer": table.slice(0, 39),
        "more": pa.concat_tables([table, table.slice(0, 1)]),
        "others": pa.concat_tables([table.slice(0, 38), table.slice(39), table.slice(38, 1)]),
        "none": table.slice(0, 0),
    }[change]
    paths.task(reward).record.unlink()
    entry = write_shard(paths, paths.task(reward).data("1-bb"), changed)
    assert publish(paths, make_record(reward, outputs=(entry,)))
    config = SimpleNamespace(rollout=SimpleNamespace(num_shards=1, staleness=0))
    context = Context(paths, config, Task(1, Stage.UPDATE), "1-aa")
    with pytest.raises(StaleData, match="its rows are not those of the rollout shard"):
        read_experience(context, 1)
    with pytest.raises(StaleData, match="its rows are not those of the rollout shard"):
        read_shards(context, 1)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_nothing_that_is_as_long_as_the_tokens_is_in_memory_twice(tmp_path, num_shards):
    """What Python and numpy hold at most, besides Arrow's buffers, is less than 1.2 times the shards; and a
    matrix of all, which counts before it is filled, when it takes no memory yet."""
    paths, given = RunPaths(tmp_path), SimpleNamespace(tokens=3000, letters=0)
    sizes = [benchmark.commit_shard(paths, 1, shard, 200 // num_shards, given) for shard in range(num_shards)]
    config = SimpleNamespace(rollout=SimpleNamespace(num_shards=num_shards, staleness=0))
    context = Context(paths, config, Task(1, Stage.UPDATE), "1-aa")
    tracemalloc.start()
    try:
        found = read_experience(context, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 200
    assert peak < 1.2 * sum(sizes) + found.rollout_log_probs.nbytes
    buffers = {id(np.asarray(row.response).base) for row in found.rows}
    assert len(buffers) == {1: 2, 4: 4}[num_shards]  # views of one array each batch, not copies


def test_a_matrix_of_a_teacher_that_has_not_the_longest_response_is_as_wide_as_the_others():
    some = pa.chunked_array([pa.array([[1.0, 2.0], None], pa.list_(pa.float32()))])
    assert padded(some, 3).tolist() == [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    assert padded(some).tolist() == [[1.0, 2.0], [0.0, 0.0]]
