"""The code of the page on engines of one's own: a run with its engine and trainer, and its other blocks."""

import math

import pyarrow as pa
import pytest

from pipeline.run.commits import read_record
from pipeline.run.directory import load_run
from pipeline.run.schemas import ROLLOUT
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task
from stages.engines import base
from tests.support import documented, tiny

BLOCKS = [b for b in documented.blocks(documented.DOCS / "howto/own_engine.md") if b.language == "python"]
WORDS = ("rollout.engine=my_engine:make_generator", "update.engine=my_trainer:make_trainer")


def values_of(rows: pa.Table, column: str) -> list[float]:
    return rows.column(column).combine_chunks().flatten().to_pylist()


def test_a_run_with_the_pages_engine_and_trainer_ends_in_policies(inputs, slurm_ppo, tmp_path):
    for block in BLOCKS:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    done = slurm_ppo("run", *tiny.overrides(inputs, tmp_path / "run"), *WORDS, "iterations=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    rows = read_shard(run.paths, read_record(run.paths, Task(1, Stage.ROLLOUT, 0)), ROLLOUT)
    tokens, (log_prob, *others) = (values_of(rows, name) for name in ("response_tokens", "rollout_logprobs"))
    assert max(tokens) < round(math.exp(-log_prob))
    assert set(others) == {log_prob}
    weights = "model.safetensors"
    assert (run.paths.policies / "00001" / weights).read_bytes() == (inputs / "policy" / weights).read_bytes()


@pytest.mark.parametrize("block", [b for b in BLOCKS if not b.file], ids=lambda block: block.where)
def test_other_blocks_define_what_an_engine_may_have(block):
    names = {"Generator": base.Generator}
    exec(block.text, names)
    mine = names.get("MyGenerator", base.Generator)
    assert {name for name in vars(mine) if name[0] != "_"} <= set(vars(base.Generator))
