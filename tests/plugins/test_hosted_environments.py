"""Environments in an interpreter of their own: nothing of it meets this one's packages, and whatever becomes
of its process is said with the task.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.environment import TASKS_KEY, EnvironmentComponentConfig, EnvironmentConfig
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import configure
from pipeline.config.reward import RowsPerCall, RuleConfig
from pipeline.config.rollout import MultiTurnConfig
from pipeline.plugins.environments import made_tasks
from pipeline.plugins.hosted import HostedEnvironment, connect
from pipeline.plugins.interpreter.contract import DescribedError
from pipeline.plugins.load import MissingImport, PluginError
from pipeline.run.commits import read_record
from pipeline.run.directory import Run, load_run
from pipeline.run.schemas import ROLLOUT, FinishReason
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task
from stages.context import UserError
from stages.engines.base import Request, Response
from stages.generation.calls import CallPool
from stages.generation.conversations import Conversation, Conversations, SchedulerFailed, TokenBudget
from stages.generation.environments import EnvironmentScheduler
from tests.support import ROOT, tiny
from tests.support.hosted import make_interpreter, write_environments
from tests.support.killing import assert_same_end
from tests.support.light import make_tokenizer
from tests.support.processes import config_of
from tests.support.waiting import eventually

KEY = "data.environment.components.sums.source"
CONVERSING = MultiTurnConfig(scheduler="environment")


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    return make_interpreter(tmp_path_factory.mktemp("venv") / "own")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hosted") / "project"
    write_environments(folder)
    return folder


@pytest.fixture
def opened(python, project, monkeypatch):
    """Make an environment of the module in its interpreter; all are closed in the end."""
    monkeypatch.syspath_prepend(str(project))
    found: list[HostedEnvironment] = []

    def make(name: str, threads: int = 1, **arguments) -> HostedEnvironment:
        found.append(connect(KEY, f"hosted_tasks:{name}", python, threads)(**arguments))
        return found[-1]

    yield make
    for one in found:
        one.close()


@pytest.fixture
def tasks(inputs, python, project, monkeypatch) -> Callable[..., dict]:
    monkeypatch.syspath_prepend(str(project))

    def make(name: str, size: int = 6, multi_turn=None, **arguments) -> dict:
        config = config_of(inputs, Path("run"))
        source = f"hosted_tasks:{name}"
        one = EnvironmentComponentConfig(source=source, arguments=arguments, python=python)
        made = EnvironmentConfig(
            components={"sums": one}, size=size, time_limit=1.0 if "what" in arguments else 9
        )
        rollout = replace(config.rollout, multi_turn=multi_turn)
        return made_tasks(replace(config, rollout=rollout, data=replace(config.data, environment=made)))

    return make


def row(index: int, response: str = "5", **more) -> dict:
    return {"response": response, "metadata": [5, index], **more}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


# --- what it is ---


def test_it_has_its_own_packages_and_none_of_slurm_ppos(tasks, python):
    (_, first), *_ = tasks("Packages", size=1)[TASKS_KEY]
    assert first["prompt"] == f"[] {Path(python).parents[1]} 0"
    entry = json.loads(first["environment_entry"])
    assert entry["python"] == python


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo hello; exec sleep 60", "was answered by something else than Python"),
        ("exit 3", r"ended its process \(exit code 3\)"),
    ],
)
def test_a_program_that_is_no_interpreter_is_not_waited_for(tmp_path, text, why):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    with pytest.raises(DescribedError, match=why):
        connect(KEY, "hosted_tasks:Sums", str(program))


def test_its_tasks_follow_from_the_seed_and_its_scores_are_those_of_its_code(tasks, opened):
    made = tasks("Sums")[TASKS_KEY]
    assert made == tasks("Sums")[TASKS_KEY]
    assert [name for name, _ in made] == [f"sums/{i}" for i in range(6)]
    assert opened("Sums").scores([row(1, "6"), row(1, "x")]) == [1.01, 0.01]
    heldout = next(iter(opened("Sums").tasks(1, 0, heldout=True)))
    assert "held out" in heldout.prompt


@pytest.mark.parametrize(
    ("hash_seed", "zone", "folder"), [("1", "Asia/Tokyo", "/"), ("7", "America/Lima", "/tmp")]
)
def test_its_tasks_do_not_depend_on_what_surrounds_this_process(opened, monkeypatch, hash_seed, zone, folder):
    first = list(opened("Sums").tasks(4, 3, heldout=False))
    for key, value in {
        "PYTHONHASHSEED": hash_seed,
        "TZ": zone,
        "LC_ALL": "C",
        "PYTHONPATH": "/nowhere",
    }.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(folder)
    assert list(opened("Sums").tasks(4, 3, heldout=False)) == first


# --- what becomes of it ---


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("raises", r"its task 2 raised KeyError: 'nothing' at .*hosted_tasks\.py:\d+$"),
        ("exits", r"its task 2 raised SystemExit: 3 at .*hosted_tasks\.py:\d+$"),
        ("leaves", r"its task 2 ended its process \(exit code 4\)$"),
        ("hangs", r"its task 2 gave no answer within 1 s \(time_limit\)$"),
    ],
)
def test_a_task_that_breaks_down_is_named(tasks, what, why):
    with pytest.raises(PluginError, match=rf"^{KEY}=hosted_tasks:Sums: {why}"):
        tasks("Sums", what=what)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("raises", r"^raised KeyError: 'nothing' at .*hosted_tasks\.py:\d+\n"),
        ("leaves", r"^ended its process \(exit code 4\)$"),
        ("leaves one behind", r"^ended its process \(exit code 4\)$"),
    ],
)
def test_a_score_that_breaks_down_says_why(opened, what, why):
    made = opened("Sums", what=what)
    with pytest.raises(DescribedError, match=why):
        made.scores([row(2)])
    assert made.has_ended == (what != "raises")


def test_what_it_prints_forks_or_changes_of_its_process_harms_no_answer(opened):
    for what in ("spoils", "forks"):
        made = opened("Sums", what=what)
        assert made.scores([row(2)]) == [1.0]
        assert made.scores([row(1, "6")]) == [1.01]


@pytest.mark.parametrize(
    ("what", "shown"), [("nan", "nan"), ("huge", "inf"), ("object", "[<object"), ("text", "'good'")]
)
def test_a_score_that_is_no_number_stays_none(opened, what, shown):
    from pipeline.plugins.called import PluginFailure, judged

    found = judged(opened("Sums", what=what).scores([row(1), row(2)][1:]), 1)
    assert isinstance(found, PluginFailure)
    assert found.text.startswith(f"returned {shown}")


def test_it_ends_with_the_process_that_started_it_also_while_it_is_busy(python, project, tmp_path):
    code = f"""
