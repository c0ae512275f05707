"""The report of a sweep: what it says of groups of runs, from directories made by hand."""

import json
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.evaluate import Best, EvaluateConfig
from pipeline.report import write_comparison, write_sweep_report
from pipeline.report.comparison import compare_runs, compare_sweep, groups_of, samples_beside
from pipeline.report.figures import merged
from pipeline.report.settings import settings_table
from pipeline.run.directory import load_run
from pipeline.run.identity import RunError
from pipeline.run.tasks import Stage, Task
from pipeline.sweep.manifest import SweepError, read_sweep, write_sweep
from pipeline.sweep.points import Measure, measure_of
from pipeline.text import spread_text
from tests.support.reports import data_of
from tests.support.sweeps import make_sweep


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Three rates times three seeds, of which eight runs have begun; the later ones have more reward."""
    root = tmp_path_factory.mktemp("sweep") / "lr"
    make_sweep(root, ["1e-6", "3e-6", "1e-5"], 3, begun=8)
    return root


def test_groups_come_best_first_with_all_their_runs(root):
    data = compare_sweep(root)
    assert [group.label for group in data.groups] == [
        "learning_rate=1e-5",
        "learning_rate=3e-6",
        "learning_rate=1e-6",
    ]
    assert [(len(group.members), group.size) for group in data.groups] == [(2, 3), (3, 3), (3, 3)]


def test_the_page_says_means_spread_and_who_is_missing(root):
    text = write_sweep_report(root).read_text()
    assert "5 of 9 runs are complete" in text
    assert f"slurm-ppo sweep {root}" in text
    group = compare_sweep(root).groups[1]
    last = [member.last["reward/mean"] for member in group.members]
    assert spread_text(last) in text
    assert f"{statistics.fmean(last):.3f} ± {statistics.stdev(last):.3f}" in text
    assert "not begun" in text
    figures = data_of(text, "figures")
    reward = figures["chart-reward"]["data"]
    assert [trace["fillcolor"] for trace in reward if "fill" in trace] == [
        "var(--c2-soft)",
        "var(--c1-soft)",
        "var(--c0-soft)",
    ]


def give_best(root, values, metric):
    """The best policy of each run, in the sweep's order."""
    for point, value in zip(read_sweep(root).points, values, strict=True):
        best = {"iteration": 9, "reward": value, "policy": "policy/00009.1-a", "metric": metric}
        (root / point.name / "best.json").write_text(json.dumps(best))


def test_where_the_lowest_is_the_best_it_comes_first_under_its_own_name(tmp_path):
    root, measured = tmp_path / "lr", EvaluateConfig(best="eval/loss", best_is=Best.LOWEST)
    make_sweep(root, ["1e-6", "3e-6", "1e-5"], 1, evaluate=measured)
    give_best(root, [0.75, 0.25, 0.5], "eval/loss")
    assert [group.label for group in compare_sweep(root).groups] == [
        "learning_rate=3e-6",
        "learning_rate=1e-5",
        "learning_rate=1e-6",
    ]
    text = write_sweep_report(root).read_text()
    assert "Best first, by eval/loss, the lowest first, where there is one" in text
    assert ">eval/loss</th>" in text
    assert "held-out reward</th>" not in text
    (root / "learning_rate_3e-6-seed_0/best.json").unlink()
    assert compare_sweep(root).groups[-1].label == "learning_rate=3e-6", "nothing says that it is good"


def test_best_values_of_different_things_are_not_compared():
    one, other = EvaluateConfig(best="eval/loss"), EvaluateConfig(best="eval/loss", best_is=Best.LOWEST)
    assert measure_of([one, one]) == Measure("eval/loss", is_lowest_best=False)
    assert measure_of([one, other]) is None


def test_a_run_with_policies_left_to_measure_is_not_called_complete(tmp_path):
    measured = EvaluateConfig(command=("measure", "{policy}", "{output}"), command_every=20)
    _, runs = make_sweep(tmp_path / "lr", ["1e-6", "3e-6"], 1, evaluate=measured)
    assert "0 of 2 runs are complete" in write_sweep_report(tmp_path / "lr").read_text()
    record = runs[0].paths.task(Task(20, Stage.BENCHMARK)).record
    record.parent.mkdir(parents=True)
    record.touch()
    assert "1 of 2 runs are complete" in write_sweep_report(tmp_path / "lr").read_text()


