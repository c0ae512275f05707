"""Dashboards as code: one workspace a project, made of the tables that rows and report are made of."""

import copy
import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from inspect import signature
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wandb_workspaces.workspaces import Workspace
from wandb_workspaces.workspaces.internal import View, WorkspaceViewspec

from pipeline.metrics.catalogue import CHARTS, METRICS, SAMPLE_TABLE, Section, describe
from pipeline.run.directory import load_run
from pipeline.tracking.client import MEASURED_STEP
from pipeline.tracking.push import target_of
from pipeline.tracking.workspace import (
    NOT_SHOWN,
    SAMPLES,
    Panel,
    build,
    is_ours,
    merged,
    panels,
    pinned,
    sections_of,
)
from tests.support import ROOT
from tests.support.wandb_server import KEY, StoredRun, WandbServer

GOLDEN = ROOT / "tests/golden/dashboard.json"
"""Written anew by DASHBOARD_GOLDEN=1."""


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        yield server


@pytest.fixture
def shell(server: WandbServer, environment: dict[str, str], tmp_path: Path) -> dict[str, object]:
    """Of a user with a key, whose home and working directory are empty."""
    (tmp_path / "home").mkdir()
    (tmp_path / "cwd").mkdir()
    env = environment | server.environment | {"HOME": str(tmp_path / "home")}
    return {"env": env | {"PYTHONPATH": str(Path.cwd())}, "cwd": tmp_path / "cwd"}


def make_project(server: WandbServer, name: str = "slurm-ppo", run_id: str = "someone") -> None:
    """It exists as soon as anything was logged to it."""
    server.runs[("me", name, run_id)] = StoredRun("me", name, run_id)


def saved(server: WandbServer) -> dict[str, object]:
    (view,) = server.views.values()
    return json.loads(view["spec"])


def titles(spec: dict[str, object]) -> dict[str, list[str]]:
    return {s["name"]: [p["config"].get("chartTitle") for p in s["panels"]] for s in sections_of(spec)}


def test_private_parts_are_used_of_exactly_the_version_that_has_them():
    """None of its public calls gives a workspace's JSON, or carries one to W&B under a name of ours."""
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError
    from wandb_workspaces._graphql import execute_graphql, get_app_url

    installed = f"wandb-workspaces=={version('wandb-workspaces')}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert installed in project["dependencies"]
    assert installed in (ROOT / "constraints.txt").read_text().splitlines()
    assert list(signature(execute_graphql).parameters) == ["api", "query", "variables"]
    assert list(signature(get_app_url).parameters) == ["api"]
    assert isinstance(Workspace(entity="", project="")._to_model(), View)
    assert issubclass(WandbApiFailedError, Exception)


# --- pushing ---


def test_pushing_twice_leaves_one_workspace_with_the_run_in_view(complete_run, server, shell, slurm_ppo):
    none = slurm_ppo("dashboard", "push", complete_run, **shell)
    assert none.returncode == 2
    assert "error: W&B has no project me/slurm-ppo that your key may see" in none.stderr

    run_id = json.loads((complete_run / "run.json").read_text())["id"]
    make_project(server)
    first = slurm_ppo("dashboard", "push", complete_run, **shell)
    make_project(server, run_id=run_id)
    again = slurm_ppo("dashboard", "push", complete_run, **shell)
    address = f"{server.url}/me/slurm-ppo?nw=slurmppo001\n"
    third = slurm_ppo("dashboard", "push", complete_run, **shell)
    assert [first.stdout, again.stdout, third.stdout] == [address] * 3
    absent = f"the workspace is new; not on W&B yet, so not kept in view: {run_id}\n"
    assert [first.stderr, again.stderr] == [absent, "the workspace was brought up to date\n"]
    assert (third.returncode, third.stderr) == (0, "the workspace was up to date\n")
    (view,) = server.views.values()
    assert view["displayName"] == "slurm-ppo"
    assert view["type"] == "project-view"
    loaded = Workspace._from_model(
        View(
            entity="me",
            project="slurm-ppo",
            display_name="slurm-ppo",
            name=view["name"],
            id=view["id"],
            spec=WorkspaceViewspec.model_validate_json(view["spec"]),
        )
    )
    assert loaded.runset_settings.pinned_runs == [run_id]
    assert loaded.settings.x_axis == "iteration"
    assert [section.name for section in loaded.sections] == [s["name"] for s in sections_of(build())]
    assert KEY not in "".join([first.stdout, first.stderr, view["spec"]])


