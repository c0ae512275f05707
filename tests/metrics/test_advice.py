"""What to look at in a run: every rule notices its failure, and none speaks of a run that is fine."""

import dataclasses
import json
import math
import random
import re
import time
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.compose import compose
from pipeline.config.scheduler import LocalConfig
from pipeline.config.schema import Config
from pipeline.metrics.advice import advise, first_shown, in_a_line, worst
from pipeline.metrics.advice_input import LOOK_BACK, MIN_ROWS, Advice, AdviceInput, Rule, Severity, TaskTime
from pipeline.metrics.catalogue import describe
from pipeline.metrics.staleness import staleness_metrics
from pipeline.text import number
from pipeline.workers.summary import REASONS, Spent, WorkersOf
from tests.support import ROOT, scripted

Change = Callable[[int], dict[str, float]]

CONFIG = scripted.imagined_run(
    iterations=100,
    scheduler={"rollout": {"mem": "64G"}, "pools": {"big": {}}},
    rollout={"num_shards": 8, "samples_per_prompt": 4},
    data={"prompts": "/prompts", "prompts_per_iteration": 64},
    evaluate={},
    algorithm={"kl": {"coef": 0.05}},
    update={"epochs": 2, "minibatches": 2},
    reward={
        "components": {
            "rm": {"kind": "model", "path": "/rm", "pool": "big"},
            "exact": {"kind": "rule", "function": "a:b"},
        }
    },
).config


def healthy(iteration: int) -> dict[str, float]:
    """A row of a run that learns, with noise that is the same each time."""
    noise = math.sin(12.9898 * iteration) * 0.5
    return {
        "iteration": iteration,
        "reward/mean": 0.02 * iteration + 0.05 * noise,
        "reward/std": 0.8,
        "reward/frac_zero_std": 0.1,
        "reward/rm/mean": 0.01 * iteration + 0.03 * noise,
        "reward/rm/std": 0.6,
        "reward/exact/mean": 0.2 + 0.01 * iteration + 0.02 * noise,
        "reward/exact/std": 0.4,
        "reward/rm/truncated": 0.0,
        "objective/kl": 0.1 * iteration,
        "objective/kl_per_token": 0.002 * iteration,
        "policy/entropy": max(0.5, 2.0 - 0.01 * iteration),
        "policy/approx_kl": 0.004,
        "policy/ratio_error_first": 1e-6,
        "policy/clip_fraction_low": 0.05,
        "policy/clip_fraction_high": 0.06,
        "policy/learning_rate": 1e-6,
        "policy/steps": 4.0,
        "policy/skipped_steps": 0.0,
        "policy/overflow_steps": 0.0,
        "policy/stopped_early": 0.0,
        "policy/grad_norm": 0.8 + 0.2 * noise,
        "policy/padding_efficiency": 0.8,
        "value/grad_norm": 1.5 + 0.3 * noise,
        "value/explained_variance": min(0.6, 0.05 * iteration - 0.1),
        "mismatch/k3": 5e-4,
        "response_length/mean": 120 + 5 * noise + iteration,
        "response_length/clip_ratio": 0.05,
        "finish_reason/length": 0.05,
        "evaluate/reward": 0.02 * iteration + 0.05 * noise,
        "seconds/iteration": 600.0,
        "seconds/rollout": 350.0,
        "seconds/score-big": 100.0,
        "seconds/reward": 60.0,
        "seconds/update": 150.0,
        "seconds/compute/rollout": 2000.0,
        "seconds/compute/score-big": 500.0,
        "seconds/compute/reward": 300.0,
        "seconds/compute/update": 120.0,
        "memory_gib/rollout": 40.0,
        "slurm/queue_seconds/rollout": 200.0,
        "slurm/run_seconds/rollout": 2600.0,
        "slurm/run_seconds/update": 160.0,
        "slurm/wasted_share": 0.02,
        "slurm/worker_idle_share/rollout": 0.1,
    }


def rows_of(change: Change = lambda i: {}, count: int = 30) -> list[dict[str, float]]:
    return [healthy(i) | change(i) for i in range(1, count + 1)]


