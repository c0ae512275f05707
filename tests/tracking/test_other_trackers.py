"""TensorBoard's event files and MLflow as mirrors: each row once, whatever is killed."""

import os
import posixpath
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checks.settings import package_problems
from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.metrics.catalogue import METRICS
from pipeline.run import journal
from pipeline.run.benchmarks import Measured, note_measured
from pipeline.run.directory import Run, create_run, load_run
from pipeline.tracking import destination
from pipeline.tracking.destination import Destination, package_problem
from pipeline.tracking.mirror import Once, mirror
from pipeline.tracking.mlflow_client import metric_names
from pipeline.tracking.tracker import MirrorProcess, behind, open_trackers
from tests.support import ROOT, tiny
from tests.support.mirrored import append, children, driver, family, follow, kill_all, row
from tests.support.waiting import wait_for

Rows = dict[int, dict[str, float]]
"""Numbers by iteration."""


def in_events(run: Run, own: str) -> Rows:
    """What TensorBoard shows of one folder of event files; a number that is there twice is an error."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.paths.tensorboard / own), {"scalars": 0}).Reload()
    events = [(one.step, name, one.value) for name in found.Tags()["scalars"] for one in found.Scalars(name)]
    return by_iteration(events)


def in_mlflow(run: Run, own: str) -> Rows:
    """What MLflow's client reads of one run in the file store; a number that is there twice is an error."""
    from mlflow import MlflowClient

    client = MlflowClient(run.paths.mlflow.as_uri())
    experiment = client.get_experiment_by_name("slurm-ppo")
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`slurm_ppo.id` = '{own}'")
    events = [
        (one.step, name, one.value)
        for name in found.data.metrics
        for one in client.get_metric_history(found.info.run_id, name)
    ]
    return by_iteration(events)


def by_iteration(events: list[tuple[int, str, float]]) -> Rows:
    assert len({(step, name) for step, name, _ in events}) == len(events)
    found: Rows = {}
    for step, name, value in events:
        found.setdefault(step, {})[name] = pytest.approx(value)
    return found


READERS = {Destination.TENSORBOARD: in_events, Destination.MLFLOW: in_mlflow}


