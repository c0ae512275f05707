"""What ``slurm-ppo try`` prints: lines of at most 80 columns, or one JSON object. Pure.

What a model wrote is shown, and never obeyed by the terminal.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.checks.finding import Finding, Verdict
from pipeline.cli.samples import facts_of, finite, foreign_lines, response_lines, wrapped
from pipeline.metrics.samples import Choice, Sample
from pipeline.run.schemas import FinishReason
from pipeline.run.tasks import Stage
from pipeline.text import MISSING, duration, table
from pipeline.tryout.outlook import SecondsRange, TryOutlook, is_scaled_down
from pipeline.tryout.prompt_look import PromptLook
from pipeline.tryout.result import Lengths, TriedStage, TryResult

_INDENT = "  "
_MOST_SHOWN = 4
"""Prompts whose responses are shown without --full."""
_LONGEST = 8
"""Lines of a prompt or response that are shown without --full."""
_PROMPT_LINES = 16
SCHEMA = 1


def before_lines(seen: PromptLook, width: int, is_full: bool) -> Iterator[str]:
    """Yield the lines about the first prompt, and where a response ends."""
    yield f"The first prompt as the policy reads it, {seen.tokens} tokens:"
    yield from foreign_lines(seen.text, width, None if is_full else _PROMPT_LINES)
    ends = "; ".join(seen.ends) or "none, but rollout.max_new_tokens"
    yield from wrapped(f"A response ends at: {ends}", width)


def result_lines(result: TryResult, took: TryOutlook, where: str, width: int, is_full: bool) -> Iterator[str]:
    """Yield the lines about a small run.

    Args:
        where: machine or partitions, in words.
    """
    yield ""
    yield from _responses(result, width, is_full)
    yield ""
    yield from _numbers(result)
    yield ""
    yield from _stages(result, where, width)
    yield ""
    yield from _outlook(result, took, width)


# --- responses ---


def _responses(result: TryResult, width: int, is_full: bool) -> Iterator[str]:
    count, groups = len(result.samples), result.groups
    shown = groups if is_full else groups[:_MOST_SHOWN]
    some = "" if len(shown) == len(groups) else f"; the first {len(shown)}, --full shows all"
    yield from wrapped(f"{count} responses to {len(groups)} prompts{some}:", width)
    for group in shown:
        yield ""
        yield from foreign_lines(f"prompt {group[0].prompt_id}:", width, 1, indent="")
        yield from foreign_lines(group[0].prompt.rstrip("\n"), width, None if is_full else _LONGEST)
        if len(group) > 1:
            rewards = " ".join(f"{sample.reward:.3g}" for sample in group)
            yield from wrapped(f"{_INDENT}rewards: {rewards}", width)
        for choice, sample in _chosen(group, is_full):
            yield from wrapped(
                f"{_INDENT}{choice or f'sample {sample.sample_index}'}: {facts_of(sample)}", width
            )
            yield from response_lines(sample, width, None if is_full else _LONGEST)


def _chosen(group: Sequence[Sample], is_full: bool) -> list[tuple[Choice | None, Sample]]:
    """Return all of a prompt's responses, or the best and the worst."""
    if is_full:
        return [(None, sample) for sample in group]
    ranked = sorted(group, key=lambda s: -math.inf if math.isnan(s.reward) else s.reward)
    if ranked[0].reward == ranked[-1].reward:
        return [(None, ranked[0])]
    return [(Choice.BEST, ranked[-1]), (Choice.WORST, ranked[0])]


# --- numbers ---


def _numbers(result: TryResult) -> Iterator[str]:
    yield "What they show"
    yield from (f"{_INDENT}{line}" for line in table(list(_shares(result))))
    yield ""
    yield from (f"{_INDENT}{line}" for line in table(list(_rewards(result))))
    yield ""
    prompts, responses = Lengths.of(list(result.prompt_lengths.values())), result.response_lengths
    head = ("tokens", "median", "95 %", "longest")
    cells = [head, _cells("prompts", prompts), _cells("responses", responses)]
    yield from (f"{_INDENT}{line}" for line in table(cells))


def _shares(result: TryResult) -> Iterator[tuple[str, ...]]:
    count, config = len(result.samples), result.config
    cut = f"cut at rollout.max_new_tokens={config.rollout.max_new_tokens}"
    found = [
        (cut, result.num_ended(FinishReason.LENGTH), count),
        ("refused by the engine", result.num_ended(FinishReason.REFUSED), count),
    ]
    if result.num_flat is not None:
        found.insert(0, ("prompts whose responses all get the same", result.num_flat, len(result.groups)))
    if result.is_solvable:
        solved = f"solved: a reward of {config.evaluate.solved_at:g} or more"
        found.insert(0, (solved, result.num_solved, count))
    return ((text, f"{part} of {of}", f"{100 * part / of:.0f} %") for text, part, of in found)


def _rewards(result: TryResult) -> Iterator[tuple[str, ...]]:
    """Yield a row of lowest, mean and highest for the reward, and for each component of several."""
    yield ("rewards", "lowest", "mean", "highest")
    yield _spread("sum", [sample.reward for sample in result.samples])
    names = list(result.config.reward.components)
    for name in names if len(names) > 1 else ():
        yield _spread(name, [sample.components.get(name, math.nan) for sample in result.samples])


