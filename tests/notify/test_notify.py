"""Whoever is to be told that a run failed, completed or stands still is told: once, and no secrets."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.compose import compose
from pipeline.config.conversion import converted
from pipeline.config.issue import ConfigError
from pipeline.config.notify import NotifyConfig, Occasion
from pipeline.config.resolve import resolve
from pipeline.config.schema import TrackingConfig, WandbConfig
from pipeline.executors.slurm.dry_run import scripts
from pipeline.executors.slurm.passes import make_pass
from pipeline.notify.events import Event, _event, completion, pass_failed, tell
from pipeline.run import journal
from pipeline.run.control import begin_invocation
from pipeline.run.directory import Run, create_run
from pipeline.run.lease import hold
from slurm.commands import SlurmTimeout
from tests.support import tiny
from tests.support.passes import Watcher
from tests.support.scripted import imagined_run
from tests.support.services import Answer, Seen, service
from tests.support.toyworld import Luck, World, make_world

TELL = """#!/bin/sh
{ cat; echo; } >>"${0%/*}/told.jsonl"
env | grep ^SLURM_PPO_ >>"${0%/*}/told.env"
"""
SECRET = "/services/T0SECRET/B0SECRET"


@pytest.fixture
def command(tmp_path) -> Path:
    """A command that keeps what it is told in told.jsonl beside it."""
    (tmp_path / "tell").write_text(TELL)
    (tmp_path / "tell").chmod(0o755)
    return tmp_path / "tell"


def told_by(command: Path) -> list[dict]:
    file = command.with_name("told.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def hook() -> Iterator[Seen]:
    with service(lambda body, number: Answer({})) as seen:
        yield seen


@pytest.fixture
def run(tmp_path) -> Run:
    """On disk, nothing done yet."""
    given = imagined_run(tmp_path / "run").config
    return create_run(dataclasses.replace(given, tracking=TrackingConfig(wandb=WandbConfig(mode="disabled"))))


def telling(run: Run, **notify: object) -> Run:
    given = NotifyConfig(**{"time_limit": 5, **notify})  # type: ignore[arg-type]
    return dataclasses.replace(run, config=dataclasses.replace(run.config, notify=given))


def event_of(run: Run, occasion: str = "failed", key: str = "k") -> Event:
    return _event(run, occasion, "why", key, 2)


def outcomes(run: Path) -> list[dict]:
    rows = journal.read(run / "events.jsonl")
    return [{"of": row["of"], "command": row["command"]} for row in rows if row["event"] == "notified"]


def files_with(text: str, root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


# --- trying it ---


def test_a_person_tries_a_command_before_a_run_begins(inputs, tmp_path, slurm_ppo, environment, command):
    words = tiny.overrides(inputs, tmp_path / "run")
    words += [f"notify.command=[{command},two words,$HOME]", "name=mine"]
    done = slurm_ppo("notify", *words, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "notify.command: a test event was sent\n"
    (told,) = told_by(command)
    assert (told["event"], told["name"], told["run"]) == ("test", "mine", str(tmp_path / "run"))
    assert told["text"].startswith("mine: test, iteration 1 of 2: this is a test")
    assert told["next"] == f"slurm-ppo status {tmp_path / 'run'}"
    variables = dict(line.split("=", 1) for line in (tmp_path / "told.env").read_text().splitlines())
    wanted = ("event", "run", "name", "iteration", "state", "message", "next")
    assert variables == {f"SLURM_PPO_{name.upper()}": str(told[name]) for name in wanted}
    assert not (tmp_path / "run").exists()


def test_a_chat_gets_the_event_by_curl_from_an_address_that_is_written_nowhere(run, hook):
    address = run.paths.root.parent / "chat"
    address.write_text(f'url = "{hook.url}"\n')
    post = f"curl -sSf -H 'Content-Type: application/json' --data-binary @- --config {address}"
    notes: list[str] = []
    tell(telling(run, command=shlex.split(post)), event_of(run), notes.append)
    assert notes == []
    (posted,) = hook.bodies
    assert (posted["event"], posted["next"]) == ("failed", f"slurm-ppo resume {run.paths.root}")
    assert posted["text"].endswith(f"iteration 2 of {run.plan.iterations}: why\nnext: {posted['next']}")
    assert files_with(hook.url, run.paths.root) == []


def test_what_goes_wrong_is_told_in_a_line_without_secrets(inputs, tmp_path, slurm_ppo, environment):
    script = 'echo one >&2; echo "curl: cannot reach $MY_HOOK with $API_TOKEN" >&2; exit 7'
    words = [*tiny.overrides(inputs, tmp_path / "run"), f"notify.command=[sh,-c,{json.dumps(script)}]"]
    secrets = {"MY_HOOK": f"http://127.0.0.1:9{SECRET}", "API_TOKEN": "tok-123456"}
    done = slurm_ppo("notify", *words, env=environment | secrets)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "notify.command: sh ended with exit code 7: curl: cannot reach [hidden] with [hidden]"
    ]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sleep 60", "was stopped, it took more than 1 s"),
        ("yes >&2", "was stopped, it took more than 1 s"),
        ("trap '' TERM INT HUP; sleep 60 & wait", "was stopped, it took more than 1 s"),
        ("sleep 60 & exit 0", ""),
        ("exec 0<&-; exit 0", ""),
        ("kill -9 $$", "was killed by signal 9"),
    ],
)
def test_a_command_may_do_what_it_likes(run, script, said):
    notes: list[str] = []
    started = time.monotonic()
    tell(telling(run, command=["sh", "-c", script], time_limit=1), event_of(run), notes.append)
    assert time.monotonic() - started < 10
    assert [said in note for note in notes] == [True] * bool(said)


def test_two_calls_in_a_second_are_each_told(run, command):
    watched = telling(run, command=[str(command)])
    for begun in (1000.2, 1000.2, 1000.4):
        tell(watched, pass_failed(watched, "why", begun), print)
    keys = [event["key"] for event in told_by(command)]
    assert keys == ["trouble with pass, call 1000.2", "trouble with pass, call 1000.4"]


def test_without_anybody_to_tell_there_is_nothing_to_try(complete_run, slurm_ppo):
    done = slurm_ppo("notify", complete_run)
    assert done.returncode == 2
    assert "notify: no notification is sent; give notify.command=..." in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["notify.command=no-such-mailer"], "notify.command=no-such-mailer: no such program on this machine"),
        (["notify.command='mail \"x'"], "notify.command: No closing quotation"),
        (
            ["notify.on=[complete,broken]"],
            "notify.on.1: Input should be 'failed', 'complete', 'stalled' or 'trouble'",
        ),
        (
            [f"notify.command='sh -c \"curl https://hooks.slack.com{SECRET}\"'"],
            "notify.command=...hooks.slack.com/...: this address is a secret",
        ),
    ],
)
def test_what_could_not_be_sent_is_refused_before_a_run_begins(inputs, tmp_path, words, said):
    why = refusal(tiny.overrides(inputs, tmp_path / "run", *words))
    assert said in why
    assert SECRET not in why


def refusal(words: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(compose(words))
    return str(caught.value)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_a_command_is_a_list_of_words_or_one_text_and_no_shell_sees_it(words):
    for command in (words, shlex.join(words)):
        assert converted(NotifyConfig, {"command": command}).command == tuple(words)


# --- runs of this machine ---


def test_a_run_that_fails_tells_once_in_each_call(inputs, tmp_path, slurm_ppo, command):
    rows: list[dict[str, object]] = [{"id": str(i), "prompt": "x" * 200} for i in range(8)]
    prompts = tiny.write_jsonl(tmp_path / "prompts.jsonl", rows)
    root = tmp_path / "run"
    words = [f"notify.command={command}", f"data.prompts={prompts}", "data.max_dropped=0"]
    done = slurm_ppo("run", *tiny.overrides(inputs, root, *words))
    assert done.returncode == 2, done.stderr
    (told,) = told_by(command)
    assert (told["event"], told["state"], told["iteration"]) == ("failed", "failed", 0)
    assert told["message"].startswith("prepare, attempt 1: data.prompts=")
    assert told["next"] == f"slurm-ppo resume {root}"
    again = slurm_ppo("resume", root)
    assert again.returncode == 2, again.stderr
    assert len(told_by(command)) == 2
    assert outcomes(root) == [{"of": "failed", "command": "sent"}] * 2


def test_a_command_that_hangs_does_not_harm_a_run_and_its_end_is_told_once(inputs, tmp_path, slurm_ppo):
    root, slow = tmp_path / "run", tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\necho "$SLURM_PPO_EVENT" >>{tmp_path}/told\nsleep 100\n')
    slow.chmod(0o755)
    words = ["iterations=1", f"notify.command={slow}", "notify.time_limit=1"]
    done = slurm_ppo("run", *tiny.overrides(inputs, root, *words))
    assert done.returncode == 0, done.stderr
    assert f"notify.command got no notification that the run is complete: {slow} was stopped" in done.stderr
    assert outcomes(root)[0]["of"] == "complete"
    assert slurm_ppo("resume", root).returncode == 0
    assert (tmp_path / "told").read_text() == "complete\n"
    assert json.loads(slurm_ppo("status", root, "--json").stdout)["state"] == "complete"


# --- once ---


def test_what_is_not_wanted_is_not_told(run, command):
    quiet = telling(run, command=str(command), on=["complete"])
    tell(quiet, event_of(run, "failed"), print)
    tell(quiet, event_of(run, "complete"), print)
    assert [event["event"] for event in told_by(command)] == ["complete"]


def test_a_driver_that_is_killed_before_it_notes_it_tells_again(run, command, monkeypatch):
    given = telling(run, command=str(command))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal, "event", killed)
        with pytest.raises(KeyboardInterrupt):
            tell(given, event_of(run), print)
    for _ in range(3):
        tell(given, event_of(run), print)
    assert len(told_by(command)) == 2


def test_of_two_drivers_one_tells(run, command):
    given = telling(run, command=str(command))
    with hold(run.paths.locks / "notify"):
        tell(given, event_of(run), print)
    assert told_by(command) == []


def test_a_disk_that_takes_nothing_keeps_nobody_from_being_told(run, command):
    shutil.rmtree(run.paths.locks)
    run.paths.locks.write_text("in the way")
    run.paths.events.mkdir()
    notes: list[str] = []
    tell(telling(run, command=str(command)), event_of(run), notes.append)
    assert len(told_by(command)) == 1
    assert "could not take note" in notes[0]


# --- standing still ---


@pytest.fixture
def world(tmp_path, monkeypatch, clock) -> World:
    made = make_world(tmp_path / "run", monkeypatch, 3, Luck())
    quiet = TrackingConfig(wandb=WandbConfig(mode="disabled"))
    config = dataclasses.replace(made.run.config, tracking=quiet)
    made.run = dataclasses.replace(made.run, config=config)
    return made


def test_on_slurm_each_standstill_is_told_once_by_whichever_driver_comes(world, command, clock):
    world.run = telling(world.run, command=[str(command)])
    hours = 3600.0

    def guard_comes() -> list[str]:
        make_pass(world.run, Watcher(world.story))
        return [told["event"] for told in told_by(command)]

    clock[0] += 100 * hours  # since it was made; then a person comes
    begin_invocation(world.run.paths)
    assert guard_comes() == []
    clock[0] += 5 * hours
    assert guard_comes() == []
    clock[0] += 2 * hours
    assert [guard_comes(), guard_comes()] == [["stalled"], ["stalled"]]
    while not world.run.paths.data.joinpath("prompts.json").exists():
        assert world.happen()
    assert guard_comes() == ["stalled"]
    clock[0] += 7.1 * hours
    assert guard_comes() == ["stalled", "stalled"]
    assert told_by(command)[-1]["message"] == "nothing was committed for 7 h 5 min"
    begin_invocation(world.run.paths)  # a person looked after it
    assert guard_comes() == ["stalled", "stalled"]


def test_on_slurm_a_controller_that_does_not_answer_for_hours_is_a_standstill(
    world, command, clock, monkeypatch
):
    monkeypatch.setattr("pipeline.executors.slurm.passes.SLURM_PATIENCE", -1.0)
    world.run = telling(world.run, command=[str(command)])
    begin_invocation(world.run.paths)
    clock[0] += 7 * 3600

    def silent(program: str) -> None:
        raise SlurmTimeout([program], None, "Unable to contact slurm controller")

    world.slurm.before = silent
    with pytest.raises(SlurmTimeout):
        make_pass(world.run, Watcher(world.story))
    (told,) = told_by(command)
    assert "Unable to contact slurm controller" in told["message"]


def test_the_end_of_a_run_is_told_anew_when_it_is_made_anew(complete_run):
    from pipeline.run.directory import load_run

    run = load_run(complete_run)
    event = completion(run)
    assert event.key == completion(run).key
    assert re.match(r"all 2 iterations are committed, reward [+-]\d", event.message)
    assert event.text.splitlines()[1] == f"next: slurm-ppo report {complete_run}"


# --- Slurm's own mails ---


def mails(run: Run) -> dict[str, list[str]]:
    found = re.split(r"^### .*/(\w+)-1-0\.sh\n", scripts(run), flags=re.MULTILINE)[1:]
    pairs = zip(found[::2], found[1::2], strict=True)
    return {name: re.findall(r"^#SBATCH --mail-(\S+)$", text, re.MULTILINE) for name, text in pairs}


def test_slurm_mails_once_of_each_array_of_a_stage_and_not_of_driver_jobs():
    given = {"mail_user": "me@example.org", "mail_type": "fail,time_limit_80"}
    given["update"] = {"options": {"mail-type": "END"}}
    given["reward"] = {"options": {"mail-type": "NONE"}}
    found = mails(imagined_run(scheduler=given))
    assert found["rollout"] == ["type=FAIL,TIME_LIMIT_80", "user=me@example.org"]
    assert found["update"] == ["type=END", "user=me@example.org"]
    assert found["reward"] == ["type=NONE", "user=me@example.org"]
    assert found["driver"] == found["guard"] == []
    asked = mails(imagined_run(scheduler={"driver": {"options": {"mail-type": "FAIL"}}}))
    assert (asked["driver"], asked["rollout"]) == (["type=FAIL"], [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scheduler.mail_type=[FAILED]"], "scheduler.mail_type.0: Input should be 'BEGIN', 'END'"),
        (["scheduler.mail_user='a b'", "scheduler.mail_type=[FAIL]"], "mail_user: write an address such as"),
        (["scheduler.mail_user=me"], "scheduler.mail_user=me: nothing is sent there without"),
    ],
)
def test_mails_that_slurm_would_not_send_are_refused(inputs, tmp_path, words, said):
    assert said in refusal(tiny.overrides(inputs, tmp_path / "run", "scheduler=slurm", *words))


def test_every_occasion_is_told_of_by_default():
    assert NotifyConfig().on == tuple(Occasion)
    assert NotifyConfig().command is None
    assert os.environ.get("SLURM_PPO_EVENT") is None
