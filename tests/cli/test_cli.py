"""The command line as users and scripts rely on it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from pipeline.checks.components import why_silent
from pipeline.checks.prompts import judged_files
from pipeline.checks.settings import validate_inputs
from pipeline.cli.app import app
from pipeline.config.compose import compose
from pipeline.config.findings import Findings
from pipeline.config.resolve import resolve
from tests.support import ROOT, tiny
from tests.support.composed import composed_of
from tests.support.copying import snapshot
from tests.support.damage import edit
from tests.support.services import Answer, service

HEAVY = ("torch", "transformers", "deepspeed", "pyarrow", "wandb", "hydra", "plotly", "numpy")

SURFACE = {
    "quickstart": ["OVERRIDES"],
    "run": ["OVERRIDES", "--config-dir"],
    "submit": ["OVERRIDES", "--config-dir", "--dry-run"],
    "resume": ["RUN", "OVERRIDES", "--config-dir", "--from", "--take-over"],
    "cancel": ["RUN"],
    "advance": ["RUN", "--asked"],
    "status": ["RUN", "--json", "--cost"],
    "watch": ["RUN", "--interval"],
    "logs": ["RUN", "[STAGE[@ITERATION]]", "--failed", "--follow", "--lines"],
    "plan": ["OVERRIDES", "--config-dir", "--gpu-memory", "--all"],
    "config": ["OVERRIDES", "--config-dir", "--history"],
    "validate": ["OVERRIDES", "--config-dir", "--probe", "--json", "--gpu-memory"],
    "try": [
        *("OVERRIDES", "--config-dir", "--prompts", "--minutes", "--full", "--keep", "--json"),
        "--time-candidates",
    ],
    "doctor": ["RUN|OVERRIDES", "--config-dir", "--probe", "--json", "--time-candidates"],
    "rehearse": ["RUN|OVERRIDES", "--config-dir", "--short", "--only", "--json"],
    "notify": ["OVERRIDES", "--config-dir"],
    "samples": ["RUN[@ITERATION]", "--best", "--worst", "--random", "--prompt", "--seed", "--full", "--json"],
    "report": ["RUN...", "--out"],
    "sync": ["RUN", "--to", "--new-run", "--project", "--entity", "--offline", "--timeout"],
    "export": ["RUN[@ITERATION]", "DIR", "--adapter"],
    "fork": ["RUN[@ITERATION]", "NEW_RUN", "OVERRIDES", "--config-dir"],
    "sweep": ["OVERRIDES", "--config-dir", "--seeds", "--at-once", "--point", "--drop", "--dry-run"],
    "ls": ["DIR", "--json"],
    "clean": ["RUN|DIR", "--yes", "--only"],
    "devcluster": [],
    "dashboard": [],
    "completion": [],
}

STATUS_KEYS = [
    *("schema", "run", "state", "iterations_done", "iterations", "evaluations_done", "evaluations"),
    *("current", "driver", "stopped", "last_row", "last_failure", "remedy", "slurm", "cost"),
    "forked_from",
    *(
        "settings_changed",
        "copy_of",
        "kept",
        "best",
        "advice",
        "rows_missing",
        "ways_on",
        "troubles",
        "state_lost",
        "workers",
    ),
    *("benchmarks_done", "benchmarks", "benchmarks_missing", "benchmarks_told", "paused", "held_back"),
    "smaller_budgets",
    "said",
]


@pytest.fixture
def incomplete_run(copied_run) -> Path:
    (copied_run / "iterations/00002/reward/shard-00001.json").unlink()
    (copied_run / "iterations/00002/update/shard-00000.json").unlink()
    (copied_run / "iterations/00002/evaluate/shard-00000.json").unlink()
    return copied_run


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
    assert sorted(group.commands) == ["down", "env", "kill", "revive", "status", "up"]


def test_the_commands_of_the_tab_key():
    group = typer.main.get_command(app).commands["completion"]
    assert {name: [p.metavar for p in command.params] for name, command in group.commands.items()} == {
        "install": ["[SHELL]"],
        "show": ["[SHELL]"],
    }


def test_the_commands_of_dashboards():
    group = typer.main.get_command(app).commands["dashboard"]
    found = {name: [p.opts[0] for p in command.params] for name, command in group.commands.items()}
    where = ["run_dir", "--project", "--entity"]
    assert found == {"push": [*where, "--timeout"], "print": where}


HELP_OF_EACH = """
import sys
from pipeline.cli.app import main
for command in {commands}:
    sys.argv = ["slurm-ppo", *command.split(), "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, command
    rooms = {{name.split(".")[1] for name in sys.modules if name.startswith("pipeline.")}}
    print("HEAVY", [name for name in {heavy} if name in sys.modules], "ROOMS", *rooms)
    print("END OF", command)
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What each command prints, and what was imported by then in one process that asks them all."""
    done = python(HELP_OF_EACH.format(commands=["", *SURFACE], heavy=HEAVY))
    assert done.returncode == 0, done.stderr
    pages = re.findall(r"(.*?)^END OF (.*?)$\n", done.stdout, re.MULTILINE | re.DOTALL)
    return {command.strip(): page for page, command in pages}


@pytest.mark.parametrize("command", ["", *SURFACE])
def test_help_is_quick_because_it_imports_nothing_heavy(helps, command):
    assert f"Usage: slurm-ppo {command}".strip() in helps[command]
    assert helps[command].splitlines()[-1] == "HEAVY [] ROOMS cli", "each room brings imports of its own"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "x", "--jsno"], "No such option: --jsno.*--json"),
        (["run", "--config-dri", "x"], "No such option: --config-dri.*--config-dir"),
        (["resume", "x", "--form", "update"], "No such option: --form.*--from"),
        (["stauts", "x"], "No such command 'stauts'"),
        (["status"], "Missing argument 'RUN'"),
        (["sweep", "seed=0,1", "--at-once", "0"], "Invalid value for '--at-once'"),
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
    counts = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("   2  ")]
    assert counts == [["rollout", "2/2"], ["reward", "1/2"], ["update", "0/1"], ["evaluate", "0/1"]]
    assert done.stdout.splitlines()[-1] == f"next: slurm-ppo resume {incomplete_run}"
    assert snapshot(incomplete_run) == before


def test_status_as_json_has_stable_keys(incomplete_run, slurm_ppo):
    done = slurm_ppo("status", incomplete_run, "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert list(found) == STATUS_KEYS
    assert (found["schema"], found["state"], found["iterations_done"]) == (3, "incomplete", 1)
    assert {"stage": "reward", "done": 1, "total": 2} in found["current"]


# --- plan, config, validate ---


def test_a_plan_of_overrides_lists_every_task_and_writes_nothing(inputs, tmp_path, slurm_ppo):
    done = slurm_ppo("plan", "--all", *tiny.overrides(inputs, tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 + 2 * (2 + 2 + 1) + 1
    assert "iteration 2 update: not committed" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_a_run_lists_what_is_left_and_why(incomplete_run, slurm_ppo):
    cut = next(incomplete_run.glob("iterations/00002/rollout/shard-00000.*.arrow"))
    cut.write_bytes(cut.read_bytes()[:100])
    before = snapshot(incomplete_run)
    done = slurm_ppo("plan", incomplete_run, "--all")
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


def test_what_is_held_out_does_not_count_as_usable_prompts(inputs, tmp_path, slurm_ppo):
    """Else the run's first task would find out."""
    rows = ({"id": str(i), "prompt": ""} for i in range(30))
    (tmp_path / "empty.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
    words = tiny.overrides(inputs, tmp_path / "run", f"data.prompts={tmp_path / 'empty.jsonl'}", *more)
    done = slurm_ppo("validate", *words)
    assert done.returncode == 2
    assert "empty.jsonl" in done.stderr
    assert "has 0 usable rows" in done.stderr


# --- what becomes of prompts ---


def tokenised(inputs: Path, folder: Path, rows: list[dict], *more: str) -> list[str]:
    """Settings of a run on these prompts whose tokenizer is that of the policy's files."""
    path = tiny.write_jsonl(folder / "mine.jsonl", rows)
    return tiny.overrides(inputs, folder / "run", "model.tokenizer=null", f"data.prompts={path}", *more)


def rows_of(*lengths: int) -> list[dict]:
    return [{"id": f"r{i}", "prompt": "x" * length} for i, length in enumerate(lengths)]


def test_validate_counts_prompts_that_are_too_long_and_shows_ten(inputs, tmp_path, slurm_ppo):
    """max_new_tokens leaves 52 of 64 tokens."""
    rows = [*rows_of(*range(20, 60)), {"id": "null", "prompt": None}, {"id": "q" * 500, "prompt": [1]}]
    rows += [{"id": f"m{i}", "prompt": "ok", "n": i} for i in range(20)]
    rows += [{"id": "m", "prompt": " ", "n": ["z"]}]
    done = slurm_ppo("validate", *tokenised(inputs, tmp_path, rows))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("data.prompts: "))
    counts = "10 rows cannot be used: 7 too_long, 1 empty, 1 not_text, 1 null"
    assert lines[begin].endswith(f"53 usable rows in {tmp_path / 'mine.jsonl'}; {counts}")
    assert lines[begin + 1] == "  too_long: line 34: 53 tokens, and data.max_prompt_tokens is 52"
    assert lines[begin + 10] == "  empty: line 63: prompt is empty or white space"
    assert lines[begin + 11].startswith("warning: data.prompts: 10 of 63 rows (16%) cannot be used")
    assert lines[-1].startswith("ok so far")


def test_of_many_rows_each_reason_has_an_example_and_the_rest_is_counted(inputs, tmp_path, slurm_ppo):
    rows = [*rows_of(*[60] * 30, *[9] * 60), {"id": "last", "prompt": None}]
    done = slurm_ppo("validate", *tokenised(inputs, tmp_path, rows))
    listed = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    assert len(listed) == 11
    assert listed[9:] == ["  null: line 91: prompt is null", "  and 21 more"]


@pytest.mark.parametrize(
    ("lengths", "more", "said"),
    [
        ((60, 60, 9), [], r"2 of 3 rows \(67%\) cannot be used.*; lower rollout.max_new_tokens"),
        ((60, 9), ["data.max_dropped=0"], r"1 of 2 rows \(50%\) cannot be used, most are too_long"),
        ((60, 60), ["data.max_dropped=1"], "has 0 usable rows, fewer than .*most are too_long"),
        ((60, 9, 9), ["data.prompts_per_iteration=3"], "has 2 usable rows, fewer than data.prompts_per_it"),
        ((60, 60, 9), ["data.max_dropped=0.7"], None),
        ((60, 60, 9), ["data.long_prompts=truncate"], None),
    ],
)
def test_validate_refuses_what_prepare_would_refuse(inputs, tmp_path, slurm_ppo, lengths, more, said):
    small = ["data.prompts_per_iteration=1", "rollout.num_shards=1", "update.minibatches=1"]
    done = slurm_ppo("validate", *tokenised(inputs, tmp_path, rows_of(*lengths), *small, *more))
    assert done.returncode == (2 if said else 0), done.stdout + done.stderr
    if said:
        (line,) = done.stderr.splitlines()
        assert f"data.prompts={tmp_path / 'mine.jsonl'}" in line
        assert re.search(said, line), line


def test_validate_renders_chats_as_tasks_do(inputs, tmp_path, slurm_ppo):
    policy = Path(shutil.copytree(inputs / "policy", tmp_path / "policy"))
    template = (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('no ' + m.content) }}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{{ eos_token }}{% endfor %}"
        "{% if strftime_now('%Y') | int > 2000 and add_generation_prompt %}<a>{% endif %}"
    )
    (policy / "chat_template.jinja").write_text(template)
    user = [{"role": "user", "content": "hi"}]
    rows = [
        {"id": "s", "prompt": [{"role": "system", "content": "\x1b[1msystem"}, *user]},
        {"id": "u", "prompt": user},
    ]
    rows += rows_of(*[5] * 8)
    done = slurm_ppo("validate", *tokenised(inputs, tmp_path, rows, f"model.policy={policy}"))
    assert done.returncode == 0, done.stderr
    assert "1 bad_message" in done.stdout
    assert "line 1: the policy's chat template refuses it: no system" in done.stdout
    (policy / "chat_template.jinja").write_text("{% for %}")
    done = slurm_ppo("validate", *tokenised(inputs, tmp_path, rows, f"model.policy={policy}"))
    assert done.returncode == 2
    assert re.fullmatch(r"error: the policy's chat template, line 1: .*\n", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "tokenizer_config.json").write_text('{"auto_map": {}}'), "Python code"),
        (lambda folder: (folder / "tokenizer_config.json").write_text('{"eos_token": 3}'), "settings"),
    ],
)
def test_without_a_tokenizer_validate_says_that_it_did_not_look(inputs, tmp_path, slurm_ppo, spoil, why):
    policy = Path(shutil.copytree(inputs / "policy", tmp_path / "policy"))
    spoil(policy)
    words = tokenised(inputs, tmp_path, rows_of(*[60] * 9), f"model.policy={policy}")
    done = slurm_ppo("validate", *words)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("not checked: lengths in tokens"))
    assert why in line


