"""A number is the same wherever one looks: metrics.jsonl, report, status, W&B's server."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pipeline.metrics.catalogue import SAMPLE_TABLE
from pipeline.metrics.responses import Selection, read_samples
from pipeline.metrics.terminal import COLUMNS, cells
from pipeline.report.page import MORE_COLUMNS
from pipeline.run import journal
from pipeline.run.commits import require_record
from pipeline.run.directory import Run, load_run
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import PREPARE
from tests.support import tiny
from tests.support.reports import data_of
from tests.support.wandb_server import WandbServer

ITERATIONS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        yield server


@pytest.fixture(scope="module")
def run(inputs, slurm_ppo, server, environment, tmp_path_factory) -> Run:
    """A run that W&B follows offline, with tables of the first and the last iteration."""
    root = tmp_path_factory.mktemp("tracked") / "run"
    heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=2")
    tracked = ("tracking=wandb", "tracking.wandb.mode=offline", f"iterations={ITERATIONS}")
    done = slurm_ppo(
        "run",
        *tiny.overrides(inputs, root),
        *heldout,
        *tracked,
        env=environment | {"WANDB_BASE_URL": server.url},
    )
    assert done.returncode == 0, done.stderr
    return load_run(root)


@pytest.fixture(scope="module")
def rows(run) -> list[dict[str, float]]:
    rows = journal.read(run.paths.metrics)
    assert len(rows) == ITERATIONS
    return rows


def numbers(item: Mapping[str, Any]) -> dict[str, float]:
    """Of a row of W&B's: what is ours, and no table."""
    return {k: v for k, v in item.items() if not k.startswith(("_", SAMPLE_TABLE))}


@pytest.fixture(scope="module")
def report(run, slurm_ppo) -> str:
    done = slurm_ppo("report", run.paths.root)
    assert done.returncode == 0, done.stderr
    return run.paths.report.read_text()


def curves(report: str) -> Iterator[tuple[str, dict[int, float]]]:
    """Names and points of what the report's charts draw of single numbers."""
    for figure in data_of(report, "figures").values():
        for trace in figure["data"]:
            if "/" in trace.get("name", ""):
                yield trace["name"], dict(zip(trace["x"], trace["y"], strict=True))


def tables_of(server: WandbServer) -> dict[int, list[dict[str, Any]]]:
    """The tables of W&B's server, by iteration."""
    files = [
        json.loads(f) for a in server.artifacts.values() for n, f in a["files"].items() if ".table." in n
    ]
    read = [[dict(zip(table["columns"], row, strict=True)) for row in table["data"]] for table in files]
    return {table[0]["iteration"]: table for table in read}


def test_wandbs_server(run, rows, slurm_ppo, server, environment):
    done = slurm_ppo("sync", run.paths.root, env=environment | server.environment)
    assert done.returncode == 0, done.stderr
    assert [numbers(item) for item in server.rows(run.identity.id)] == rows


def test_status(run, rows, slurm_ppo):
    assert json.loads(slurm_ppo("status", run.paths.root, "--json").stdout)["last_row"] == rows[-1]
    assert f"reward {rows[-1]['reward/mean']:+.4f}" in slurm_ppo("status", run.paths.root).stdout


def test_the_reports_figures(run, rows, report):
    """They draw the numbers of metrics.jsonl, to six significant digits."""
    drawn = dict(curves(report))
    for name in set(drawn) & rows[0].keys():
        assert drawn[name] == {row["iteration"]: float(f"{row[name]:.6g}") for row in rows}
    assert {"objective/kl", "policy/entropy", "policy/grad_norm", "response_length/mean"} <= drawn.keys()


def test_the_reports_table(rows, report):
    columns = [c for c in (*COLUMNS, *MORE_COLUMNS) if any(c.value(row) is not None for row in rows)]
    wanted = [cells(row, columns) for row in reversed(rows)]
    shown = re.findall(r"<tr>((?:<td[^>]*>[^<]*</td>)+)</tr>", report)
    read = [re.findall(r"<td[^>]*>([^<]*)</td>", line) for line in shown]
    assert [line for line in read if len(line) == len(columns)][: len(rows)] == wanted


def test_wandbs_table_of_responses(run, server):
    """Of the first and the last iteration: the responses that the report's browser may choose from."""
    tables = tables_of(server)
    assert sorted(tables) == [1, ITERATIONS]
    for iteration, table in tables.items():
        found = read_samples(run, iteration, Selection(best=4, worst=4, at_random=8))
        chosen = zip(found.choices, found.rows, strict=True)
        wanted = [(str(choice), s.response, s.reward, s.components["rm"], s.kl) for choice, s in chosen]
        names = ("chosen", "response", "reward", "reward/rm", "kl")
        assert [tuple(row[name] for name in names) for row in table] == wanted


def test_the_report_says_that_the_run_is_complete(report):
    assert "The run is complete." in report


def test_an_iteration_lasts_from_the_policy_before_or_its_first_task_to_its_own_policy(run, rows):
    ended = require_record(run.paths, PREPARE).ended
    for row in rows:
        tasks = run.plan.tasks(row["iteration"])
        started = min(require_record(run.paths, task).started for task in tasks)
        end = require_record(run.paths, policy_maker(row["iteration"])).ended
        assert row["seconds/iteration"] == pytest.approx(end - max(ended, started), abs=1e-6)
        assert started != ended
        ended = end
