"""A program of the user's: whatever it does, its task ends in time, with numbers or with a reason."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.evaluation.program import ProgramFailed, parse_numbers, read_numbers, run_program
from tests.support import ROOT
from tests.support.waiting import wait_for

values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


def python(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text]


# --- what it writes ---


@given(values)
def test_only_objects_of_finite_numbers_are_taken(said):
    try:
        found = parse_numbers(json.dumps(said).encode())
    except ProgramFailed:
        return
    assert isinstance(said, dict)
    assert found == {name: float(value) for name, value in said.items()}
    assert all(math.isfinite(value) for value in found.values())
    assert not any(isinstance(value, bool) for value in said.values())


@given(st.binary(max_size=40))
def test_no_bytes_break_the_reader(content):
    with contextlib.suppress(ProgramFailed):
        parse_numbers(content)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON: recursion limit exceeded"),
        (b"[1]", "should be an object"),
        (b'{"acc": NaN}', "'acc': Input should be a finite number"),
        (b'{"acc": ' + b"9" * 400 + b"}", "finite number"),
        (b'{"acc": {"mean": 1}}', "'acc': Input should be a valid number"),
        (b'{"acc": "0.5"}', "valid number"),
        (b'{"acc": true}', "valid number"),
        (b'{"a b": 1}', "'a b': String should match pattern"),
        (b"{}", "at least 1 item"),
        (json.dumps({str(i): i for i in range(3000)}).encode(), "at most 2000 items"),
        (b'{"acc": 1}' + b" " * (1 << 20), "1.0 MiB at most"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(content, told, tmp_path):
    file = tmp_path / "numbers.json"
    file.write_bytes(content)
    with pytest.raises(ProgramFailed, match=re.escape(told)) as failed:
        read_numbers(file)
    assert "\n" not in str(failed.value)


def test_a_file_that_is_none_is_not_waited_for(tmp_path):
    with pytest.raises(ProgramFailed, match="did not write"):
        read_numbers(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ProgramFailed, match="is not a file"):
            read_numbers(path)


# --- how it runs ---


def test_words_are_passed_on_as_they_are_and_no_shell_sees_them(tmp_path):
    words = ["a b", "$HOME", "; touch hurt", "*", "it's"]
    program = python("import sys, json; json.dump(sys.argv[1:], open('said', 'w'))")
    run_program([*program, *words], tmp_path, seconds=60)
    assert json.loads((tmp_path / "said").read_text()) == words
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["/no/such/program"], "cannot be started"),
        (["a\0b"], "cannot be started"),
        (python("raise SystemExit(3)"), "exit code 3"),
        (python("import os; os.kill(os.getpid(), 9)"), "was killed"),
    ],
)
def test_how_it_failed_is_said(words, told, tmp_path):
    with pytest.raises(ProgramFailed, match=told):
        run_program(words, tmp_path, seconds=60)


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    open("child", "w").write(str(os.getpid()))
    time.sleep(600)
{then}
"""


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only its entry is left for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_until_it_has_ended(file: Path) -> None:
    wait_for(lambda: has_ended(int(file.read_text())), "its end", 30)


def test_one_that_hangs_is_stopped_with_all_that_it_has_started(tmp_path, monkeypatch):
    monkeypatch.setattr("stages.evaluation.program._GRACE_SECONDS", 0.1)
    child = tmp_path / "child"
    program = python(STUBBORN.format(then="time.sleep(600)"))
    is_there = lambda: child.exists() and bool(child.read_text())  # noqa: E731
    with pytest.raises(ProgramFailed, match="was stopped, as its task was warned"):
        run_program(program, tmp_path, seconds=600, should_stop=is_there)
    wait_until_it_has_ended(child)
    with pytest.raises(ProgramFailed, match=r"was stopped after 0\.1 s"):
        run_program(python("import time; time.sleep(600)"), tmp_path, seconds=0.1)


def test_what_one_that_ended_well_has_left_behind_is_ended_too(tmp_path):
    waits = "\nwhile not (os.path.exists('child') and open('child').read()): time.sleep(0.01)"
    run_program(python(STUBBORN.format(then=waits)), tmp_path, seconds=60)
    wait_until_it_has_ended(tmp_path / "child")


APART = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", {child!r}], start_new_session={is_apart})
while not (os.path.exists("child") and open("child").read()): time.sleep(0.01)
{then}
"""
"""A program that calls another one, as a harness calls its models: in a session of its own, or not."""
CHILD = "import os, time; open('child', 'w').write(str(os.getpid())); time.sleep(600)"


@pytest.mark.parametrize("then", ["", "time.sleep(600)"])
def test_what_has_left_the_programs_session_is_ended_too(then, tmp_path, monkeypatch):
    monkeypatch.setattr("stages.evaluation.program._GRACE_SECONDS", 0.1)
    child = tmp_path / "child"
    is_there = lambda: child.exists() and bool(child.read_text())  # noqa: E731
    program = python(APART.format(child=CHILD, is_apart=True, then=then))
    with pytest.raises(ProgramFailed, match="was stopped") if then else contextlib.nullcontext():
        run_program(program, tmp_path, seconds=60, should_stop=is_there if then else lambda: False)
    assert has_ended(int(child.read_text()))


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_task_that_is_killed_leaves_nothing_of_the_program(is_apart, tmp_path):
    program = python(APART.format(child=CHILD, is_apart=is_apart, then="time.sleep(600)"))
    code = "import sys; from pathlib import Path; from stages.evaluation.program import run_program as run; "
    code += f"run(sys.argv[1:], Path({str(tmp_path)!r}), 600)"
    words = [sys.executable, "-c", code, *program]
    task = subprocess.Popen(words, cwd=ROOT, start_new_session=True)
    try:
        child = tmp_path / "child"
        wait_for(lambda: child.exists() and child.read_text(), "the program's child", 30)
    finally:
        os.killpg(task.pid, signal.SIGKILL)
        task.wait(30)
    wait_until_it_has_ended(tmp_path / "child")
