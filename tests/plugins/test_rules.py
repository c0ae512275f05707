"""What a rule is given, and what becomes of one that fails: one row is to blame, by name."""

import sys
import time
from collections.abc import Callable

import pyarrow as pa
import pytest
from pebble.pool import process
from pebble.pool.process import PoolManager

from pipeline.config.reward import OnError, RowsPerCall, RuleConfig
from pipeline.plugins.load import PluginError
from stages.context import UserError
from stages.rewards.rules import RuleFailed, rule_scores
from tests.support.rollouts import table
from tests.support.user_rules import module


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


def test_a_rule_may_abstain_and_its_abstentions_are_counted(project):
    rule = RuleConfig(function=f"{module(project)}:none", on_error=OnError.SCORE, error_score=-1.0)
    found, counts = rule_scores("mine", rule, table(["xyz", "", "ü", ""]))
    assert found == [None, 0.0, None, 0.0]
    assert counts == {"abstained/mine": 2.0, "failed/mine": 0.0}


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


@pytest.mark.parametrize(
    ("function", "arguments", "why"),
    [
        ("numeric_match", {"tolerence": 0.1}, "no argument 'tolerence'; it has: column, pattern, tolerance"),
        ("length_penalty", {"limit": 9, "buffer": 1, "units": "words"}, "no argument 'units'; it has: limit"),
        ("checked", {}, "its attribute check is True, no function of rows"),
        ("late", {}, "its attribute timeout_score is 'zero', no finite number"),
    ],
)
def test_what_a_rule_would_overlook_in_silence_is_refused(project, function, arguments, why):
    name = function if "_" in function else f"{module(project)}:{function}"
    with pytest.raises(UserError, match=f"function={name}: .*{why}"):
        rule_scores("mine", RuleConfig(function=name, arguments=arguments), table(ground_truth=["1"] * 4))


def test_a_rule_that_returns_something_else_than_a_list_stays_an_error(project):
    config = RuleConfig(function=f"{module(project)}:nothing", on_error=OnError.SCORE, max_failed=1.0)
    with pytest.raises(UserError, match="returned NoneType instead of a list of numbers"):
        rule_scores("mine", config, table())


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