@pytest.mark.parametrize("missing", ["tokenizers", "jinja2"])
def test_without_the_packages_validate_says_that_it_did_not_look(inputs, tmp_path, monkeypatch, missing):
    policy = Path(shutil.copytree(inputs / "policy", tmp_path / "policy"))
    (policy / "chat_template.jinja").write_text("{{ messages }}")
    rows = [{"id": f"u{i}", "prompt": [{"role": "user", "content": "hi"}]} for i in range(9)]
    config = resolve(compose(tokenised(inputs, tmp_path, rows, f"model.policy={policy}")))
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else there(name))
    files, _, why_not = judged_files(config)
    assert why_not == f"the package {missing} is not installed here"
    assert len(files[0].kept) == 9


def test_of_many_prompts_validate_looks_at_some(inputs, tmp_path, slurm_ppo):
    line = '{"id": "%d", "prompt": "' + "x" * 9 + '"}\n'
    path = tmp_path / "many.jsonl"
    path.write_text("".join(line % i for i in range(100_000)))
    words = tiny.overrides(inputs, tmp_path / "run", "model.tokenizer=null", f"data.prompts={path}")
    done = slurm_ppo("validate", *words, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "20000 usable rows in" in done.stdout
    assert "looked at 20,000 of 100,000 rows" in done.stdout


def test_prompts_that_leave_responses_no_room_are_counted(inputs, tmp_path, slurm_ppo):
    """Where data.max_prompt_tokens is given, a response is cut where the context ends."""
    words = tokenised(inputs, tmp_path, rows_of(*[20] * 6, *[40] * 4), "data.max_prompt_tokens=50")
    done = slurm_ppo("validate", *words, "rollout.max_new_tokens=30")
    assert done.returncode == 0, done.stderr
    assert "after 4 of 10 prompts there is no room for rollout.max_new_tokens=30" in done.stdout
    lengths = "prompts of 20 to 40 tokens, median 20, 95% up to 40; 4 of 10 leave no room for"
    limit = "none is over data.max_prompt_tokens=50 of a context of 64"
    assert f"data.prompts: {lengths} rollout.max_new_tokens=30; {limit}\n" in done.stdout


def test_validate_tells_how_long_prompts_are(inputs, tmp_path, slurm_ppo):
    done = slurm_ppo("validate", *tokenised(inputs, tmp_path, rows_of(*range(10, 30), 52)))
    assert done.returncode == 0, done.stderr
    lengths = (
        "prompts of 10 to 52 tokens, median 20, 95% up to 29; all leave room for rollout.max_new_tokens=12; "
        "none is over data.max_prompt_tokens=52 of a context of 64"
    )
    assert f"data.prompts: {lengths}\n" in done.stdout


def test_a_plan_tells_how_long_prompts_are_how_many_are_over_and_what_is_not_known(
    inputs, tmp_path, slurm_ppo
):
    done = slurm_ppo("plan", *tokenised(inputs, tmp_path, rows_of(*range(10, 30), 60)))
    assert done.returncode == 0, done.stderr
    assert "prompts of 10 to 29 tokens, median 19, 95% up to 28;" in done.stdout
    assert "; 1 beside them are over data.max_prompt_tokens=52 of a context of 64\n" in done.stdout
    assert "\nseconds: not known: there is no earlier run of such a model here" in done.stdout
    cut = slurm_ppo(
        "plan", *tokenised(inputs, tmp_path, rows_of(*range(10, 30), 60), "data.long_prompts=truncate")
    )
    assert "; 1 of them were over data.max_prompt_tokens=52" in cut.stdout


def test_a_run_keeps_what_was_expected_of_it(complete_run):
    found = json.loads((complete_run / "forecast.json").read_text())
    assert found["seconds"] is None or found["seconds"]["iteration"] > 0
    assert "lengths" in found


def test_validate_says_what_ends_responses_where_model_and_tokenizer_disagree(inputs, tmp_path, slurm_ppo):
    """A fine-tune that has kept its base model's eos_token_id."""
    policy = Path(shutil.copytree(inputs / "policy", tmp_path / "policy"))
    words = tokenised(inputs, tmp_path, rows_of(*[20] * 10), f"model.policy={policy}")
    done = slurm_ppo("validate", *words)
    assert done.returncode == 0, done.stderr
    assert "end token" not in done.stdout
    for name in ("config.json", "generation_config.json"):
        given = json.loads((policy / name).read_text())
        (policy / name).write_text(json.dumps(given | {"eos_token_id": 0}))
    done = slurm_ppo("validate", *words)
    assert done.returncode == 0, done.stderr
    assert "end token (1 '<eos>') is none of the model's end-of-sequence ids (0" in done.stdout
    assert "responses end at any of 0" in done.stdout


def test_with_evaluations_off_what_is_held_out_is_not_looked_at(inputs, tmp_path, slurm_ppo):
    heldout = tiny.write_jsonl(tmp_path / "heldout.jsonl", [{"id": "h", "prompt": None}])
    words = tiny.overrides(inputs, tmp_path / "run", f"data.heldout={heldout}")
    done = slurm_ppo("validate", *words, "evaluate.every=0")
    assert done.returncode == 0, done.stderr
    assert "heldout" not in done.stdout
    done = slurm_ppo("validate", *words, "evaluate.every=1")
    assert done.returncode == 2
    assert "data.heldout=" in done.stderr


# --- settings that cannot work ---


def test_a_folder_that_takes_nothing_new_is_no_place_for_a_run(inputs, tmp_path, slurm_ppo):
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut").chmod(0o500)
    done = slurm_ppo("validate", *tiny.overrides(inputs, tmp_path / "shut/deeper/run"))
    (tmp_path / "shut").chmod(0o700)
    if os.geteuid():  # nothing is shut to root
        assert done.returncode == 2
        assert f"{tmp_path / 'shut'} takes no new directory (Permission denied)" in done.stderr
    assert list((tmp_path / "shut").iterdir()) == []


FAR = "reward.components.far={kind: remote, url: 'http://127.0.0.1:9/score'"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([FAR + ", trial: false}"], "reward far: not asked whether it answers (trial=false)"),
        ([FAR + "}", "scheduler=slurm"], "nothing answers there (Connection refused); compute nodes may"),
    ],
)
def test_a_service_that_is_started_later_or_elsewhere_is_a_warning(
    inputs, tmp_path, slurm_ppo, words, said, monkeypatch
):
    config = resolve(composed_of(inputs, tmp_path / "run", *words))
    assert any(said in line.replace("[Errno 111] ", "") for line in validate_inputs(config, Findings()))