def found_in(change: Change, count: int = 30, config: Config = CONFIG, **more: Any) -> list[Advice]:
    return advise(AdviceInput(rows_of(change, count), config, **more))


def only(rule: Rule, found: list[Advice]) -> Advice:
    """The finding, which must be the only one."""
    assert [advice.rule for advice in found] == [rule], found
    return found[0]


# --- runs that are fine ---


@pytest.mark.parametrize("count", [0, 1, 4, 5, 9, 30, 300])
def test_a_run_that_learns_gets_no_advice(count):
    assert found_in(lambda i: {}, count) == []


def test_a_short_run_gets_none_however_bad():
    """But for engines that disagree."""
    change = dict.fromkeys(healthy(1), 1e9) | {"mismatch/k3": 0.0}
    assert found_in(lambda i: change | {"iteration": i}, MIN_ROWS - 1) == []


FIRST_SIGNS: Mapping[str, tuple[Rule, Severity, Mapping[str, float]]] = {
    "constant": (
        Rule.CONSTANT_REWARD,
        Severity.PROBLEM,
        {"reward/mean": 0.0, "reward/std": 0.0, "reward/frac_zero_std": 1.0, "reward/exact/std": 0.0},
    ),
    "constant, but for rounding": (
        Rule.CONSTANT_REWARD,
        Severity.PROBLEM,
        {"reward/mean": 0.1, "reward/std": 7.45e-09, "reward/frac_zero_std": 1.0},
    ),
    "flat": (Rule.FLAT_GROUPS, Severity.PROBLEM, {"reward/frac_zero_std": 1.0}),
    "cut": (Rule.TRUNCATION, Severity.PROBLEM, {"finish_reason/length": 1.0}),
    "format never met": (
        Rule.CONSTANT_COMPONENT,
        Severity.WARNING,
        {"reward/exact/mean": 0.0, "reward/exact/std": 0.0},
    ),
    "format always met": (
        Rule.CONSTANT_COMPONENT,
        Severity.WARNING,
        {"reward/exact/mean": 0.2, "reward/exact/std": 2.8e-17},
    ),
}
"""What no response of the first iteration contradicts."""


@pytest.mark.parametrize(("rule", "severity", "sign"), FIRST_SIGNS.values(), ids=FIRST_SIGNS)
def test_what_no_response_contradicts_is_said_after_the_first_iteration_and_once(rule, severity, sign):
    advice = only(rule, found_in(lambda i: sign, count=1))
    assert advice.severity is severity
    assert "iteration 1" in advice.what
    for count in range(1, 2 * MIN_ROWS):
        rows = rows_of(lambda i: sign, count)
        shown = [one.rule for one in first_shown(AdviceInput(rows, CONFIG)) if one.rule in {rule}]
        assert shown == [rule] * (count == 1), count


@pytest.mark.parametrize("sign", [sign for _, _, sign in FIRST_SIGNS.values()], ids=FIRST_SIGNS)
def test_what_chance_may_give_is_not_said_so_early(sign):
    """One response in many contradicts it; or there are few responses, or one prompt."""
    nearly = {name: abs(value - 0.02) for name, value in sign.items()}
    assert found_in(lambda i: nearly, count=1) == []
    few = replace(CONFIG, data=replace(CONFIG.data, prompts_per_iteration=1))
    assert found_in(lambda i: sign, count=1, config=few) == []


@pytest.mark.parametrize("name", ["mismatch/kl", "mismatch/k3"])
@pytest.mark.parametrize("gap", [0.04, 0.07, 3.0])
def test_engines_that_disagree_are_named_after_the_first_iteration(name, gap):
    found = found_in(lambda i: {name: gap}, count=1)
    if gap < 0.05:
        assert found == []
        return
    advice = only(Rule.ENGINE_MISMATCH, found)
    assert advice.severity is (Severity.PROBLEM if gap > 1 else Severity.WARNING)
    assert advice.what == f"{name}: {number(gap)} nats per token in iteration 1"
    assert [a.rule for a in first_shown(AdviceInput(rows_of(lambda i: {name: gap}, 1), CONFIG))] == [
        advice.rule
    ]
    assert first_shown(AdviceInput(rows_of(lambda i: {name: gap}, 2), CONFIG)) == [], "it is said once"


