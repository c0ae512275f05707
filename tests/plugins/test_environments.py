"""Environments: prompts that Python makes, the same each time; what is wrong is named with its task."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.config.environment import (
    TASKS_KEY,
    EnvironmentComponentConfig,
    EnvironmentConfig,
)
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import configure
from pipeline.config.reward import RuleConfig
from pipeline.plugins.environments import made_tasks, task_sets
from pipeline.plugins.load import PluginError
from pipeline.run.commits import read_record
from pipeline.run.directory import create_run, load_run
from pipeline.run.schemas import PROMPTS
from pipeline.run.shards import read_shard
from pipeline.run.tasks import PREPARE
from stages.context import UserError
from stages.rewards.rules import RuleFailed, rule_scores
from tests.support import tiny
from tests.support.killing import assert_same_end, hooked
from tests.support.processes import config_of, python_m_stages, stage_arguments
from tests.support.user_environments import write_environments

RULE = "stages.rewards.environments:environment"


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    """Name of a module with environments, in the user's folder."""
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    return write_environments(tmp_path / "project")


@pytest.fixture
def tasks(inputs, module) -> Callable[..., dict]:
    """Tasks of one environment, or of several by name."""

    def make(*sources: str, size: int = 12, arguments: dict | None = None, seed: int = 0, **more) -> dict:
        config = config_of(inputs, Path("run"))
        components = {
            f"env{i}": EnvironmentComponentConfig(source=f"{module}:{source}", arguments=arguments or {})
            for i, source in enumerate(sources)
        }
        made = EnvironmentConfig(components=components, size=size, **more)
        return made_tasks(replace(config, seed=seed, data=replace(config.data, environment=made)))

    return make


def words(inputs: Path, run_dir: Path, *more: str) -> list[str]:
    """A run of light tasks without a file of prompts."""
    given = tiny.overrides(inputs, run_dir, "reward=environment", *more)
    return [word for word in given if not word.startswith(("data.prompts=", "data.id_column="))]


def of_sums(module: str, source: str = "Different") -> list[str]:
    return [
        f"data.environment.components.sums.source={module}:{source}",
        "data.environment.size=24",
        "data.environment.heldout_size=6",
        "evaluate.every=1",
    ]


def prompts_of(run_dir: Path, part: str = "") -> pa.Table:
    run = load_run(run_dir)
    return read_shard(run.paths, read_record(run.paths, PREPARE), PROMPTS, part)


# --- the tasks ---


def test_a_task_has_all_that_scoring_takes(tasks, module):
    (name, row), *_ = tasks("Different", arguments={"largest": 7})[TASKS_KEY]
    assert name == row["environment_task"] == "env0/0"
    assert row["prompt"] == row["answer"]
    entry = json.loads(row["environment_entry"])
    assert entry == {
        "source": f"{module}:Different",
        "arguments": {"largest": 7},
        "metadata": {"prompt": row["prompt"], "index": 0},
    }


def test_tasks_follow_from_the_seed_and_the_name(tasks):
    def prompts(**more) -> list[str]:
        return [row["prompt"] for _, row in tasks("Sums", **more)[TASKS_KEY]]

    first = prompts()  # draws from Python's own generator
    assert prompts() == first != prompts(seed=1)
    both = tasks("Different", "Different")[TASKS_KEY]
    assert len({row["prompt"].split()[1] for _, row in both}) == 2


def test_what_it_prints_is_no_part_of_what_a_command_says(tasks, capfd):
    """Which is JSON, say."""
    tasks("Different")
    said = capfd.readouterr()
    assert said.out == ""
    assert "environments may print\n" in said.err


def test_seeds_of_data_come_before_the_runs_and_held_out_tasks_have_others():
    given = {"a": EnvironmentComponentConfig(source="x:y")}

    def seeds(run_seed: int, **more) -> list[int]:
        made = EnvironmentConfig(components=given, **more)
        return [one.seed_of("a") for one in task_sets(made, run_seed, has_heldout=True)]

    train, heldout = seeds(0)
    assert train != heldout
    assert seeds(1, seed=0) == [train, heldout]
    assert seeds(1, heldout_seed=0) == [seeds(1)[0], heldout]