@pytest.fixture(params=READERS)
def to(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Destination:
    if why := package_problem(request.param):
        pytest.skip(why)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return request.param


@pytest.fixture
def run(home: None, inputs: Any, tmp_path: Path, to: Destination) -> Run:
    words = tiny.overrides(inputs, tmp_path / "run")
    return create_run(resolve(compose([*words, f"tracking={to}"])))


def rows(*iterations: int) -> Rows:
    return {iteration: row(iteration) for iteration in iterations}


# --- each row once ---


def test_rows_of_two_drivers_and_then_sync(run, to, slurm_ppo, environment):
    append(run, 1, 2)
    assert behind(run) == [to]
    assert follow(run) == []
    assert not behind(run)
    append(run, 3)
    done = slurm_ppo("sync", run.paths.root, "--to", to, env=environment)
    assert "3 rows, each once; 2 were there, 1 sent" in done.stdout, done.stderr
    assert str(run.paths.root / to) in done.stdout
    assert READERS[to](run, run.identity.id) == rows(1, 2, 3)
    assert follow(run) == []
    assert READERS[to](run, run.identity.id) == rows(1, 2, 3)


def test_killed_while_rows_are_written_and_what_was_noted_is_lost(run, to):
    for iteration in (1, 2):
        append(run, iteration)
        with driver(run) as process:
            wait_for(lambda: children(process.pid), "the mirror")
            wait_for(lambda: is_there(run, to, iteration), "the row")  # noqa: B023
            kill_all(family(process.pid), signal.SIGKILL)
    (run.paths.root / to / "online.json").write_text("{")
    append(run, 3)
    assert follow(run) == []
    assert READERS[to](run, run.identity.id) == rows(1, 2, 3)


def is_there(run: Run, to: Destination, iteration: int) -> bool:
    """Whether the first bytes of a row have been written, of one that is read while it grows."""
    if to is Destination.TENSORBOARD:
        files = list(run.paths.tensorboard.glob("*/events*"))
        return bool(files) and files[0].stat().st_size >= 40 + 100 * iteration
    files = list(run.paths.mlflow.glob("*/*/metrics/reward/mean"))
    return bool(files) and len(files[0].read_text().splitlines()) >= iteration


def test_rows_that_were_taken_back_are_in_another_run_there(run, to):
    """As after ``resume RUN --from update@2``: W&B's way, so that no tracker shows two curves as one."""
    append(run, 1, 2, 3)
    assert follow(run) == []
    changed = row(2) | {"policy/loss": 0.2}
    journal.rewrite(run.paths.metrics, [row(1), changed])
    (note,) = follow(run)
    assert note == (f"{to.label} has rows that were retracted or changed since: a new {to.label} run has all")
    assert READERS[to](run, run.identity.id) == rows(1, 2, 3)
    assert READERS[to](run, f"{run.identity.id}-2") == {1: row(1), 2: changed}


def test_numbers_of_a_program_and_numbers_that_are_none(run, to):
    program = replace(run.config.evaluate, command=("x", "{policy}", "{output}"), command_every=1)
    run = replace(run, config=replace(run.config, evaluate=program))
    journal.append(run.paths.metrics, row(1) | {"policy/loss": float("nan"), "eval/pass@4": 0.5})
    note_measured(run.paths, [Measured(7, {"eval/acc": 0.25})], after=1)
    assert [mirror(run, to, Once(), print).sent for _ in range(2)] == [2, 0]
    found = READERS[to](run, run.identity.id)
    assert found[7] == {"eval/acc": 0.25, "eval/iteration": 7}
    assert "policy/loss" not in found[1]
    assert found[1]["eval/pass_4" if to is Destination.MLFLOW else "eval/pass@4"] == 0.5


def test_a_run_that_goes_back_keeps_both_curves(home, inputs, tmp_path, slurm_ppo, environment):
    pytest.importorskip("tensorboard")
    words = [*tiny.overrides(inputs, tmp_path / "run", "iterations=2"), "tracking=tensorboard"]
    assert slurm_ppo("run", *words, env=environment).returncode == 0
    run = load_run(tmp_path / "run")
    first = in_events(run, run.identity.id)
    assert sorted(first) == [1, 2]
    done = slurm_ppo("resume", tmp_path / "run", "--from", "update@2", env=environment)
    assert done.returncode == 0, done.stderr
    again = in_events(run, f"{run.identity.id}-2")
    assert in_events(run, run.identity.id) == first
    assert again[1] == first[1]
    assert again[2]["reward/mean"] == first[2]["reward/mean"]


# --- a kill at any byte ---


@pytest.fixture
def events(home, inputs, tmp_path) -> Callable[[], Run]:
    pytest.importorskip("tensorboard")
    words = tiny.overrides(inputs, tmp_path / "run")
    run = create_run(resolve(compose([*words, "tracking=tensorboard"])))
    journal.append(run.paths.metrics, *(row(i) | {"seconds/elapsed": 60.0 * i} for i in (1, 2, 3)))
    return run


def test_an_event_file_that_is_cut_anywhere_becomes_the_same_bytes(events):
    mirror(events, Destination.TENSORBOARD, Once(), print)
    (file,) = events.paths.tensorboard.glob("*/events.out.tfevents.*")
    whole = file.read_bytes()
    for length in range(0, len(whole), 29):
        for tail in (b"", b"\0" * 40):  # zeros: what a machine that went down may leave
            file.write_bytes(whole[:length] + tail)
            mirror(events, Destination.TENSORBOARD, Once(), print)
            assert file.read_bytes() == whole, (length, tail)


def test_the_times_are_those_of_the_run(events):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    mirror(events, Destination.TENSORBOARD, Once(), print)
    (folder,) = [path for path in events.paths.tensorboard.iterdir() if path.is_dir()]
    found = EventAccumulator(str(folder)).Reload()
    created = events.identity.created
    assert [one.wall_time - created for one in found.Scalars("reward/mean")] == [60.0, 120.0, 180.0]


@pytest.mark.parametrize("written", [0, 2, 3])
def test_a_row_that_was_logged_in_part_is_completed(home, inputs, tmp_path, monkeypatch, written):
    """A file store writes number by number; a kill in between leaves the first ones of a row."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.store.tracking.file_store import FileStore

    run = create_run(resolve(compose([*tiny.overrides(inputs, tmp_path / "run"), "tracking=mlflow"])))
    append(run, 1)
    mirror(run, Destination.MLFLOW, Once(), print)
    append(run, 2)
    with monkeypatch.context() as patch:
        log, count = FileStore._log_run_metric, iter(range(10))

        def killed(store: FileStore, *given: Any) -> None:
            if next(count) == written:
                raise KeyboardInterrupt
            log(store, *given)

        patch.setattr(FileStore, "_log_run_metric", killed)
        with pytest.raises(KeyboardInterrupt):
            mirror(run, Destination.MLFLOW, Once(), print)
    mirror(run, Destination.MLFLOW, Once(), print)
    assert in_mlflow(run, run.identity.id) == rows(1, 2)


def test_mlflow_has_the_configuration_and_says_whether_the_run_failed(home, inputs, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    store = tmp_path / "of the group"
    words = [*tiny.overrides(inputs, tmp_path / "run"), "tracking=mlflow", "tracking.mlflow.experiment=sums"]
    run = create_run(resolve(compose([*words, f"tracking.mlflow.uri='{store}'"])))
    append(run, 1)
    mirror(run, Destination.MLFLOW, Once(exit_code=1), print)
    mirror(run, Destination.MLFLOW, Once(exit_code=1), print)
    client = MlflowClient(store.as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert found.info.status == "FAILED"
    assert found.info.run_name == run.identity.name
    assert found.data.params["update.learning_rate"] == "0.001"
    assert found.data.params["run_dir"] == str(run.paths.root)


WRITERS = """
import sys, time
from pathlib import Path
from pipeline.run.directory import load_run
from pipeline.tracking.mlflow_client import open_mlflow
from mlflow.store.tracking.file_store import FileStore

make = FileStore.create_experiment
def slow(*given, **named):
    time.sleep(0.2)
    return make(*given, **named)
FileStore.create_experiment = slow
open_mlflow(load_run(Path(sys.argv[1])))
"""


def test_runs_that_begin_at_the_same_time_have_one_experiment(
    home, inputs, tmp_path, environment, monkeypatch
):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    store = tmp_path / "of the group"
    for name in "ab":
        words = [*tiny.overrides(inputs, tmp_path / name), f"tracking.mlflow.uri='{store}'"]
        create_run(resolve(compose([*words, "tracking=mlflow"])))
    words = [sys.executable, "-c", WRITERS]
    writers = [subprocess.Popen([*words, str(tmp_path / name)], env=environment, cwd=ROOT) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    found = [one for one in MlflowClient(store.as_uri()).search_experiments() if one.name == "slurm-ppo"]
    assert len(found) == 1
    assert len(MlflowClient(store.as_uri()).search_runs([found[0].experiment_id])) == 2


def test_a_number_below_another_is_logged_beside_it(home, inputs, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = create_run(resolve(compose([*tiny.overrides(inputs, tmp_path / "run"), "tracking=mlflow"])))
    odd = {
        "reward/mean/sums": 0.5,
        "eval/../x": 1.0,
        "eval/a+b": 2.0,
        "eval/a:b": 3.0,
        "eval/" + "l" * 300: 4,
    }
    journal.append(run.paths.metrics, row(1) | odd)
    mirror(run, Destination.MLFLOW, Once(), print)
    found = in_mlflow(run, run.identity.id)[1]
    assert found == {name: pytest.approx(value) for name, value in row(1).items()} | {
        "reward/mean.sums": 0.5,
        "eval/_.x": 1.0,
        "eval/a_b": 2.0,
        "eval/a_b_2": 3.0,
        f"eval/{'l' * 235}": 4,
    }


# --- names for MLflow ---


def as_mlflow_checks(name: str) -> bool:
    """What mlflow.utils.validation does, of 3.17."""
    normal = posixpath.normpath(name)
    is_path = normal == name and normal != "." and not normal.startswith(("..", "/"))
    return bool(re.fullmatch(r"[/\w.\- ]+", name)) and is_path and len(name) <= 250


def test_every_number_of_a_row_has_a_file_of_its_own():
    """In a file store, of any names of components, files and stages; none is a folder of others too."""
    words = ("rm", "sums", "rollout", "4")
    names = {metric.name.replace("*", word) for metric in METRICS for word in words}
    names |= {f"eval/{name}" for name in ("acc", "acc/hard", "acc/hard/1", "pass@4", "iteration")}
    found = metric_names(names)
    assert len(set(found.values())) == len(names)
    assert all(map(as_mlflow_checks, found.values()))
    folders = {
        "/".join(one.split("/")[:count]) for one in found.values() for count in range(1, one.count("/") + 1)
    }
    assert not folders & set(found.values())
    for name in ("iteration", "eval/iteration", "reward/mean", "reward/rm/mean", "evaluate/reward"):
        assert found[name] == name


@given(st.sets(st.text(st.sampled_from("a./@ :\n"), min_size=1, max_size=8), max_size=6))
def test_whatever_a_number_is_named_mlflow_takes_it(names):
    found = metric_names(names)
    assert len(set(found.values())) == len(names)
    assert all(map(as_mlflow_checks, found.values()))


# --- what is missing or wrong ---


@pytest.mark.parametrize("name", [Destination.TENSORBOARD, Destination.MLFLOW])
def test_a_missing_package_is_one_line(home, inputs, tmp_path, monkeypatch, name):
    monkeypatch.setattr(destination.importlib.util, "find_spec", lambda _: None)
    config = compose([*tiny.overrides(inputs, tmp_path / "run"), f"tracking={name}"])
    assert [str(issue) for issue in package_problems(config)] == [
        f"tracking.{name}.enabled=true: the package of {name.label} is not installed here: "
        f"pip install 'slurm-ppo[{name}]'"
    ]


def test_a_missing_package_is_a_note_of_the_driver(home, inputs, tmp_path, monkeypatch):
    """A machine whose environment lacks it: the run goes on, and sync writes the rows later."""
    run = create_run(resolve(compose([*tiny.overrides(inputs, tmp_path / "run"), "tracking=tensorboard"])))
    append(run, 1)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys; sys.modules['tensorboard'] = None")
    monkeypatch.setenv("PYTHONPATH", str(hidden), prepend=os.pathsep)
    assert follow(run) == [
        "TensorBoard cannot be used now (the package of TensorBoard is not installed here: pip install "
        "'slurm-ppo[tensorboard]'); the rest follows with the next driver, or by: "
        f"slurm-ppo sync {run.paths.root} --to tensorboard"
    ]
    assert behind(run) == [Destination.TENSORBOARD]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--to", "tensorboard", "--project", "p", "--new-run"), "are W&B's: leave them out with --to"),
        (("--to", "mlflow", "--offline", "d"), "are W&B's: leave them out with --to mlflow"),
        (("--to", "comet"), "'comet' is not one of"),
    ],
)
def test_options_that_do_not_go_together(make, slurm_ppo, environment, options, text):
    done = slurm_ppo("sync", make().paths.root, *options, env=environment)
    assert done.returncode == 2
    assert text in done.stderr


def test_a_password_in_an_address_is_refused(inputs, tmp_path):
    words = [*tiny.overrides(inputs, tmp_path / "run"), "tracking=mlflow"]
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        resolve(compose([*words, "tracking.mlflow.uri='https://me:secret@mlflow.site'"]))
    assert "secret" not in str(refused.value)


def test_a_driver_that_ends_has_all_mirrors_send_at_the_same_time(monkeypatch):
    done: list[str] = []

    class Sending:
        has_failed = False

        def __init__(self, run: None, to: Destination) -> None:
            self.to = to

        def tell(self, line: str) -> None:
            done.append(f"{self.to}: {line}")

        def wait(self, seconds: float) -> bool:
            done.append(f"{self.to}: awaited")
            return True

        def said(self) -> list[dict[str, Any]]:
            return []

    monkeypatch.setattr(MirrorProcess, "start", Sending)
    open_trackers(None, list(READERS), print).close(0)
    assert done == ["tensorboard: end 0", "mlflow: end 0", "tensorboard: awaited", "mlflow: awaited"]
