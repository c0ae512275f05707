"""Where a run goes on W&B, and its names there, are settled when it is made: later shells move nothing."""

import json
from dataclasses import replace

import pytest

from pipeline.cli import run as cli_run
from pipeline.config.schema import WandbConfig
from pipeline.run.directory import load_run
from pipeline.run.identity import identity_text
from pipeline.run.wandb_place import DEFAULT_URL, VARIABLES, WandbPlace, settled
from pipeline.tracking.push import target_of
from pipeline.tracking.refusal import stays
from pipeline.tracking.state import moved_here, not_followed, place_of
from tests.support import wandb_graphql
from tests.support.mirrored import append, follow
from tests.support.wandb_server import KEY, StoredRun, WandbServer

OF_THE_FIRST_SHELL = {
    "WANDB_PROJECT": "first",
    "WANDB_ENTITY": "team",
    "WANDB_NAME": "shown",
    "WANDB_RUN_GROUP": "paper",
    "WANDB_JOB_TYPE": "baseline",
    "WANDB_NOTES": "with the old prompts",
    "WANDB_TAGS": "a,b",
}
OF_ANOTHER = {variable: f"other-{number}" for number, variable in enumerate(OF_THE_FIRST_SHELL)}


@pytest.fixture
def server(wandb_server: WandbServer) -> WandbServer:
    return wandb_server


def say(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def only_run(server: WandbServer) -> StoredRun:
    (found,) = server.runs.values()
    return found


# --- one run on W&B, whatever the shell ---


def test_a_run_that_began_in_one_shell_is_synced_from_another(server, make, sync, monkeypatch):
    """A driver on a node without internet, in the shell the run was made in; then sync on the login node."""
    say(monkeypatch, OF_THE_FIRST_SHELL | {"WANDB_MODE": "offline"})
    run = make()
    append(run, 1)
    assert follow(run) == []

    say(monkeypatch, OF_ANOTHER | server.environment | {"WANDB_BASE_URL": "http://127.0.0.1:9"})
    done = sync(run)
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()
    assert len(told) == 1
    assert told[0].startswith("W&B goes on as when the run was made, without this shell's WANDB_BASE_URL=")
    found = only_run(server)
    assert (found.entity, found.project, found.display_name) == ("team", "first", "shown")
    assert (found.group, found.job_type, found.notes) == ("paper", "baseline", "with the old prompts")
    assert sorted(found.tags) == ["a", "b"]
    assert len(found.history) == 1


def test_a_shell_that_says_nothing_goes_where_the_first_did_and_a_full_one_not_where_it_says(
    server, make, monkeypatch
):
    """Also where the first said nothing of it."""
    say(monkeypatch, {"WANDB_PROJECT": "first"})
    run = make()
    monkeypatch.delenv("WANDB_PROJECT")
    say(
        monkeypatch,
        {name: "x" for name in VARIABLES.values() if name not in ("WANDB_PROJECT", "WANDB_BASE_URL")},
    )
    append(run, 1)
    assert follow(run) == []
    found = only_run(server)
    assert (found.entity, found.project, found.display_name) == ("me", "first", run.identity.name)
    assert (found.group, found.job_type, found.notes, found.tags) == (None, None, None, [])


def test_a_run_of_a_sweep_has_its_names_on_wandb(server, make):
    """Chosen ones stand for those that a sweep fills in."""
    names = ["name='lr: seed=0'", "group=lr", "job_type='learning_rate=1e-6'", "tags=['seed=0']"]
    append(run := make(*(f"tracking.wandb.{name}" for name in names)), 1)
    assert follow(run) == []
    found = only_run(server)
    assert (found.display_name, found.group) == ("lr: seed=0", "lr")
    assert (found.job_type, found.tags) == ("learning_rate=1e-6", ["seed=0"])


def test_resume_says_in_one_line_what_is_not_followed(make, monkeypatch, capsys):
    run = make("tracking.wandb.entity=team")
    monkeypatch.setattr(cli_run, "local_executor", lambda config: object())
    monkeypatch.setattr(cli_run, "carry_on", lambda *_, **__: 0)
    assert cli_run.resume_run(run, watch=True) == 0
    assert "W&B" not in capsys.readouterr().err
    say(monkeypatch, {"WANDB_PROJECT": "other", "WANDB_ENTITY": "never followed"})
    assert cli_run.resume_run(run, watch=True) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "W&B" in line] == [
        "W&B goes on as when the run was made, without this shell's WANDB_PROJECT=other (the run has "
        "slurm-ppo); to send all rows to a new W&B run, as this shell has it: "
        f"slurm-ppo sync {run.paths.root} --new-run"
    ]


def test_the_dashboard_is_that_of_the_runs_project(make, monkeypatch):
    say(monkeypatch, {"WANDB_PROJECT": "first", "WANDB_BASE_URL": "https://wandb.example.org"})
    run = make()
    say(monkeypatch, {"WANDB_PROJECT": "other", "WANDB_BASE_URL": "https://api.wandb.ai"})
    target = target_of(run, None, None)
    assert (target.project, target.base_url) == ("first", "https://wandb.example.org")
    assert target_of(None, None, None).project == "other"
    assert target_of(run, "asked", None).project == "asked"


def test_no_secret_is_kept(make, monkeypatch):
    say(monkeypatch, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "https://someone:s3cret@wandb.example.org/"})
    run = make()
    kept = run.paths.run_json.read_text()
    assert json.loads(kept)["wandb"]["base_url"] == "https://wandb.example.org"
    assert KEY not in kept
    assert "s3cret" not in kept