def test_environments_share_the_tasks_by_weight_in_every_part_of_them():
    parts = {"a": 3.0, "b": 1.0, "c": 1.0}
    components = {n: EnvironmentComponentConfig(source="x:y", weight=w) for n, w in parts.items()}
    made = EnvironmentConfig(components=components, size=102, heldout_size=4)
    assert made.shares == {"a": 61, "b": 21, "c": 20}
    assert made.heldout_shares == {"a": 2, "b": 1, "c": 1}
    assert sum(made.shares.values()) == made.size


def test_environments_are_mixed_evenly(tasks):
    names = [name for name, _ in tasks("Different", "Sums", size=12)[TASKS_KEY]]
    assert names[:4] == ["env0/0", "env1/0", "env0/1", "env1/1"]
    assert len(names) == 12


BROKEN = {
    "raises": r"its task 3 raised KeyError: 'nothing' at .*tasks_\w+\.py:\d+$",
    "leaves": r"its task 3 ended its process \(exit code 4\)",
    "leaves quietly": r"its task 3 ended its process \(exit code 0\)",
    "hangs": r"its task 3 gave no answer within 0\.5 s \(time_limit\)",
    "text": "its task 3 is 'a prompt' instead of a dictionary with a prompt",
    "unknown": "its task 3 has the unknown key 'question'; legal: prompt, answer, metadata, tools",
    "no prompt": "its task 3 has as prompt None instead of text or a list of messages",
    "list": r"its task 3 has as answer \['4'\] instead of text",
    "tuple": "its task 3 has metadata that JSON text cannot give back as they are, .*; use dictionaries",
    "nan": "its task 3 has metadata that JSON text cannot give back",
    "infinite": r"its task 3 has metadata that JSON text cannot give back as they are, \[inf\]; use",
    "keys": "its task 3 has metadata that JSON text cannot give back as they are, {1: 2}; use",
    "digits": "its task 3 has metadata that JSON text cannot give back as they are, a int without a text",
    "deep": "its task 3 has metadata that JSON text cannot give back as they are, .*; use",
    "mute": "its task 3 has metadata that JSON text cannot give back as they are, a Mute without a text; use",
    "surrogate": "its task 3 has a prompt, answer or tools that JSON text cannot give back as they are",
    "object": "its task 3 has metadata that JSON text cannot give back",
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_environment_that_breaks_down_or_makes_nonsense_is_named_with_its_task(tasks, what):
    limit = 0.5 if what == "hangs" else 30.0
    with pytest.raises(PluginError, match=rf"components\.env0\.source=\w+:broken: {BROKEN[what]}") as error:
        tasks("broken", arguments={"what": what}, time_limit=limit)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("Few", "it makes 5 tasks, and 12 are its share of data.environment.size; ask for fewer"),
        ("no_score", r"as it is made, it raised TypeError: returned Random without a method tasks\(size, se"),
        ("no_environment", "as it is made, it raised TypeError: no_environment.. missing 1 required pos"),
        ("missing", r"module 'tasks_\w+' has no 'missing'"),
    ],
)
def test_an_environment_that_is_none_or_makes_too_few_tasks_is_named(tasks, source, why):
    with pytest.raises(
        PluginError, match=rf"^data\.environment\.components\.env0\.source=\w+:{source}: {why}"
    ):
        tasks(source)


# --- the scores ---


def rollouts(module: str, arguments: dict, responses: list[str]) -> pa.Table:
    entries = [
        json.dumps({"source": f"{module}:Scores", "arguments": arguments, "metadata": {"index": i}})
        for i in range(len(responses))
    ]
    return pa.table(
        {
            "prompt_id": [f"p{i}" for i in range(len(responses))],
            "sample_index": [0] * len(responses),
            "prompt_text": ["say"] * len(responses),
            "response_text": responses,
            "response_messages": pa.nulls(len(responses), pa.string()),
            "environment_task": [f"env0/{i}" for i in range(len(responses))],
            "environment_entry": entries,
        }
    )