def test_a_service_answers_whatever_it_says():
    for status in (200, 404, 405, 500):
        with service(lambda body, number: Answer({}), head=status) as seen:
            assert why_silent(seen.url) == ""
            assert seen.bodies == []
    with service(lambda body, number: Answer({}), head=503) as seen:
        assert why_silent(seen.url).startswith("503")


# --- run and resume ---


def test_resuming_a_complete_run_changes_no_result(copied_run, slurm_ppo):
    rows = (copied_run / "metrics.jsonl").read_bytes()
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
    assert (copied_run / "metrics.jsonl").read_bytes() == rows
    assert not (copied_run / "superseded").exists()


def test_who_goes_on_with_a_run_of_another_version_is_told(copied_run, slurm_ppo):
    edit(copied_run / "run.json", {"version": "0.0.1"})
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
    assert "warning: the run began with slurm-ppo 0.0.1, and goes on with " in done.stderr


@pytest.mark.parametrize(
    ("record", "change", "said"),
    [
        ("data/prompts.json", {"version": 0}, "its records are of format 0, and "),
        ("data/prompts.json", {"schema": "prompts/9"}, "its data is prompts/9, and prompts/1 is read here"),
        ("iterations/00001/rollout/shard-00000.json", {"schema": "rollout/1"}, "its data is rollout/1"),
    ],
)
def test_a_run_in_the_formats_of_another_version_is_left_alone(copied_run, slurm_ppo, record, change, said):
    edit(copied_run / "run.json", {"version": "0.0.1"})
    edit(copied_run / record, change)
    before = snapshot(copied_run)
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line
    assert snapshot(copied_run) == before


