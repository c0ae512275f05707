"""A sweep as a whole: where its runs stand, which is the best, and what has changed since the look before."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import RunError, open_run
from pipeline.run.lease import hold
from pipeline.status.listing import Entry
from pipeline.status.sweep import SweepStatus, describe_sweep, find_best, read_sweep_status
from pipeline.sweep.manifest import locks_of, write_sweep
from pipeline.sweep.points import Measure
from pipeline.watch.loop import Seen
from pipeline.watch.sweep import SweepReading, sweep_changes, sweep_screen
from tests.support.sweeps import make_sweep

SWEEP = Path("/s")
LOSS = Measure("eval/loss", is_lowest_best=True)
HELDOUT = Measure("evaluate/reward", is_lowest_best=False)


def nothing(cluster: str) -> frozenset[str]:
    return frozenset()


def entry(name: str, state: str = "complete", **more: object) -> Entry:
    return Entry(f"/s/{name}", state, name, 3, 9, **more)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two rates times two seeds, of which three runs have begun."""
    root = tmp_path_factory.mktemp("sweep") / "lr"
    make_sweep(root, ["1e-6", "3e-6"], 2, begun=3)
    return root


def status_of(*entries: Entry, driver: str | None = None) -> SweepStatus:
    return SweepStatus(SWEEP, "s", entries, find_best(entries, HELDOUT), driver)


@pytest.mark.parametrize(
    ("measure", "best", "title"),
    [
        (HELDOUT, "b", "held-out reward"),
        (LOSS, "a", "eval/loss"),
        (None, "c", "mean reward of the newest iteration"),
    ],
)
def test_the_best_is_chosen_by_what_runs_choose_their_best_policy_by(measure, best, title):
    """One without such a policy is none of them, whatever its reward."""
    runs = [entry("a", reward=0.1, best=0.3), entry("b", reward=0.2, best=0.5), entry("c", reward=0.9)]
    found = find_best(runs, measure)
    assert (found.name, found.title, found.compared) == (best, title, 3 if measure is None else 2)
    assert found.has_best_policy == (measure is not None)


def test_without_numbers_none_is_the_best(tmp_path):
    assert find_best([entry("a"), entry("b", reward=float("nan"))], HELDOUT) is None
    _, runs = make_sweep(tmp_path / "lr", ["1e-6"], 1)
    runs[0].paths.metrics.unlink()
    with pytest.raises(RunError, match="has a row yet, so none is the best; where they are: "):
        open_run(tmp_path / "lr")


@pytest.mark.parametrize(
    ("states", "state", "command"),
    [
        (["complete", "complete"], "complete", "report"),
        (["failed", "running", "not begun"], "running", "watch"),
        (["failed", "complete", "not begun"], "failed", "sweep"),
        (["unknown", "complete"], "unknown", "status"),
        (["complete", "not begun"], "incomplete", "sweep"),
        (["stopped", "cancelled"], "incomplete", "sweep"),
    ],
)
def test_a_sweep_stands_where_its_runs_do(states, state, command):
    found = status_of(*(entry(f"r{i}", one) for i, one in enumerate(states)))
    assert found.state == state
    text = describe_sweep(found)
    assert text.splitlines()[-1] == f"next: slurm-ppo {command} {SWEEP}"
    assert ("why:  slurm-ppo logs" in text) == ("failed" in states)


def test_every_run_has_a_line_that_fits_80_columns(root):
    found = read_sweep_status(root, nothing)
    lines = describe_sweep(found).splitlines()
    of_runs = [line.split()[:4] for line in lines if line.startswith("learning_rate")]
    assert [words[:3] for words in of_runs] == [
        ["learning_rate_1e-6-seed_0", "complete", "20/20"],
        ["learning_rate_1e-6-seed_1", "incomplete", "16/20"],
        ["learning_rate_3e-6-seed_0", "complete", "20/20"],
        ["learning_rate_3e-6-seed_1", "not", "begun"],
    ]
    assert max(len(line) for line in lines if str(root) not in line) <= 80
    assert json.loads(json.dumps(found.to_json())).keys() == {
        "schema",
        "sweep",
        "name",
        "state",
        "driver",
        "best",
        "runs",
    }


