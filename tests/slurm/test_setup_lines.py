"""Setup: a user's lines run one after another; the first that fails is named, and ends the job."""

import subprocess

import pytest

from slurm.setup_lines import SETUP_EXIT, checked, failed_line


def run(*lines: str, ends_job: bool = True) -> tuple[int, str, str]:
    """Return the exit code of a job with this setup, what it printed, and the line that it names."""
    script = "\n".join(["# of ours", *checked(lines, ends_job), "echo the task"])
    environment = {"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "gpu07"}
    done = subprocess.run(["bash"], input=script.encode(), capture_output=True, env=environment)
    return done.returncode, done.stdout.decode(), failed_line(done.stdout)


@pytest.fixture
def profile(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "profile.sh").write_text(text)
        return str(tmp_path / "profile.sh")

    return write


def test_a_module_command_that_is_not_there_ends_the_job_with_the_line_and_the_node():
    code, said, line = run("echo one", "module load cuda/12.6 # ours", "echo two")
    assert code == SETUP_EXIT
    assert line == "line 2 of setup failed on node gpu07 (exit code 127): module load cuda/12.6 # ours"
    assert "one" in said
    assert "two" not in said
    assert "the task" not in said


def test_a_line_that_may_fail_says_so():
    assert run("module load cuda || true", "echo two") == (0, "two\nthe task\n", "")


def test_what_a_sites_file_does_on_its_way_is_its_own_and_what_it_ends_with_counts(profile):
    """A profile tries things that fail; `source` ends with what the file ends with."""
    tries = profile('false; [ -n "$NOPE" ]; true')
    assert run(f"source {tries}")[0] == 0
    line = f"source {profile('true; false')}"
    assert run(line)[2] == f"line 1 of setup failed on node gpu07 (exit code 1): {line}"
    assert run(f"{line} || true")[0] == 0
    assert run("source /nowhere/modules.sh")[0] == SETUP_EXIT


@pytest.mark.parametrize(
    "lines",
    [
        ("if false", "then", "echo no", "fi"),
        ("case x in", "y) false ;;", "esac"),
        ("try() { false; true; }", "try"),
        ("[ -d /nowhere ] && module use /nowhere", "! false", "while false; do :; done"),
        ("cat >/dev/null <<END", "false", "END", "export X=\\", "1"),
        ("set -u", "unset Y", 'echo "${Y-}" >/dev/null'),
        (),
    ],
    ids=["if", "case", "function", "conditions", "several lines", "set -u", "none"],
)
def test_lines_that_make_up_one_command_and_conditions_that_are_not_met_are_no_failures(lines):
    assert run(*lines) == (0, "the task\n", "")


def test_of_a_command_of_several_lines_the_one_that_failed_is_named():
    assert run("if true", "then", "  modul load x", "fi")[2].endswith("(exit code 127):   modul load x")
    assert "line 2 " in run("true\nfalse\ntrue")[2]


def test_a_job_that_goes_on_names_the_line_too():
    code, said, line = run("false", "echo two", ends_job=False)
    assert (code, said.splitlines()[1:]) == (0, ["two", "the task"])
    assert line.startswith("line 1 of setup failed")


def test_after_the_setup_a_failure_is_the_tasks_own():
    script = "\n".join([*checked(["true"]), "false", "exit 3"])
    assert subprocess.run(["bash"], input=script.encode()).returncode == 3
