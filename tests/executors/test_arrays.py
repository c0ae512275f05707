"""Batch scripts: what is rendered is pinned; nothing that is given is taken for shell or for a pattern."""

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from submitit import SlurmExecutor
from submitit.core.utils import FailedSubmissionError

from pipeline.config.compose import compose
from pipeline.config.conversion import plain
from pipeline.config.job_kinds import DRIVER, GUARD
from pipeline.config.scheduler import SlurmConfig
from pipeline.decide.escalating import Escalation
from pipeline.executors.slurm.arrays import array_of, driver_submission, log_folder, stage_submissions
from pipeline.run.directory import Run
from pipeline.run.submissions import (
    Ledger,
    Submission,
    chunk_size_for,
    chunks_of,
    is_job_of,
    job_name,
    parse_job_name,
)
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.claims import Claim, newest_numbers
from slurm.query import expand
from slurm.submission import Array, Refused, array_expression, literal, own_answer, render
from slurm.tasklist import TaskList, attempt_id
from tests.support.scripted import ID, imagined_run, pinned, rendered

NASTY = 'it\'s 100% "é" $HOME `touch x` $(touch x) #!'

# Everything that a stage can be given.
STAGE = {
    "partition": ["gpu", "spare"],
    "account": "lab",
    "qos": "high",
    "time": "1-12:00:00",
    "gres": "gpu:a100:2",
    "cpus_per_task": 8,
    "mem": "64G",
    "constraint": "a100&(ib|hdr)",
    "exclude": "n1,n2",
    "reservation": "maintenance_1",
    "requeue": False,
    "signal": 300,
    "setup": ["module purge", "source ~/env.sh # ours"],
    "container": "apptainer exec --nv '/images/our ppo.sif'",
    "python": "/opt/our env/bin/python",
    "environment": {"PLAIN": "1", "NASTY": f"{NASTY} \\n", "EMPTY": ""},
    "options": {"mail-type": "FAIL,TIME_LIMIT_80", "mail-user": "me+ppo@example.org"}
    | {"exclusive": True, "nice": 3, "overcommit": False, "comment": "a # b"},
}
EVERYTHING = dict.fromkeys(("prepare", "rollout", "reward", "evaluate", "driver"), STAGE) | {
    "rollout": STAGE | {"array_parallelism": 2},
    "update": STAGE | {"gres": None, "gpus_per_node": "h100:4", "nodes": 2, "ntasks_per_node": 4},
}


def plain_run(*more: str) -> Run:
    """``scheduler=slurm`` and what a user types."""
    config = compose(
        [
            *("name=r1", "run_dir=/runs/r1", "model.policy=/policy", "data.prompts=/prompts"),
            *("data.prompts_per_iteration=8", "rollout.num_shards=4", "iterations=4"),
            *("data.heldout=/heldout", "evaluate.every=2"),
            "evaluate.command=[measure,'{policy}','{output}']",
            *("reward=rule", "reward.components.rule.function=a:b"),
            *("scheduler=slurm", "scheduler.reward.partition=rm", "scheduler.account=lab"),
            "scheduler.python=/env/bin/python",
            *more,
        ]
    )
    return replace(imagined_run(), config=config)


# Jobs that stay: rollouts and updates in an image, where Slurm's commands may be missing.
WORKERS = {
    "rollout": {"container": STAGE["container"]},
    "reward": {"linger": 60, "start_early": False},
    "update": {"linger": 60, "nodes": 2, "container": STAGE["container"], "setup": ["module load apptainer"]},
    "driver": {"setup": ["module load slurm # ours"], "environment": {"NASTY": NASTY}},
}
RUNS = {
    "plain": plain_run(),
    "everything": imagined_run(f"/runs/{NASTY}", EVERYTHING),
    "workers": imagined_run(f"/runs/{NASTY}", WORKERS),
}


@pytest.mark.parametrize("kind", RUNS)
def test_the_scripts_are_what_they_were(kind):
    """After a change that is meant: PIN=1 pytest tests/executors/test_arrays.py; look at the difference."""
    found = rendered(RUNS[kind])
    assert found == pinned(kind, found)
    stages = {name.split("-")[1] for name in found}
    measures = {"benchmark"} if RUNS[kind].plan.benchmark_every else set()
    assert stages == {"prepare", "rollout", "reward", "update", "evaluate", *measures, "driver", "guard"}


# --- the shell ---

