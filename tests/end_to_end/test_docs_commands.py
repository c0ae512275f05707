"""Every command in the documentation does what it says: run for real, on tiny models."""

import ast
import json
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
import typer.testing
import yaml

from pipeline.cli.app import app
from pipeline.cli.arguments import typed_words
from pipeline.config.choices import known_groups
from tests.support import ROOT, documented, light, warm_client
from tests.support.documented import Kind

COMMANDS = documented.all_commands()
CLI = typer.main.get_command(app)
TUTORIAL = [f"docs/tutorial/{name}.md" for name in ("quickstart", "your_model", "reading")]
CHECKED = [c for c in COMMANDS if c.kind is Kind.CHECK]
STORY = documented.once(
    sorted((c for c in COMMANDS if c.kind is Kind.RUN), key=lambda c: c.page not in TUTORIAL)
)
"""The tutorial first. The pages after it may come in any order."""
RUN_PAGES = list(dict.fromkeys(c.page for c in STORY if c.page not in TUTORIAL))


@pytest.fixture(scope="module")
def sandbox(inputs, complete_run, tmp_path_factory) -> Path:
    """With a run that stands for the one of `make quickstart`."""
    folder = documented.make_sandbox(tmp_path_factory.mktemp("docs"), inputs)
    shutil.copytree(complete_run, folder / "runs/quickstart", symlinks=True)
    return folder


@pytest.fixture(scope="module")
def env(sandbox, environment, warm_commands) -> dict[str, str]:
    """For commands that are composed and planned."""
    more = {"WANDB_MODE": "disabled", warm_client.ADDRESS: warm_commands.address}
    return documented.environment(sandbox, environment | more)


@pytest.fixture(scope="module")
def light_env(env) -> dict[str, str]:
    """For commands that are run: with light tasks, since what pages show is not what models compute."""
    return env | {documented.SMALLER: json.dumps(dict(word.split("=", 1) for word in light.WORDS))}


@pytest.fixture(scope="module")
def tutorial(sandbox, light_env) -> str:
    """The tutorial, told once: the other pages use the run that it makes."""
    return documented.tell(of_pages(*TUTORIAL), sandbox, light_env, timeout=600)


def of_pages(*pages: str) -> list[documented.Command]:
    return [command for page in pages for command in STORY if command.page == page]


# --- what is run ---


def test_the_tutorial_from_quickstart_to_the_result(tutorial, sandbox):
    assert "complete" in tutorial
    assert (sandbox / "runs/first/report.html").is_file()
    assert (sandbox / "exported/first-policy/model.safetensors").is_file()


@pytest.mark.parametrize("page", RUN_PAGES)
def test_the_commands_of_a_page(page, tutorial, sandbox, light_env):
    documented.tell(of_pages(page), sandbox, light_env, timeout=400)


@pytest.fixture(scope="module")
def calls(sandbox, env) -> dict[documented.Command, list[list[str]]]:
    return documented.recorded(CHECKED, sandbox, env)


@pytest.mark.parametrize("command", CHECKED, ids=lambda command: command.where)
def test_what_needs_gpus_or_services_is_composed_and_planned(command, calls, sandbox, monkeypatch):
    monkeypatch.chdir(sandbox)
    assert calls[command], f"{command.where}: calls no slurm-ppo"
    for name, *words in calls[command]:
        if name not in documented.COMPOSING:
            assert is_command(shlex.join(["slurm-ppo", name, *words])), command.where
            continue
        words = [word for word in words if word not in ("--dry-run", "--no-probe")]
        planned = ["submit", "--dry-run"] if name == "submit" else ["plan"]
        done = typer.testing.CliRunner().invoke(app, [*planned, *typed_words(words)])
        assert done.exit_code == 0, f"{command.where}: {done.output}{done.exception!r}"
        assert "rollout" in done.output


# --- nothing is left out ---


def test_every_block_says_what_it_is():
    known = {"bash", "console", "python", "yaml", "json", "toml", "text", "markdown"}
    for block in documented.all_blocks():
        assert block.language in known or block.language.startswith("{"), (
            f"{block.where}: ```{block.language}"
        )
        strange = [w for w in block.words if w not in tuple(Kind) and not w.startswith("file=")]
        assert not strange or block.language.startswith("{"), f"{block.where}: {strange}"
        if block.language == "text":
            lines = block.text.splitlines()
            hidden = [line for line in lines if re.match(r"\s*(\$|slurm-ppo [a-z]|make |pip )", line)]
            usage = block.page == "docs/reference/commands.md"
            assert usage or not hidden, f"{block.where}: commands in a block of text: {hidden}"