def test_the_advice_on_engines_names_what_can_be_changed():
    """Nobody who generates with transformers is told to."""
    words = ["experiment=quickstart"]
    given = {
        "transformers": compose([*words, "rollout.precision=bf16"]),
        "vllm": compose(
            [*words, "rollout.engine=vllm", "rollout.precision=fp32", "algorithm.correction.level=token"]
        ),
    }
    found = {
        name: only(Rule.ENGINE_MISMATCH, found_in(lambda i: {"mismatch/k3": 1.0}, 1, config)).remedy
        for name, config in given.items()
    }
    assert "rollout.tokens_per_batch=1" in found["transformers"]
    assert "algorithm.correction.level=token" in found["transformers"]
    assert "rollout.precision=bf16 and update.precision=fp32 the same" in found["transformers"]
    assert "engine=transformers" not in found["transformers"]
    assert found["vllm"] == "try rollout.engine=transformers"


def test_the_quickstart_gets_none_that_is_more_than_a_note():
    rows = [json.loads(line) for line in (ROOT / "tests/golden/quickstart_metrics.jsonl").open()]
    found = advise(AdviceInput(rows, compose(["experiment=quickstart"])))
    assert len(rows) == 12
    assert worst(found) == ()


def test_chance_alone_is_no_trend():
    """Noise of the size that rewards of a few hundred responses have, many seeds."""
    for seed in range(200):
        chance = random.Random(seed)

        def change(i: int, chance: random.Random = chance) -> dict[str, float]:
            names = ("reward/mean", "reward/exact/mean", "evaluate/reward")
            return {name: chance.gauss(0, 0.05) for name in names}

        assert found_in(change, 40) == [], seed


# --- one failure each ---


def late(start: int, **numbers: Callable[[int], float]) -> Change:
    """Numbers that change after an iteration; ``__`` stands for a slash."""
    return lambda i: {n.replace("__", "/"): f(i - start) for n, f in numbers.items()} if i > start else {}


def counted(scored: float) -> dict[str, float]:
    """Counts of validity, where the rest of the responses was cut."""
    return {"validity/scored": scored, "validity/truncated": COUNTING - scored}


