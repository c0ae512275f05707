"""Rules as a user meets them: validate finds what is wrong; else the run's first task, or its reward task."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli.app import main
from pipeline.config.environment import EnvironmentComponentConfig, EnvironmentConfig
from pipeline.config.reward import RuleConfig
from pipeline.config.schema import Config
from pipeline.plugins import sandbox
from pipeline.plugins.trial import SampleRow, check_rules, first_look, open_rules
from pipeline.run.commits import read_record
from pipeline.run.directory import Run
from pipeline.run.tasks import Stage, Task
from tests.support import tiny
from tests.support.composed import composed_of
from tests.support.processes import Done, make_run, stage
from tests.support.user_rules import module


@pytest.fixture
def validate(inputs, tmp_path, project, slurm_ppo) -> Callable[..., Done]:
    """``slurm-ppo validate`` of a run with one rule, in the user's folder."""

    def call(function: str, *more: str) -> Done:
        words = [word for word in tiny.overrides(inputs, tmp_path / "run") if not word.startswith("reward")]
        words += ["reward=rule", f"reward.components.rule.function={function}", *more]
        done = slurm_ppo("validate", *words, cwd=project, timeout=60)
        return Done(done.returncode, done.stdout + done.stderr)

    return call


def test_validate_tries_a_rule_and_says_so(validate, project):
    done = validate(f"{module(project)}:length")
    assert done.code == 0, done.log
    assert f"reward rule: rule {module(project)}:length, weight 1\n" in done.log


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("missing", (), "has no 'missing'"),
        ("not_a_function", (), "is not a function"),
        ("scaled", (), "cannot be called with answer, prompts, responses: missing a required argument: 'fac"),
        (
            "picky",
            (),
            "argument 'answer'; have it take **columns too, or name the columns to keep in data.colu",
        ),
        ("turns", (), "missing a required argument: 'response_messages'"),
        (
            "length",
            ("reward.components.rule.arguments.answer=3",),
            "answer: both a column of the prompts and",
        ),
        ("length", ("reward.components.rule.arguments.prompts=3",), "slurm-ppo itself passes"),
        ("length", ("reward.components.rule.workers=0",), "workers: Input should be greater than 0 (got 0)"),
        ("length", ("reward.components.rule.worker=1",), "unknown key 'worker'"),
        (
            "length",
            ("reward.components.rule.kind=rulle",),
            "no such kind; legal: model, rule, remote (did you",
        ),
        (
            "hangs",
            ("reward.components.rule.timeout_score=0.0", "reward.components.rule.rows_per_call=prompt"),
            "all responses of a call would get it",
        ),
    ],
)
def test_validate_refuses_a_rule_that_cannot_be_called(validate, project, name, more, why):
    done = validate(f"{module(project)}:{name}", *more)
    assert done.code == 2, done.log
    assert why in done.log
    assert "Traceback" not in done.log
    assert done.log.count("error: ") == 1


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("no_such_module:f", "no module 'no_such_module'"),
        ("blocks_at_import:f", "its import took longer than 0.5 s, at "),
        ("exact_match", "the prompt file has no column 'ground_truth'; it has: answer"),
    ],
)
def test_validate_finds_a_rule_that_cannot_work(validate, function, why):
    limit = "reward.components.rule.import_limit=" + ("0.5" if "blocks" in function else "60.0")
    done = validate(function, limit)
    assert done.code == 2, done.log
    assert why in done.log


