"""evaluate.command: a program of the user's measures policies, and whatever it does, training goes on.

Runs of light tasks, real everything else.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.orchestrate.rewind import Point, go_back
from pipeline.run.benchmarks import read_measured
from pipeline.run.directory import load_run
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage
from tests.support import ROOT, tiny
from tests.support.killing import assert_same_end, events
from tests.support.processes import script
from tests.support.tables import LONG

PROGRAM = """
import json, os, sys, time
policy, output, iteration, folder = sys.argv[1:]
assert os.path.exists(policy + "/config.json") and os.path.exists(policy + "/tokenizer.json")
with open(os.path.join(folder, "calls"), "a") as file:
    file.write(iteration + "\\n")
first = open(os.path.join(folder, "calls")).read().split().count(iteration) == 1
how = json.load(open(os.path.join(folder, "how.json"))).get(iteration, "fine")
if how == "fails": sys.exit("it says why")
if how == "fails once" and first: sys.exit(3)
if how == "hangs": time.sleep(600)
if how == "writes nothing": sys.exit(0)
numbers = {"acc": 1 / (1 + int(iteration)), "tasks/n": 4}
if how == "writes NaN": numbers["acc"] = float("nan")
if how == "nests": numbers = {"all": numbers}
with open(output, "w") as file:
    json.dump(numbers, file)
    if how == "writes much": file.write(" " * (2 << 20))
    if how == "breaks": file.seek(3); file.truncate()