FAILURES: Mapping[str, tuple[Rule, Severity, Change]] = {
    "held-out": (
        Rule.REWARD_HACKING,
        Severity.PROBLEM,
        lambda i: {"reward/mean": 0.1 * i, "evaluate/reward": 2 - 0.1 * i},
    ),
    "component": (
        Rule.REWARD_HACKING,
        Severity.WARNING,
        lambda i: {"reward/mean": 0.1 * i, "reward/exact/mean": 0.9 - 0.02 * i},
    ),
    "reward": (Rule.REWARD_FALLING, Severity.WARNING, late(15, reward__mean=lambda i: 0.3 - 0.1 * i)),
    "kl": (Rule.KL_JUMP, Severity.WARNING, late(26, objective__kl_per_token=lambda i: 0.3 * i)),
    "teacher": (
        Rule.AWAY_FROM_TEACHER,
        Severity.WARNING,
        lambda i: {"teacher/kl_per_token": 0.5 + 0.01 * i},
    ),
    "longer": (
        Rule.LENGTH_EXPLOSION,
        Severity.WARNING,
        lambda i: {"response_length/mean": 50.0 * i, "reward/mean": 0.0},
    ),
    "longer and better": (Rule.LENGTH_EXPLOSION, Severity.NOTE, lambda i: {"response_length/mean": 50.0 * i}),
    "shorter": (Rule.LENGTH_COLLAPSE, Severity.WARNING, lambda i: {"response_length/mean": 200.0 / i}),
    "entropy": (Rule.ENTROPY_COLLAPSE, Severity.WARNING, late(20, policy__entropy=lambda i: 0.03)),
    "no entropy": (Rule.ENTROPY_COLLAPSE, Severity.PROBLEM, late(20, policy__entropy=lambda i: 0.001)),
    "flat": (Rule.FLAT_GROUPS, Severity.WARNING, late(20, reward__frac_zero_std=lambda i: 0.95)),
    "clipped": (Rule.CLIPPING, Severity.WARNING, late(20, policy__clip_fraction_high=lambda i: 0.4)),
    "still": (Rule.NOTHING_MOVES, Severity.WARNING, lambda i: {"policy/approx_kl": 1e-9}),
    "stopped": (
        Rule.STOPPED_EARLY,
        Severity.NOTE,
        lambda i: {"policy/stopped_early": 1.0, "policy/steps": 1.0},
    ),
    "ratio": (Rule.FIRST_RATIO, Severity.PROBLEM, lambda i: {"policy/ratio_error_first": 0.2}),
    "skipped": (Rule.SKIPPED_STEPS, Severity.WARNING, lambda i: {"policy/skipped_steps": float(i % 2)}),
    "overflow": (Rule.LOSS_SCALE, Severity.WARNING, lambda i: {"policy/overflow_steps": 2.0}),
    "gradients": (Rule.GRADIENT_EXPLOSION, Severity.WARNING, late(25, policy__grad_norm=lambda i: 80.0)),
    "critic": (Rule.BLIND_CRITIC, Severity.WARNING, lambda i: {"value/explained_variance": -0.2}),
    "cut": (Rule.TRUNCATION, Severity.WARNING, late(20, finish_reason__length=lambda i: 0.5)),
    "all cut": (Rule.TRUNCATION, Severity.PROBLEM, lambda i: {"finish_reason/length": 0.99}),
    "cut prompts": (Rule.UNSCORED, Severity.WARNING, lambda i: {"reward/rm/truncated": 30.0}),
    "late rules": (Rule.UNSCORED, Severity.WARNING, lambda i: {"reward/exact/late": 30.0}),
    "left out": (Rule.UNSCORED, Severity.WARNING, lambda i: counted(COUNTING / 2)),
    "mostly left out": (Rule.UNSCORED, Severity.PROBLEM, lambda i: counted(COUNTING / 5)),
    "mismatch": (Rule.ENGINE_MISMATCH, Severity.WARNING, late(20, mismatch__k3=lambda i: 0.03)),
    "great mismatch": (Rule.ENGINE_MISMATCH, Severity.PROBLEM, lambda i: {"mismatch/k3": 0.3}),
    "stale": (Rule.STALE_RESPONSES, Severity.WARNING, lambda i: {"staleness/effective_samples": 0.7}),
    "very stale": (
        Rule.STALE_RESPONSES,
        Severity.PROBLEM,
        late(20, staleness__effective_samples=lambda i: 0.3),
    ),
    "slow rollout": (Rule.BOTTLENECK, Severity.NOTE, lambda i: {"seconds/rollout": 500.0}),
    "slow update": (Rule.BOTTLENECK, Severity.NOTE, lambda i: {"seconds/update": 500.0}),
    "slow pool": (Rule.BOTTLENECK, Severity.NOTE, lambda i: {"seconds/score-big": 500.0}),
    "queue": (Rule.QUEUE_BOUND, Severity.WARNING, lambda i: {"slurm/queue_seconds/rollout": 9e4}),
    "starts": (Rule.START_UP, Severity.WARNING, lambda i: {"seconds/compute/rollout": 200.0}),
    "idle": (Rule.IDLE_WORKERS, Severity.NOTE, lambda i: {"slurm/worker_idle_share/rollout": 0.5}),
    "wasted": (Rule.WASTED, Severity.WARNING, lambda i: {"slurm/wasted_share": 0.3}),
    "mostly wasted": (Rule.WASTED, Severity.PROBLEM, lambda i: {"slurm/wasted_share": 0.6}),
    "padding": (Rule.PADDING, Severity.NOTE, lambda i: PADDED),
    "memory": (Rule.MEMORY, Severity.WARNING, lambda i: {"memory_gib/rollout": 63.0}),
    "states": (Rule.STATE_WRITES, Severity.NOTE, lambda i: {"seconds/state/held_up": 90.0}),
}
COUNTING = CONFIG.responses_per_iteration
PADDED = {"policy/padding_efficiency": 0.3, "seconds/update": 250.0}


