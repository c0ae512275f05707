"""The command line as users and scripts rely on it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import typer.main
import yaml

from pipeline.cli import app

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "deepspeed", "pyarrow", "wandb", "hydra", "plotly", "numpy")

SURFACE = {
    "run": ["OVERRIDES", "--config-dir"],
    "submit": ["OVERRIDES", "--config-dir", "--dry-run"],
    "resume": ["RUN", "--from"],
    "cancel": ["RUN"],
    "advance": ["RUN"],
    "status": ["RUN", "--json", "--cost"],
    "watch": ["RUN", "--interval"],
    "logs": ["RUN", "[STAGE[@ITERATION]]", "--failed", "--follow", "--lines"],
    "plan": ["OVERRIDES", "--config-dir"],
    "config": ["OVERRIDES", "--config-dir"],
    "validate": ["OVERRIDES", "--config-dir", "--probe"],
    "doctor": ["RUN|OVERRIDES", "--config-dir", "--probe", "--json"],
    "notify": ["OVERRIDES", "--config-dir"],
    "report": ["RUN...", "--out"],
    "sync": ["RUN", "--anew", "--timeout"],
    "export": ["RUN[@ITERATION]", "DIR", "--adapter"],
    "fork": ["RUN[@ITERATION]", "NEW_RUN", "OVERRIDES", "--config-dir"],
    "devcluster": [],
    "dashboard": [],
}

STATUS_KEYS = [
    "schema",
    "run",
    "state",
    "iterations_done",
    "iterations",
    "evaluations_done",
    "evaluations",
    "current",
    "driver",
    "stopped",
    "last_row",
    "last_failure",
    "slurm",
    "cost",
    "forked_from",
    "kept",
    "advice",
]


@pytest.fixture
def copied_run(complete_run, tmp_path) -> Path:
    return Path(shutil.copytree(complete_run, tmp_path / "run", symlinks=True))


@pytest.fixture
def incomplete_run(copied_run) -> Path:
    (copied_run / "iterations/00002/reward/shard-00001.json").unlink()
    (copied_run / "iterations/00002/update/shard-00000.json").unlink()
    (copied_run / "iterations/00002/evaluate/shard-00000.json").unlink()
    return copied_run


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)


# --- the surface ---


def test_commands_arguments_and_options_are_an_interface():
    found = {}
    for name, command in typer.main.get_command(app).commands.items():
        parameters = [p for p in command.params if p.name != "help"]
        found[name] = [
            p.opts[0] if p.param_type_name == "option" else p.metavar or p.name.upper() for p in parameters
        ]
    assert found == SURFACE


def test_the_commands_of_a_cluster_of_ones_own():
    group = typer.main.get_command(app).commands["devcluster"]
    assert sorted(group.commands) == ["down", "env", "status", "up"]


def test_the_commands_of_dashboards():
    group = typer.main.get_command(app).commands["dashboard"]
    found = {name: [p.opts[0] for p in command.params] for name, command in group.commands.items()}
    where = ["run_dir", "--project", "--entity"]
    assert found == {"push": [*where, "--timeout"], "print": where}


def test_this_machine_has_no_queue(inputs, tmp_path, slurm_ppo):
    done = slurm_ppo("submit", *tiny.overrides(inputs, tmp_path / "run"))
    assert done.returncode == 2
    assert "error: scheduler=local has no queue to submit to" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_this_machine_has_no_jobs_to_cancel(complete_run, slurm_ppo):
    before = snapshot(complete_run)
    done = slurm_ppo("cancel", complete_run)
    assert done.returncode == 2
    assert "end that with Ctrl-C" in done.stderr
    assert snapshot(complete_run) == before


@pytest.mark.parametrize("command", ["", *SURFACE])
def test_help_is_quick_because_it_imports_nothing_heavy(command):
    code = f"""
import sys
from pipeline.cli import main
sys.argv = ["slurm-ppo", *{[command] if command else []}, "--help"]
try:
    main()
finally:
    print("HEAVY", [name for name in {HEAVY} if name in sys.modules])
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "x", "--jsno"], "No such option: --jsno.*--json"),
        (["run", "--config-dri", "x"], "No such option: --config-dri.*--config-dir"),
        (["resume", "x", "--form", "update"], "No such option: --form.*--from"),
        (["stauts", "x"], "No such command 'stauts'"),
        (["status"], "Missing argument 'RUN'"),
    ],
)
def test_typos_are_answered_with_what_is_possible(slurm_ppo, arguments, said):
    done = slurm_ppo(*arguments)
    assert done.returncode == 2
    assert re.search(said, " ".join(done.stderr.split())), done.stderr