import os, sys, threading, time
sys.path[:0] = [{str(project)!r}]
from pipeline.plugins.hosted import connect
made = connect("key", "hosted_tasks:Sums", {python!r})(what="hangs")
threading.Thread(target=made.scores, args=[[{row(2)!r}]], daemon=True).start()
time.sleep(0.3)
print(made._child._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    until = time.monotonic() + 10
    while is_running(int(done.stdout)):
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.02)


def test_what_it_has_started_ends_with_it(opened):
    made = opened("Sums", what="leaves one behind")
    group = made._child._process.pid
    with pytest.raises(DescribedError, match="ended its process"):
        made.scores([row(2)])
    assert running(group)
    made.close()
    assert eventually(lambda: not running(group))


def running(group: int) -> list[list[str]]:
    """Processes of a group that run."""
    found = map(stat_of, Path("/proc").glob("[0-9]*"))
    return [words for words in found if words[0] != "Z" and words[2] == str(group)]


def stat_of(process: Path) -> list[str]:
    """State, parent, group and what follows of a process; as of a zombie where it is gone."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", "", ""]


def is_running(pid: int) -> bool:
    return stat_of(Path(f"/proc/{pid}"))[0] != "Z"


# --- what cannot be ---


@pytest.mark.parametrize(
    ("source", "error", "why"),
    [
        ("hosted_tasks:None_", PluginError, "module 'hosted_tasks' has no 'None_'"),
        (
            "no_such_module:x",
            PluginError,
            "no module 'no_such_module'; modules are looked for among the pack",
        ),
        ("nameless", PluginError, "no package of .* has an environment of this name; write module:function"),
        ("json:codecs", PluginError, "is not a function"),
        ("reasoning_gym", MissingImport, "reasoning_gym needs reasoning-gym: pip install"),
        (
            "verifiers",
            MissingImport,
            "verifiers needs the package verifiers in an environment of its own: pyt",
        ),
    ],
)
def test_a_source_that_is_not_there_is_named(python, project, monkeypatch, source, error, why):
    monkeypatch.syspath_prepend(str(project))
    with pytest.raises(error, match=f"^{KEY}={source}: {why}") as raised:
        connect(KEY, source, python)
    assert "\n" not in str(raised.value)


def test_an_interpreter_that_is_none_is_named(tmp_path):
    (tmp_path / "python").write_text("")
    with pytest.raises(PluginError, match="python cannot be run: Permission denied"):
        connect(KEY, "a:b", str(tmp_path / "python"))


# --- several turns, and groups ---


def test_it_converses_in_several_turns_at_once(opened):
    made = opened("Guess", threads=4)
    assert made.has_step
    said = [answer("1")]
    said += made.step(said, [5, 1])
    assert said[-1] == {"role": "user", "content": " no 1 1 "}
    assert made.step([*said, answer("6")], [5, 1]) is None
    assert made.scores([row(1, messages=said)]) == [2 + 8 / 100]


def test_what_a_step_returns_has_to_be_json(opened):
    with pytest.raises(DescribedError, match=r"^returned \[<object .*, which JSON text cannot give back"):
        opened("Guess", what="object").step([answer("1")], [5, 2])


def test_conversations_and_groups_have_to_be_configured(tasks, inputs, monkeypatch):
    with pytest.raises(
        PluginError, match=r"converses in several turns; set rollout\.multi_turn\.scheduler=env"
    ):
        tasks("Guess")
    with pytest.raises(
        PluginError, match=r"^rollout\.multi_turn\.scheduler=environment: no environment of the"
    ):
        tasks("Sums", multi_turn=CONVERSING)
    assert tasks("Guess", multi_turn=CONVERSING)[TASKS_KEY]


def test_scores_that_compare_responses_need_all_of_a_prompt(inputs, python, project, monkeypatch, opened):
    from stages.rewards.environments import environment

    monkeypatch.syspath_prepend(str(project))
    config = config_of(inputs, Path("run"))
    one = EnvironmentComponentConfig(source="hosted_tasks:Best", python=python)
    made = EnvironmentConfig(components={"sums": one}, size=4)
    config = replace(config, data=replace(config.data, environment=made))
    for per_call in RowsPerCall.RESPONSE, RowsPerCall.PROMPT:
        rule = RuleConfig(function="environment", rows_per_call=per_call)
        config = replace(config, reward=replace(config.reward, components={"best": rule}))
        if per_call is RowsPerCall.RESPONSE:
            with pytest.raises(PluginError, match=r"set reward\.components\.best\.rows_per_call=prompt"):
                made_tasks(config)
        else:
            entries = [task["environment_entry"] for _, task in made_tasks(config)[TASKS_KEY]]
    entry, other = entries[:2]
    assert environment(responses=["a", "bb", "c"], environment_entry=[entry, entry, other]) == [0.0, 1.0, 1.0]


def test_without_environments_there_is_no_one_to_converse_with(inputs, tmp_path):
    with pytest.raises(
        ConfigError, match=r"multi_turn\.scheduler=environment: no environment makes the prompts"
    ):
        configure(tiny.overrides(inputs, tmp_path / "run", "rollout.multi_turn.scheduler=environment"))


# --- a run ---


@pytest.fixture(scope="module")
def conversing_run(inputs, python, project, slurm_ppo, tmp_path_factory) -> Path:
    """An undisturbed run of light tasks with an environment of one turn and one of several."""
    run_dir = tmp_path_factory.mktemp("conversing") / "run"
    done = slurm_ppo("run", *words(inputs, run_dir, python), cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


def words(inputs: Path, run_dir: Path, python: str, *more: str) -> list[str]:
    given = [
        "reward=environment",
        "data.environment.components.sums.source=hosted_tasks:Sums",
        f"data.environment.components.sums.python={python}",
        "data.environment.components.guess.source=hosted_tasks:Guess",
        f"data.environment.components.guess.python={python}",
        "data.environment.size=24",
        "data.environment.heldout_size=8",
        "evaluate.every=1",
        "rollout.max_new_tokens=40",
        "rollout.multi_turn.scheduler=environment",
        *more,
    ]
    found = tiny.overrides(inputs, run_dir, *given)
    return [word for word in found if not word.startswith(("data.prompts=", "data.id_column="))]


def conversations_of(run: Run, iteration: int) -> dict[str, list]:
    """Messages after each prompt, by environment."""
    found = {"sums": [], "guess": []}
    for shard in range(2):
        record = read_record(run.paths, Task(iteration, Stage.ROLLOUT, shard))
        rows = read_shard(run.paths, record, ROLLOUT)
        names = rows["environment_task"].to_pylist()
        for name, messages in zip(names, rows["response_messages"].to_pylist(), strict=True):
            found[name.partition("/")[0]].append(json.loads(messages))
    return found


def test_a_run_converses_scores_and_reports_by_environment(conversing_run):
    run = load_run(conversing_run)
    first, said = (conversations_of(run, iteration) for iteration in (1, 2))
    assert {len(messages) for messages in first["sums"] + said["sums"]} == {1}
    assert max(len(messages) for messages in first["guess"] + said["guess"]) > 1
    metrics = [json.loads(line) for line in (conversing_run / "metrics.jsonl").read_text().splitlines()]
    scores = [len(messages) + len(messages[-1]["content"]) / 100 for messages in said["guess"]]
    assert metrics[-1]["environment/guess/reward"] == pytest.approx(statistics.fmean(scores))
    for row in metrics[-2:]:
        by_environment = [row[f"environment/{name}/reward"] for name in said]
        assert min(by_environment) <= row["reward/mean"] <= max(by_environment)
        held_out = [row[f"evaluate/{name}/reward"] for name in said]
        assert min(held_out) <= row["evaluate/reward"] <= max(held_out)
    assert "Reward by environment" in (conversing_run / "report.html").read_text()


def test_going_back_over_conversations_gives_the_same_run(conversing_run, project, slurm_ppo, tmp_path):
    run_dir = Path(shutil.copytree(conversing_run, tmp_path / "run", symlinks=True))
    done = slurm_ppo("resume", run_dir, "--from", "rollout@1", cwd=project)
    assert done.returncode == 0, done.stderr
    assert_same_end(run_dir, conversing_run)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (
            "raises",
            r"raised KeyError: 'nothing' at .*hosted_tasks\.py:\d+ for prompt_id \w+, sample 0, task guess/2",
        ),
        ("leaves", r"ended its process \(exit code 4\) for prompt_id \w+, sample 0, task guess/2"),
        (
            "hangs",
            r"was not back after rollout\.multi_turn\.step_seconds=0\.5 for prompt_id \w+, .* task guess/2",
        ),
        ("number", r"returned int 7 for prompt_id \w+, sample 0, task guess/2; wanted is a list of messages"),
    ],
)
def test_a_conversation_that_breaks_down_is_named_with_its_task(inputs, opened, what, why):
    made = opened("Guess", what=what)
    settings = MultiTurnConfig(scheduler="environment", step_seconds=0.5)
    entry = {"source": "x:y", "python": None, "arguments": {}, "metadata": [5, 2]}
    columns = {"environment_entry": json.dumps(entry), "environment_task": "guess/2"}
    opening = Conversation("abc", 0, "5 + 2 =", None, [], 0, columns)
    calls = CallPool(EnvironmentScheduler({("x:y", None, "{}"): made}), 1, settings.step_seconds)
    request = Request([1, 2], 20, 1)
    talk = Conversations(
        settings,
        [opening],
        [request],
        make_tokenizer(inputs / "policy"),
        None,
        TokenBudget(20, None, 64),
        lambda request: None,
        calls,
        lambda: False,
    )
    talk.ended(0, Response([5], [0.0], FinishReason.STOP))
    with pytest.raises(
        (SchedulerFailed, UserError), match=rf"^rollout\.multi_turn\.scheduler=environment {why}"
    ):
        talk.due(wait=True)
    calls.close()
