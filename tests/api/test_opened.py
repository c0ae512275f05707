"""A run in Python: what a notebook or a script gets, of runs in every state, and that nothing is changed."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest

import pipeline
from pipeline import MissingPackage, RunError, open_run
from pipeline.config.scheduler import LocalConfig
from pipeline.run import journal
from pipeline.run.commits import publish
from pipeline.run.directory import Run
from pipeline.run.packed import archives
from pipeline.run.packing import pack
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import PREPARE, Stage, Task
from tests.support import ROOT, reportrun
from tests.support.committed import commit
from tests.support.copying import snapshot

SHARDS = 3


def commit_iteration(run: Run, iteration: int) -> None:
    """Shards of three responses each; the best is the last of the last shard."""
    for shard in range(SHARDS):
        rewards = [shard - 1.0, shard + 0.25, float(shard)]
        names = [f"{iteration}.{shard}.{i}" for i in range(3)]
        reportrun.commit_shard(run, iteration, shard, responses=names, rewards=rewards)


@pytest.fixture
def run(tmp_path) -> Run:
    """Two iterations are done, of the third two shards are scored."""
    run = reportrun.make_run(tmp_path / "run", SHARDS, iterations=9, scheduler=LocalConfig())
    publish(run.paths, reportrun.record(PREPARE))
    for iteration in (1, 2):
        commit_iteration(run, iteration)
        commit(run, iteration)
        journal.append(run.paths.metrics, reportrun.make_row(iteration))
    for shard in range(2):
        reportrun.commit_shard(run, 3, shard, responses=["a", "b"], rewards=[1.0, 2.0])
    return run


# --- what there is to see ---


def test_a_complete_run(complete_run):
    before = snapshot(complete_run)
    opened = open_run(str(complete_run))
    status = opened.status()
    assert (status.state, status.iterations_done, status.iterations) == ("complete", 2, 2)
    assert (status.evaluations_done, status.evaluations) == (3, 3)
    rows = opened.metrics().to_pylist()
    written = list(map(json.loads, (complete_run / "metrics.jsonl").read_text().splitlines()))
    assert [{k: v for k, v in row.items() if v is not None} for row in rows[1:]] == written
    assert rows[0]["iteration"] == 0  # the evaluation of the user's model
    assert rows[0]["reward/mean"] is None
    assert [policy.version for policy in opened.policies()] == [0, 1, 2]
    (best,) = (policy for policy in opened.policies() if policy.is_best)
    assert best.reward == max(row["evaluate/reward"] for row in rows[1:])
    assert all((policy.path / "config.json").is_file() for policy in opened.policies())
    assert opened.samples().iteration == 2
    assert {record.task.stage for record in opened.records(0).rows} == {"prepare", "evaluate"}
    records = opened.records(2)
    assert {"rollout", "reward", "update", "state", "evaluate"} == {r.task.stage for r in records.rows}
    assert all(
        (complete_run / file.path).stat().st_size == file.bytes for r in records.rows for file in r.outputs
    )
    assert (records.damage, records.missing) == ((), ())
    assert opened.config.iterations == 2
    assert snapshot(complete_run) == before


def test_metrics_have_types_that_do_not_depend_on_their_values(run):
    table = open_run(run.paths.root).metrics()
    assert table.column_names[0] == "iteration"
    assert table["iteration"].to_pylist() == [1, 2]
    kinds = {name: str(kind) for name, kind in zip(table.column_names, table.schema.types, strict=True)}
    assert (kinds["iteration"], kinds["samples"], kinds["reward/mean"]) == ("int64", "int64", "double")
    assert table["evaluate/reward"].to_pylist()[0] is None  # every other iteration is evaluated


def test_a_frame_of_pandas_has_iterations_as_its_index(run):
    pandas = pytest.importorskip("pandas")
    frame = open_run(run.paths.root).metrics_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == [1, 2]
    assert math.isnan(frame["evaluate/reward"][1])


def test_without_pandas_one_line_says_the_way_out(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match=r"^pandas is not installed here: pip install pandas; or"):
        open_run(run.paths.root).metrics_frame()


# --- samples ---


def test_while_it_goes_on_the_newest_iteration_with_rewards_is_read(run):
    opened = open_run(run.paths.root)
    found = opened.samples()
    assert (found.iteration, found.num_scored, found.num_pending, found.reward_mean) == (3, 4, 1, 1.5)
    assert [sample.response for sample in found.rows] == ["a", "b", "a", "b"]
    reportrun.commit_shard(run, 3, 2, responses=["new"], rewards=[9.0])
    assert [sample.response for sample in opened.samples(best=1).rows] == ["new"]
    assert opened.samples().num_pending == 0


def test_best_worst_and_random_ones_are_of_the_whole_iteration(run):
    found = open_run(run.paths.root).samples(1, best=2, worst=1, at_random=2, seed=5)
    assert [str(choice) for choice in found.choices] == ["best", "best", "worst", "random", "random"]
    assert [sample.response for sample in found.rows[:3]] == ["1.2.1", "1.2.2", "1.0.0"]
    assert len({sample.response for sample in found.rows}) == 5
    assert found == open_run(run.paths.root).samples(1, best=2, worst=1, at_random=2, seed=5)


@pytest.mark.parametrize("name", ["best", "worst", "at_random"])
def test_fewer_than_no_responses_are_refused_in_a_line(run, name):
    with pytest.raises(RunError, match=f"^{name}=-1 is negative; give 0 or more$"):
        open_run(run.paths.root).samples(1, **{name: -1})


def test_responses_of_one_prompt_by_its_id_or_its_text(run):
    texts = ["Add 2 and 3", "Add 7 and 8", "Say hello"]
    ids = ["sum", "sum-2", "hello"]
    words = ["5", "15", "hi"]
    reportrun.commit_shard(run, 3, 2, responses=words, rewards=[0, 0, 0], prompts=texts, prompt_ids=ids)
    opened = open_run(run.paths.root)
    assert [sample.response for sample in opened.samples(3, prompt="sum").rows] == ["5"]
    assert [sample.response for sample in opened.samples(3, prompt="SAY hello").rows] == ["hi"]
    with pytest.raises(RunError, match=r"2 prompts of iteration 3 have the text 'add'; .*'sum', 'sum-2'"):
        opened.samples(3, prompt="add")
    with pytest.raises(RunError, match="no prompt with the id 'x'"):
        opened.samples(3, prompt="x")


def test_samples_as_a_table(run):
    table = open_run(run.paths.root).samples(1, best=1).table()
    (row,) = table.to_pylist()
    assert row["response"] == "1.2.1"
    assert (row["reward/rm"], row["reward/brevity"], row["choice"], row["turns"]) == (2.25, 1.125, "best", [])
    assert open_run(run.paths.root).samples(1).table().schema == table.schema


def test_shards_that_cannot_be_read_are_named_and_the_others_are_given(run):
    path = run.paths.task(Task(1, Stage.ROLLOUT, 2)).data("one")
    path.write_bytes(path.read_bytes()[::-1])
    run.paths.task(Task(1, Stage.REWARD, 0)).record.write_text("{")
    found = open_run(run.paths.root).samples(1, best=1)
    assert [sample.response for sample in found.rows] == ["1.1.1"]
    assert found.num_scored == 3
    assert {damage.what for damage in found.damage} == {
        "iteration 1 rollout shard 2",
        "iteration 1 reward shard 0",
    }
    assert all("shard-0000" in damage.why for damage in found.damage)


def test_scores_of_other_responses_than_there_are_now_are_damage(run, tmp_path):
    """As where a rollout was repeated, and the scores are not made again yet."""
    other = reportrun.make_run(tmp_path / "other", SHARDS)
    reportrun.commit_shard(other, 2, 1, responses=["x"] * 3, rewards=[9.0] * 3, prompt_ids=["p", "q", "r"])
    task = Task(2, Stage.ROLLOUT, 1)
    for file in (run.paths.task(task).record, run.paths.task(task).data("one")):
        shutil.copy(other.paths.root / run.paths.relative(file), file)
    found = open_run(run.paths.root).samples(2)
    assert len(found.rows) == 6
    assert [damage.what for damage in found.damage] == ["iteration 2 reward shard 1"]
    assert "other responses" in found.damage[0].why


def test_packed_iterations_are_read_like_others(run):
    opened = open_run(run.paths.root)
    before = opened.samples(1), opened.records(1)
    pack(run, 1)
    assert archives(run.paths, 1)[1].is_file()
    assert not run.paths.task(Task(1, Stage.REWARD, 0)).record.exists()
    assert (opened.samples(1), opened.records(1)) == before


# --- runs that have not begun, and what is not there ---


def test_a_run_that_has_not_begun(tmp_path):
    run = reportrun.make_run(tmp_path / "run", SHARDS, scheduler=LocalConfig())
    opened = open_run(run.paths.root)
    assert (opened.metrics().num_rows, opened.metrics().column_names) == (0, ["iteration"])
    assert opened.status().state == "incomplete"
    assert [policy.version for policy in opened.policies()] == [0]
    assert opened.records(0).missing == ("prepare",)
    assert opened.samples(1).rows == ()
    with pytest.raises(RunError, match="no responses with rewards yet"):
        opened.samples()


def test_what_is_not_there_is_said_in_a_line(run, tmp_path):
    opened = open_run(run.paths.root)
    with pytest.raises(RunError, match="has iterations 1 to 9, and no iteration 0"):
        opened.samples(0)
    with pytest.raises(RunError, match="has iterations 0 to 9, not 10"):
        opened.records(10)
    with pytest.raises(RunError, match="is not a run directory: nothing is there; did you mean"):
        open_run(tmp_path / "rum")


def test_policies_that_were_thinned_out_are_left_out_and_damaged_ones_are_named(run):
    folder = run.paths.task(policy_maker(1)).policy("1-ab")
    (folder / "weights").unlink()
    damaged, whole = open_run(run.paths.root).policies()[1:]
    assert (damaged.version, damaged.path, whole.damage) == (1, folder, None)
    assert damaged.damage
    assert "weights is gone" in damaged.damage.why
    marker = run.paths.task(policy_maker(1)).thinned
    marker.write_text(json.dumps({"folders": ["policy/00001.1-ab"]}))
    assert [policy.version for policy in open_run(run.paths.root).policies()] == [0, 2]


# --- the promise ---


def test_every_stable_name_is_there_and_documented():
    for name in pipeline.__all__:
        found = getattr(pipeline, name)
        assert found.__doc__, name
        assert name in dir(pipeline)
        if is_dataclass(found):
            assert found.__dataclass_params__.frozen, name
    with pytest.raises(AttributeError, match="has no attribute 'open_runs'"):
        pipeline.open_runs  # noqa: B018


def test_importing_the_package_imports_nothing_else():
    code = "import sys; a = set(sys.modules); import pipeline; print(sorted(set(sys.modules) - a))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == "['pipeline']\n"


def test_no_torch_is_imported_to_look_at_a_run(complete_run):
    code = (
        "import sys; from pipeline import open_run; r = open_run(sys.argv[1]); r.metrics(); r.samples(); "
        "r.policies(); r.records(1); r.status(); r.samples(1, best=1).table(); "
        "print([n for n in ('torch', 'transformers', 'hydra', 'plotly', 'wandb') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(complete_run)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr


# --- what is no iteration, no number, no path ---


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run: run.samples("x"), "iteration='x' is of type str; give a whole number"),
        (lambda run: run.samples(1.0), "iteration=1.0 is of type float; give a whole number"),
        (lambda run: run.samples(True), "iteration=True is of type bool; give a whole number"),
        (lambda run: run.samples([1]), r"iteration=\[1\] is of type list; give a whole number"),
        (lambda run: run.samples(best="2"), "best='2' is of type str; give a whole number"),
        (lambda run: run.samples(worst=None), "worst=None is of type NoneType; give a whole number"),
        (lambda run: run.samples(at_random=0.5), "at_random=0.5 is of type float; give a whole number"),
        (lambda run: run.samples(prompt=7), "prompt=7 is of type int; give a text"),
        (lambda run: run.samples(seed="a"), "seed='a' is of type str; give a whole number"),
        (lambda run: run.records("1"), "iteration='1' is of type str; give a whole number"),
        (lambda run: run.records(None), "iteration=None is of type NoneType; give a whole number"),
        (lambda run: open_run(7), "path=7 is of type int; give a path, as text or pathlib.Path"),
        (lambda run: open_run(None), "path=None is of type NoneType; give a path"),
        (lambda run: open_run(b"run"), "path=b'run' is of type bytes; give a path"),
        (lambda run: open_run("~nobody-at-all/run"), "no user is called 'nobody-at-all'; for a folder"),
    ],
)
def test_a_wrong_type_is_one_line_that_says_what_is_wanted(run, call, said):
    with pytest.raises(ValueError, match=said) as refused:
        call(open_run(run.paths.root))
    assert len(str(refused.value).splitlines()) == 1


def test_numbers_of_numpy_and_pyarrow_columns_are_numbers(run):
    opened = open_run(run.paths.root)
    numpy = pytest.importorskip("numpy")
    assert opened.samples(numpy.int64(1), best=numpy.int32(1)).iteration == 1
    assert opened.records(numpy.int64(1)).iteration == 1


def test_a_path_may_begin_with_the_home_directory(run, monkeypatch):
    monkeypatch.setenv("HOME", str(run.paths.root.parent))
    assert open_run("~/run").path == open_run(Path("~", "run")).path == run.paths.root


def test_behind_the_run_that_may_be_meant_a_new_sentence_begins(run):
    with pytest.raises(RunError, match=r"; did you mean \S*/run\? Start a run with: slurm-ppo run"):
        open_run(run.paths.root.with_name("rum"))
