"""What a small run shows: numbers, what the run would take, what to change, and its text."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checks.finding import Finding, Verdict
from pipeline.cli.try_text import as_object, before_lines, in_words, result_lines
from pipeline.config.scheduler import ResourcesConfig
from pipeline.config.schema import Config
from pipeline.data.tokens import Ends
from pipeline.metrics.samples import Sample
from pipeline.tryout.judgement import judge
from pipeline.tryout.outlook import SecondsRange, outlook
from pipeline.tryout.places import gpu_places
from pipeline.tryout.prompt_look import PromptLook, judge_likelihood, named_ends
from pipeline.tryout.result import Lengths, TriedStage, TryResult
from pipeline.tryout.small_run import prompts_to_try, small_config
from slurm.limits import NodeKind, Partition
from tests.support import ROOT, scripted

GOLDEN = ROOT / "tests/golden/try.txt"
CONFIG = scripted.imagined_run(
    iterations=100,
    data={"prompts": "/prompts", "prompts_per_iteration": 64},
    rollout={"num_shards": 4, "samples_per_prompt": 4, "max_new_tokens": 32, "tokens_per_batch": 480},
    model={"policy": "/policy", "context_length": 128},
    algorithm={"estimator": "grpo"},
    update={"minibatches": 1, "tokens_per_micro_batch": 256},
    reward={
        "components": {
            "right": {"kind": "rule", "function": "a:b"},
            "form": {"kind": "rule", "function": "a:c"},
        }
    },
).config


def response(prompt: int, index: int, reward: float, **more: object) -> Sample:
    components = {"right": reward, "form": float(index % 2)}
    facts = {"length": 8 + index, "finish_reason": "stop", "components": components} | more
    return Sample(1, f"p{prompt}", index, f"What is {prompt} + 1?", f"It is {index}.", reward, **facts)


def tried(samples: list[Sample] | None = None, config: Config = CONFIG, **more: object) -> TryResult:
    samples = samples or [response(p, i, float(p == i)) for p in range(4) for i in range(4)]
    stages = (
        TriedStage("prepare", 2.0, 0.0, 0.0, 0.0, 0.4, host="node1"),
        TriedStage("rollout", 13.0, 2.0, 10.0, 160.0, 1.2, host="node1"),
        TriedStage("reward", 0.5, 0.0, 0.0, 160.0, 0.3, host="node1"),
        TriedStage("update", 12.0, 1.0, 8.0, 160.0, 4.5, host="node1"),
    )
    parts = {"read": 0.5, "load": 1.0, "steps": 8.0, "save": 2.0}
    update = {f"seconds/update/{name}": seconds for name, seconds in parts.items()}
    lengths = {sample.prompt_id: 10 for sample in samples}
    given = {"stages": stages, "update": update | {"policy/computed_responses": 16.0}} | more
    return TryResult(config, 4, tuple(samples), lengths, **given)


# --- what the run would take ---


def test_an_iteration_is_what_grows_times_its_rows_and_what_is_done_once():
    """Four shards of 16 prompts, four times what was tried; two of them at once."""
    took = outlook(tried(), {"rollout": 2, "update": 1})
    rollout, reward, update = took.stages
    # 16 responses were two batches of 11 sequences; a shard's 64 are six.
    assert (rollout.tasks, rollout.at_once) == (4, 2)
    assert rollout.seconds == SecondsRange(2 * (10.0 * 6 / 2 + 1.0), 2 * (10.0 * 4 + 1.0) + 2.0)
    assert reward.seconds == SecondsRange(0.5 * 4, 0.5 * 4)  # a rule: each row takes its time
    # An update has all 64 prompts: 16 times what was tried. 312 tokens were two micro-batches, 4992 are 20.
    assert update.seconds == SecondsRange(8.5 * 20 / 2 + 2.0, 8.5 * 16 + 2.5 + 1.0)
    assert took.iteration == SecondsRange(62.0 + 2.0 + 87.0, 84.0 + 2.0 + 139.5)
    assert took.run == SecondsRange(2.0 + 100 * 151.0, 2.0 + 100 * 225.5)


@given(st.integers(1, 4), st.integers(1, 4))
def test_fewer_places_never_make_an_iteration_shorter(few, more):
    few, more = sorted((few, more))
    slow, fast = (outlook(tried(), {"rollout": n}).iteration for n in (few, more))
    assert slow.low >= fast.low
    assert slow.high >= fast.high


def test_an_update_without_a_gradient_shows_no_time():
    result = tried(update={"policy/computed_responses": 0.0})
    assert outlook(result, {}).iteration is None
    text = " ".join(result_lines(result, outlook(result, {}), "here", 80, is_full=False))
    assert "an iteration: not known; the run: not known" in text
    assert "No response had a gradient" in " ".join(text.split())


@pytest.mark.parametrize(
    ("gpus", "nodes", "places"), [(0, 1, None), (1, 1, 10), (2, 1, 4), (4, 1, 2), (4, 2, 1), (8, 1, None)]
)
def test_as_many_jobs_run_at_once_as_the_partition_has_gpus_for(gpus, nodes, places):
    kinds = (NodeKind(2, 64, 1000, {"gpu": 4}), NodeKind(2, 64, 1000, {"gpu": 1}), NodeKind(9, 64, 1000, {}))
    known = {"a": Partition("a", None, "UP", 13, True, None, None, kinds)}
    asked = ResourcesConfig(partition=("a",), gpus_per_node=str(gpus) if gpus else None, nodes=nodes)
    assert gpu_places(asked, known) == places


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(1.26, 1.26, "1.3 s"), (8.0, 12.0, "8.0 s to 12 s"), (60.0, 60.2, "1 min 0 s")],
)
def test_a_range_whose_ends_read_alike_is_one_time(low, high, words):
    assert in_words(SecondsRange(low, high)) == words


def test_where_rollouts_overlap_with_updates_an_iteration_takes_its_longest_stage_at_least():
    stale = replace(CONFIG, rollout=replace(CONFIG.rollout, staleness=1))
    apart, beside = (outlook(tried(config=config), {}).iteration for config in (CONFIG, stale))
    stages = outlook(tried(config=stale), {}).stages
    assert beside == SecondsRange(max(one.seconds.low for one in stages), apart.high)


def test_more_prompts_are_advised_only_where_an_iteration_has_more():
    flat = [response(p, i, float(p)) for p in range(4) for i in range(4)]
    few = replace(CONFIG, data=replace(CONFIG.data, prompts_per_iteration=4))
    (some,), (all_) = judge(tried(flat)), judge(tried(flat, few))
    assert "try --prompts 32 looks at more" in some.advice
    assert "--prompts" not in all_[0].advice


# --- the small run ---


def test_it_keeps_all_that_decides_what_is_computed(tmp_path):
    small = small_config(CONFIG, 8, tmp_path)
    assert (small.iterations, small.data.prompts_per_iteration, small.rollout.num_shards) == (1, 8, 1)
    same = ("model", "reward", "algorithm", "scheduler", "seed")
    assert all(getattr(small, name) == getattr(CONFIG, name) for name in same)
    kept = replace(small.update, minibatches=1, keep_last=3, keep_shards_last=20)
    assert kept == CONFIG.update


def test_it_has_prompts_for_32_responses_and_at_least_four():
    assert prompts_to_try(CONFIG, None) == 8
    assert prompts_to_try(CONFIG, 64) == 64
    many = replace(CONFIG, rollout=replace(CONFIG.rollout, samples_per_prompt=16))
    assert prompts_to_try(many, None) == 4


# --- what to change ---

Change = Callable[[], TryResult]


def all_of(**more: object) -> list[Sample]:
    return [response(p, i, float(i), **more) for p in range(4) for i in range(4)]


FINDINGS: dict[str, tuple[TryResult, Verdict, str, str]] = {
    "constant": (
        tried([response(p, i, 0.0) for p in range(4) for i in range(4)]),
        Verdict.PROBLEM,
        "no reward is above 0: all 16 responses get 0",
        "reward.components",
    ),
    "flat": (
        tried([response(p, i, float(p)) for p in range(4) for i in range(4)]),
        Verdict.WARNING,
        "of 4 of 4 prompts all responses get the same reward",
        "rollout.samples_per_prompt",
    ),
    "flat in many": (
        tried([response(p, i, float(p)) for p in range(8) for i in range(4)]),
        Verdict.PROBLEM,
        "of 8 of 8 prompts all responses get the same reward",
        "rollout.temperature",
    ),
    "format": (
        tried(
            all_of(components={"right": 1.0, "form": 0.0})[:1]
            + [
                replace(one, components={"right": float(n), "form": 0.0})
                for n, one in enumerate(all_of()[1:])
            ]
        ),
        Verdict.WARNING,
        "all 16 responses get 0 of it",
        "reward.components.form.arguments",
    ),
    "cut": (
        tried(all_of(finish_reason="length")),
        Verdict.PROBLEM,
        "no response ends by itself: 16 of 16 are cut at rollout.max_new_tokens=32",
        "rollout.stop_token_ids",
    ),
    "half cut": (
        tried([*all_of()[:8], *all_of(finish_reason="length")[8:]]),
        Verdict.WARNING,
        "8 of 16 responses are cut at rollout.max_new_tokens=32",
        "rollout.max_new_tokens",
    ),
    "refused": (
        tried([*all_of()[:15], *all_of(finish_reason="refused")[15:]]),
        Verdict.WARNING,
        "the engine refused 1 of 16 prompts or turns",
        "data.max_prompt_tokens",
    ),
    "unscored": (
        tried([*all_of()[:15], response(3, 3, math.nan)]),
        Verdict.WARNING,
        "1 of 16 responses have no reward",
        "rollout.max_new_tokens",
    ),
    "none scored": (
        tried([response(p, i, math.nan, components={}) for p in range(4) for i in range(4)]),
        Verdict.PROBLEM,
        "16 of 16 responses have no reward",
        "another reward model",
    ),
    "memory": (
        tried(stages=(TriedStage("update", 1.0, 0.1, 0.5, 1.0, 1.0, halvings=2),)),
        Verdict.WARNING,
        "the GPU's memory sufficed only for 1/4 of update.tokens_per_micro_batch",
        "update.tokens_per_micro_batch",
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_what_responses_show_is_named_with_the_key_to_change(name):
    result, verdict, measured, key = FINDINGS[name]
    (found,) = judge(result)
    assert (found.verdict, found.measured) == (verdict, measured)
    assert key in found.advice


def test_responses_that_differ_and_end_are_not_complained_of():
    assert judge(tried()) == []


# --- whether the policy knows the ids of its tokenizer ---


@pytest.mark.parametrize(
    ("nll", "entropy", "verdict"),
    [
        (4.3, 2.0, Verdict.OK),  # SmolLM2-135M on chats
        (6.3, 4.8, Verdict.OK),  # and on letters that are no words
        (10.0, 5.4, Verdict.PROBLEM),  # ids that are three off
        (15.4, 5.5, Verdict.PROBLEM),  # ids in any order
        (10.9, 10.7, Verdict.WARNING),  # random weights
    ],
)
def test_a_policy_that_finds_prompts_as_unlikely_as_chance_has_anothers_tokenizer(nll, entropy, verdict):
    assert judge_likelihood(nll, entropy, 10.8, 100).verdict is verdict
    assert judge_likelihood(nll, entropy, 10.8, 5).verdict is Verdict.SKIPPED
    assert judge_likelihood(nll / 2, entropy / 2, 5.4, 100).verdict is not Verdict.PROBLEM  # a toy


def test_each_id_that_ends_a_response_is_shown_with_who_names_it():
    ends = Ends(frozenset({2, 7}), 2, 9, frozenset({9}))
    assert named_ends(ends, lambda ids: f"<{ids[0]}>") == [
        "2 '<2>' (model, tokenizer)",
        "7 '<7>' (model)",
        "9 '<9>' (chat template, rollout.stop_token_ids)",
    ]


# --- text ---


@given(st.lists(st.integers(1, 1000), min_size=1))
def test_lengths_are_some_that_there_are(lengths):
    found = Lengths.of(lengths)
    assert found.median <= found.most <= found.longest == max(lengths)
    assert {found.median, found.most} <= set(lengths)


def shown() -> str:
    result = tried([*all_of()[:8], *all_of(finish_reason="length")[8:]])
    seen = PromptLook("<user>\nWhat is 1 + 1?\n<assistant>\n", 10, ("2 '<end>' (model)",))
    lines = [*before_lines(seen, 80, False), ""]
    lines += result_lines(result, outlook(result, {"rollout": 2}), "on this machine", 80, is_full=False)
    return "\n".join(lines) + "\n"


def test_the_text_is_that_which_people_know():
    assert shown() == GOLDEN.read_text()
    assert max(map(len, shown().splitlines())) <= 80


def test_the_object_says_the_same_without_numbers_that_are_none():
    result = FINDINGS["unscored"][0]
    found = as_object(result, outlook(result, {}), None, [Finding("a", Verdict.PROBLEM, "b")])
    assert (found["responses"], found["solved"], found["problems"]) == (16, 11, 1)
    assert found["samples"][15]["reward"] is None
    assert found["stages"][1]["tokens_per_second"] == 16.0


if __name__ == "__main__":
    GOLDEN.write_text(shown())