def test_what_people_have_made_of_it_stays(server, shell, slurm_ppo):
    make_project(server, "mine")
    arguments = ("dashboard", "push", "--project", "mine", "--entity", "me")
    assert slurm_ppo(*arguments, **shell).returncode == 0
    (view,) = server.views.values()
    spec = json.loads(view["spec"])
    sections = sections_of(spec)
    theirs = {"__id__": "x1", "viewType": "Markdown Panel", "config": {"value": "look"}, "layout": {}}
    objective = sections[0]
    lost = objective["panels"].pop(0)
    objective["panels"].insert(1, theirs)
    objective["isOpen"] = False
    sections.insert(0, copy.deepcopy(objective) | {"name": "my own", "panels": [theirs]})
    sections.reverse()
    gone = {"name": "of an older version", "panels": [dict(lost, __id__="slurmppo-00000000")]}
    sections.append(objective | gone)
    spec["section"]["runSets"][0]["filters"]["filters"] = [{"mine": True}]
    spec["somethingNew"] = 1
    view |= {"spec": json.dumps(spec), "displayName": "renamed"}

    done = slurm_ppo(*arguments, **shell)
    assert (done.returncode, done.stderr) == (0, "the workspace was brought up to date\n")
    (view,) = server.views.values()
    after = saved(server)
    assert view["displayName"] == "renamed"
    assert [section["name"] for section in sections_of(after)] == [s["name"] for s in sections[:-1]]
    (mended,) = [s for s in sections_of(after) if s["name"] == "objective"]
    assert mended["panels"] == [*sections_of(build())[0]["panels"], theirs]
    assert mended["isOpen"] is False
    assert after["section"]["runSets"] == spec["section"]["runSets"]
    assert after["somethingNew"] == 1


def test_a_run_and_those_it_was_forked_from_are_kept_in_view(complete_run, tmp_path, slurm_ppo):
    parent = tmp_path / "parent"
    shutil.copytree(complete_run, parent, symlinks=True)
    forked = slurm_ppo("fork", f"{parent}@1", tmp_path / "fork", "iterations=2")
    assert forked.returncode == 0, forked.stderr
    ids = [json.loads((folder / "run.json").read_text())["id"] for folder in (parent, tmp_path / "fork")]
    printed = slurm_ppo("dashboard", "print", tmp_path / "fork", "--entity", "team", "--project", "mine")
    found = json.loads(printed.stdout)
    assert found["pinned_runs"] == ids
    assert (found["schema"], found["entity"], found["project"]) == (1, "team", "mine")
    shutil.rmtree(parent)
    assert target_of(load_run(tmp_path / "fork"), None, None).runs == tuple(ids)


# --- what goes wrong ---


def test_without_a_key_it_says_how_to_give_one(server, shell, slurm_ppo):
    env = {name: value for name, value in shell["env"].items() if name != "WANDB_API_KEY"}
    done = slurm_ppo("dashboard", "push", **shell | {"env": env})
    assert done.returncode == 2
    assert done.stderr == "error: there is no API key for W&B: run `wandb login`, or set WANDB_API_KEY\n"
    assert server.requests == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"status": 401}, "refused: Failed to verify credentials with"),
        ({"status": 403, "only": "UpsertView2"}, "refused: Forbidden"),
        ({"hang": True}, "did not answer within 1 s"),
    ],
)
def test_a_server_that_refuses_or_does_not_answer_is_one_line(server, shell, slurm_ppo, fault, said):
    make_project(server)
    for name, value in fault.items():
        setattr(server.faults, name, value)
    done = slurm_ppo("dashboard", "push", "--timeout", 1, **shell, timeout=120)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: W&B at {server.url} {said}")
    assert KEY not in line
    assert server.views == {}


# --- printing ---


def test_printing_needs_neither_key_nor_network_and_is_stable(server, shell, slurm_ppo):
    env = {name: value for name, value in shell["env"].items() if name != "WANDB_API_KEY"}
    offline = shell | {"env": env}
    done = slurm_ppo("dashboard", "print", **offline)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["spec"] == build()
    assert server.requests == []
    assert list(shell["cwd"].iterdir()) == []


def test_the_shape_that_is_sent():
    """One panel of each kind; whole tables would change with every metric."""
    names = ("reward/mean", "reward/*/mean", "slurm/wasted_share", "seconds/iteration", "iteration")
    metrics = [metric for metric in METRICS if metric.name in names]
    charts = [chart for chart in CHARTS if set(chart.names.split()) & set(names)]
    made = json.dumps(build(charts, metrics), indent=1) + "\n"
    if "DASHBOARD_GOLDEN" in os.environ:
        GOLDEN.write_text(made)
    assert made == GOLDEN.read_text()


# --- one table of metrics ---


def test_every_panel_shows_metrics_that_exist_and_every_metric_has_one_panel():
    known = {metric.name for metric in METRICS}
    shown = [name for panel in panels() for name in panel.names]
    assert set(shown) <= known
    assert {name for name in shown if shown.count(name) > 1} == set()
    assert set(shown) | NOT_SHOWN == known
    assert not set(shown) & NOT_SHOWN
    assert len(NOT_SHOWN) <= 4


