"""A bit that flips in a file of a run gives one clear line, or changes nothing: never another result.

With SOAK_ROUNDS=20, as `make soak` has it, 400 bits of each file are tried instead of 20.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.run.commits import CorruptData, read_record
from pipeline.run.directory import load_run
from pipeline.run.identity import RunError
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import PROMPTS, REWARD, ROLLOUT
from pipeline.run.shards import LISTING
from pipeline.run.tasks import PREPARE, Stage, Task
from stages.context import Context
from tests.support import tiny

TRIALS = 20 * int(os.environ.get("SOAK_ROUNDS", "1"))
ROLLED_OUT, REWARDED = Task(1, Stage.ROLLOUT, 0), Task(1, Stage.REWARD, 0)


@pytest.fixture(scope="module")
def run(slurm_ppo, inputs, tmp_path_factory) -> Path:
    """A run whose prompts have columns of text and of objects, which shards hold once for all samples."""
    folder = tmp_path_factory.mktemp("flipped")
    rows = [
        {"id": f"p{i}", "prompt": f"say {i}", "gold": "x" * i, "more": {"of": ["a", str(i)]}}
        for i in range(8)
    ]
    prompts = f"data.prompts={tiny.write_jsonl(folder / 'prompts.jsonl', rows)}"
    rule = "+reward.components.short={kind: rule, function: length_penalty, arguments: {limit: 9, buffer: 3}}"
    done = slurm_ppo("run", *tiny.overrides(inputs, folder / "run", prompts, rule, "iterations=1"))
    assert done.returncode == 0, done.stderr
    RunPaths(folder / "run").run_copy.unlink()  # which would be read instead of a spoilt run.json
    return folder / "run"


def context_of(root: Path) -> Context:
    run = load_run(root)
    return Context(run.paths, run.config, ROLLED_OUT, "test")


def date_of(root: Path) -> Any:
    """The run's identity, and the time that chat templates are told."""
    return load_run(root).identity, context_of(root).rendering


READERS: dict[str, tuple[Callable[[RunPaths], Path], Callable[[Path], Any]]] = {
    "the run's date": (lambda paths: paths.run_json, date_of),
    "its configuration": (lambda paths: paths.config_yaml, lambda root: load_run(root).config),
    "prepare's record": (
        lambda paths: paths.task(PREPARE).record,
        lambda root: read_record(RunPaths(root), PREPARE),
    ),
    "a rule's record": (
        lambda paths: paths.task(REWARDED).record,
        lambda root: read_record(RunPaths(root), REWARDED),
    ),
    "prompts": (
        lambda paths: file_of(paths, PREPARE),
        lambda root: context_of(root).rows(PREPARE, PROMPTS, range(8)),
    ),
    "the listing of prompts": (
        lambda paths: file_of(paths, PREPARE, LISTING, "json"),
        lambda root: context_of(root).rows(PREPARE, PROMPTS, range(8)),
    ),
    "normalization": (
        lambda paths: file_of(paths, PREPARE, "normalization", "json"),
        lambda root: context_of(root).json(PREPARE, "normalization"),
    ),
    "responses": (
        lambda paths: file_of(paths, ROLLED_OUT),
        lambda root: context_of(root).table(ROLLED_OUT, ROLLOUT),
    ),
    "rewards": (
        lambda paths: file_of(paths, REWARDED),
        lambda root: context_of(root).table(REWARDED, REWARD),
    ),
}


def file_of(paths: RunPaths, task: Task, part: str = "", suffix: str = "arrow") -> Path:
    record = read_record(paths, task)
    assert record
    return paths.root / record.output(part, suffix).path


def assert_one_line(text: str) -> None:
    assert "\n" not in text


def test_shards_hold_the_columns_of_prompts_once(run):
    table = context_of(run).table(ROLLED_OUT, ROLLOUT)
    assert pa.types.is_dictionary(table["gold"].type)


@pytest.mark.soak
@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_is_one_line_or_nothing(name, run):
    find, reader = READERS[name]
    path, expected = find(RunPaths(run)), reader(run)
    good, draw, told = path.read_bytes(), random.Random(30), 0
    try:
        for _ in range(TRIALS):
            bad = bytearray(good)
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
            path.write_bytes(bad)
            try:
                assert reader(run) == expected
            except (CorruptData, RunError) as error:
                assert_one_line(str(error))
                told += 1
    finally:
        path.write_bytes(good)
    assert told > TRIALS / 2
