"""Rules as a user meets them: validate finds what is wrong; in a run one row is to blame, by name."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pebble.pool import process
from pebble.pool.process import PoolManager

from pipeline.config.reward import OnError, RowsPerCall, RuleConfig
from pipeline.plugins.load import PluginError
from pipeline.run.commits import read_record
from pipeline.run.directory import Run
from pipeline.run.tasks import Stage, Task
from stages.context import UserError
from stages.engines import release_all
from stages.rewards import ready
from stages.rewards.rules import RuleFailed, rule_scores
from tests.support import tiny
from tests.support.processes import Done, make_run, stage
from tests.support.rollouts import table
from tests.support.waiting import eventually

# what a user writes: for an empty response all is well, so that only a run finds it

RULES = '''
import ctypes
import os
import re
import sys
import time


def length(*, prompts, responses, **columns):
    print("rules may print")
    return [len(r) / 10 for r in responses]

def answer(*, prompts, responses, answer, **columns):
    assert len(prompts) == len(responses) == len(answer)
    return (a + 0.5 for a in answer)

def scaled(*, responses, factor, **columns):
    return [factor * len(r) for r in responses]

def ranks(*, responses, **columns):
    return [sorted(responses).index(r) for r in responses]

def count(*, responses, **columns):
    return [len(responses)] * len(responses)

def turns(*, response_messages, **columns):
    return [len(messages) for messages in response_messages]

def process(*, responses, **columns):
    time.sleep(0.05)
    return [os.getpid()] * len(responses)

def unordered(*, responses, **columns):
    """Sums in the order of a set of words, which differs between interpreters."""
    return [sum(hash(w) % 1000 / 7.0 for w in set(r)) for r in responses]

def has_torch(*, responses, **columns):
    return ["torch" in sys.modules] * len(responses)

def too_few(*, responses, **columns):
    return [0.0 for r in responses if not r]

def text(*, responses, **columns):
    return [r or 0.0 for r in responses]

def nothing(*, responses, **columns):
    return None if responses[0] else [0.0]

def number(*, responses, **columns):
    return 1.0 if responses[0] else [0.0]

def letters(*, responses, **columns):
    return "1" if responses[0] else [0.0]

def none(*, responses, **columns):
    return [None if r else 0.0 for r in responses]

def nan(*, responses, **columns):
    return [float("nan") if len(r) == 1 else 0.0 for r in responses]

def large(*, responses, **columns):
    return [1e39 if len(r) == 1 else 3.4e38 for r in responses]

def raises(*, responses, **columns):
    if any(responses):
        raise KeyError("my own mistake")
    return [0.0]

def leaves(*, responses, **columns):
    if any(responses):
        sys.exit(4)
    return [0.0]

def ends(*, responses, **columns):
    if any(responses):
        os._exit(3)
    return [0.0]

def crashes(*, responses, **columns):
    if any(responses):
        ctypes.string_at(0)
    return [0.0]

def hangs(*, responses, **columns):
    if responses[0] == "a longer answer":
        time.sleep(1000)
    return [1.0]

def fragile(*, responses, **columns):
    if responses[0] == "raise":
        raise ValueError("hard")
    if responses[0] == "leave":
        sys.exit(1)
    if responses[0] == "end":
        os._exit(3)
    return [float("nan") if responses[0] == "nan" else 1.0]

def backtracks(*, responses, **columns):
    return [bool(re.fullmatch("(a|a)*b", "a" * 60)) if responses[0] else 0.0]

not_a_function = 3
'''

BROKEN = {
    "blocks": "import time; time.sleep(1000)",
    "dies": "import os; os._exit(7)",
    "leaves": "import sys; sys.exit(7)",
    "lacks": "import no_such_library",
    "raises": "1 / 0",
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The user's own folder. Every test has a module name of its own."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / f"{tmp_path.name}_rules.py").write_text(RULES)
    for name, code in BROKEN.items():
        (folder / f"{name}_at_import.py").write_text(f"{code}\n\ndef f(**columns):\n    return [0.0]\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def module(project: Path) -> str:
    return next(project.glob("*_rules.py")).stem


@pytest.fixture
def scores(project) -> Callable[..., list[float]]:
    """Scores of a table by a function of the module."""

    def score(
        name: str, rows: pa.Table | None = None, rows_per_call: str = "response", **settings: object
    ) -> list[float]:
        calls = RowsPerCall(rows_per_call)
        config = RuleConfig(function=f"{module(project)}:{name}", rows_per_call=calls, **settings)
        return rule_scores("mine", config, table() if rows is None else rows)[0]

    return score


# what a rule is given


def test_a_rule_gets_texts_columns_and_arguments(scores):
    assert scores("answer", table(answer=[1, 2, 3, 4])) == [1.5, 2.5, 3.5, 4.5]
    assert scores("scaled", arguments={"factor": 2}) == [6.0, 30.0, 2.0, 6.0]


def test_a_rule_of_conversations_gets_their_messages(scores):
    messages = ['[{"role": "assistant", "content": "a"}]', "[]", "[]", "[]"]
    assert scores("turns", table(messages=messages)) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rows_per_call", "seen"), [("response", [1.0] * 4), ("prompt", [2.0] * 4), ("shard", [4.0] * 4)]
)
def test_a_call_gets_a_response_the_responses_of_a_prompt_or_all(scores, rows_per_call, seen):
    assert scores("count", rows_per_call=rows_per_call) == seen


def test_a_rule_may_compare_the_responses_of_a_prompt(scores):
    assert scores("ranks", rows_per_call="prompt") == [1.0, 0.0, 1.0, 0.0]


def test_scores_do_not_depend_on_the_number_of_workers(scores):
    rows = table([f"{i} words in {i * i} orders" for i in range(20)])
    assert scores("unordered", rows, workers=3) == scores("unordered", rows, workers=1)
    assert len(set(scores("process", rows, workers=3))) > 1


def test_a_worker_starts_without_torch(scores):
    """In a process that has it: a start takes a fifth of a second instead of several."""
    import torch

    assert torch.__name__ in sys.modules
    assert scores("has_torch") == [0.0] * 4


def test_a_shard_without_rows_has_no_scores(scores):
    assert scores("length", table([])) == []


# what may be wrong with its answer


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("too_few", "returned 0 scores instead of 1 for prompt_id p0, sample 0"),
        ("text", "returned 'xyz' instead of a finite number for prompt_id p0, sample 0"),
        ("nothing", "returned NoneType instead of a list of numbers for prompt_id p0, sample 0"),
        ("number", "returned float instead of a list of numbers for prompt_id p0, sample 0"),
        ("letters", "returned str instead of a list of numbers for prompt_id p0, sample 0"),
        ("none", "returned None instead of a finite number for prompt_id p0, sample 0"),
        ("nan", "returned nan instead of a finite number for prompt_id p1, sample 0"),
        ("large", "returned 1e+39 instead of a number up to 3.403e+38 for prompt_id p1, sample 0"),
    ],
)
def test_an_answer_that_is_not_one_number_per_row_names_rule_and_row(scores, name, why):
    with pytest.raises(UserError) as error:
        scores(name, workers=2)
    assert str(error.value).startswith("reward component 'mine' (")
    assert str(error.value).endswith(f":{name}) {why}")


def test_of_a_call_with_several_rows_the_one_is_named(scores):
    with pytest.raises(UserError, match="returned nan instead of a finite number for prompt_id p1, sample 0"):
        scores("nan", rows_per_call="shard")
    with pytest.raises(
        UserError, match="0 scores instead of 4 for prompt_id p0, sample 0 to prompt_id p1, sa"
    ):
        scores("too_few", rows_per_call="shard")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "raises",
            "raised KeyError: 'my own mistake' at .* for prompt_id p0, sample 0, whose response begins 'xyz'",
        ),
        ("leaves", "raised SystemExit: 4 at "),
        ("ends", r"ended its process \(exit code 3\) for prompt_id p0, sample 0"),
        ("crashes", r"ended its process \(signal SIGSEGV\) for prompt_id p0, sample 0"),
    ],
)
def test_a_rule_that_breaks_down_takes_only_its_own_process_along(scores, name, why):
    with pytest.raises(RuleFailed, match=rf"reward component 'mine' \(.*_rules:{name}\) {why}"):
        scores(name)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_rule_that_ends_its_process_is_named_though_this_one_is_slow_to_hear_of_its_calls(
    scores, workers, monkeypatch
):
    def listens_now_and_then(manager: PoolManager) -> None:
        while manager.context.alive:
            manager.process_next_message(0.01)
            time.sleep(0.7)  # the end of a process is seen within 0.1 s

    monkeypatch.setattr(process, "message_manager_loop", listens_now_and_then)
    with pytest.raises(RuleFailed, match=r"ended its process \(exit code 3\) for prompt_id p0, sample 0"):
        scores("ends", workers=workers)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_rule_that_hangs_is_stopped_and_the_row_named(scores, workers):
    with pytest.raises(
        RuleFailed, match=r"gave no answer within 0\.2 s \(time_limit\) for prompt_id p0, sample 1$"
    ):
        scores("hangs", time_limit=0.2, workers=workers)


def test_a_regular_expression_without_end_is_stopped_though_it_never_lets_go_of_the_interpreter(scores):
    with pytest.raises(RuleFailed, match=r"gave no answer within 0\.2 s"):
        scores("backtracks", time_limit=0.2)


def test_a_response_at_which_the_rule_fails_may_have_a_score_and_is_counted(project, caplog):
    texts = ["raise", "fine", "fine", "fine", "leave", "nan", "fine", "fine", "end", "fine"]
    config = RuleConfig(
        function=f"{module(project)}:fragile", on_error=OnError.SCORE, error_score=-2.0, max_failed=0.4
    )
    found = rule_scores("mine", config, table(texts))
    assert found == ([-2.0, 1.0, 1.0, 1.0, -2.0, -2.0, 1.0, 1.0, -2.0, 1.0], {"failed/mine": 4.0})
    assert "failed at 4 of 10 responses, which get error_score=-2; the first: it raised Val" in caplog.text


def test_a_rule_that_fails_at_too_many_responses_ends_the_task_and_the_first_is_named(project):
    function = f"{module(project)}:fragile"
    config = RuleConfig(function=function, on_error=OnError.SCORE, max_failed=0.25)
    with pytest.raises(
        RuleFailed,
        match=rf"reward component 'mine' \({function}\) failed at 2 of 4 responses, a larger share than "
        r"max_failed=0\.25; the first: it raised ValueError: hard at .* for prompt_id p0, sample 1, whose "
        "response begins 'raise'",
    ):
        rule_scores("mine", config, table(["fine", "raise", "fine", "raise"]))
    assert rule_scores("mine", config, table(["fine", "raise", "fine", "fine"]))[1] == {"failed/mine": 1.0}


def test_a_rule_that_returns_something_else_than_a_list_stays_an_error(project):
    config = RuleConfig(function=f"{module(project)}:nothing", on_error=OnError.SCORE, max_failed=1.0)
    with pytest.raises(UserError, match="returned NoneType instead of a list of numbers"):
        rule_scores("mine", config, table())


# processes that stay


@pytest.fixture
def staying() -> Iterator[None]:
    yield
    release_all()


def test_a_worker_keeps_the_processes_of_a_rule_from_task_to_task(project, staying):
    """The import, of a second here, is paid once."""
    (project / "slow_import.py").write_text(
        "import os, time\ntime.sleep(1)\n\ndef pid(*, responses, **columns):\n    return [os.getpid()]\n"
    )
    config = RuleConfig(function="slow_import:pid")
    first = rule_scores("mine", config, table(), stays=True)
    began = time.monotonic()
    assert rule_scores("mine", config, table(), stays=True) == first
    assert time.monotonic() - began < 0.5
    release_all()
    with pytest.raises(ProcessLookupError):
        os.kill(int(first[0][0]), 0)


def test_processes_that_stay_have_the_rule_as_it_is_now(project, staying):
    rule = project / "changing.py"
    config = RuleConfig(function="changing:f")
    for score in (1.0, 2.0):
        rule.write_text(f"def f(*, responses, **columns):\n    return [{score}]  # {'x' * int(score)}\n")
        assert rule_scores("mine", config, table(), stays=True)[0] == [score] * 4


def test_rules_of_two_components_keep_processes_side_by_side_and_one_may_be_late(project, staying):
    name = module(project)
    late = RuleConfig(function=f"{name}:hangs", time_limit=0.2, timeout_score=-3.0)
    for _ in range(2):
        assert rule_scores("late", late, table(), stays=True)[0] == [1.0, -3.0, 1.0, 1.0]
        assert rule_scores("mine", RuleConfig(function=f"{name}:length"), table(), stays=True)[0][0] == 0.3
    began = time.monotonic()
    release_all()
    assert time.monotonic() - began < 5


def test_processes_that_stay_end_with_a_worker_that_is_killed(project):
    code = (
        "import os, signal, sys\nfrom pipeline.config.reward import RuleConfig\n"
        "from tests.support.rollouts import table\nfrom stages.rewards.rules import rule_scores\n"
        "if __name__ == '__main__':\n"
        f"    config = RuleConfig(function='{module(project)}:process')\n"
        "    print(int(rule_scores('mine', config, table(), stays=True)[0][0]), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join([str(project), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout, done.stderr
    status = Path("/proc", done.stdout.strip(), "stat")
    assert eventually(lambda: not status.exists() or ") Z " in status.read_text())


def test_a_late_response_may_have_a_score_of_its_own(project):
    name = f"{module(project)}:hangs"
    config = RuleConfig(function=name, time_limit=0.2, timeout_score=-3.0)
    assert rule_scores("mine", config, table()) == ([1.0, -3.0, 1.0, 1.0], {"late/mine": 1.0})


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("blocks_at_import:f", r"its import took longer than 0\.3 s, at .*blocks_at_import.py:1"),
        ("dies_at_import:f", "its import ended the process"),
        ("leaves_at_import:f", "its import raised SystemExit: 7 at "),
        ("raises_at_import:f", "its import raised ZeroDivisionError: division by zero at "),
        ("lacks_at_import:f", "no module 'no_such_library'"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("ready:f", "no module 'ready'"),
        ("exact_matsch", r"no installed package has .*\(did you mean 'exact_match'\?\)"),
    ],
)
def test_a_rule_that_cannot_be_imported_is_one_error_and_never_a_hang(project, function, why):
    config = RuleConfig(function=function, import_limit=0.3 if "blocks" in function else 60.0, workers=2)
    with pytest.raises((PluginError, UserError), match=f"reward.components.mine.function={function}: {why}"):
        rule_scores("mine", config, table())


# validate, and the run


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


def test_validate_takes_a_ready_rule_with_its_options(validate):
    done = validate("exact_match", "reward.components.rule.arguments.column=answer")
    assert done.code == 0, done.log


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


def scored(models: Path, tmp_path: Path, project: Path, name: str) -> tuple[Run, Done]:
    given = f"+reward.components.mine={{kind: rule, function: '{module(project)}:{name}'}}"
    run = make_run(models, tmp_path / "run", given)
    for task in (("prepare",), ("rollout", 1, 0)):
        done = stage(run, *task, cwd=project)
        assert done.code == 0, done.log
    return run, stage(run, "reward", 1, 0, cwd=project)


def test_a_rule_with_a_wrong_answer_ends_in_exit_code_2(models, tmp_path, project):
    run, done = scored(models, tmp_path, project, "none")
    assert done.code == 2, done.log
    assert "returned None instead of a finite number for prompt_id " in done.log
    assert "Traceback" not in done.log
    assert read_record(run.paths, Task(1, Stage.REWARD, 0)) is None


def test_an_exception_of_the_rule_itself_leaves_its_traceback_and_one_that_vanished_is_the_users(
    models, tmp_path, project
):
    run, done = scored(models, tmp_path, project, "raises")
    assert done.code == 1, done.log
    assert "my own mistake" in done.log
    assert "in raises" in done.log
    next(project.glob("*_rules.py")).unlink()
    done = stage(run, "reward", 1, 0, cwd=project)
    assert done.code == 2
    assert "reward.components.mine.function=" in done.log
    assert "no module" in done.log


def test_prepare_stops_a_run_whose_rule_cannot_work(models, tmp_path, project):
    given = "+reward.components.mine={kind: rule, function: dies_at_import:f}"
    done = stage(make_run(models, tmp_path / "run", given), "prepare", cwd=project)
    assert done.code == 2
    assert "reward.components.mine.function=dies_at_import:f: its import ended the process" in done.log


# ready rules


def test_exact_match():
    given = {"responses": [" Paris", "paris", "It is <a>Paris</a>", "x"], "ground_truth": ["Paris"] * 4}
    assert ready.exact_match(**given) == [1.0, 0.0, 0.0, 0.0]
    assert ready.exact_match(**given, ignore_case=True) == [1.0, 1.0, 0.0, 0.0]
    assert ready.exact_match(**given, pattern="<a>(.*?)</a>") == [0.0, 0.0, 1.0, 0.0]
    assert ready.exact_match(responses=["b"], right=[["a", "b"]], column="right") == [1.0]


@pytest.mark.parametrize(
    ("response", "right", "score"),
    [
        ("so it is 42.", 42, 1.0),
        ("1,234.50 dollars", "#### 1234.5", 1.0),
        ("12345678901234567890", "12345678901234567891", 0.0),
        ("first 42, then 43", 42, 0.0),
        ("-3", 3, 0.0),
        ("from 5-3", 3, 1.0),
        ("2e3", 2000, 1.0),
        ("1e99999999999999999999", 1, 0.0),
        ("none", 1, 0.0),
        ("", 1, 0.0),
        ("one of 7", [6, 7], 1.0),
        # what is longer than any number that can be compared
        ("9e9999999", 5, 0.0),
        ("-" + "9" * 5000, 5, 0.0),
        # a number of several is one number
        ("3/2", "1/2", 0.0),
        ("2/4", "1/2", 1.0),
        ("1 1/2", "1/2", 0.0),
        ("it is 1 1/2", 1.5, 1.0),
        ("3/2", 2, 0.0),
        ("1/0", 0, 0.0),
        ("at 12:30", "11:30", 0.0),
        ("at 12:30", "12:30", 1.0),
        ("at 12:30", 30, 0.0),
        ("on 2024-01-05", 5, 0.0),
        ("version 1.2.3", 0.3, 0.0),
        ("2^10", 10, 0.0),
        ("1 000", "5 000", 0.0),
        ("1\u202f000", 1000, 1.0),
        ("1\u2019000.5", 1000.5, 1.0),
        ("in 2020 300 came", 300, 1.0),
        ("x=1,2,3", 3, 1.0),
        # signs, LaTeX
        ("\u22125", -5, 1.0),
        ("\u22125", 0, 0.0),
        ("3 - 5", 5, 1.0),
        ("3\u20135", 5, 1.0),
        (r"\frac{3}{2}", 1.5, 1.0),
        (r"\frac{3}{2}", 2, 0.0),
        (r"1{,}000 and 2\,000", 2000, 1.0),
    ],
)
def test_numeric_match(response, right, score):
    assert ready.numeric_match(responses=[response], ground_truth=[right]) == [score]


def test_numeric_match_with_a_tolerance_and_a_place():
    assert ready.numeric_match(responses=["0.33"], ground_truth=["0.3333"], tolerance=0.01) == [1.0]
    boxed = r"\\boxed\{(.*?)\}"
    assert ready.numeric_match(responses=[r"\boxed{4} or 5"], ground_truth=[4], pattern=boxed) == [1.0]
    for several in (r"\boxed{3 or 4}", r"\boxed{}", "4"):
        assert ready.numeric_match(responses=[several], ground_truth=[4], pattern=boxed) == [0.0]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be a number of at least 0"):
            ready.numeric_match(responses=["4"], ground_truth=[4], tolerance=wrong)
    with pytest.raises(ValueError, match="column 'ground_truth' holds no number: 'four'"):
        ready.numeric_match(responses=["4"], ground_truth=["four"])


def test_regex_match():
    responses = [" <think>a\nb</think> c", "no <think>a</think>"]
    assert ready.regex_match(responses=responses, pattern="<think>.*</think>.*") == [1.0, 0.0]
    assert ready.regex_match(responses=responses, pattern="<think>", anywhere=True) == [1.0, 1.0]


def test_length_penalty():
    responses = ["a" * n for n in (0, 6, 8, 10, 20)]
    assert ready.length_penalty(responses=responses, limit=10, buffer=4) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert ready.length_penalty(responses=["a b c"], limit=4, buffer=2, unit="words") == [-0.5]
    with pytest.raises(ValueError, match="'tokens' is not a valid Unit"):
        ready.length_penalty(responses=["a"], limit=4, buffer=2, unit="tokens")


def test_repetition_penalty():
    responses = ["one two three four", "la la la la la", "too short", ""]
    assert ready.repetition_penalty(responses=responses) == pytest.approx([0.0, -2 / 3, 0.0, 0.0])


@given(st.lists(st.text(), max_size=5), st.integers(1, 4))
def test_penalties_are_between_minus_1_and_0_for_any_text(responses, size):
    found = ready.repetition_penalty(responses=responses, size=size)
    found += ready.length_penalty(responses=responses, limit=size + 3, buffer=size)
    assert all(-1 <= score <= 0 for score in found)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_a_number_is_found_as_it_is_written(number):
    for text in (f"{number}", f"{number:,}", f"is {number}.", f"({number})"):
        assert ready.last_number(text).value == Fraction(number)