@pytest.mark.parametrize(
    ("what", "kind", "why"),
    [
        (
            "raises",
            RuleFailed,
            r"raised KeyError: 'nothing' at .* for prompt_id p1, sample 0, task env0/1, wh",
        ),
        (
            "text",
            UserError,
            "returned 'good' instead of a finite number for prompt_id p1, sample 0, task env0/1",
        ),
        ("nan", UserError, "returned inf instead of a finite number for prompt_id p1, sample 0, task env0/1"),
        ("hangs", RuleFailed, "gave no answer within 0.5 s .* for prompt_id p1, sample 0, task env0/1"),
    ],
)
def test_a_score_that_is_none_is_named_with_its_task(module, what, kind, why):
    rule = RuleConfig(function=RULE, time_limit=0.5 if what == "hangs" else 30.0)
    with pytest.raises(kind, match=why):
        rule_scores("environment", rule, rollouts(module, {"what": what}, ["a", "b", "c"]))


# --- what the configuration may say ---


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            ["data.prompts=p.jsonl"],
            "data.prompts=.*: data.environment makes the prompts; set data.prompts=n",
        ),
        (["data.heldout=h.jsonl"], "data.heldout=.*: data.environment makes the prompts; set data.heldout=n"),
        (["data.id_column=id"], "data.id_column=id: is for prompt files, and data.environment makes"),
        (
            ["data.environment.components.b.source=b:c", "data.environment.components.b.weight=1e-9"],
            r"components\.b\.weight=1e-09: of data\.environment\.size=24 tasks it makes none; give a larger",
        ),
        (["data.environment.components.sums.source=no-name"], "or the name of an environment such as reason"),
        (["data.environment.sise=3"], "unknown key 'sise' in data.environment"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(inputs, tmp_path, more, why):
    with pytest.raises(ConfigError, match=why) as error:
        configure([*words(inputs, tmp_path / "run", *of_sums("my_tasks")), *more])
    assert "must be given" not in str(error.value)


def test_prompts_have_to_come_from_somewhere(inputs, tmp_path):
    with pytest.raises(ConfigError) as error:
        configure(words(inputs, tmp_path / "run"))
    first, second = str(error.value).splitlines()
    assert first == "data.prompts: must be given, e.g. data.prompts=FILE, or data.environment instead"
    assert "function=environment: scores tasks of environments, and the run has none; give" in second


# --- before a run ---


@pytest.fixture
def validate(inputs, tmp_path, module, slurm_ppo) -> Callable[..., tuple[int, str]]:
    """``slurm-ppo validate`` of a run with one environment. Returns the exit code and what is said."""

    def call(source: str, *more: str) -> tuple[int, str]:
        given = words(inputs, tmp_path / "run", *of_sums(module, source), *more)
        done = slurm_ppo("validate", *given, cwd=tmp_path / "project", timeout=60)
        return done.returncode, done.stdout + done.stderr

    return call


def test_validate_makes_a_few_tasks_and_scores_them(validate, module):
    code, said = validate("Different")
    assert code == 0, said
    assert f"environment sums: {module}:Different, is asked for 24 tasks and 6 held-out ones\n" in said
    assert (
        "data.environment.size: 20 usable rows of environments; all rows can be used; looked at 20 of 24"
        in said
    )
    assert "an empty response gets 0.0095 (0 to 0.019); the text of column answer as response gets 1" in said
    assert "warning: data.environment" not in said


def test_validate_says_in_one_line_what_is_wrong_with_an_environment(validate, module):
    code, said = validate(
        "broken", "data.environment.components.sums.arguments.what=hangs", "data.environment.time_limit=0.5"
    )
    assert code == 2, said
    source = f"data.environment.components.sums.source={module}:broken"
    assert f"error: {source}: its task 3 gave no answer within 0.5 s (time_limit)\n" in said
    assert "Traceback" not in said


def test_validate_warns_where_environments_score_nothing(validate, module):
    code, said = validate(
        "Different",
        "reward=rule",
        "reward.components.rule.function=length_penalty",
        "reward.components.rule.arguments={limit: 9, buffer: 1}",
    )
    assert code == 0, said
    assert "warning: data.environment: no component of the reward scores by the environments; choose" in said


# --- a run ---


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "project"
    write_environments(folder)
    return folder


@pytest.fixture(scope="module")
def environment_run(inputs, project, slurm_ppo, tmp_path_factory) -> Path:
    """An undisturbed run of light tasks whose prompts an environment made."""
    run_dir = tmp_path_factory.mktemp("environment") / "run"
    name = next(project.glob("tasks_*.py")).stem
    done = slurm_ppo("run", *words(inputs, run_dir, *of_sums(name)), cwd=project)
    assert done.returncode == 0, done.stderr
    return run_dir


def test_a_run_of_an_environment_scores_with_it_and_keeps_held_out_tasks_apart(environment_run):
    prompts, heldout = prompts_of(environment_run), prompts_of(environment_run, "heldout")
    assert sorted(prompts["environment_task"].to_pylist()) == sorted(f"sums/{i}" for i in range(24))
    assert heldout.num_rows == 6
    assert not set(prompts["prompt_id"].to_pylist()) & set(heldout["prompt_id"].to_pylist())
    rows = [json.loads(line) for line in (environment_run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["reward/environment/mean"] > 0 and row["evaluate/reward"] > 0 for row in rows[1:])


def test_killed_in_prepare_it_is_made_again_the_same(
    environment_run, inputs, project, slurm_ppo, environment, tmp_path
):
    name, run_dir = next(project.glob("tasks_*.py")).stem, tmp_path / "run"
    env = hooked(environment, tmp_path, "before-link:data/prompts.json")
    killed = slurm_ppo(
        "run", *words(inputs, run_dir, *of_sums(name), "scheduler.max_attempts=1"), cwd=project, env=env
    )
    assert list(tmp_path.glob("killed-*")), killed.stderr
    assert killed.returncode != 0
    resumed = slurm_ppo("resume", run_dir, cwd=project)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_end(run_dir, environment_run)
    assert prompts_of(run_dir).equals(prompts_of(environment_run))


def test_a_flipped_bit_in_what_scores_need_is_found_and_prepare_makes_the_same_again(
    environment_run, project, slurm_ppo, tmp_path
):
    run_dir = Path(shutil.copytree(environment_run, tmp_path / "run", symlinks=True))
    (file,) = run_dir.glob("data/prompts.1-*.arrow")
    content = bytearray(file.read_bytes())
    content[content.index(b'"metadata": ') + 20] ^= 1
    file.write_bytes(content)
    done = slurm_ppo("resume", run_dir, "--from", "rollout@2", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "prepare will be computed again: prepare is corrupt" in done.stdout + done.stderr
    assert_same_end(run_dir, environment_run)
    assert prompts_of(run_dir).equals(prompts_of(environment_run))


def test_a_fork_keeps_the_prompts(environment_run, project, slurm_ppo, tmp_path):
    done = slurm_ppo("fork", f"{environment_run}@1", tmp_path / "fork", "iterations=2", cwd=project)
    assert done.returncode == 0, done.stderr
    done = slurm_ppo("resume", tmp_path / "fork", cwd=project)
    assert done.returncode == 0, done.stderr
    assert prompts_of(tmp_path / "fork").equals(prompts_of(environment_run))


def test_prompts_are_the_same_whatever_strings_hash_to(inputs, project, environment, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    name, found = next(project.glob("tasks_*.py")).stem, []
    for seed in ("1", "2"):
        given = words(inputs, tmp_path / seed, *of_sums(name, "Sums"), "data.max_dropped=1")
        run = create_run(configure(given))
        arguments = stage_arguments(run, "prepare")
        done = python_m_stages(arguments, environment | {"PYTHONHASHSEED": seed}, project)
        assert done.code == 0, done.log
        found.append(prompts_of(tmp_path / seed)["prompt_text"].to_pylist())
    assert found[0] == found[1]