def test_a_changed_configuration_is_refused(copied_run, slurm_ppo):
    path = copied_run / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 2
    assert f"{path} was changed since the run began" in done.stderr


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "null", '{"id": "a"}', '{"id": 1, "name": 2, "created": "x"}', "\x00\x01"]
)
def test_a_run_json_that_is_none_is_named(copied_run, slurm_ppo, text):
    for name in ("run.json", "run.copy.json"):
        (copied_run / name).write_text(text)
    done = slurm_ppo("status", copied_run)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {copied_run}/run.json cannot be read")


def test_a_run_json_with_values_of_wrong_types_is_named(copied_run, slurm_ppo):
    for name in ("run.json", "run.copy.json"):
        edit(copied_run / name, {"created": "yesterday"})
    done = slurm_ppo("status", copied_run)
    assert done.returncode == 2
    assert "run.json cannot be read" in done.stderr
    assert "created" in done.stderr


def test_output_into_a_closed_pipe_is_no_traceback(inputs, tmp_path, environment):
    overrides = " ".join(tiny.overrides(inputs, tmp_path / "run", "iterations=5000"))
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m pipeline plan --all {overrides} | head -1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert [line[:6] for line in done.stderr.splitlines()] == ["auto: "]
    assert done.stdout == "prepare: not committed\n"


# --- who imports whom ---

RUN_AND_PRINT_IMPORTED = """
import sys
from pipeline.cli.app import main
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
        ("plan OVERRIDES", {"hydra", "omegaconf", "pyarrow", "numpy"}),
        ("validate OVERRIDES", {"hydra", "omegaconf", "pyarrow", "numpy"}),
        ("validate OVERRIDES model.tokenizer=null", {"hydra", "omegaconf", "pyarrow", "numpy"}),
        ("samples RUN", {"pyarrow", "numpy"}),
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


def test_what_is_not_given_is_said_once_and_nothing_is_looked_at_in_its_place(slurm_ppo, tmp_path):
    done = slurm_ppo("run", cwd=tmp_path)
    keys = [line.split(":")[1].strip() for line in done.stderr.splitlines()]
    assert keys == ["data.prompts", "model.policy", "reward.components"]