FAKE = """#!/bin/sh
printf '%s\\0' "$@" > "$FOUND/arguments"
printf '%s\\0' "$NASTY" "$EMPTY" "$CONTAINER" "$PWD" > "$FOUND/environment"
"""


@pytest.fixture
def bench(tmp_path) -> Path:
    """Where scripts run: a fake Python, a fake srun that drops its options."""
    for name, text in {
        "our python": FAKE,
        "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "found").mkdir()
    (tmp_path / "empty").mkdir()
    return tmp_path


def run_script(bench: Path, text: str) -> tuple[list[str], list[str]]:
    """The arguments that the fake Python got, and some of its environment."""
    (bench / "script.sh").write_text(text)
    environment = {"PATH": f"{bench}:{os.environ['PATH']}", "HOME": "/nowhere", "FOUND": str(bench / "found")}
    subprocess.run(["bash", "-n", bench / "script.sh"], check=True)
    with (bench / "output").open("w") as output:  # not a pipe, which what attends to a worker would keep open
        command = ["bash", bench / "script.sh"]
        where = {"cwd": bench / "empty", "env": environment, "stdin": subprocess.DEVNULL}
        code = subprocess.run(command, **where, stdout=output, stderr=output, timeout=60).returncode
    assert (code, (bench / "output").read_text()) == (0, "")
    arguments, variables = (
        (bench / "found" / n).read_text().split("\0")[:-1] for n in ("arguments", "environment")
    )
    return arguments, variables


@pytest.mark.parametrize("job_kind", ["rollout", "update", "driver"])
def test_nothing_that_is_given_is_split_or_expanded_by_the_shell(bench, job_kind):
    stage = STAGE | {
        "python": str(bench / "our python"),
        "container": "env CONTAINER='a  $b'",
        "setup": ["SETUP=1"],
    }
    config = EVERYTHING | dict.fromkeys(("rollout", "driver"), stage)
    config["update"] = stage | {"gres": None, "nodes": 2}
    run = imagined_run(f"/runs/{NASTY}", config)
    if job_kind == "driver":
        submission = driver_submission(run, 1, DRIVER, 1)
    else:
        (submission,) = stage_submissions(run, 1, 1, [Task(1, Stage(job_kind))], 1000)
    text = render(array_of(run, run.config.scheduler, submission, Escalation(), None))
    arguments, variables = run_script(bench, text)
    folder = "00000" if job_kind == "driver" else "00001"
    tasks = f"/runs/{NASTY}/slurm/{folder}/{job_kind}-1-0.json"
    assert arguments == ["-P", "-m", "slurm.element", tasks, *(["--rank"] if job_kind == "update" else [])]
    assert variables == [f"{NASTY} \\n", "", "a  $b", str(bench / "empty")]
    assert list((bench / "empty").iterdir()) == []


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20))
def test_any_text_comes_through_the_shells_quoting(text):
    script = render(Array("n", [0], ["printf", "%s", text], "/o", Path("/"), environment={"V": text}))
    (exports,) = re.findall(r"^export V=(.*)$", script, re.MULTILINE)
    (command,) = re.findall(r"^exec (.*)$", script, re.MULTILINE)
    assert shlex.split(exports) in ([text], [] if not text else [text])
    assert shlex.split(command) == ["printf", "%s", text]


@pytest.mark.parametrize(
    ("said", "job"),
    [
        ("12\n", "12"),
        ("12;gold\n", "12"),
        ("Submitted batch job 12\n", "12"),
        ("Submitted batch job 12 on cluster gold\n", "12"),
        ("site: you have job 17 of 500 in the queue\n12\n", "12"),
        ("site: you have job 17 of 500 in the queue\nSubmitted batch job 12\nsee job 18\n", "12"),
        ("17\nSubmitted batch job 12\n", "12"),
        ("job 17\n", None),
        ("17\n18\n", None),
        ("Submitted batch job 17\nSubmitted batch job 18\n", None),
        ("", None),
    ],
)
def test_of_what_a_sites_wrapper_prints_only_sbatchs_own_line_counts(said, job):
    """Where that is not clear the job is looked for by its name."""
    if job is None:
        assert own_answer(said) == ""
    else:
        assert SlurmExecutor._get_job_id_from_submission_command(own_answer(said)) == job


