"""One HTML file about a run: opens from disk, loads nothing, reads in light and dark, wide and narrow.

Charts are plain plotly figures (dictionaries) whose colours are names of CSS variables; a small script puts
in the values of the reader's colour scheme and draws again when the scheme changes.
"""

import json
import math
import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from pipeline import journal
from pipeline.commits import CorruptData, read_record, replace_durably
from pipeline.compose import to_yaml
from pipeline.metrics import Section, describe, evaluation_metrics
from pipeline.runs import Run
from pipeline.tasks import Stage, Task
from pipeline.views import COLUMNS, Column, Row, cells, number

_COLOURS = 6
"""Series colours of the style sheet: --c0 and so on, and --c0-soft for areas."""
_STAGES = (Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE, Stage.EVALUATE)
"""A stage has the same colour in every chart."""


@dataclass(frozen=True)
class Sample:
    """One response, as the reward stage saw it."""

    prompt: str
    response: str
    reward: float


@dataclass(frozen=True)
class Chart:
    """Curves over iterations. ``names`` are names of METRICS; one with ``*`` is a curve for each match."""

    section: Section
    title: str
    names: tuple[str, ...]
    lower: tuple[str, ...] = ()
    """Curves of another unit, in a panel below."""
    caption: str = ""
    """Default: the meaning of the first name."""
    kind: str = "lines"
    """lines, bars (stacked), or band: the three names are middle, lower and upper edge."""
    from_zero: bool = False


_O, _H, _R, _E, _P = (
    Section.OBJECTIVE,
    Section.HEALTH,
    Section.ROLLOUT,
    Section.EVALUATION,
    Section.PIPELINE,
)

CHARTS: tuple[Chart, ...] = (
    Chart(
        _O,
        "Reward",
        ("reward/mean", "reward/low", "reward/high"),
        kind="band",
        caption="mean total reward, ± one standard deviation; diamonds: held-out prompts, greedy",
    ),
    Chart(_O, "Reward components", ("reward/*/mean",)),
    Chart(_O, "KL to the reference", ("objective/kl",), ("objective/kl_coef",)),
    Chart(_H, "Entropy", ("policy/entropy",)),
    Chart(
        _H,
        "Clipping",
        (
            "policy/clip_fraction_low",
            "policy/clip_fraction_high",
            "policy/dual_clip_fraction",
            "value/clip_fraction",
        ),
        caption="share of tokens clipped at either bound, by dual clipping, and in the value loss",
        from_zero=True,
    ),
    Chart(_H, "Losses", ("policy/loss",), ("value/loss",), "clipped losses, mean over optimizer steps"),
    Chart(_H, "Gradient norms", ("policy/grad_norm",), ("value/grad_norm",), from_zero=True),
    Chart(_H, "Explained variance", ("value/explained_variance",)),
    Chart(_H, "Policy step", ("policy/approx_kl",), from_zero=True),
    Chart(_H, "Mismatch of engines", ("mismatch/kl", "mismatch/max")),
    Chart(
        _R,
        "Response length",
        ("response_length/mean", "response_length/min", "response_length/max"),
        ("response_length/clip_ratio",),
        "tokens per response, shortest to longest; below: share of responses of max_new_tokens",
        kind="band",
        from_zero=True,
    ),
    Chart(_R, "Finish reasons", ("finish_reason/*",), kind="bars"),
    Chart(_E, "Held-out reward components", ("evaluate/reward/*",)),
    Chart(_E, "Held-out response length", ("evaluate/response_length",), from_zero=True),
    Chart(_P, "Seconds per stage", ("seconds/*",), kind="bars"),
    Chart(_P, "Tokens per second", ("tokens_per_second/*",), from_zero=True),
    Chart(_P, "Memory", ("memory_gib/*",), caption="largest peak memory of a stage's tasks, GiB", from_zero=True),
    Chart(
        _P, "GPU memory", ("gpu_memory_gib/*",), caption="largest peak GPU memory, GiB", from_zero=True
    ),
)

_MORE_COLUMNS = (
    Column("KL coef", ("objective/kl_coef",)),
    Column("cut %", ("response_length/clip_ratio",), 1, scale=100),
    Column("grad norm", ("policy/grad_norm",)),
    Column("expl. var.", ("value/explained_variance",)),
)


def write_report(run: Run) -> Path:
    """Write ``report.html`` of the run in one step, also while the run goes on. Returns its path."""
    rows = read_rows(run)
    samples = read_samples(run, int(rows[-1]["iteration"])) if rows else []
    replace_durably(run.paths.report, page(run, rows, samples))
    return run.paths.report


def read_rows(run: Run) -> list[Row]:
    """Rows of ``metrics.jsonl``, ascending, the last line of an iteration being the one that counts.

    Before them, if policy 0 was evaluated, a row of iteration 0 with that evaluation.
    """
    rows: dict[int, Row] = {}
    try:
        start = read_record(run.paths, Task(0, Stage.EVALUATE))
    except CorruptData:
        start = None
    if start is not None:
        rows[0] = {"iteration": 0, **evaluation_metrics(start)}
    rows |= {row["iteration"]: row for row in journal.read(run.paths.metrics) if "iteration" in row}
    return [rows[iteration] for iteration in sorted(rows)]


def read_samples(run: Run, iteration: int) -> list[Sample]:
    """Responses of the iteration's first shard with their rewards; none if they are gone or corrupt."""
    from pipeline.schemas import REWARD, ROLLOUT
    from pipeline.shards import read_shard

    try:
        rollout = read_record(run.paths, Task(iteration, Stage.ROLLOUT))
        reward = read_record(run.paths, Task(iteration, Stage.REWARD))
        if rollout is None or reward is None:
            return []
        texts = read_shard(run.paths, rollout, ROLLOUT)
        scores = read_shard(run.paths, reward, REWARD)
        columns = (texts["prompt_text"], texts["response_text"], scores["reward"])
        return [Sample(*row) for row in zip(*(c.to_pylist() for c in columns), strict=True)]
    except (CorruptData, OSError, ValueError):  # Arrow's and the schemas' errors are ValueErrors
        return []


def choose_samples(samples: Iterable[Sample]) -> list[tuple[str, Sample]]:
    """Two lowest, two median and two highest rewards with these words; all of them when there are few."""
    ranked = sorted(samples, key=lambda sample: sample.reward)
    if len(ranked) <= 6:
        return [("", sample) for sample in ranked]
    middle = len(ranked) // 2 - 1
    words = {"lowest": 0, "median": middle, "highest": len(ranked) - 2}
    return [(word, ranked[i]) for word, first in words.items() for i in (first, first + 1)]


def page(run: Run, rows: Sequence[Row], samples: Sequence[Sample]) -> str:
    """The whole document. ``rows`` ascend; ``samples`` are of the newest iteration."""
    figures = {f"chart-{i}": (chart, figure(chart, rows)) for i, chart in enumerate(CHARTS)}
    shown = {key: (chart, made) for key, (chart, made) in figures.items() if made is not None}
    body = [_header(run, rows)]
    if rows:
        body += [_sections(shown), _samples(run, int(rows[-1]["iteration"]), samples), _table(rows)]
    body += [_configuration(run), _scripts({key: made for key, (_, made) in shown.items()})]
    return _PAGE.replace("@TITLE@", escape(run.identity.name), 1).replace("@BODY@", "\n".join(body), 1)