# --- status ---


def test_status_of_a_complete_run(complete_run, slurm_ppo):
    done = slurm_ppo("status", complete_run)
    assert done.returncode == 0
    assert f"{complete_run}: complete, 2/2 iterations, 3/3 evaluations" in done.stdout
    assert done.stdout.splitlines()[-1] == f"next: slurm-ppo report {complete_run}"


def test_status_of_an_incomplete_run(incomplete_run, slurm_ppo):
    before = snapshot(incomplete_run)
    done = slurm_ppo("status", incomplete_run)
    assert done.returncode == 3
    assert "incomplete, 1/2 iterations" in done.stdout
    assert "rollout 2/2, reward 1/2, update 0/1" in done.stdout
    assert done.stdout.splitlines()[-1] == f"next: slurm-ppo resume {incomplete_run}"
    assert snapshot(incomplete_run) == before


def test_status_as_json_has_stable_keys(incomplete_run, slurm_ppo):
    done = slurm_ppo("status", incomplete_run, "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert list(found) == STATUS_KEYS
    assert (found["schema"], found["state"], found["iterations_done"]) == (3, "incomplete", 1)
    assert {"stage": "reward", "done": 1, "total": 2} in found["current"]


def test_status_of_nothing(tmp_path, slurm_ppo):
    done = slurm_ppo("status", tmp_path / "absent")
    assert done.returncode == 2
    assert "is not a run directory" in done.stderr
    assert done.stdout == ""


# --- plan, config, validate ---


def test_a_plan_of_overrides_lists_every_task_and_writes_nothing(inputs, tmp_path, slurm_ppo):
    done = slurm_ppo("plan", *tiny.overrides(inputs, tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"rollout +4 +0\n", done.stdout)
    assert "iteration 2 update: not committed" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_a_run_lists_what_is_left_and_why(incomplete_run, slurm_ppo):
    cut = next(incomplete_run.glob("iterations/00002/rollout/shard-00000.*.arrow"))
    cut.write_bytes(cut.read_bytes()[:100])
    before = snapshot(incomplete_run)
    done = slurm_ppo("plan", incomplete_run)
    assert done.returncode == 0, done.stderr
    listed = [line for line in done.stdout.splitlines() if re.match(r"(iteration \d|prepare:)", line)]
    assert len(listed) == 4
    assert re.search(r"iteration 2 rollout shard 0: .* has 100 bytes instead of \d+", done.stdout)
    assert "iteration 2 reward shard 1: not committed" in listed
    assert snapshot(incomplete_run) == before


def test_a_plan_of_a_complete_run_is_empty(complete_run, slurm_ppo):
    assert "nothing to do: every task is committed" in slurm_ppo("plan", complete_run).stdout


def test_config_prints_every_key_and_what_it_prints_is_what_a_run_freezes(inputs, complete_run, slurm_ppo):
    more = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
    done = slurm_ppo("config", *tiny.overrides(inputs, complete_run, *more))
    assert done.returncode == 0, done.stderr
    assert done.stdout == (complete_run / "config.yaml").read_text()
    assert yaml.safe_load(done.stdout)["rollout"]["temperature"] == 1.0


def test_validate_says_what_it_looked_at(inputs, tmp_path, slurm_ppo):
    done = slurm_ppo("validate", *tiny.overrides(inputs, tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"data.prompts: 24 usable rows in .*prompts.jsonl", done.stdout)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.prompt_column=question", "question"),
        ("data.prompts_per_iteration=200", "has 24 usable rows, fewer than data.prompts_per_iteration=200"),
        ("data.prompts={inputs}/policy/config.json", "config.json"),
    ],
)
def test_validate_refuses_data_that_cannot_be_used(inputs, tmp_path, slurm_ppo, override, said):
    overrides = tiny.overrides(inputs, tmp_path / "run", override.replace("{inputs}", str(inputs)))
    done = slurm_ppo("validate", *overrides)
    assert done.returncode == 2
    assert said in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())


# --- run and resume ---


def test_run_into_an_existing_run_lists_the_legal_next_moves(inputs, copied_run, slurm_ppo):
    before = snapshot(copied_run)
    done = slurm_ppo("run", *tiny.overrides(inputs, copied_run))
    assert done.returncode == 2
    assert f"slurm-ppo resume {copied_run}" in done.stderr
    assert "choose run_dir=... or name=..." in done.stderr
    assert snapshot(copied_run) == before