def test_a_run_without_wandb_keeps_nothing_and_one_of_an_earlier_version_follows_the_shell(make, monkeypatch):
    run = make("tracking.wandb.mode=disabled")
    assert run.identity.wandb is None
    run.paths.run_json.write_text(identity_text(replace(run.identity, wandb=None)))
    assert place_of(load_run(run.paths.root), {"WANDB_PROJECT": "now"}).project == "now"


def test_rows_stay_with_whom_the_first_key_was_of(server, make, sync, monkeypatch):
    """Neither shell names an entity, and two people of a group have keys."""
    run = make()
    append(run, 1)
    assert follow(run) == []
    monkeypatch.setattr(wandb_graphql, "ENTITY", "colleague")
    append(run, 2)
    assert sync(run).returncode == 0
    assert only_run(server).entity == "me"
    assert len(only_run(server).history) == 2


# --- another place, on request ---


def test_all_rows_go_where_this_shell_says_when_a_person_asks(server, make, sync, monkeypatch):
    run = make()
    append(run, 1, 2)
    assert follow(run) == []
    say(monkeypatch, {"WANDB_PROJECT": "moved", "WANDB_TAGS": "late"})
    assert sync(run, "--new-run", "--entity", "team").returncode == 0
    monkeypatch.delenv("WANDB_PROJECT")
    append(run, 3)
    assert follow(run) == []
    moved = server.runs["team", "moved", f"{run.identity.id}-2"]
    assert [row["iteration"] for row in moved.history] == [1, 2, 3]
    assert moved.tags == ["late"]


def test_a_place_without_a_new_run_is_refused(make, sync):
    run = make()
    done = sync(run, "--project", "other")
    assert done.returncode == 2
    assert "--project and --entity go with --new-run" in done.stderr


# --- W&B refuses ---


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"WANDB_TAGS": "x" * 100}, "Tags must be between 1 and 64 characters"),
        ({"WANDB_PROJECT": "a/b"}, "Invalid project name 'a/b'"),
    ],
)
def test_settings_that_wandb_never_takes_have_a_last_word(server, make, sync, monkeypatch, variables, why):
    say(monkeypatch, variables)
    run = make()
    append(run, 1)
    done = sync(run)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: W&B refuses the run as it was made, for ")
    assert line.endswith(f"and run: slurm-ppo sync {run.paths.root} --new-run")
    say(monkeypatch, dict.fromkeys(variables, "fine"))
    assert sync(run, "--new-run").returncode == 0
    assert len(only_run(server).history) == 1


@pytest.mark.parametrize(
    ("status", "said"),
    [(404, "and will again (CommError: Not Found)"), (401, "refuses the API key (CommError: Unauthorized)")],
)
def test_a_server_that_says_no_is_not_asked_for_ever(server, make, sync, status, said):
    run = make()
    append(run, 1)
    server.faults.status, server.faults.only = status, "UpsertBucket"
    done = sync(run)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Forbidden", True),
        ("Timed out while retrying: HTTP 409: Conflict Consider increasing", True),
        ("Timed out while retrying: HTTP 429: Too Many Requests", False),
        ("Timed out while retrying: HTTP 503: Service Unavailable", False),
        ('Timed out while retrying: Post "http://x/graphql": dial tcp: connection refused', False),
        ("Run initialization has timed out after 30.0 sec.", False),
    ],
)
def test_what_may_pass_and_what_stays(said, expected):
    assert stays(said) is expected


# --- what goes before what ---


def test_configuration_then_environment_then_files_of_wandb_then_defaults(tmp_path):
    user, folder = tmp_path / "user", tmp_path / "work/wandb"
    for place, lines in (
        (user, ["base_url = https://wandb.example.org/", "entity = of-the-user", "project = of-the-user"]),
        (folder, ["project = of-the-folder", "run_group = of-the-folder", "run_tags = a, b"]),
    ):
        place.mkdir(parents=True)
        (place / "settings").write_text("\n".join(["[default]", *lines]))
    shell = {"WANDB_CONFIG_DIR": str(user), "WANDB_RUN_GROUP": "of-the-shell", "WANDB_NOTES": "of-the-shell"}
    given = WandbConfig(notes="of the configuration")
    assert settled(given, "first", shell, tmp_path / "work") == WandbPlace(
        base_url="https://wandb.example.org",
        project="of-the-folder",
        entity="of-the-user",
        name="first",
        group="of-the-shell",
        notes="of the configuration",
        tags=("a", "b"),
    )
    parent = WandbPlace(name="parent", project="of-the-parent", entity="of-the-parent", group="of-the-parent")
    forked = settled(given, "fork", shell | {"WANDB_ENTITY": "of-the-shell"}, tmp_path / "work", parent)
    assert (forked.project, forked.entity, forked.name) == ("of-the-parent", "of-the-shell", "fork")
    assert forked.group == "of-the-shell"
    (folder / "settings").write_bytes(b"[default\n\xff")
    assert settled(given, "first", shell, tmp_path / "work").project == "of-the-user"
    nothing = settled(WandbConfig(), "first", {"WANDB_CONFIG_DIR": str(tmp_path)}, tmp_path)
    assert nothing == WandbPlace(name="first", base_url=DEFAULT_URL, project="slurm-ppo")


def test_an_empty_variable_takes_a_name_away_when_all_is_sent_again(make, monkeypatch):
    say(monkeypatch, {"WANDB_ENTITY": "gone", "WANDB_PROJECT": "kept"})
    run = make()
    assert not_followed(run, {"WANDB_ENTITY": ""}) == ""
    moved = moved_here(run, {"WANDB_ENTITY": ""})
    assert (moved.entity, moved.project) == (None, "kept")
