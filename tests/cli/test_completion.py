"""The Tab key, in the shells themselves: what they are offered and make of it, and how it is installed."""

import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.generate.completion_words import PATH, completion_words
from pipeline.cli.completion.answer import answer, offers, read_table, remainder, split_line
from pipeline.cli.completion.install import script
from tests.support import ROOT

TABLE = read_table()
BREAKS = " \t\n\"'><=;|&(:@"
"""COMP_WORDBREAKS as bash has it."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A folder to type in: two runs, one of them with a blank in its name, files, settings of one's own."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("first", "my second"):
        (folder / "runs" / name / "iterations/00002").mkdir(parents=True)
        (folder / "runs" / name / "iterations/00010").mkdir()
        (folder / "runs" / name / "run.json").write_text("{}")
    (folder / "runs/first/best.json").write_text("{}")
    (folder / "runs/.hidden").mkdir()
    (folder / "data").mkdir()
    (folder / "data/prompts.jsonl").write_text("")
    (folder / "my/experiment").mkdir(parents=True)
    (folder / "my/experiment/mine.yaml").write_text("")
    return folder


@pytest.fixture
def offered(desk, monkeypatch) -> Callable[[str], list[str]]:
    monkeypatch.chdir(desk)

    def call(line: str) -> list[str]:
        words, _ = split_line(line)
        return offers(words[1:-1], words[-1], TABLE)

    return call


OFFERED = [
    ("slurm-ppo stat", ["status"]),
    ("slurm-ppo status ", ["runs/"]),
    ("slurm-ppo status runs/", ["runs/first", "runs/my second"]),
    ("slurm-ppo status runs/m", ["runs/my second"]),
    ("slurm-ppo status runs/first --c", ["--cost"]),
    ("slurm-ppo status runs/first ", []),
    ("slurm-ppo report runs/first runs/f", ["runs/first"]),
    ("slurm-ppo samples runs/first@", ["runs/first@best", "runs/first@10", "runs/first@2"]),
    ("slurm-ppo samples runs/nothing@", []),
    ("slurm-ppo export runs/first ", ["data/", "my/", "runs/"]),
    ("slurm-ppo fork runs/first runs/second algorithm.kl.coe", ["algorithm.kl.coef="]),
    ("slurm-ppo logs runs/first roll", ["rollout"]),
    ("slurm-ppo logs runs/first d", ["driver"]),
    ("slurm-ppo resume runs/first --from u", ["update"]),
    ("slurm-ppo resume --from=u", ["--from=update"]),
    ("slurm-ppo run algorithm=gr", ["algorithm=grpo"]),
    ("slurm-ppo run alg", ["algorithm.", "algorithm="]),
    ("slurm-ppo run algorithm.estimator=gr", ["algorithm.estimator=grpo"]),
    ("slurm-ppo run +algorithm.kl.coe", ["+algorithm.kl.coef="]),
    ("slurm-ppo run reward.components.any.ki", ["reward.components.any.kind="]),
    ("slurm-ppo run reward.components.any.kind=m", ["reward.components.any.kind=model"]),
    ("slurm-ppo run rollout.engine=v", ["rollout.engine=vllm"]),
    ("slurm-ppo run update.save_state=", []),
    (
        "slurm-ppo run model.trust_remote_code=",
        ["model.trust_remote_code=true", "model.trust_remote_code=false"],
    ),
    ("slurm-ppo run data.prompts=data/", ["data.prompts=data/prompts.jsonl"]),
    ("slurm-ppo run iterations=", []),
    ("slurm-ppo run experiment=m", []),
    ("slurm-ppo run --config-dir my experiment=m", ["experiment=mine"]),
    ("slurm-ppo run --config-dir=my experiment=q", ["experiment=quickstart", "experiment=quickstart_vllm"]),
    ("slurm-ppo submit runs/f", ["runs/first"]),
    ("slurm-ppo submit runs/first run_d", ["run_dir="]),
    ("slurm-ppo devcluster ", ["up", "down", "kill", "revive", "status", "env"]),
    ("slurm-ppo completion install f", ["fish"]),
    ("slurm-ppo nonsense ", []),
]


@pytest.mark.parametrize(("line", "wanted"), OFFERED, ids=[line for line, _ in OFFERED])
def test_what_is_offered(offered, line, wanted):
    assert offered(line) == wanted


def test_every_command_that_people_type_is_offered(offered):
    assert {"run", "samples", "completion"} <= set(offered("slurm-ppo "))
    assert "advance" not in offered("slurm-ppo ")


def test_the_table_is_what_the_code_says():
    assert PATH.read_text() == completion_words(), "run `make docs`"


# --- lines ---

words_of_lines = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1), min_size=1
)


@given(words_of_lines)
def test_lines_are_split_as_shells_split_them(words):
    assert split_line(" ".join(map(shlex.quote, words))) == (words, None)


@given(st.text(" a=@:/'\"\\", max_size=12))
def test_no_line_is_too_odd(line):
    words, quote_at = split_line(line)
    assert words
    assert quote_at is None or 0 <= quote_at <= len(words[-1])


@given(st.text("ab=@:./", max_size=8), st.text("ab=@:./", max_size=8))
def test_what_bash_replaces_and_what_it_gets_make_the_word(typed, more):
    kept = remainder(typed + more, typed, BREAKS, None)
    assert (typed + more).endswith(kept)
    assert kept.endswith(more)


def test_nothing_is_said_and_nothing_fails_whatever_is_asked(desk, environment):
    for words in (
        [],
        ["bash"],
        ["bash", "slurm-ppo", "="],
        ["plain"],
        ["bash", "x", "", "slurm-ppo status /root/\\"],
    ):
        done = complete(words, desk, environment)
        assert (done.returncode, done.stderr) == (0, "")


def complete(words: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", "complete", *words]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)


def test_an_answer_imports_nothing_slow():
    code = """