def test_submitit_has_what_is_used_of_it():
    """One name of its plug-ins' interface has an underscore: this tells when an upgrade moves it."""
    assert SlurmExecutor._get_job_id_from_submission_command("Submitted batch job 12 on cluster a") == "12"
    with pytest.raises(FailedSubmissionError):
        SlurmExecutor._get_job_id_from_submission_command("")
    assert SlurmExecutor.affinity() == (2 if shutil.which("srun") else -1)


def test_a_task_finds_submitits_environment():
    command = [sys.executable, "-c", "import submitit; print(submitit.JobEnvironment().job_id)"]
    script = render(Array("n", [0], command, "/o", Path("/")))
    environment = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "7_3\n", done.stderr


@pytest.mark.parametrize("kind", RUNS)
def test_every_script_is_valid_shell(kind, tmp_path):
    for name, text in rendered(RUNS[kind]).items():
        (tmp_path / name).write_text(text)
        assert subprocess.run(["bash", "-n", tmp_path / name], capture_output=True).stderr == b""


@pytest.mark.parametrize(
    "change",
    [
        {"environment": {"A": "b\nc"}},
        {"options": {"comment": "a\n#SBATCH --uid=0"}},
        {"output": "/a\nb"},
        {"folder": Path("/a\nb")},
        {"name": "a\nb"},
        {"dependency": "afterany:1\nb"},
        {"output": "/a\\b"},
        {"options": {"constraint": "a\\b"}},
        {"options": {"comment": "a\nb"}, "environment": {"comment": "harmless"}},
    ],
)
def test_what_would_not_come_through_an_sbatch_line_is_refused(change):
    array = Array("n", [0], ["true"], "/o", Path("/"))
    with pytest.raises(Refused, match="line break or a backslash"):
        render(replace(array, **change))


# --- sbatch ---

CONFIG = """ClusterName=none
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
AuthType=auth/none
CredType=cred/none
NodeName=localhost
PartitionName=p Nodes=ALL
"""