def test_validate_says_which_import_it_waits_for(inputs, tmp_path, project, monkeypatch, capsys):
    """After 3 seconds, and here after a third of one."""
    monkeypatch.setattr(sandbox, "_QUIET_SECONDS", 0.3)
    monkeypatch.chdir(project)
    key = "reward.components.rule"
    words = [word for word in tiny.overrides(inputs, tmp_path / "run") if not word.startswith("reward")]
    words += ["reward=rule", f"{key}.function=blocks_at_import:f", f"{key}.import_limit=1"]
    monkeypatch.setattr(sys, "argv", ["slurm-ppo", "validate", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    first, *_, last = capsys.readouterr().err.splitlines()  # other imports may take a third of a second too
    waits = f"waiting for the import of {key}.function=blocks_at_import:f; it is given up after 1 s"
    assert (ended.value.code, first) == (2, waits)
    assert "its import took longer than 1 s, at " in last


def test_a_rule_that_needs_what_only_its_jobs_have_can_go_without_a_trial(validate, project):
    (project / "far_rules.py").write_text(
        "def served(*, responses, **columns):\n    raise ConnectionError('no GPU here')\n"
    )
    (project / "farther_rules.py").write_text("import cluster_only\n\ndef f(*, responses, **columns): ...\n")
    tried = validate("far_rules:served")
    assert tried.code == 2, tried.log
    assert "no GPU here" in tried.log
    assert "if it needs what only its jobs have, set reward.components.rule.trial=false" in tried.log
    for function in ("far_rules:served", "farther_rules:f"):
        untried = validate(function, "reward.components.rule.trial=false")
        assert untried.code == 0, untried.log
    wrong = validate("far_rules:missing", "reward.components.rule.trial=false")
    assert wrong.code == 2, wrong.log


def test_validate_takes_a_ready_rule_with_its_options_and_has_a_first_look_at_what_it_gives(validate):
    done = validate("exact_match", "reward.components.rule.arguments.column=answer")
    assert done.code == 0, done.log
    look = "an empty response gets 0; the text of column answer as response gets 1\n"
    assert f"reward rule: a first look at 20 prompts, without a model: {look}" in done.log


@pytest.fixture
def config(inputs, tmp_path) -> Config:
    return composed_of(inputs, tmp_path / "run")


@pytest.fixture
def look(config, project) -> Callable[..., list[str]]:
    """The first look at a rule that a user has written into a file."""

    def at(
        text: str, *columns: dict, environment: EnvironmentConfig | None = None, **more: object
    ) -> list[str]:
        name = f"rule_{len(list(project.iterdir()))}"
        (project / f"{name}.py").write_text(f"import time\ndef f(*, responses, **columns):\n    {text}\n")
        rule = RuleConfig(function=f"{name}:f", **more)
        given = replace(config, reward=replace(config.reward, components={"mine": rule}))
        given = replace(given, data=replace(given.data, environment=environment))
        samples = [SampleRow("data.prompts=p", f"p{i}", "say", one) for i, one in enumerate(columns)]
        with open_rules(given) as rules:
            assert list(check_rules(given, rules, samples[:1])) == []
            return list(first_look(given, rules, samples))

    return at


def test_a_first_look_says_the_mean_and_the_range_of_each_text(look):
    by_length = "return [float(len(r)) for r in responses]"
    line = "reward mine: a first look at 2 prompts, without a model: an empty response gets 0"
    assert look(by_length, {"other": "x"}, {"other": "yy"}) == [line]
    answers = "the text of column solution as response gets 2 (1 to 3)"
    assert look(by_length, {"solution": "x"}, {"solution": ["yyy", "z"]}) == [f"{line}; {answers}"]
    assert look(by_length, {"solution": "x"}, trial=False) == []


def test_a_first_look_says_for_which_texts_a_rule_abstains(look):
    (line,) = look("return [None] * len(responses)", {"answer": "x"})
    assert line.endswith(
        "at 1 prompt, without a model: an empty response gets no score (None); the text of column answer as "
        "response gets no score (None)"
    )
    (line,) = look("return [None if r == 'x' else 2 for r in responses]", {"answer": "x"}, {"answer": "y"})
    assert line.endswith("the text of column answer as response gets 2, and 1 times no score (None)")


@pytest.mark.parametrize(("arguments", "warnings"), [({}, 1), ({"pattern": "= (.*)"}, 0)])
def test_a_reward_that_even_answers_do_not_get_is_warned_of_where_they_are_responses(
    look, arguments, warnings
):
    source = EnvironmentComponentConfig(source="reasoning_gym", arguments=arguments)
    made, answers = EnvironmentConfig(components={"sums": source}), [{"answer": "5"}] * 4
    found = look("return [0.0] * len(responses)", *answers, environment=made)
    assert sum("the reward is never above 0, not even for the answers" in line for line in found) == warnings


def test_a_first_look_at_a_slow_rule_ends_and_at_one_that_fails_says_where(look, monkeypatch):
    monkeypatch.setattr("pipeline.plugins.trial._SECONDS", 0.5)
    (slow,) = look("time.sleep(0.15); return [1.0]", *[{}] * 20)
    assert re.fullmatch("reward mine: a first look at [1-3] prompts?, .* gets 1; no more in 0.5 s", slow)
    late = {"time_limit": 0.1, "timeout_score": -3.0}
    (line,) = look("time.sleep(len(responses[0])); return [0.0]", {"answer": "x"}, **late)
    assert line.endswith("an empty response gets 0; the text of column answer as response gets -3")
    warning, line = look("return [1 / (1 - len(responses[0]))]", {"answer": "xx"}, {"answer": "x"})
    assert ":f: raised ZeroDivisionError: division by zero at " in warning
    assert warning.endswith(" for the text of column answer as response to prompt_id p1")
    assert line.endswith(
        "at 2 prompts, without a model: an empty response gets 1; the text of column answer "
        "as response gets -1"
    )


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [
        ("no_such_module:step", "no module 'no_such_module'"),
        ("{module}:length", "cannot be called with 1 arguments: too many positional arguments"),
        ("{module}:missing", "has no 'missing'"),
    ],
)
def test_a_scheduler_of_conversations_without_its_plug_in_is_an_error_before_the_run(
    validate, project, scheduler, why
):
    name = scheduler.format(module=module(project))
    done = validate(f"{module(project)}:count", f"+rollout.multi_turn={{scheduler: '{name}'}}")
    assert done.code == 2, done.log
    assert f"rollout.multi_turn.scheduler={name}: " in done.log
    assert why in done.log


def test_an_engine_of_the_users_own_is_imported_too_and_may_lack_what_login_nodes_lack(validate, project):
    rule = f"{module(project)}:length"
    done = validate(rule, "rollout.engine=no_such_module:make")
    assert done.code == 2
    assert "rollout.engine=no_such_module:make: no module 'no_such_module'" in done.log
    done = validate(rule, "rollout.engine=lacks_at_import:f")
    assert done.code == 0, done.log
    assert "warning: rollout.engine=lacks_at_import:f: no module 'no_such_library'" in done.log


def scored(inputs: Path, tmp_path: Path, project: Path, name: str) -> tuple[Run, Done]:
    given = f"+reward.components.mine={{kind: rule, function: '{module(project)}:{name}'}}"
    run = make_run(inputs, tmp_path / "run", given)
    for task in (("prepare",), ("rollout", 1, 0)):
        done = stage(run, *task, cwd=project)
        assert done.code == 0, done.log
    return run, stage(run, "reward", 1, 0, cwd=project)


def test_a_rule_with_a_wrong_answer_ends_in_exit_code_2(inputs, tmp_path, project):
    run, done = scored(inputs, tmp_path, project, "text")
    assert done.code == 2, done.log
    assert " instead of a finite number for prompt_id " in done.log
    assert "Traceback" not in done.log
    assert read_record(run.paths, Task(1, Stage.REWARD, 0)) is None


def test_an_exception_of_the_rule_itself_leaves_its_traceback_and_one_that_vanished_is_the_users(
    inputs, tmp_path, project
):
    run, done = scored(inputs, tmp_path, project, "raises")
    assert done.code == 1, done.log
    assert "my own mistake" in done.log
    assert "in raises" in done.log
    next(project.glob("*_rules.py")).unlink()
    done = stage(run, "reward", 1, 0, cwd=project)
    assert done.code == 2
    assert "reward.components.mine.function=" in done.log
    assert "no module" in done.log


def test_prepare_stops_a_run_whose_rule_cannot_work(inputs, tmp_path, project):
    given = "+reward.components.mine={kind: rule, function: dies_at_import:f}"
    done = stage(make_run(inputs, tmp_path / "run", given), "prepare", cwd=project)
    assert done.code == 2
    assert "reward.components.mine.function=dies_at_import:f: its import ended the process" in done.log