"""


def words(inputs: Path, folder: Path, how: dict[int, str], *more: str) -> list[str]:
    """The words of the ``complete_run`` fixture, and a program that does what ``how`` says by version."""
    (folder / "measure.py").write_text(PROGRAM)
    (folder / "how.json").write_text(json.dumps(how))
    heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
    command = f"[{sys.executable},{folder / 'measure.py'},'{{policy}}','{{output}}','{{iteration}}',{folder}]"
    return tiny.overrides(inputs, folder / "run", *heldout, f"evaluate.command={command}", *more)


def calls(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "calls").read_text().split()]


@pytest.fixture(scope="module")
def measured_run(inputs, slurm_ppo, tmp_path_factory) -> Path:
    """A run whose policies 0, 1 and 2 were measured, 1 only at the second try."""
    folder = tmp_path_factory.mktemp("measured")
    best = ("evaluate.best=eval/acc", "evaluate.best_is=lowest")
    done = slurm_ppo("run", *words(inputs, folder, {1: "fails once"}, *best))
    assert done.returncode == 0, done.stderr
    (folder / "stderr").write_text(done.stderr)
    return folder


def test_every_policy_is_measured_and_training_is_the_same_to_the_byte(measured_run, complete_run):
    run_dir = measured_run / "run"
    assert_same_end(run_dir, complete_run)
    found = read_measured(RunPaths(run_dir))
    expected = [(k, {"eval/acc": 1 / (1 + k), "eval/tasks/n": 4.0}, "") for k in (0, 1, 2)]
    assert [(one.policy_version, one.numbers, one.missing) for one in found] == expected
    assert calls(measured_run) == [0, 1, 1, 2]
    assert [event["task"] for event in events(run_dir, "failed")] == ["1/benchmark/0"]
    assert "exit code 3" in (measured_run / "stderr").read_text()
    left = [path.name for path in run_dir.glob("iterations/*/benchmark/*") if ".written." in path.name]
    assert left == []


def test_the_best_policy_may_be_chosen_by_a_number_of_the_program(measured_run):
    best = json.loads((measured_run / "run/best.json").read_text())
    assert (best["iteration"], best["reward"], best["metric"]) == (2, 1 / 3, "eval/acc")
    assert (measured_run / "run/policy/best").readlink() == (measured_run / "run/policy/00002").readlink()


def test_the_best_is_chosen_again_where_its_numbers_are_taken_back(measured_run, tmp_path):
    run = load_run(shutil.copytree(measured_run / "run", tmp_path / "run", symlinks=True))
    folder = go_back(run, Point(Stage.BENCHMARK, 2))
    best = json.loads(run.paths.best.read_bytes())
    assert (best["iteration"], best["reward"]) == (1, 1 / 2)
    assert (run.paths.policies / "best").readlink() == (run.paths.policies / "00001").readlink()
    assert json.loads((folder / "best.json").read_bytes())["iteration"] == 2


def test_the_numbers_are_in_status_doctor_report_and_logs(measured_run, slurm_ppo):
    run_dir = measured_run / "run"
    status = slurm_ppo("status", run_dir)
    assert "3/3 policies measured by evaluate.command" in status.stdout
    told = json.loads(slurm_ppo("status", run_dir, "--json").stdout)
    assert (told["benchmarks_done"], told["benchmarks"], told["benchmarks_missing"]) == (3, 3, [])
    assert "Numbers of evaluate.command" in (run_dir / "report.html").read_text()
    assert "measure.py" in slurm_ppo("logs", run_dir, "benchmark@2").stdout
    assert "nothing to do" in slurm_ppo("plan", run_dir).stdout


MISDEEDS = ("fails", "writes nothing", "writes NaN", "nests", "breaks", "writes much", "hangs")


@pytest.fixture(scope="module")
def poor_run(inputs, slurm_ppo, tmp_path_factory) -> Path:
    """A run whose program does something else wrong at each policy, but for the last."""
    folder = tmp_path_factory.mktemp("poor")
    how = dict(enumerate(MISDEEDS))
    limits = (f"iterations={len(MISDEEDS)}", "evaluate.command_seconds=2", "evaluate.command_attempts=1")
    done = slurm_ppo("run", *words(inputs, folder, how, *limits))
    assert done.returncode == 0, done.stderr
    (folder / "told").write_text(done.stderr + done.stdout)
    return folder


def test_whatever_the_program_does_the_run_completes_and_says_what_is_missing(poor_run, slurm_ppo):
    run_dir, told = poor_run / "run", (poor_run / "told").read_text()
    found = read_measured(RunPaths(run_dir))
    reasons = (
        "exit code 1",
        "did not write",
        "finite number",
        "valid number",
        "Invalid JSON",
        "2.0 MiB",
        "after 2 s",
    )
    assert [one.policy_version for one in found if one.missing] == list(range(7))
    for one, reason in zip(found, reasons, strict=False):
        assert reason in one.missing, one
    assert found[-1].numbers["eval/acc"] == 1 / 8
    assert "complete without some numbers: 1/8 policies measured" in told
    assert calls(poor_run) == list(range(8)), "each was tried as often as it may"
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 7
    status = json.loads(slurm_ppo("status", run_dir, "--json").stdout)
    assert (status["state"], status["benchmarks_missing"]) == ("complete", list(range(7)))
    assert "7 missing" in slurm_ppo("doctor", run_dir).stdout
    assert "it says why" in slurm_ppo("logs", run_dir, "benchmark@0").stdout


def test_missing_numbers_are_measured_again_when_a_person_asks(poor_run, complete_run, slurm_ppo):
    """From policy 5 on; training is left alone."""
    run_dir = poor_run / "run"
    (poor_run / "how.json").write_text("{}")
    before = [path.read_bytes() for path in sorted(run_dir.glob("iterations/*/update/*.json"))]
    done = slurm_ppo("resume", run_dir, "--from", "benchmark@5")
    assert done.returncode == 0, done.stderr
    found = read_measured(load_run(run_dir).paths)
    assert [one.policy_version for one in found if one.missing] == list(range(5))
    assert calls(poor_run)[8:] == [5, 6, 7]
    assert [path.read_bytes() for path in sorted(run_dir.glob("iterations/*/update/*.json"))] == before
    refused = slurm_ppo("resume", run_dir, "--from", "benchmark@8")
    assert refused.returncode == 2
    assert "iteration 7" in refused.stderr


def test_several_sets_and_samples_have_numbers_of_their_own(inputs, slurm_ppo, tmp_path):
    sets = [
        f"data.heldout.{name}={inputs / file}.jsonl" for name, file in (("a", "heldout"), ("b", "prompts"))
    ]
    more = ["evaluate.every=2", "evaluate.samples_per_prompt=3", "evaluate.pass_at=[1,2]"]
    more += ["evaluate.num_prompts=4", "evaluate.solved_at=0", "evaluate.best=evaluate/b/reward"]
    done = slurm_ppo("run", *tiny.overrides(inputs, tmp_path / "run", *sets, *more))
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    names = {
        f"{s}{n}" for s in ("", "a/", "b/") for n in ("reward", "reward/rm", "mean@3", "pass@1", "pass@2")
    }
    found = {name.removeprefix("evaluate/") for name in row if name.startswith("evaluate/")}
    assert found == names | {"response_length", "num_turns"}
    assert row["evaluate/reward"] == pytest.approx((row["evaluate/a/reward"] + row["evaluate/b/reward"]) / 2)
    assert row["evaluate/pass@1"] <= row["evaluate/pass@2"]
    record = json.loads((tmp_path / "run/iterations/00002/evaluate/shard-00000.json").read_text())
    assert record["rows"] == (4 + 4) * 3
    best = json.loads((tmp_path / "run/best.json").read_text())
    assert (best["reward"], best["metric"]) == (row["evaluate/b/reward"], "evaluate/b/reward")


# --- lm-evaluation-harness ---

EXAMPLE = ROOT / "examples/evaluation"


@LONG
def test_lm_evaluation_harness_measures_a_policy(models, tmp_path):
    """The real one, on the task whose data lie beside it. What a program's numbers become is tested above."""
    output = tmp_path / "numbers.json"
    more = ("--include_path", EXAMPLE / "tasks", "--device", "cpu", "--limit", 4)
    words = (models / "policy", output, "--tasks", "last_letter", "--", *more)
    done = script(EXAMPLE / "lm_eval_numbers.py", *words)
    assert done.code == 0, done.log
    assert 0 <= json.loads(output.read_text())["last_letter/acc"] <= 1


def test_words_for_lm_evaluation_harness_and_its_filters(tmp_path):
    """Words behind -- reach it as they are; a program of the same interface says what it got."""
    (tmp_path / "said.py").write_text(SAID)
    program = f"{sys.executable} {tmp_path / 'said.py'}"
    words = [
        tmp_path,
        tmp_path / "numbers.json",
        "--tasks",
        "a,b",
        "--program",
        program,
        "--",
        "--limit",
        "4",
    ]
    subprocess.run([sys.executable, EXAMPLE / "lm_eval_numbers.py", *words], check=True, timeout=60)
    assert json.loads((tmp_path / "numbers.json").read_text()) == {"a,b/acc": 4, "a,b/em@strict-match": 0.5}


SAID = """
import json, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert pathlib.Path(given["--model_args"].removeprefix("pretrained=")).is_dir()
metrics = {"alias": "x", "acc,none": int(given["--limit"]), "acc_stderr,none": "N/A", "em,strict-match": 0.5}
(pathlib.Path(given["--output_path"]) / "results_2026.json").write_text(
    json.dumps({"results": {given["--tasks"]: metrics}})
)
"""
