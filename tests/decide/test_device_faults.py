"""Errors of GPUs, drivers and NCCL: each is known, means one thing, and is tried again where that helps."""

import re

import pytest

from pipeline.decide.budgets import budget_in_words, halved, next_halvings
from pipeline.decide.device_faults import FAULTS, DeviceFault, Helps, diagnose
from pipeline.decide.escalating import escalate
from pipeline.decide.judging import judge_process
from pipeline.decide.reconcile import is_hopeless
from pipeline.run.endings import Evidence
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.tasks import Stage, Task
from pipeline.workers.claims import Budget
from tests.support import documented
from tests.support.composed import composed_of
from tests.support.fault_texts import PLAIN, TEXTS

ROLLOUT, UPDATE = Task(1, Stage.ROLLOUT), Task(1, Stage.UPDATE)
WATCHDOG = next(text for text, fault in TEXTS if fault is DeviceFault.WATCHDOG)


@pytest.mark.parametrize(("text", "fault"), TEXTS, ids=[f"{f}-{i}" for i, (_, f) in enumerate(TEXTS)])
def test_what_users_see_is_known(text, fault):
    found = diagnose(text)
    assert found is not None
    assert found.row.fault is fault
    said = found.in_words(Stage.ROLLOUT)
    assert "\n" not in said
    assert "STAGE" not in said
    assert said.startswith(f"{found.row.meaning} (")


def test_every_row_has_a_text_that_users_see():
    assert {fault for _, fault in TEXTS} == {row.fault for row in FAULTS} == set(DeviceFault)
    assert len({row.fault for row in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("text", PLAIN)
def test_other_errors_are_none_of_a_gpu(text):
    assert diagnose(text) is None


def failed(kind: FailureKind, node: str = "n1") -> Failure:
    return Failure(ROLLOUT, 1, kind, "why", node=node)


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row.fault)
def test_another_try_is_made_where_it_can_help(row):
    text = next(text for text, fault in TEXTS if fault is row.fault)
    one = failed(diagnose(text).kind(Stage.ROLLOUT))
    assert is_hopeless([one], 3) is (row.helps is Helps.NOTHING)
    assert is_hopeless([one] * 3, 3)
    assert escalate([one], [one]).exclude == (("n1",) if row.helps is Helps.ELSEWHERE else ())
    again = next_halvings([Budget(0, one.kind)])
    assert again == (row.helps is Helps.SMALLER)


def test_an_update_has_no_smaller_batch():
    found = diagnose("CUDA error: out of memory")
    assert found.kind(Stage.UPDATE) is FailureKind.ERROR
    assert "update.tokens_per_micro_batch" in found.in_words(Stage.UPDATE)
    for stage in (Stage.PREPARE, Stage.ROLLOUT, Stage.SCORE, Stage.REWARD, Stage.EVALUATE):
        assert found.kind(stage) is FailureKind.DEVICE_MEMORY


KEY = re.compile(r"\b(?:scheduler|rollout|reward|update)(?:\.[a-z_]+)+")


def test_the_keys_that_are_named_are_keys(inputs, tmp_path):
    made = [
        composed_of(inputs, tmp_path / "run", *more) for more in (("scheduler=slurm",), ("scheduler=local",))
    ]
    said = [diagnose(text).in_words(stage) for text, _ in TEXTS for stage in (Stage.ROLLOUT, Stage.SCORE)]
    named = {key for line in said for key in KEY.findall(line.partition("); ")[2])}
    assert len(named) > 10
    assert [key for key in named if not any(has_key(config, key) for config in made)] == []


def has_key(config: object, key: str) -> bool:
    for name in key.split("."):
        if not hasattr(config, name):
            return False
        config = getattr(config, name)
    return True


def test_the_budget_is_halved_once_more_than_of_what_ran_out():
    assert next_halvings([]) == 0
    assert next_halvings([Budget(0, None), Budget(0, FailureKind.PREEMPTED)]) == 0
    twice_at_once = [Budget(0, FailureKind.DEVICE_MEMORY), Budget(0, FailureKind.DEVICE_MEMORY)]
    assert next_halvings(twice_at_once) == 1, "two workers at one task"
    assert next_halvings([*twice_at_once, Budget(1, FailureKind.KILLED)]) == 1
    assert next_halvings([*twice_at_once, Budget(1, FailureKind.DEVICE_MEMORY)]) == 2
    assert next_halvings([Budget(2, None)]) == 2, "of a commit that was taken back"


def test_what_is_halved(inputs, tmp_path):
    words = (
        "rollout.engine=vllm",
        "rollout.vllm.max_model_len=48",
        "rollout.vllm.max_num_batched_tokens=60",
        "reward.tokens_per_batch=3",
        "reward.vllm.max_num_seqs=2",
        "reward.vllm.max_num_batched_tokens=64",
    )
    given = composed_of(inputs, tmp_path / "run", *words)
    less = halved(given, 2)
    assert less.rollout.tokens_per_batch == given.rollout.tokens_per_batch // 4
    assert less.rollout.vllm.max_num_seqs == given.rollout.vllm.max_num_seqs // 4
    assert less.rollout.vllm.max_num_batched_tokens == 60, "a step holds a token of each of 64 sequences"
    assert (less.reward.tokens_per_batch, less.reward.vllm.max_num_seqs) == (1, 1)
    assert less.reward.vllm.max_num_batched_tokens == 64, "where the longest sequence is not known"
    assert halved(given, 0) is given
    said = budget_in_words(given, Stage.ROLLOUT, 1)
    assert said == "half of the batch budget (rollout.vllm.max_num_seqs=128 instead of 256)"
    assert "1/4 of the batch budget (reward.tokens_per_batch=1 instead of 3)" in budget_in_words(
        given, Stage.REWARD, 2
    )


def test_a_process_that_nccl_ended_is_judged_by_its_log():
    log = f"step 3\n{WATCHDOG}\nFatal Python error: Aborted"
    kind, message, evidence = judge_process(UPDATE, None, -6, "rank 1: killed by signal 6", 2, log)
    assert (kind, evidence) == (FailureKind.ERROR, Evidence.LOG)
    assert "a rank waited in vain for another" in message
    assert "rank 1: killed by signal 6" in message
    assert judge_process(UPDATE, None, -9, "", 1, log).evidence is Evidence.EXIT_CODE, "killed from outside"


def test_the_page_on_failures_has_a_table_for_each_kind_of_retry():
    page = (documented.DOCS / "howto/failures.md").read_text()
    tables = dict(re.findall(r"^### (.*?)$(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    for row in FAULTS:
        assert f"| {row.meaning} | {row.change} |" in tables[row.helps.capitalize()]