def _spread(name: str, values: Sequence[float]) -> tuple[str, ...]:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return (name, MISSING, MISSING, MISSING)
    mean = math.fsum(known) / len(known)
    return (name, *(f"{value:.3f}" for value in (min(known), mean, max(known))))


def _cells(name: str, found: Lengths) -> tuple[str, ...]:
    return (name, f"{found.median:,}", f"{found.most:,}", f"{found.longest:,}")


def _stages(result: TryResult, where: str, width: int) -> Iterator[str]:
    has_gpus = any(one.gpu_memory_gib is not None for one in result.stages)
    head = ("", "seconds", "start", "compute", "tokens/s", "GiB", *(["GPU GiB"] if has_gpus else []))
    yield from wrapped(f"Each stage, {where}", width)
    rows = [head, *(_stage_cells(one, has_gpus) for one in result.stages)]
    yield from (f"{_INDENT}{line}" for line in table(rows))
    if parts := result.update_parts:
        named = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)
        yield f"{_INDENT}update: {named or 'next to nothing'} s"


def _stage_cells(one: TriedStage, has_gpus: bool) -> tuple[str, ...]:
    speed = one.tokens_per_second
    cells = (
        one.job_kind,
        f"{one.seconds:.1f}",
        f"{one.start:.1f}" if one.compute else "-",
        f"{one.compute:.1f}" if one.compute else "-",
        "-" if speed is None else f"{speed:,.0f}",
        f"{one.memory_gib:.1f}",
    )
    gpu = "-" if one.gpu_memory_gib is None else f"{one.gpu_memory_gib:.1f}"
    return (*cells, gpu) if has_gpus else cells


# --- outlook ---


def _outlook(result: TryResult, took: TryOutlook, width: int) -> Iterator[str]:
    config = result.config
    what = f"{config.iterations} iterations of {config.responses_per_iteration} responses"
    yield from wrapped(f"What the run would take: {what}", width)
    rows = [("", "tasks", "at once", "an iteration")]
    rows += [(one.job_kind, str(one.tasks), str(one.at_once), in_words(one.seconds)) for one in took.stages]
    yield from (f"{_INDENT}{line}" for line in table(rows))
    yield f"{_INDENT}an iteration: {in_words(took.iteration)}; the run: {in_words(took.run)}"
    yield from (f"{_INDENT}{line}" for line in wrapped(_reservation(result, took), width - len(_INDENT)))


def in_words(found: SecondsRange | None) -> str:
    """Return a range in words; one whose ends are written alike as one duration."""
    if found is None:
        return "not known"
    low, high = _seconds(found.low), _seconds(found.high)
    return high if low == high else f"{low} to {high}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else duration(value)


def _reservation(result: TryResult, took: TryOutlook) -> str:
    """Say what the numbers leave out."""
    update = next(one for one in took.stages if one.job_kind == Stage.UPDATE)
    texts = ["Without evaluations, and without waits in a queue."]
    if is_scaled_down(result.config, result):
        texts.insert(
            0,
            f"From {len(result.samples)} responses. Longer time: fuller batches are no faster and each task "
            "loads its model. Shorter time: fuller batches take no longer and workers keep their models.",
        )
    if took.overlaps:
        staleness = result.config.rollout.staleness
        texts.append(f"Shorter, too: with rollout.staleness={staleness} rollouts go on beside updates.")
    if update.seconds is None:
        texts.append("No response had a gradient, so that the update took no step to measure.")
    return " ".join(texts)


# --- JSON ---


def as_object(
    result: TryResult | None,
    took: TryOutlook | None,
    seen: PromptLook | None,
    found: Sequence[Finding],
    timed: Sequence[str] = (),
) -> dict[str, Any]:
    """Return all that was found, under stable keys; what is not known is null, or not there."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "problems": sum(one.verdict is Verdict.PROBLEM for one in found),
        "warnings": sum(one.verdict is Verdict.WARNING for one in found),
        "findings": [asdict(one) for one in found],
    }
    if seen is not None:
        content["prompt"] = {"text": seen.text, "tokens": seen.tokens, "ends": list(seen.ends)}
    if result is not None and took is not None:
        content |= _result_object(result, took)
    if timed:
        content["timed"] = list(timed)
    rounded: dict[str, Any] = finite(content)
    return rounded


def _result_object(result: TryResult, took: TryOutlook) -> dict[str, Any]:
    samples = [
        asdict(sample) | {"turns": [turn._asdict() for turn in sample.turns]} for sample in result.samples
    ]
    return {
        "prompts": len(result.groups),
        "responses": len(result.samples),
        "solved": result.num_solved,
        "flat_prompts": result.num_flat,
        "cut": result.num_ended(FinishReason.LENGTH),
        "refused": result.num_ended(FinishReason.REFUSED),
        "prompt_tokens": asdict(Lengths.of(list(result.prompt_lengths.values()))),
        "response_tokens": asdict(result.response_lengths),
        "stages": [asdict(one) | {"tokens_per_second": one.tokens_per_second} for one in result.stages],
        "update_seconds": result.update_parts,
        "outlook": {
            "stages": [asdict(one) for one in took.stages],
            "iteration": took.iteration and asdict(took.iteration),
            "run": took.run and asdict(took.run),
        },
        "samples": samples,
    }