def test_panels_are_drawn_over_iterations_and_are_told_apart():
    found = [panel for section in sections_of(build()) for panel in section["panels"]]
    lines = [panel["config"] for panel in found if panel["viewType"] == "Run History Line Plot"]
    assert {config["xAxis"] for config in lines} == {"iteration", MEASURED_STEP}
    own = [config["metricRegex"] for config in lines if config["xAxis"] == MEASURED_STEP]
    assert own == ["^eval/.+$"], "numbers of evaluate.command come later than rows"
    assert all(config["metrics"] or config["metricRegex"] for config in lines)
    assert len(lines) == len(panels())
    assert len({panel["__id__"] for panel in found}) == len(found)
    assert all(is_ours(panel) for panel in found)


def test_sections_are_those_of_the_metrics_and_one_of_samples():
    made = {section["name"]: section["panels"] for section in sections_of(build())}
    assert list(made) == [
        "objective",
        "reward components",
        "PPO health",
        "rollout",
        "samples",
        "evaluation",
        "pipeline",
        "progress",
    ]
    assert set(made) == {*Section, SAMPLES}
    (table,) = made[SAMPLES]
    assert SAMPLE_TABLE in json.dumps(table)
    for section in Section:
        words = made[section][-1]["config"]["value"]
        assert all(f"`{m.name}`: {m.meaning}" in words for m in METRICS if m.section is section)


def test_every_number_of_a_real_row_is_drawn_by_the_panel_that_describes_it(complete_run):
    lines = (complete_run / "metrics.jsonl").read_text().splitlines()
    keys = {key for line in lines for key in json.loads(line)}
    assert len(keys) > 40
    for key in keys:
        metric = describe(key)
        assert metric is not None, key
        drawing = [panel for panel in panels() if draws(panel, key)]
        wanted = [panel for panel in panels() if metric.name in panel.names]
        besides = [panel.title for panel in drawing if panel not in wanted]
        assert [panel for panel in drawing if panel in wanted] == wanted, key
        # W&B's expressions cannot say "but not"; it is a mean of rewards like the others of that panel.
        assert besides == (["Reward components"] if key == "reward/shaped/mean" else []), key


@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("seconds/score-big", "Seconds per stage"),
        ("seconds/iteration", "seconds/iteration"),
        ("seconds/compute/rollout", "seconds/compute/*"),
        ("slurm/idle_share/score-big", "Idle share"),
        ("slurm/worker_idle_share/score-big", "Idle share of workers"),
        ("reward/my_rule/mean", "Reward components"),
        ("reward/my_rule/retries", "reward/*/retries"),
        ("finish_reason/stop", "Finish reasons"),
    ],
)
def test_curves_that_are_found_by_their_names(key, title):
    assert [panel.title for panel in panels() if draws(panel, key)] == [title]


def draws(panel: Panel, key: str) -> bool:
    return bool(re.search(panel.regex, key)) if panel.regex else key in panel.names


# --- merging ---


OURS = {section["name"]: section for section in sections_of(build())}
NAMES = st.lists(st.sampled_from([*OURS, "mine", "theirs"]), unique=True)


@given(names=NAMES, kept=st.lists(st.booleans(), min_size=10, max_size=10), own=st.sets(st.integers(0, 9)))
def test_bringing_a_workspace_up_to_date_changes_nothing_else(names, kept, own):
    ours = build_once()
    existing = copy.deepcopy(ours)
    sections = []
    for i, name in enumerate(names):
        panels_of_ours = OURS[name]["panels"] if name in OURS and kept[i] else []
        added = [{"__id__": f"p{i}"}] if i in own or name not in OURS else []
        sections.append({"name": name, "panels": [*panels_of_ours[:2], *added], "isOpen": i in own})
    existing["section"]["panelBankConfig"]["sections"] = sections
    before = copy.deepcopy(existing)

    after = merged(existing, ours)
    assert existing == before
    assert merged(after, ours) == after
    found = {section["name"]: section for section in sections_of(after)}
    assert len(found) == len(sections_of(after))
    assert [name for name in found if name in names] == names
    for section in sections:
        theirs = [panel for panel in section["panels"] if not is_ours(panel)]
        assert [p for p in found[section["name"]]["panels"] if not is_ours(p)] == theirs
        assert found[section["name"]]["isOpen"] == section["isOpen"]
    for name, section in OURS.items():
        assert [p for p in found[name]["panels"] if is_ours(p)] == section["panels"]


_BUILT = build()


def build_once() -> dict[str, object]:
    return copy.deepcopy(_BUILT)


def test_runs_are_added_to_those_in_view_and_the_oldest_leave():
    spec = pinned(build_once(), ["a", "b"])
    assert spec["section"]["runSets"][0]["pinnedRunIds"] == ["a", "b"]
    assert pinned(pinned(spec, ["c"]), ["a"])["section"]["runSets"][0]["pinnedRunIds"] == ["b", "c", "a"]
    many = pinned(spec, [str(i) for i in range(19)])
    assert many["section"]["runSets"][0]["pinnedRunIds"] == ["b", *map(str, range(19))]
    assert pinned(spec, []) == spec