def test_keys_that_end_alike_make_groups_of_their_own(tmp_path):
    sweep, _ = make_sweep(tmp_path / "s", ["1e-6", "3e-6"], 2)
    keys = ["rollout.temperature"] * 2 + ["evaluate.temperature"] * 2
    given = zip(sweep.points, keys, strict=True)
    points = [replace(p, settings={key: "1", "seed": p.settings["seed"]}) for p, key in given]
    write_sweep(tmp_path / "s", replace(sweep, points=tuple(points)))
    groups = compare_sweep(tmp_path / "s").groups
    assert {group.label: len(group.members) for group in groups} == {
        "rollout.temperature=1": 2,
        "evaluate.temperature=1": 2,
    }


def test_prompts_side_by_side_are_the_same_ones(root):
    beside = samples_beside(compare_sweep(root))
    assert beside is not None
    assert beside.heads[0].title == "learning_rate=1e-5"
    for prompt, samples in beside.prompts:
        assert "of seed 0" in prompt
        assert {sample.prompt for sample in samples} == {prompt}
        assert len({sample.response for sample in samples}) == 3


def test_settings_that_name_the_groups_need_no_table_of_their_own(root):
    configs = [group.members[0].run.config for group in compare_sweep(root).groups]
    assert settings_table(configs, ["update.learning_rate"]) == []
    (line,) = settings_table(configs, ["seed"])
    assert line == ["learning_rate", "1e-5", "3e-6", "1e-6"]
    assert settings_table(configs, [])[0][0] == "update.learning_rate"


def test_a_spoilt_run_is_named_and_the_others_are_shown(tmp_path):
    root = tmp_path / "lr"
    make_sweep(root, ["1e-6", "3e-6"], 1)
    (root / "learning_rate_1e-6-seed_0/config.yaml").write_text("changed: true\n")
    data = compare_sweep(root)
    assert list(data.unreadable) == ["learning_rate_1e-6-seed_0"]
    assert "was changed since the run began" in write_sweep_report(root).read_text()


def test_a_sweep_without_rows_or_without_a_manifest(tmp_path):
    with pytest.raises(SweepError, match="holds no sweep"):
        write_sweep_report(tmp_path)
    make_sweep(tmp_path / "lr", ["1e-6"], 1)
    (tmp_path / "lr/learning_rate_1e-6-seed_0/metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"no run of the sweep .* has a row yet"):
        write_sweep_report(tmp_path / "lr")


values = st.lists(
    st.lists(st.floats(-9, 9), min_size=1, max_size=5),  # rows of each run
    min_size=1,
    max_size=4,
)


@given(values)
def test_areas_hold_every_run_and_the_mean(runs):
    rows = [[{"iteration": i, "x": value} for i, value in enumerate(run)] for run in runs]
    mean, low, high = (merged(rows, how) for how in (statistics.fmean, min, max))
    for middle, least, most in zip(mean, low, high, strict=True):
        of_all = [run[int(middle["iteration"])] for run in runs if len(run) > middle["iteration"]]
        assert (least["x"], most["x"]) == (min(of_all), max(of_all))
        assert least["x"] - 1e-9 <= middle["x"] <= most["x"] + 1e-9
    several = merged(rows, min, least=2)
    assert sum("x" in row for row in several) == sum(
        sum(len(run) > i for run in runs) > 1 for i in range(len(mean))
    )


def test_runs_of_one_setting_are_one_group(root):
    data = compare_sweep(root)
    points = [point for point in data.points if point.settings["update.learning_rate"] == "1e-6"]
    only_seeds = [type(p)(**vars(p) | {"settings": {"seed": p.settings["seed"]}}) for p in points]
    assert [group.label for group in groups_of(only_seeds, [])] == ["all seeds"]


def test_runs_named_one_by_one_are_a_page_like_the_sweeps_with_groups_of_one(root, tmp_path):
    runs = [load_run(root / point.name) for point in read_sweep(root).points[:6:3]]
    data = compare_runs(runs)
    assert [(group.label, group.number, group.size) for group in data.groups] == [
        (runs[1].identity.name, 1, 1),
        (runs[0].identity.name, 0, 1),
    ]
    text = write_comparison(runs, tmp_path / "both.html").read_text()
    for part in ("2 of 2 runs are complete", "update.learning_rate", "Samples side by side", str(root)):
        assert part in text
    assert "fillcolor" not in str(data_of(text, "figures")["chart-reward"]), "one run has no spread"
