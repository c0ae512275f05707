"""A number is the same wherever one looks: metrics.jsonl, the report, status, W&B's files and W&B's server."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
from test_report import embedded
from test_tracking import iterations_by_segment, segments
from wandb_server import WandbServer

from pipeline import journal
from pipeline.charts import CHARTS, figure
from pipeline.metrics import SAMPLE_TABLE
from pipeline.runs import Run, load_run
from pipeline.samples import choose, read_samples, sample_seed

ITERATIONS = 3


@pytest.fixture(scope="module")
def run(inputs, slurm_ppo, tmp_path_factory) -> Run:
    """A run that W&B follows offline, with tables of the first and the last iteration."""
    root = tmp_path_factory.mktemp("tracked") / "run"
    heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=2")
    tracked = ("tracking=wandb", "tracking.wandb.mode=offline", f"iterations={ITERATIONS}")
    done = slurm_ppo("run", *tiny.overrides(inputs, root), *heldout, *tracked)
    assert done.returncode == 0, done.stderr
    return load_run(root)


@pytest.fixture(scope="module")
def rows(run) -> list[dict[str, float]]:
    rows = journal.read(run.paths.metrics)
    assert len(rows) == ITERATIONS
    return rows


@pytest.fixture(scope="module")
def items(run) -> list[dict[str, Any]]:
    """W&B's rows, offline."""
    return [r["history"]["item"] for rs in segments(run) for r in rs if r["type"] == "history"]


def numbers(item: Mapping[str, Any]) -> dict[str, float]:
    """Of a row of W&B's: what is ours, and no table."""
    return {k: v for k, v in item.items() if not k.startswith(("_", SAMPLE_TABLE))}


def test_wandbs_files(items, rows):
    assert [numbers(item) for item in items] == rows


def test_wandbs_server(run, rows, slurm_ppo, environment):
    with WandbServer() as server:
        done = slurm_ppo("sync", run.paths.root, env=environment | server.environment)
        assert done.returncode == 0, done.stderr
        assert [numbers(item) for item in server.rows(run.identity.id)] == rows


def test_status(run, rows, slurm_ppo):
    assert json.loads(slurm_ppo("status", run.paths.root, "--json").stdout)["last_row"] == rows[-1]
    assert f"reward {rows[-1]['reward/mean']:+.4f}" in slurm_ppo("status", run.paths.root).stdout