def test_every_command_is_covered_in_exactly_one_way():
    counted = Counter(command.kind for command in COMMANDS)
    assert min(counted[kind] for kind in Kind) > 0
    assert all(sum(word in tuple(Kind) for word in b.words) <= 1 for b in documented.all_blocks())
    told = {command.text for page in (*TUTORIAL, *RUN_PAGES) for command in of_pages(page)}
    assert told == {command.text for command in COMMANDS if command.kind is Kind.RUN}
    assert {command.page for command in COMMANDS if command.kind is Kind.SLURM} == {"docs/tutorial/slurm.md"}


def test_what_ci_runs_elsewhere_is_in_the_table():
    known = "|".join(documented.ELSEWHERE)
    elsewhere = {command.text for command in COMMANDS if command.kind is Kind.ELSEWHERE}
    assert [text for text in sorted(elsewhere) if not re.fullmatch(known, text)] == []
    for place in documented.ELSEWHERE.values():
        assert (ROOT / place).is_file(), place


def inline_commands() -> Iterator[tuple[str, str]]:
    """``slurm-ppo ...`` in running text and tables: where, and the words."""
    for page in documented.pages():
        text = re.sub(r"^\s*```.*?^\s*```", "", page.read_text(), flags=re.M | re.S)
        for found in re.finditer(r"`(slurm-ppo [^`]+)`", text):
            yield str(page.relative_to(ROOT)), found[1]


def test_commands_in_running_text_exist():
    wrong = [f"{page}: {words}" for page, words in inline_commands() if not is_command(words)]
    assert not wrong


def is_command(words: str) -> bool:
    """Whether the command line has this command with these options."""
    command, rest = CLI, [word for word in shlex.split(words)[1:] if word != "..."]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    options = {opt for p in command.params for opt in [*p.opts, *p.secondary_opts]} | {"--help", "--version"}
    is_named = command is not CLI or rest[0] == "COMMAND" or rest[0] in options
    return is_named and all(word in options for word in rest if word.startswith("--"))


def test_every_command_and_every_group_is_in_the_hand_written_pages():
    written = [page for page in documented.pages() if page.parent.name != "reference"]
    text = "\n".join(page.read_text() for page in written)
    for name, command in CLI.commands.items():
        for inner in getattr(command, "commands", {"": None}):
            assert command.hidden or f"slurm-ppo {name} {inner}".strip() in text, f"{name} {inner}"
    missing = [
        f"{group}={option}"
        for group, options in known_groups(None).items()
        for option in options
        if f"{group}={option}" not in text and f"`{option}`" not in text
    ]
    assert not missing


# --- blocks of other languages ---


def blocks_of(language: str) -> pytest.MarkDecorator:
    found = [block for block in documented.all_blocks() if block.language == language]
    return pytest.mark.parametrize("block", found, ids=lambda block: block.where)


@blocks_of("python")
def test_python_parses(block):
    ast.parse(block.text)


@blocks_of("yaml")
def test_yaml_is_a_group_or_settings_that_compose(block, sandbox, monkeypatch):
    """A file's block is chosen as the group that its place says; others are laid over the tutorial's run."""
    monkeypatch.chdir(sandbox)
    settings = yaml.safe_load(block.text)
    chosen = ["experiment=first"]
    folder = "my"
    if block.file:
        folder, group, name = Path(block.file).with_suffix("").parts
        chosen = [f"{group}={name}"] if group == "experiment" else ["experiment=first", f"{group}={name}"]
    else:
        (sandbox / "my/experiment/shown.yaml").write_text(
            "# @package _global_\n" + yaml.safe_dump({"defaults": ["first", "_self_"], **settings})
        )
        chosen = ["experiment=shown"]
    words = documented.enlarge(["config", "--config-dir", folder, *chosen])
    done = typer.testing.CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{block.where}: {done.exception}"


@blocks_of("json")
def test_json_parses(block):
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        for line in block.text.splitlines():
            json.loads(line)


def test_commands_are_what_a_shell_can_parse():
    script = "\n".join(command.text for command in COMMANDS)
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
