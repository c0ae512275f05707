"""A list of runs: how each stands, from little that is read; what is spoilt has a line as well."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.evaluate import EvaluateConfig
from pipeline.run import journal
from pipeline.run.benchmarks import leave_out
from pipeline.run.control import Control, write_control
from pipeline.run.directory import Run
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.identity import Parent
from pipeline.run.lease import hold
from pipeline.run.tasks import Stage, Task
from pipeline.status.listing import Entry, find_places, last_row, read_entries, setting
from pipeline.status.listing_text import describe
from slurm.errors import UserError
from tests.support import ROOT
from tests.support.reportrun import SLURM, make_row, make_run, make_spans, slurm_row
from tests.support.sweeps import make_sweep


def never(cluster: str) -> None:
    raise AssertionError("Slurm is asked, though no run may be at work")


def entries(folder: Path, live=never) -> dict[str, Entry]:
    found = read_entries(find_places(folder), live)
    return {str(Path(entry.run).relative_to(folder)): entry for entry in found}


def with_rows(run: Run, *iterations: int) -> Run:
    journal.rewrite(run.paths.metrics, [make_row(i) for i in iterations])
    return run


def test_runs_of_this_machine_and_their_states(tmp_path):
    with_rows(make_run(tmp_path / "done"), *range(1, 21))
    failed = with_rows(make_run(tmp_path / "failed"), 1, 2)
    journal.event(failed.paths.events, "driver_ended", outcome="failed")
    with_rows(make_run(tmp_path / "stopped"), 1)
    at_work = make_run(tmp_path / "at_work")
    with hold(at_work.paths.locks):
        found = entries(tmp_path)
    assert {name: entry.state for name, entry in found.items()} == {
        "at_work": "running",
        "done": "complete",
        "failed": "failed",
        "stopped": "incomplete",
    }
    assert (found["failed"].iteration, found["failed"].iterations) == (2, 20)
    assert found["failed"].reward == pytest.approx(make_row(2)["reward/mean"])


def test_of_runs_on_slurm_the_queue_is_asked_once(tmp_path):
    asked = []
    runs = [make_run(tmp_path / name, scheduler=SLURM) for name in ("a", "b", "c", "d")]
    for run in runs:
        write_control(run.paths, Control(1))
    write_control(runs[2].paths, Control(1, cancelled=True))
    write_control(runs[3].paths, Control(1, has_failed=True))

    def live(cluster):
        asked.append(1)
        return {runs[0].identity.id}

    states = [entry.state for entry in entries(tmp_path, live).values()]
    assert states == ["running", "stopped", "cancelled", "failed"]
    assert len(asked) == 1
    assert [entry.state for entry in entries(tmp_path, lambda cluster: None).values()][:2] == [
        "unknown",
        "unknown",
    ]


def test_each_cluster_is_asked_for_the_runs_whose_settings_name_it(tmp_path):
    on_far = replace(SLURM, options={"clusters": "far-2", "export": "NONE"})
    runs = [make_run(tmp_path / name, scheduler=given) for name, given in (("a", SLURM), ("b", on_far))]
    for run in runs:
        write_control(run.paths, Control(1))
    asked = {"": {runs[1].identity.id}, "far-2": {runs[1].identity.id}}
    states = [entry.state for entry in entries(tmp_path, asked.pop).values()]
    assert states == ["stopped", "running"]
    assert not asked, "once each"


def test_a_setting_is_found_at_its_place_alone():
    config = "kind: none\nscheduler:\n  check_minutes: 5\n  options:\n    clusters: 'a,b'\n  kind: slurm\n"
    config += "evaluate:\n  command:\n  - kind\n  best: null\n"
    assert [
        setting(config, *keys) for keys in (("scheduler", "kind"), ("scheduler", "options", "clusters"))
    ] == ["slurm", "'a,b'"]
    assert setting(config, "evaluate", "command") == "- kind"
    assert setting(config, "evaluate", "clusters") == setting(config, "iterations", "kind") == ""


def test_what_a_line_says(tmp_path):
    run = make_run(tmp_path / "run", scheduler=SLURM)
    rows = [make_row(i) | slurm_row(i, make_spans(i, 2)) for i in range(1, 21)]
    journal.rewrite(run.paths.metrics, rows)
    run.paths.best.write_text(json.dumps({"iteration": 18, "reward": 0.5, "policy": "policy/00018.1-a"}))
    (run.paths.policies / "00020.1-a").mkdir(parents=True)
    (run.paths.policies / "00020.1-a/weights").write_text("x" * 3000)
    (run.paths.policies / "00020").symlink_to("00020.1-a")
    run.paths.log_root.mkdir(exist_ok=True)
    (run.paths.log_root / "log").write_text("x" * 5000)
    entry = entries(tmp_path)["run"]
    hours = sum(v for row in rows for name, v in row.items() if name.startswith("slurm/gpu_hours/"))
    assert entry.gpu_hours == pytest.approx(hours, rel=0.1)
    assert (entry.best, entry.bytes) == (0.5, 3000)
    text = describe([entry], tmp_path)
    assert "run  complete      20/20" in text
    assert "2.9 KiB" in text
    assert text.splitlines()[-1].startswith("1 run: 1 complete; 2.9 KiB (size: policies, critics and")


def test_a_fork_that_has_no_row_yet_is_where_it_begins(tmp_path):
    make_run(tmp_path / "fork", parent=Parent("abc", "/parent", 7))
    assert entries(tmp_path)["fork"].iteration == 7


def test_runs_of_a_sweep_are_listed_with_those_that_have_not_begun(tmp_path):
    make_sweep(tmp_path / "lr", ["1e-6", "3e-6"], 2, begun=3)
    make_run(tmp_path / "single")
    found = entries(tmp_path)
    assert [entry.state for entry in found.values()] == [
        "complete",
        "incomplete",
        "complete",
        "not begun",
        "incomplete",
    ]
    assert list(found)[3] == "lr/learning_rate_3e-6-seed_1"
    assert list(entries(tmp_path / "lr")) == [name.partition("/")[2] for name in list(found)[:4]]
    assert list(entries(tmp_path / "single")) == ["."]


def spoil(run: Run, name: str, text: str) -> None:
    (run.paths.root / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", ""),
        ("run.json", "[1]"),
        ("run.json", '{"name": "x"}'),
        ("config.yaml", "name: x\n"),
        ("metrics.jsonl", "garbage\n"),
        ("best.json", "{"),
    ],
)
def test_a_spoilt_run_is_a_line_beside_the_others(tmp_path, name, text):
    bad = with_rows(make_run(tmp_path / "bad"), 1)
    for one in ("run.json", "run.copy.json") if name == "run.json" else (name,):
        spoil(bad, one, text)
    with_rows(make_run(tmp_path / "good"), 1)
    found = entries(tmp_path)
    assert [entry.state for entry in found.values()] == ["corrupt", "incomplete"]
    assert found["bad"].note
    lines = describe(list(found.values()), tmp_path).splitlines()
    assert lines[1].startswith("bad")
    assert "1 corrupt" in lines[-1]


READ = """
import json, sys
from pathlib import Path
from pipeline.cli.listing import list_runs