def test_settings_of_another_version_keep_no_run_from_being_shown(tmp_path):
    sweep, _ = make_sweep(tmp_path / "lr", ["1e-6", "3e-6"], 1)
    first, *others = sweep.points
    later = replace(first, config={**first.config, "of_a_later_version": 1})
    write_sweep(tmp_path / "lr", replace(sweep, points=(later, *others)))
    found = read_sweep_status(tmp_path / "lr", nothing)
    assert [one.state for one in found.entries] == ["complete", "complete"]
    assert found.best.title == "mean reward of the newest iteration"


def test_while_its_command_is_at_work_a_sweep_is_running_between_two_runs_too(root):
    reading = SweepReading(root, 1.0, nothing)
    with hold(locks_of(root)):
        for _ in range(2):
            reading.look()
        assert reading.seen.look.state == "running"
        assert not reading.seen.is_settled
    reading.look()
    assert not reading.seen.is_settled, "one look may fall between two commands"
    reading.look()
    assert reading.seen.is_settled


def test_lines_say_what_changed_and_nothing_twice():
    before = status_of(entry("a", "running", reward=0.5), entry("b", "not begun"))
    first = sweep_changes(None, before)
    assert [line[9:] for line in first] == [
        f"{SWEEP}: running, a sweep of 2 runs: 1 running, 1 not begun",
        "a: running, 3/9 iterations, reward 0.500",
    ]
    assert sweep_changes(before, before) == []
    after = status_of(entry("a", reward=0.5), entry("b", "running", reward=0.75))
    assert [line[9:] for line in sweep_changes(before, after)] == [
        "a: complete, 3/9 iterations, reward 0.500",
        "b: running, 3/9 iterations, reward 0.750",
        "best so far: b, the best of 2 by mean reward of the newest iteration (0.750)",
    ]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (120, 50)])
def test_a_screen_is_filled_and_never_exceeded_and_all_runs_can_be_reached(width, height):
    runs = [entry(f"run-{i:02d}", "running", reward=i / 9) for i in range(30)]
    seen = Seen(status_of(*runs))
    shown = set()
    for first in range(30):
        lines = [line.plain for line in sweep_screen(seen, first, width, height)]
        assert len(lines) == height
        assert max(map(len, lines)) <= width
        shown |= {line.split()[0] for line in lines if line.startswith("run-")}
    assert len(shown) == 30
    assert len(sweep_screen(Seen(), 0, width, height)) == height


def test_what_cannot_be_read_for_now_is_said_and_what_was_seen_stays(root, monkeypatch):
    reading = SweepReading(root, 1.0, nothing)
    reading.look()
    before = reading.seen.look

    def refuse(*ignored: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pipeline.watch.sweep.read_sweep_status", refuse)
    reading.look()
    assert reading.seen.look is before
    assert "cannot read the sweep now" in sweep_screen(reading.seen, 0, 80, 24)[-2].plain


def test_the_best_policy_of_the_best_run_is_what_a_sweep_alone_means(tmp_path, slurm_ppo):
    """Its number was chosen by it. That policy is not there, which the refusal says."""
    _, runs = make_sweep(tmp_path / "lr", ["1e-6", "3e-6"], 1)
    for run, value in zip(runs, (0.75, 0.25), strict=True):
        best = {"iteration": 9, "reward": value, "policy": "policy/00009.1-a"}
        run.paths.best.write_text(json.dumps(best))
    done = slurm_ppo("export", tmp_path / "lr", tmp_path / "out")
    assert done.returncode == 2
    assert "learning_rate_1e-6-seed_0, the best of 2 by held-out reward (0.750)" in done.stderr
    assert "policy 9 of " in done.stderr
    assert open_run(tmp_path / "lr").path == runs[0].paths.root


def test_a_spoilt_manifest_is_said_in_a_line(tmp_path, slurm_ppo):
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(RunError, match="its runs are whole"):
        open_run(tmp_path)
    for words in (["status", tmp_path], ["samples", tmp_path], ["export", tmp_path, tmp_path / "out"]):
        refused = slurm_ppo(*words)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
        assert "its runs are whole" in refused.stderr