import sys
sys.argv = ["slurm-ppo", "complete", "plain", "run", "algorithm.est"]
from pipeline.__main__ import main
main()
slow = ("typer", "dataclasses", "pathlib", "pydantic", "hydra", "yaml", "typing")
ours = [name for name in sys.modules if name.startswith("pipeline.") and "completion" not in name]
print([*ours, *(name for name in slow if name in sys.modules)])
"""
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["algorithm.estimator=", "['pipeline.__main__', 'pipeline.cli']"], (
        done.stderr
    )


# --- shells ---


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """A slurm-ppo that answers the Tab key as the real one, and otherwise notes the words that it gets."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "slurm-ppo"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = complete ] && exec {shlex.quote(sys.executable)} -m pipeline "$@"\n'
        f"printf '%s\\n' \"$@\" > {folder}/part && mv {folder}/part {folder}/words\n"
    )
    program.chmod(0o755)
    return folder


class Terminal:
    """An interactive shell at a terminal, in which somebody types."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str], note: Path) -> None:
        self._note = note
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            os.chdir(folder)
            os.execvpe(command[0], command, environment)
        self._shown = b""

    def typed(self, keys: str) -> list[str]:
        """Type a line with Tab keys in it, and Enter. Returns the words that the program got."""
        self._note.unlink(missing_ok=True)
        self._wait(lambda: b"READY>" in self._shown)
        self._shown = b""
        os.write(self._terminal, f"{keys}\n".encode())
        self._wait(self._note.exists)
        return self._note.read_text().splitlines()

    def _wait(self, is_there: Callable[[], bool], seconds: float = 30) -> None:
        until = time.monotonic() + seconds
        while not is_there():
            assert time.monotonic() < until, self._shown
            if select.select([self._terminal], [], [], 0.05)[0]:
                self._shown += os.read(self._terminal, 4096)

    def close(self) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._terminal)


def program_of(shell: str) -> str:
    """The shell; without it the test fails in CI, and is skipped elsewhere."""
    variable = f"TEST_{shell.upper()}"
    if found := shutil.which(os.environ.get(variable, shell)):
        return found
    why = f"no {shell} here: apt-get install {shell}, or {variable}=..."
    if "CI" in os.environ:
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="module", params=["bash", "zsh"])
def terminal(request, programs, desk, environment, tmp_path_factory) -> Iterator[Terminal]:
    """A shell that has read the script that it is given."""
    shell = request.param
    program = program_of(shell)
    home = tmp_path_factory.mktemp(shell)
    (home / "completion").write_text(script(shell))
    before = os.environ.get("TEST_ZSH_SETUP", "") + "\nautoload -Uz compinit; compinit -u -D\n"
    startup = f"{before if shell == 'zsh' else ''}. {home}/completion\nPS1='READY>'\n"
    (home / ".zshrc").write_text(startup)
    (home / ".bashrc").write_text(startup)
    own = {
        "HOME": str(home),
        "ZDOTDIR": str(home),
        "TERM": "xterm",
        "PATH": f"{programs}:{environment['PATH']}",
    }
    opened = Terminal([program, "-i"], desk, environment | own, programs / "words")
    yield opened
    opened.close()


def test_typing_with_the_tab_key(terminal):
    assert terminal.typed("slurm-ppo stat\truns/f\t--js\t") == ["status", "runs/first", "--json"]
    assert terminal.typed("slurm-ppo samples runs/first@b\t") == ["samples", "runs/first@best"]
    assert terminal.typed("slurm-ppo run algorithm.est\tgr\titerations=3") == [
        "run",
        "algorithm.estimator=grpo",
        "iterations=3",
    ]
    assert terminal.typed("slurm-ppo run data.prompts=da\tpr\t") == ["run", "data.prompts=data/prompts.jsonl"]


def test_names_with_blanks_come_back_as_one_word(terminal):
    assert terminal.typed("slurm-ppo status runs/my\t") == ["status", "runs/my second"]
    assert terminal.typed('slurm-ppo status "runs/my\t').pop().strip('"') == "runs/my second"


def test_what_fish_offers(programs, desk, environment, tmp_path):
    fish = program_of("fish")
    (tmp_path / "completion.fish").write_text(script("fish"))
    env = environment | {"PATH": f"{programs}:{environment['PATH']}", "HOME": str(tmp_path)}
    for line, wanted in (
        ("slurm-ppo stat", ["status"]),
        ("slurm-ppo status runs/", ["runs/first", "runs/my second"]),
        ("slurm-ppo run algorithm.estimator=gr", ["algorithm.estimator=grpo"]),
    ):
        code = f"source {tmp_path}/completion.fish; complete -C{shlex.quote(line)}"
        done = subprocess.run(
            [fish, "-c", code], env=env, cwd=desk, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.splitlines() == wanted, done.stderr


def test_bash_gets_quoted_what_it_would_take_apart(desk, monkeypatch):
    monkeypatch.chdir(desk)
    assert answer("bash", ["slurm-ppo", BREAKS, "slurm-ppo status runs/my"], TABLE) == ["runs/my\\ second"]
    assert answer("bash", ["slurm-ppo", BREAKS, "slurm-ppo status 'runs/my"], TABLE) == ["runs/my second"]
    assert answer("bash", ["slurm-ppo", BREAKS, "X=1 slurm-ppo run algorithm=gr"], TABLE) == ["grpo"]


# --- installing ---


@pytest.mark.parametrize(
    ("shell", "startup", "place"),
    [
        ("bash", ".bashrc", ".local/share/slurm-ppo/completion.bash"),
        ("zsh", ".zshrc", ".local/share/slurm-ppo/completion.zsh"),
        ("fish", None, ".config/fish/completions/slurm-ppo.fish"),
    ],
)
def test_one_command_installs_it_once(slurm_ppo, environment, tmp_path, shell, startup, place):
    home = {name: value for name, value in environment.items() if not name.startswith(("XDG_", "ZDOTDIR"))}
    home |= {"HOME": str(tmp_path), "SHELL": f"/usr/bin/{shell}"}
    if startup:
        (tmp_path / startup).write_text("export MINE=1")
    first = slurm_ppo("completion", "install", env=home)
    assert first.returncode == 0, first.stderr
    assert (tmp_path / place).read_text() == script(shell) == slurm_ppo("completion", "show", shell).stdout
    again = slurm_ppo("completion", "install", shell, env=home)
    assert again.returncode == 0
    if startup:
        mine, line = (tmp_path / startup).read_text().splitlines()
        assert mine == "export MINE=1"
        assert line.startswith("[ -r ")
        assert f"{tmp_path / startup} reads it already" in again.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == (
        [startup] if startup else []
    )


@pytest.fixture
def new_home(programs, environment, tmp_path) -> dict[str, str]:
    """The environment of somebody who has set nothing up yet."""
    own = {"HOME": str(tmp_path), "TERM": "xterm", "PATH": f"{programs}:{environment['PATH']}"}
    return {
        name: value for name, value in environment.items() if not name.startswith(("XDG_", "ZDOTDIR"))
    } | own


@pytest.mark.parametrize(("shell", "startup"), [("bash", ".bashrc"), ("zsh", ".zshrc")])
def test_after_it_the_next_shell_completes(slurm_ppo, new_home, programs, desk, tmp_path, shell, startup):
    """One whose user has nothing but a prompt."""
    program = program_of(shell)
    (tmp_path / startup).write_text("PS1='READY>'\n")
    assert slurm_ppo("completion", "install", shell, env=new_home).returncode == 0
    opened = Terminal([program, "-i"], desk, new_home, programs / "words")
    try:
        assert opened.typed("slurm-ppo stat\truns/f\t") == ["status", "runs/first"]
    finally:
        opened.close()


def test_after_it_fish_offers(slurm_ppo, new_home, desk):
    fish = program_of("fish")
    assert slurm_ppo("completion", "install", "fish", env=new_home).returncode == 0
    command = [fish, "-c", "complete -C'slurm-ppo stat'"]
    done = subprocess.run(command, env=new_home, cwd=desk, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["status"], done.stderr


@pytest.mark.parametrize(
    ("words", "shell", "said"),
    [
        (["tcsh"], "/bin/bash", "error: there is no completion for 'tcsh'; give one of bash, zsh, fish"),
        ([], "/bin/tcsh", "error: there is no completion for 'tcsh'; give one of bash, zsh, fish"),
        ([], "", "error: $SHELL does not say which shell you use; give one of bash, zsh, fish"),
    ],
)
def test_other_shells_are_one_line(slurm_ppo, environment, tmp_path, words, shell, said):
    done = slurm_ppo(
        "completion", "install", *words, env=environment | {"HOME": str(tmp_path), "SHELL": shell}
    )
    assert (done.returncode, done.stderr) == (2, f"{said}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_takes_nothing_is_one_line(slurm_ppo, environment, tmp_path):
    (tmp_path / "file").write_text("")
    done = slurm_ppo(
        "completion", "install", "fish", env=environment | {"XDG_CONFIG_HOME": str(tmp_path / "file")}
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "Not a directory" in line