read = []
sys.addaudithook(lambda event, given: event in ("open", "os.scandir") and read.append(str(given[0])))
list_runs(Path(sys.argv[1]), as_json=False)
slow = {"pyarrow", "numpy", "yaml", "hydra", "pydantic", "submitit", "torch"} & sys.modules.keys()
print(json.dumps([read, sorted(slow)]))
"""
"""Prints the files and folders that a list of runs opens, and which slow imports it needs."""


def used_run(root: Path, last: int) -> None:
    """A run with much in it: tasks, logs and rows of all its iterations, and three policies."""
    run = with_rows(make_run(root), *range(1, last + 1))
    for i in range(1, last + 1):
        for name in (f"iterations/{i:05d}/rollout/shard", f"logs/{i:05d}-rollout/log", f"rows/{i:05d}.json"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
    for i in range(last - 2, last + 1):
        (run.paths.policies / f"{i:05d}.1-a").mkdir(parents=True)
        (run.paths.policies / f"{i:05d}").symlink_to(f"{i:05d}.1-a")
    with hold(run.paths.locks):
        journal.event(run.paths.events, "driver_started")


def test_little_is_opened_of_each_run_so_that_a_thousand_are_listed_at_once(tmp_path):
    """However much a run has done: nothing of its tasks, shards and logs, and the end of its rows."""
    used_run(tmp_path / "complete", 20)
    used_run(tmp_path / "stopped", 15)
    command = [sys.executable, "-c", READ, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    read, slow = json.loads(done.stdout)
    assert slow == []

    def below(name: str) -> list[str]:
        paths = [Path(path) for path in read if Path(path).is_relative_to(tmp_path / name)]
        return sorted(str(path.relative_to(tmp_path / name)) for path in paths)

    of_all = ["best.json", "config.yaml", "metrics.jsonl", "run.json"]
    of_all += ["critic", "policy", "reference", "state", "trainer"]
    assert below("complete") == sorted([*of_all, *(f"policy/{i:05d}.1-a" for i in (18, 19, 20))])
    more = {*below("stopped")} - {*of_all, *(f"policy/{i:05d}.1-a" for i in (13, 14, 15))}
    (lease,) = more - {"events.jsonl", "locks"}
    assert Path(lease).parent == Path("locks")


def test_a_row_that_was_cut_is_none(tmp_path):
    run = with_rows(make_run(tmp_path / "run"), 1, 2)
    with run.paths.metrics.open("a") as file:
        file.write('{"iteration": 3, "rew')
    assert entries(tmp_path)["run"].iteration == 2
    assert last_row(b"") == {}


def test_a_folder_that_is_none_and_one_without_runs(tmp_path, slurm_ppo):
    with pytest.raises(UserError, match="no such folder"):
        find_places(tmp_path / "absent")
    assert find_places(tmp_path) == []
    done = slurm_ppo("ls", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"no runs in {tmp_path}" in done.stdout


def test_json_has_stable_keys(tmp_path, slurm_ppo):
    with_rows(make_run(tmp_path / "run"), 1)
    found = json.loads(slurm_ppo("ls", tmp_path, "--json").stdout)
    assert list(found) == ["schema", "folder", "runs"]
    keys = "run state name iteration iterations reward best best_metric gpu_hours age idle bytes sweep note"
    assert list(found["runs"][0]) == keys.split()
    assert found["runs"][0]["idle"] < time.time()


# --- odd folders, and by which number policies are the best ---

MEASURED = EvaluateConfig(command=("measure", "{policy}", "{output}"), command_every=10)


def leave_policy_out(run: Run, iteration: int) -> None:
    """As the driver does where the program has failed too often: a commit without numbers."""
    failure = Failure(Task(iteration, Stage.BENCHMARK), 1, FailureKind.CONFIG, "no numbers", "log")
    leave_out(run.paths, failure, [], {})


def test_a_run_is_complete_when_the_last_policy_was_measured_or_left_out(tmp_path):
    run = with_rows(make_run(tmp_path / "run", evaluate=MEASURED), *range(1, 21))
    for iteration in (0, 10):
        leave_policy_out(run, iteration)
    assert entries(tmp_path)["run"].state == "incomplete"
    leave_policy_out(run, 20)
    assert entries(tmp_path)["run"].state == "complete"


def test_a_link_to_itself_is_no_run_and_hides_none(tmp_path):
    make_run(tmp_path / "run")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    assert list(entries(tmp_path)) == ["run"]


def test_of_a_manifest_in_which_a_letter_has_flipped_the_runs_that_are_there_are_listed(tmp_path):
    make_sweep(tmp_path / "lr", ["1e-6"], 2)
    manifest = tmp_path / "lr/sweep.json"
    manifest.write_text(manifest.read_text().replace('-seed_1"', '-seed_3"', 1))
    found = {name: entry.state for name, entry in entries(tmp_path / "lr").items()}
    assert found == {"learning_rate_1e-6-seed_0": "complete", "learning_rate_1e-6-seed_1": "incomplete"}


@pytest.mark.parametrize(
    ("metrics", "title"),
    [([None, None], "held-out"), (["eval/loss", "eval/loss"], "eval/loss"), ([None, "eval/loss"], "best")],
)
def test_the_column_of_best_values_says_what_they_are_of(tmp_path, metrics, title):
    for number, metric in enumerate(metrics):
        best = {"iteration": 9, "reward": 0.5, "policy": "policy/00009.1-a"}
        best |= {"metric": metric} if metric else {}
        make_run(tmp_path / f"run{number}").paths.best.write_text(json.dumps(best))
    found = list(entries(tmp_path).values())
    assert [(entry.best, entry.best_metric) for entry in found] == [(0.5, metric) for metric in metrics]
    titles = describe(found, tmp_path).splitlines()[0].split()
    assert titles[titles.index("reward") + 1] == title