def read_by_sbatch(script: Path, folder: Path) -> dict[str, str]:
    """The options that the real sbatch finds in a script, before it looks for a controller in vain."""
    (folder / "slurm.conf").write_text(CONFIG)
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    found = {}
    with subprocess.Popen(
        ["sbatch", "-vvv", "--test-only", script], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if option := re.search(r'Found in script, argument "--([a-z-]+)=?(.*)"$', line):
                found[option[1]] = option[2]
            if "end of defined options" in line:
                break
        process.kill()
    return found


@pytest.mark.skipif(
    not shutil.which("sbatch"), reason="needs Slurm's client commands; tests/install_slurm.sh"
)
@pytest.mark.parametrize("job_kind", ["rollout", "update"])
def test_sbatch_itself_reads_every_option_as_it_was_meant(tmp_path, job_kind):
    run = RUNS["everything"]
    (submission,) = stage_submissions(run, 1, 1, [Task(1, Stage(job_kind))], 1000)
    array = array_of(run, run.config.scheduler, submission, Escalation(), None, "afterany:7")
    (tmp_path / "script.sh").write_text(render(array))
    found = read_by_sbatch(tmp_path / "script.sh", tmp_path)
    meant = {
        name: "" if value is True else str(value)
        for name, value in array.options.items()
        if value is not False
    }
    assert meant.items() <= found.items()
    assert found["output"] == array.output
    assert found["chdir"] == "/home/u"
    assert found["dependency"] == "afterany:7"
    assert found["comment"] == "a # b"
    assert "overcommit" not in found


# --- logs and indices ---


def written_by_slurm(pattern: str) -> str:
    """A pattern of sbatch's without jobs' numbers, as Slurm fills it in."""
    return re.sub(r"%(.)", lambda found: {"%": "%"}[found[1]], pattern)


@pytest.mark.parametrize("max_array_size", [1001, 10, 2, 4_000_001])
@pytest.mark.parametrize("task", [PREPARE, *(Task(3, Stage.REWARD, shard) for shard in (0, 7, 1000, 10_123))])
def test_a_job_writes_its_tasks_log_where_the_run_looks_for_it(bench, tmp_path, task, max_array_size):
    run = imagined_run(tmp_path / "100%a %j", {"reward": {"python": "echo"}, "prepare": {"python": "echo"}})
    (submission,) = stage_submissions(run, 1, 2, [task], chunk_size_for(max_array_size))
    (index,) = submission.indices
    assert index < max_array_size
    assert submission.task(index) == task
    said = as_on_a_node(bench, run, submission)
    assert not said.stdout + said.stderr
    assert "slurm.element" in submission.log(run.paths, task).read_text()


def as_on_a_node(bench: Path, run: Run, submission: Submission) -> subprocess.CompletedProcess[str]:
    """Run the script of a submission of one element; what it prints goes to the file that Slurm opens."""
    run.paths.log_root.mkdir(parents=True, exist_ok=True)
    text = render(array_of(run, run.config.scheduler, submission, Escalation(), None))
    (output,) = re.findall("^#SBATCH --output=(.*)$", text, re.MULTILINE)
    opened = run.paths.slurm_log if submission.is_of_stage else os.devnull
    assert written_by_slurm(*shlex.split(output)) == str(opened)
    element = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(submission.indices[0])}
    done = subprocess.run(
        ["bash", "-c", text],
        capture_output=True,
        text=True,
        cwd=bench,
        timeout=60,
        env={**os.environ, **element},
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("job_kind", [DRIVER, GUARD, Stage.REWARD])
def test_a_job_that_cannot_write_its_log_runs_all_the_same(bench, tmp_path, job_kind):
    """Slurm would not start it; so its log is its own business. Of driver jobs Slurm opens nothing."""
    python = {"python": "echo"}
    run = imagined_run(tmp_path / f"100%a {NASTY}", {"driver": python, "reward": python})
    submission = driver_submission(run, 1, job_kind, 2)
    if job_kind == Stage.REWARD:
        (submission,) = stage_submissions(run, 1, 2, [Task(3, Stage.REWARD, 4)], 1000)
    folder = log_folder(run, submission)
    place = folder if folder.parent == run.paths.log_root else folder.parent
    place.parent.mkdir(parents=True)
    place.write_text("in the place of a folder")
    done = as_on_a_node(bench, run, submission)
    into_old = run.paths.slurm_log.read_text() if run.paths.slurm_log.exists() else ""
    assert "slurm.element" in (done.stdout if submission.is_of_stage else into_old)
    place.unlink()
    assert not as_on_a_node(bench, run, submission).stdout
    (log,) = folder.iterdir()
    assert "slurm.element" in log.read_text()


def test_a_job_whose_run_was_moved_makes_no_folder_in_its_place(bench, tmp_path):
    run = imagined_run(tmp_path / "run", {"driver": {"python": "echo"}})
    text = render(
        array_of(run, run.config.scheduler, driver_submission(run, 1, DRIVER, 2), Escalation(), None)
    )
    subprocess.run(["bash", "-c", text], cwd=bench, capture_output=True, check=True, timeout=60)
    assert not run.paths.root.exists()


@pytest.mark.parametrize(
    ("size", "chunk"), [(2, 1), (10, 10), (11, 10), (1000, 1000), (1001, 1000), (4_000_001, 100_000)]
)
def test_a_chunk_is_a_power_of_ten_that_the_cluster_takes(size, chunk):
    assert chunk_size_for(size) == chunk


@given(st.sets(st.integers(0, 12_000), min_size=1, max_size=50), st.sampled_from([1, 10, 1000, 100_000]))
def test_every_shard_is_in_one_chunk(shards, chunk_size):
    chunks = chunks_of(list(shards), chunk_size)
    back = [index + chunk * chunk_size for chunk, indices in chunks.items() for index in indices]
    assert sorted(back) == sorted(shards)
    assert all(0 <= index < chunk_size for indices in chunks.values() for index in indices)
    assert all(indices == sorted(indices) for indices in chunks.values())


def test_array_expressions_read_like_slurms():
    assert array_expression([0, 1, 2, 3, 7], 2) == "0-3,7%2"
    assert array_expression([5], None) == "5"
    assert array_expression([1, 3, 5], None) == "1,3,5"


@given(st.sets(st.integers(0, 2000), min_size=1, max_size=60), st.none() | st.integers(1, 9))
def test_array_expressions_come_back(indices, parallelism):
    assert expand(array_expression(sorted(indices), parallelism)) == sorted(indices)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_no_character_of_a_path_is_a_pattern(text):
    assert written_by_slurm(literal(text)) == text


# --- task lists and names ---


def test_several_chunks_are_several_arrays_with_names_of_their_own():
    run = imagined_run()
    tasks = [Task(2, Stage.ROLLOUT, shard) for shard in range(25)]
    submissions = stage_submissions(run, 1, 3, tasks, 10)
    assert [s.name for s in submissions] == [f"slurm-ppo.r1.rollout.iter2.{ID}.3.{i}" for i in range(3)]
    assert [task for s in submissions for _, task in s.tasks()] == tasks
    files = {Ledger(run.paths).file(submission) for submission in submissions}
    assert len(files) == 3


def test_an_element_is_told_its_shard_and_where_to_say_why_it_failed():
    run = imagined_run()
    (submission,) = stage_submissions(run, 1, 3, [Task(2, Stage.ROLLOUT, 11)], 10)
    assert (submission.chunk, submission.indices) == (1, [1])
    failure = "/runs/r1/logs/00002-rollout/attempt-3/shard-00011.failure.json"
    assert submission.elements["1"] == ("--shard", "11", "--failure-file", failure)
    assert submission.arguments[0] == "rollout"


@given(
    st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z"),
    st.tuples(
        st.integers(0, 99), st.sampled_from([*Stage, DRIVER, GUARD]), st.integers(1, 9), st.integers(0, 9)
    ),
    st.tuples(
        st.integers(0, 99), st.sampled_from([*Stage, DRIVER, GUARD]), st.integers(1, 9), st.integers(0, 9)
    ),
)
def test_a_job_is_known_by_its_runs_id_and_no_two_have_one_name(run_name, first, second):
    names = [job_name(run_name, ID, *parts) for parts in (first, second)]
    assert [parse_job_name(name) for name in names] == [(ID, *parts) for parts in (first, second)]
    assert all(len(name) <= 160 for name in names)
    assert not any(is_job_of("ba9876543210", name) for name in names)
    assert (names[0] == names[1]) == (first == second)


def test_an_administrator_sees_whose_job_it_is():
    seen = job_name("first", ID, 7, "score-big", 2, 0)
    assert seen == f"slurm-ppo.first.score-big.iter7.{ID}.2.0"
    run = imagined_run("/scratch/runs/my first try")
    run = replace(run, identity=replace(run.identity, name="run"))
    (unnamed,) = stage_submissions(run, 1, 1, [Task(3, Stage.UPDATE)], 1000)
    assert unnamed.name.startswith("slurm-ppo.my_first_try.update.iter3.")
    long = [job_name(f"{'rates-' * 15}seed_{seed}", ID, 7, "update", 1, 0) for seed in (1, 2)]
    assert [name.split(".update")[0][-12:] for name in long] == ["rates-seed_1", "rates-seed_2"]


@pytest.mark.parametrize(
    "name", ["", "bash", f"{ID}", f"a.{ID}", f"{ID}.1.2.3", f"a.b.c.d.e.{ID}", "1.2.3.4.5.6"]
)
def test_jobs_of_others_are_left_alone(name):
    assert not is_job_of(ID, name)


def test_the_task_list_holds_no_state(tmp_path):
    run = imagined_run(tmp_path)
    (submission,) = stage_submissions(run, 1, 1, [Task(1, Stage.UPDATE)], 1000)
    assert Ledger(run.paths).begin(submission)
    content = json.loads(Ledger(run.paths).file(submission).read_text())
    assert "state" not in content
    assert stat.S_IMODE(Ledger(run.paths).file(submission).stat().st_mode) & 0o444


def test_an_element_of_the_list_is_one_task():
    run = imagined_run()
    (submission,) = stage_submissions(run, 1, 3, [Task(2, Stage.ROLLOUT, shard) for shard in (1, 4)], 10)
    tasks = TaskList.of(json.loads(json.dumps(plain(submission))))
    assert tasks.elements == submission.elements
    words = tasks.words("4", attempt_id(tasks.number, "77", "4", 0))
    assert words[:2] == ["stages.workers", "rollout"]
    assert words[words.index("--attempt") + 1] == "3-77_4r0"
    assert words[-4:-2] == ["--shard", "4"]


def test_a_worker_is_told_which_attempts_at_its_task_were_counted():
    run, tasks = imagined_run(), [Task(2, Stage.REWARD, shard) for shard in (3, 11)]
    known = newest_numbers(
        [*(Claim(tasks[1], number, "", "", 0.0) for number in (2, 1)), Claim(PREPARE, 9, "", "", 0.0)]
    )
    made = stage_submissions(run, 1, 1, tasks, 10, known=known)
    told = [TaskList.of(json.loads(json.dumps(plain(submission)))).known for submission in made]
    assert told == [{}, {"1": 2}]


def test_the_type_of_the_configuration_is_slurms():
    assert all(isinstance(run.config.scheduler, SlurmConfig) for run in RUNS.values())