@pytest.mark.parametrize(
    ("reason", "said", "remedy"),
    [
        ("truncated", "they were cut", "algorithm.mask_truncated=false"),
        ("abstained", "no rule gave a score", "return None"),
    ],
)
def test_of_responses_that_do_not_count_the_commonest_reason_is_named(reason, said, remedy):
    lost = {"validity/scored": COUNTING / 2, "validity/refused": 1.0, f"validity/{reason}": COUNTING / 2 - 1}
    advice = only(Rule.UNSCORED, found_in(lambda i: lost))
    assert advice.title == "many responses do not count"
    assert f"50 % of {5 * COUNTING:,} responses are left out of the update" in advice.what
    assert said in advice.what
    assert remedy in advice.remedy


def test_of_few_responses_that_do_not_count_nothing_is_said():
    few = {"validity/scored": COUNTING * 0.9, "validity/truncated": COUNTING * 0.1}
    assert [advice for advice in found_in(lambda i: few) if advice.rule is Rule.UNSCORED] == []


@pytest.mark.parametrize(("rule", "severity", "change"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_noticed_and_nothing_else(rule, severity, change):
    advice = only(rule, found_in(change))
    assert advice.severity is severity
    assert re.search(r"\d", advice.what), "it names numbers"
    assert all(describe(name) for name in advice.metrics)


def test_the_number_of_updates_that_is_named_spreads_what_a_state_takes():
    held_up = healthy(20)["seconds/iteration"] * 0.18
    advice = only(Rule.STATE_WRITES, found_in(lambda i: {"seconds/state/held_up": held_up}))
    assert "update.save_every=4 (it is 1)" in advice.remedy
    assert found_in(lambda i: {"seconds/state/held_up": held_up / 4}) == []


@pytest.mark.parametrize("wrong", ["held-out", "component", "reward", "kl", "clipped", "gradients", "cut"])
def test_one_odd_iteration_is_no_failure(wrong):
    """What went wrong for one iteration, amid healthy ones."""
    _, _, change = FAILURES[wrong]
    assert found_in(lambda i: change(i) if i == 29 else {}) == []


def test_what_is_over_is_no_longer_told():
    assert found_in(lambda i: {"finish_reason/length": 0.9} if i < 15 else {}) == []


def test_what_it_says_of_reward_hacking():
    _, _, change = FAILURES["held-out"]
    advice = only(Rule.REWARD_HACKING, found_in(change))
    assert advice.title == "the held-out reward falls while the reward rises"
    assert advice.what == (
        "reward/mean went from 2.600 (iterations 25-27) to 2.900 (iterations 28-30); "
        "evaluate/reward went from -0.600 (iterations 25-27) to -0.900 (iterations 28-30)"
    )
    assert "raise algorithm.kl.coef" in advice.remedy
    assert advice.metrics == ("reward/mean", "evaluate/reward")


def test_flat_groups_stop_estimators_that_compare_samples():
    _, _, change = FAILURES["flat"]
    grpo = dataclasses.replace(CONFIG.algorithm, estimator="grpo")
    found = found_in(change, config=dataclasses.replace(CONFIG, algorithm=grpo))
    assert only(Rule.FLAT_GROUPS, found).severity is Severity.PROBLEM
    assert "rollout.oversample replaces them" in only(Rule.FLAT_GROUPS, found).remedy


@pytest.mark.parametrize(("missing", "is_said"), [(0.0, False), (6.0, False), (25.0, True)])
def test_flat_groups_that_are_replaced_are_no_trouble_until_updates_are_smaller(missing, is_said):
    _, _, change = FAILURES["flat"]
    more = dataclasses.replace(CONFIG.rollout, oversample=2.0)
    found = found_in(
        lambda i: {**change(i), "refill/missing": missing}, config=dataclasses.replace(CONFIG, rollout=more)
    )
    assert [advice.rule for advice in found] == [Rule.FLAT_GROUPS] * is_said
    if is_said:
        assert only(Rule.FLAT_GROUPS, found).remedy.endswith("raise rollout.oversample")


def test_groups_that_waited_are_no_sign_of_engines_that_differ():
    change = {"mismatch/k3": 0.5, "mismatch/kl": 0.5}
    assert only(Rule.ENGINE_MISMATCH, found_in(lambda i: change))
    assert found_in(lambda i: change | {"refill/carried": 3.0}) == []


def test_one_step_an_iteration_cannot_be_seen_to_move():
    once = dataclasses.replace(CONFIG, update=dataclasses.replace(CONFIG.update, epochs=1, minibatches=1))
    change = {"policy/approx_kl": 0.0, "policy/clip_fraction_low": 0.0, "policy/clip_fraction_high": 0.0}
    assert found_in(lambda i: change, config=once) == []


def test_without_accounting_the_gaps_between_stages_show_the_queue():
    def change(i: int) -> dict[str, float]:
        return {"seconds/iteration": 6000.0}

    rows = [{n: v for n, v in row.items() if not n.startswith("slurm/")} for row in rows_of(change)]
    found = advise(AdviceInput(rows, CONFIG))
    assert only(Rule.QUEUE_BOUND, found).what.startswith("no stage runs for 89 % of an iteration")


# --- nodes and shards ---


def attempts(
    seconds: Callable[[int, int], float], iterations: range = range(20, 31), shards: int = 8
) -> tuple[TaskTime, ...]:
    return tuple(
        TaskTime(i, "rollout", shard, f"gpu{shard % 4:02d}", seconds(i, shard))
        for i in iterations
        for shard in range(shards)
    )


def test_shards_that_differ_as_responses_do_are_fine():
    usual = attempts(lambda i, shard: 300 + 40 * math.sin(i * 7 + shard * 3))
    assert found_in(lambda i: {}, attempts=usual) == []


def test_a_slow_node_is_named():
    slow = attempts(lambda i, shard: (500 if shard % 4 == 2 else 300) + 20 * math.sin(i + shard))
    advice = only(Rule.SLOW_NODE, found_in(lambda i: {}, attempts=slow))
    assert advice.title == "node gpu02 is slow"
    assert "take 1.7 times as long as those elsewhere (median of 11 iterations, 20 to 30)" in advice.what
    assert "scheduler.rollout.exclude=gpu02" in advice.remedy


def test_a_node_that_was_slow_twice_is_not():
    slow = attempts(lambda i, shard: 600 if shard % 4 == 2 and i in (21, 22) else 300)
    assert found_in(lambda i: {}, attempts=slow) == []


def test_a_straggler_that_wanders_is_no_slow_node():
    slow = attempts(lambda i, shard: 900 if shard == i % 8 else 300)
    advice = only(Rule.STRAGGLERS, found_in(lambda i: {}, attempts=slow))
    assert advice.what == "15 min 0 s against a median of 5 min 0 s (last 5 iterations)"


def test_wasted_attempts_are_counted_where_nobody_accounts():
    rows = [{n: v for n, v in row.items() if not n.startswith("slurm/")} for row in rows_of()]
    lost = tuple(
        dataclasses.replace(a, is_committed=False, seconds=200.0)
        for a in attempts(lambda i, shard: 300)
        if a.shard < 4
    )
    found = advise(AdviceInput(rows, CONFIG, attempts(lambda i, shard: 300) + lost))
    assert only(Rule.WASTED, found).what == "25 % of the hours went to attempts without a result"


# --- all of it ---


def test_the_worst_comes_first_and_notes_are_not_among_the_worst():
    def change(i: int) -> dict[str, float]:
        names = ("slow rollout", "clipped", "no entropy")
        return {name: value for wrong in names for name, value in FAILURES[wrong][2](i).items()}

    found = found_in(change)
    assert [a.severity for a in found] == ["problem", "warning", "note"]
    assert [a.rule for a in worst(found)] == [Rule.ENTROPY_COLLAPSE, Rule.CLIPPING]


def every_advice() -> list[Advice]:
    slow = attempts(lambda i, shard: 500 if shard % 4 == 2 else 300)
    uneven = attempts(lambda i, shard: 900 if shard == i % 8 else 300)
    found = [a for _, _, change in FAILURES.values() for a in found_in(change)]
    found += [a for _, _, sign in FIRST_SIGNS.values() for a in found_in(lambda i, sign=sign: sign, count=1)]
    crowds = [
        WorkersOf(kind, left=60, reasons={why: 60}, without_task=idle, without_task_reasons={why: idle})
        for why in REASONS
        for kind, idle in (("rollout", 38), ("score-big", 0))
    ]
    thrashing = [replace(one, spent=Spent(startup=60.0, busy=20.0)) for one in crowds]
    more = ({"attempts": slow}, {"attempts": uneven}, *({"workers": [one]} for one in thrashing))
    return [*found, *(advice for given in more for advice in found_in(lambda i: {}, **given))]


def test_every_rule_has_a_failure_here_and_a_row_in_the_documentation():
    assert {advice.rule for advice in every_advice()} == set(Rule)
    text = (ROOT / "docs/howto/read_a_run.md").read_text()
    tables = text[text.index("## What the policy learns") :]
    rows = re.findall(r"^\| `([a-z-]+)` \| .+ \| .+ \|$", tables, re.MULTILINE)
    assert sorted(rows) == sorted(Rule)


def has_key(node: Any, parts: list[str]) -> bool:
    """Whether a dotted key exists below a type of the configuration. Names in mappings are the user's."""
    if not parts:
        return True
    options = [node, *typing.get_args(node)]
    for option in options:
        if typing.get_origin(option) is dict and has_key(typing.get_args(option)[1], parts[1:]):
            return True
        if option is not node and typing.get_origin(option) not in (None, dict) and has_key(option, parts):
            return True
        if dataclasses.is_dataclass(option):
            hints = typing.get_type_hints(option)
            if parts[0] in hints and has_key(hints[parts[0]], parts[1:]):
                return True
    return False


GROUPS = "model|data|rollout|reward|update|algorithm|evaluate|scheduler|tracking"


def keys_in(text: str) -> list[str]:
    found = re.findall(rf"(?<![\w/@.-])(?!\w+\.md\b)((?:{GROUPS})(?:\.[a-z_]+)+)", text)
    return list(dict.fromkeys(found))


def test_every_key_that_a_remedy_names_exists():
    named = {key for advice in every_advice() for key in keys_in(advice.remedy)}
    named |= set(keys_in((ROOT / "docs/howto/read_a_run.md").read_text()))
    assert len(named) > 30
    assert [key for key in sorted(named) if not has_key(Config, key.split("."))] == []
    assert not has_key(Config, ["update", "learning_rat"])


numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.integers(-5, 10**9), st.none(), st.text(max_size=2)
)
names = st.sampled_from([*healthy(1), "reward//truncated", "policy/", "slurm/queue_seconds/x-y", ""])


@settings(max_examples=150)
@given(
    rows=st.lists(st.dictionaries(names, numbers, max_size=60), max_size=40),
    attempts=st.lists(
        st.builds(
            TaskTime,
            st.integers(0, 6),
            st.sampled_from(["rollout", "score-big", "update"]),
            st.integers(0, 5),
            st.sampled_from(["", "a", "b"]),
            st.floats(0, 1e6),
            st.booleans(),
        ),
        max_size=40,
    ),
)
def test_it_never_fails_whatever_the_rows_hold(rows, attempts):
    for iteration, row in enumerate(rows, 1):
        row.setdefault("iteration", iteration)
    for advice in advise(AdviceInput(rows, CONFIG, tuple(attempts))):
        assert advice.title
        assert advice.what


@settings(max_examples=30)
@given(
    wrong=st.sampled_from(list(FAILURES)),
    order=st.randoms(use_true_random=False),
    strange=st.dictionaries(st.from_regex(r"custom/[a-z]{1,8}", fullmatch=True), st.floats()),
)
def test_numbers_that_no_rule_knows_and_the_order_of_names_change_nothing(wrong, order, strange):
    rows = rows_of(FAILURES[wrong][2])
    shuffled = []
    for row in rows:
        items = list((row | strange).items())
        order.shuffle(items)
        shuffled.append(dict(items))
    assert advise(AdviceInput(shuffled, CONFIG)) == advise(AdviceInput(rows, CONFIG))


def test_a_long_run_costs_no_more():
    def seconds(count: int) -> float:
        rows = rows_of(count=count)
        start = time.process_time()
        advise(AdviceInput(rows, CONFIG))
        return time.process_time() - start

    rows = rows_of(FAILURES["longer"][2], count=3000)
    assert advise(AdviceInput(rows, CONFIG)) == advise(AdviceInput(rows[-LOOK_BACK:], CONFIG))
    assert seconds(5000) < 0.5


def test_slurm_and_this_machine_are_told_different_keys():
    _, _, change = FAILURES["slow rollout"]
    slurm = only(Rule.BOTTLENECK, found_in(change)).remedy
    here = dataclasses.replace(CONFIG, scheduler=LocalConfig())
    local = only(Rule.BOTTLENECK, found_in(change, config=here))
    assert "scheduler.rollout.partition" in slurm
    assert "scheduler.rollout.slots" in local.remedy


def test_a_driver_says_what_a_row_is_the_first_to_show():
    """And says it once: ``run`` shows each finding when it appears, not with every iteration."""
    _, _, change = FAILURES["flat"]
    rows = rows_of(change)
    told = [
        (count, advice.rule)
        for count in range(1, len(rows) + 1)
        for advice in first_shown(AdviceInput(rows[:count], CONFIG))
    ]
    assert [rule for _, rule in told] == [Rule.FLAT_GROUPS]
    assert told[0][0] > MIN_ROWS
    (advice,) = first_shown(AdviceInput(rows[: told[0][0]], CONFIG))
    assert in_a_line(advice).startswith("warning: ")
    assert "flat-groups" in in_a_line(advice)
    assert "\n" not in in_a_line(advice)


def rows_with_lag(share: float, count: int) -> list[dict[str, float]]:
    """The first without lag; all others have so large a share of its effective samples."""
    rows: list[dict[str, float]] = []
    for row in rows_of(count=count):
        lag = int(row["iteration"] > 1)
        row |= {"staleness/lag": lag, "mismatch/effective_samples": 0.9 * (share if lag else 1.0)}
        rows.append(row | staleness_metrics(row, rows))
    return rows


def test_responses_worth_few_samples_are_said_in_the_second_iteration_with_the_command():
    config = replace(CONFIG, run_dir="/runs/my first")
    (advice,) = first_shown(AdviceInput(rows_with_lag(0.2, 2), config))
    assert advice.severity is Severity.PROBLEM
    assert advice.what == "20 % of the effective samples of this run without lag, in iteration 2"
    assert advice.remedy == (
        "lower update.learning_rate, which is 1e-06 now, or learn from the newest policy's responses alone: "
        "slurm-ppo fork '/runs/my first' NEW_RUN rollout.staleness=0"
    )
    assert first_shown(AdviceInput(rows_with_lag(0.2, 3), config)) == [], "it is said once"


@pytest.mark.parametrize(("share", "after"), [(0.9, None), (0.7, 4), (0.4, 2)])
def test_one_iteration_has_to_show_more_than_several(share, after):
    told = [n for n in range(1, 10) if advise(AdviceInput(rows_with_lag(share, n), CONFIG))]
    assert told == ([] if after is None else list(range(after, 10)))


def test_what_is_compared_with_is_the_run_without_lag_however_long_ago():
    rows = rows_with_lag(0.6, 300)
    assert rows[-1]["staleness/effective_samples"] == pytest.approx(0.6)
    assert "staleness/effective_samples" not in rows[0]
    only(Rule.STALE_RESPONSES, advise(AdviceInput(rows[-LOOK_BACK:], CONFIG)))
    assert staleness_metrics({"staleness/lag": 1}, rows) == {}, "a row without trained rows"
    assert staleness_metrics(rows[5], rows[1:5]) == {}, "nothing to compare with"


def test_responses_of_an_older_policy_are_meant_to_have_other_probabilities():
    def change(i: int) -> dict[str, float]:
        return {"mismatch/k3": 0.3, "staleness/lag": 1} if i > 1 else {"staleness/lag": 0}

    assert found_in(change) == []
    only(Rule.ENGINE_MISMATCH, found_in(lambda i: change(i) | {"mismatch/k3": 0.3}))