def test_run_into_someone_elses_folder_touches_nothing(inputs, tmp_path, slurm_ppo):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = slurm_ppo("run", *tiny.overrides(inputs, tmp_path))
    assert done.returncode == 2
    assert "exists and holds other files; choose another run_dir" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_run_onto_a_file_or_where_nothing_can_be_made(inputs, tmp_path, slurm_ppo):
    (tmp_path / "file").write_text("")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        done = slurm_ppo("run", *tiny.overrides(inputs, run_dir))
        assert done.returncode == 2, done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: ")
        assert str(tmp_path / "file") in done.stderr
        assert "Traceback" not in done.stderr


def test_resuming_a_complete_run_changes_no_result(copied_run, slurm_ppo):
    rows = (copied_run / "metrics.jsonl").read_bytes()
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
    assert (copied_run / "metrics.jsonl").read_bytes() == rows
    assert not (copied_run / "superseded").exists()


@pytest.mark.parametrize("command", ["resume", "status", "report", "cancel", "logs", "advance", "watch"])
@pytest.mark.parametrize("kind", ["absent", "file", "folder"])
def test_what_is_no_run_is_refused_with_the_way_to_make_one(tmp_path, slurm_ppo, command, kind):
    path = tmp_path / "thing"
    if kind == "file":
        path.write_text("hello")
    if kind == "folder":
        path.mkdir()
    done = slurm_ppo(command, path)
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*thing is not a run directory: .*slurm-ppo run.*\n", done.stderr), (
        done.stderr
    )


def test_a_changed_configuration_is_refused(copied_run, slurm_ppo):
    path = copied_run / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 2
    assert f"{path} was changed since the run began" in done.stderr


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "null", '{"id": "a"}', '{"id": 1, "name": 2, "created": "x"}', "\x00\x01"],
)
def test_a_run_json_that_is_none_is_named(copied_run, slurm_ppo, text):
    (copied_run / "run.json").write_text(text)
    done = slurm_ppo("status", copied_run)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {copied_run}/run.json cannot be read")


def test_a_run_json_with_values_of_wrong_types_is_named(copied_run, slurm_ppo):
    path = copied_run / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"created": "yesterday"}))
    done = slurm_ppo("status", copied_run)
    assert done.returncode == 2
    assert "run.json cannot be read" in done.stderr
    assert "created" in done.stderr


def test_output_into_a_closed_pipe_is_no_traceback(inputs, tmp_path, environment):
    overrides = " ".join(tiny.overrides(inputs, tmp_path / "run", "iterations=5000"))
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m pipeline plan {overrides} | head -1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("stage")


# --- who imports whom ---

RUN_AND_PRINT_IMPORTED = """
import sys
from pipeline.cli import main
sys.argv = {words}
try:
    main()
finally:
    print("IMPORTED", [name for name in {unneeded} if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("status RUN", set()),
        ("status RUN --json", set()),
        ("logs RUN", set()),
        ("plan RUN", set()),
        ("config OVERRIDES", {"hydra", "omegaconf"}),
        ("plan OVERRIDES", {"hydra", "omegaconf"}),
        ("validate OVERRIDES", {"hydra", "omegaconf", "pyarrow", "numpy"}),
        ("report RUN", {"plotly", "pyarrow", "numpy"}),
        ("resume RUN", {"plotly", "plotext", "pyarrow", "numpy"}),
    ],
)
def test_commands_import_nothing_heavy_that_they_do_not_need(
    copied_run, inputs, tmp_path, environment, command, needed
):
    overrides = tiny.overrides(inputs, tmp_path / "new")
    meant = {"RUN": [str(copied_run)], "OVERRIDES": overrides}
    words = ["slurm-ppo", *(word for part in command.split() for word in meant.get(part, [part]))]
    unneeded = {*HEAVY, "omegaconf", "plotext", "rich", "submitit", "vllm"} - needed
    code = RUN_AND_PRINT_IMPORTED.format(words=words, unneeded=unneeded)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "IMPORTED []"


LOADED = """
import importlib, pkgutil, sys
for package in {packages}:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print(sorted({{name.split(".")[0] for name in sys.modules}} & set({unwanted})))
"""


@pytest.mark.parametrize(
    ("packages", "unwanted"),
    [
        (["pipeline", "slurm"], ["torch", "transformers", "deepspeed", "vllm", "stages"]),
        (["slurm"], ["pipeline", "stages"]),
    ],
)
def test_packages_import_only_what_they_may_know(packages, unwanted):
    done = python(LOADED.format(packages=packages, unwanted=unwanted))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_stages_know_nothing_of_slurm():
    for path in (ROOT / "stages").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) slurm\b", path.read_text(), re.MULTILINE), path
