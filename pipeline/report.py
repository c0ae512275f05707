"""One HTML file about a run: opens from disk, loads nothing, reads in light and dark, wide and narrow.

Charts are plain plotly figures (dictionaries) whose colours are names of CSS variables; a small script puts
in the values of the reader's colour scheme and draws again when the scheme changes.
"""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, Literal

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
_FEW = 12
"""Up to so many iterations each has a marker and a tick."""
_MANY = 200
"""From so many points on, lines and diamonds are drawn finer."""
_TABLE_ROWS = 500
"""Iterations that the table holds."""


@dataclass(frozen=True)
class Sample:
    """One response, as the reward stage saw it."""

    prompt: str
    response: str
    reward: float


@dataclass(frozen=True)
class Chart:
    """Curves over iterations. ``names`` are of METRICS, with spaces between; ``*`` is a curve per match."""

    section: Section
    title: str
    names: str
    lower: str = ""
    """Curves of another unit, in a panel below."""
    caption: str = ""
    """Default: the meaning of the first name, and of the first lower one."""
    kind: Literal["lines", "bars", "band"] = "lines"
    """bars are stacked; the names of a band are its middle, its two edges, and dots to put on it."""
    from_zero: bool = False


_LOW, _HIGH = "reward/mean-std", "reward/mean+std"
"""Edges of the reward's band, computed here."""

_O, _H, _R = Section.OBJECTIVE, Section.HEALTH, Section.ROLLOUT
_E, _P = Section.EVALUATION, Section.PIPELINE
_REWARD = "mean total reward and a band of one standard deviation; diamonds: greedy on held-out prompts"
_KL = "KL per response, summed over its tokens (k1); below: its coefficient"
_CLIPPING = "share of tokens clipped at the ratio's bounds, by dual clipping and in the value loss"
_CLIPPED = "policy/clip_fraction_low policy/clip_fraction_high policy/dual_clip_fraction value/clip_fraction"
_LOSSES, _NORMS = "clipped losses, mean over optimizer steps", "norms before clipping, mean over steps"
_LENGTH = "tokens per response, shortest to longest; below: share of responses of max_new_tokens"
_LENGTHS = "response_length/mean response_length/min response_length/max"

CHARTS: tuple[Chart, ...] = (
    Chart(_O, "Reward", f"reward/mean {_LOW} {_HIGH} evaluate/reward", "", _REWARD, "band"),
    Chart(_O, "Reward components", "reward/*/mean"),
    Chart(_O, "KL to the reference", "objective/kl", "objective/kl_coef", _KL),
    Chart(_H, "Entropy", "policy/entropy"),
    Chart(_H, "Clipping", _CLIPPED, "", _CLIPPING, from_zero=True),
    Chart(_H, "Losses", "policy/loss", "value/loss", _LOSSES),
    Chart(_H, "Gradient norms", "policy/grad_norm", "value/grad_norm", _NORMS, from_zero=True),
    Chart(_H, "Explained variance", "value/explained_variance"),
    Chart(_H, "Size of the update", "policy/approx_kl", from_zero=True),
    Chart(_H, "Rollout engine against trainer", "mismatch/kl", "mismatch/max"),
    Chart(_R, "Response length", _LENGTHS, "response_length/clip_ratio", _LENGTH, "band", from_zero=True),
    Chart(_R, "Finish reasons", "finish_reason/*", kind="bars"),
    Chart(_E, "Held-out reward components", "evaluate/reward/*"),
    Chart(_E, "Held-out response length", "evaluate/response_length", from_zero=True),
    Chart(_P, "Seconds per stage", "seconds/*", kind="bars"),
    Chart(_P, "Tokens per second", "tokens_per_second/*", from_zero=True),
    Chart(_P, "Memory (GiB)", "memory_gib/*", from_zero=True),
    Chart(_P, "GPU memory (GiB)", "gpu_memory_gib/*", from_zero=True),
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
    from plotly.offline import get_plotlyjs

    names = list(dict.fromkeys(name for row in rows for name in row))
    figures = ((chart, figure(chart, rows, names)) for chart in CHARTS)
    shown = {f"chart-{i}": (chart, made) for i, (chart, made) in enumerate(figures) if made}
    parts = [_header(run, rows)]
    if rows:
        parts += [_sections(shown), _table(rows)]
    if rows and rows[-1]["iteration"] > 0:
        parts.append(_samples(run, int(rows[-1]["iteration"]), samples))
    parts.append(_configuration(run))
    if shown:
        data = json.dumps({key: made for key, (_, made) in shown.items()}).replace("<", "\\u003c")
        parts.append(f'<script type="application/json" id="figures">{data}</script>')
        parts += [f"<script>{get_plotlyjs()}</script>", f"<script>{_SCRIPT}</script>"]
    head = _HEAD.format(title=escape(run.identity.name), style=_STYLE)
    return f"{head}<body><main>{''.join(parts)}</main></body></html>\n"


def figure(chart: Chart, rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any] | None:
    """A plotly figure with colours as CSS variables, or None when no row has the chart's numbers.

    Args:
        names: all names that occur in ``rows``.
    """
    if chart.kind == "band":
        upper = _band(chart.names.split(), rows)
    else:
        upper = [
            _bars(rows, *found) if chart.kind == "bars" else _line(rows, *found)
            for found in _series(chart.names.split(), names)
        ]
    if not upper:
        return None
    lower = [_line(rows, name, label, 1 + i, "y2") for name, label, i in _series(chart.lower.split(), names)]
    return {"data": [*upper, *lower], "layout": _layout(chart, rows, len(upper) + len(lower), bool(lower))}


def _series(patterns: Iterable[str], names: Sequence[str]) -> list[tuple[str, str, int]]:
    """(name, label, colour) of the numbers that the patterns mean."""
    found: list[tuple[str, str, int]] = []
    for pattern in patterns:
        before, _, after = pattern.partition("*")
        for name in names:
            metric = describe(name)
            if metric is None or metric.name != pattern:
                continue
            label = name[len(before) : len(name) - len(after)] if "*" in pattern else name
            colour = _STAGES.index(Stage(label)) if label in _STAGES else len(found)
            found.append((name, label, colour))
    return found


def _points(rows: Sequence[Row], name: str) -> dict[str, list[float | None]]:
    """x and y; six digits are enough to look at, and what is not finite leaves a gap."""
    found = [(row["iteration"], row[name]) for row in rows if name in row]
    y = [float(f"{value:.6g}") if math.isfinite(value) else None for _, value in found]
    return {"x": [iteration for iteration, _ in found], "y": y}


def _line(rows: Sequence[Row], name: str, label: str, colour: int, axis: str = "y") -> dict[str, Any]:
    points = _points(rows, name)
    dash = ("solid", "dash", "dot", "dashdot")[colour // _COLOURS % 4]
    width = 2 if len(points["x"]) <= _MANY else 1
    line = {"color": f"var(--c{colour % _COLOURS})", "width": width, "dash": dash}
    mode = "lines+markers" if len(points["x"]) <= _FEW else "lines"
    style = {"mode": mode, "line": line, "marker": {"size": 5}, "yaxis": axis}
    return {"type": "scatter", "name": escape(label), **points, **style}


def _bars(rows: Sequence[Row], name: str, label: str, colour: int) -> dict[str, Any]:
    marker = {"color": f"var(--c{colour % _COLOURS})", "line": {"width": 0}}
    return {"type": "bar", "name": escape(label), **_points(rows, name), "marker": marker}


def _band(names: Sequence[str], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line between two edges, and diamonds. The area between the edges is shaded."""
    rows = [_with_edges(row) for row in rows]
    middle, low, high, *dots = names
    known = {name for row in rows for name in row}
    edge = {"mode": "lines", "line": {"width": 0, "color": "var(--c0)"}, "showlegend": False}
    area = {"fill": "tonexty", "fillcolor": "var(--c0-soft)"}
    traces = []
    if {middle, low, high} <= known:
        traces += [_line(rows, low, low, 0) | edge, _line(rows, high, high, 0) | edge | area]
    traces += [_line(rows, name, name, 0) for name in [middle] if name in known]
    for name in known & set(dots):
        points = _line(rows, name, name, 1)
        marker = {"size": 9 if len(points["x"]) <= _MANY else 4, "symbol": "diamond", "color": "var(--c1)"}
        traces.append(points | {"mode": "markers", "marker": marker})
    return traces


def _with_edges(row: Row) -> Row:
    if "reward/mean" not in row or "reward/std" not in row:
        return row
    mean, std = row["reward/mean"], row["reward/std"]
    return {**row, _LOW: mean - std, _HIGH: mean + std}


def _layout(chart: Chart, rows: Sequence[Row], series: int, has_lower: bool) -> dict[str, Any]:
    first, last = rows[0]["iteration"], rows[-1]["iteration"]
    lines = {"gridcolor": "var(--line)", "zerolinecolor": "var(--axis)", "automargin": True}
    title = {"text": "iteration", "standoff": 8, "font": {"size": 12}}
    x = {**lines, "title": title, "zeroline": False, "tickformat": "d", "range": [first - 0.6, last + 0.6]}
    x |= {"unifiedhovertitle": {"text": "iteration %{x}"}} | ({"dtick": 1} if last - first <= _FEW else {})
    y = {**lines, "hoverformat": ".4~g", "exponentformat": "e", "nticks": 6}
    y["rangemode"] = "tozero" if chart.from_zero else "normal"
    upper = {"domain": [0.4, 1.0] if has_lower else [0.0, 1.0]}
    lower = {"yaxis2": {**y, "domain": [0.0, 0.3], "nticks": 4}} if has_lower else {}
    x |= {"anchor": "y2"} if has_lower else {}
    text = {"family": "system-ui, sans-serif", "size": 12, "color": "var(--soft)"}
    x |= {"spikecolor": "var(--axis)", "spikethickness": 1, "spikedash": "solid"}
    hover = {"bgcolor": "var(--panel)", "bordercolor": "var(--axis)", "font": {"color": "var(--ink)"}}
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    return {
        "height": 320,
        "margin": {"l": 52, "r": 12, "t": 12, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": text,
        "xaxis": x,
        "yaxis": {**y, **upper},
        **lower,
        "showlegend": series > 1,
        "legend": legend,
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "hoverlabel": {**hover, "namelength": -1},
        "barmode": "stack",
        "bargap": 0.15,
    }


def _header(run: Run, rows: Sequence[Row]) -> str:
    """Name, outcome, and what to do next."""
    done = int(rows[-1]["iteration"]) if rows else 0
    facts = {"iterations": f"{done} of {run.config.iterations}", **_outcome(run, rows)}
    items = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(text)}</dd></div>" for key, text in facts.items()
    )
    command = escape(f"slurm-ppo resume {shlex.quote(str(run.paths.root))}")
    if done == 0:
        note = f"No iteration is committed yet. To start or continue the run: <code>{command}</code>"
    elif done < run.config.iterations:
        left = duration(rows[-1].get("seconds/remaining"))
        note = f"About {left} remain at the recent pace. If the run has stopped: <code>{command}</code>"
    else:
        note = "The run is complete."
    return f"<header><h1>{escape(run.identity.name)}</h1><dl>{items}</dl><p>{note}</p></header>"


def _outcome(run: Run, rows: Sequence[Row]) -> dict[str, str]:
    facts = {}
    if means := [row["reward/mean"] for row in rows if "reward/mean" in row]:
        facts["mean reward, first → last"] = f"{number(means[0])} → {number(means[-1])}"
    if run.paths.best.exists():
        best = json.loads(run.paths.best.read_text())
        facts["best on held-out prompts"] = f"{number(best['reward'])} (policy {best['iteration']})"
    if rows and "seconds/elapsed" in rows[-1]:
        facts["elapsed"] = duration(rows[-1]["seconds/elapsed"])
    return facts


def duration(seconds: float | None) -> str:
    """Seconds as people say them: ``42 s``, ``58 min``, ``3 h 12 min``."""
    if seconds is None:
        return "an unknown time"
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _sections(shown: Mapping[str, tuple[Chart, Any]]) -> str:
    """The charts' places, under a heading for each section that has any."""
    parts = []
    for section in Section:
        inside = [
            _place(key, chart, made) for key, (chart, made) in shown.items() if chart.section is section
        ]
        if inside:
            title = escape(section[0].upper() + section[1:])
            parts.append(f'<section><h2>{title}</h2><div class="grid">{"".join(inside)}</div></section>')
    return "".join(parts) + "<noscript><p>The charts need JavaScript.</p></noscript>"


def _place(key: str, chart: Chart, made: Mapping[str, Any]) -> str:
    caption = chart.caption or meaning(chart.names.split()[0])
    if not chart.caption and "yaxis2" in made["layout"]:
        caption += f"; below: {meaning(chart.lower.split()[0])}"
    title, caption = escape(chart.title), escape(caption)
    kind = "card wide" if chart is CHARTS[0] else "card"
    plot = f'<div class="plot" id="{key}" role="img" aria-label="{title}: {caption}"></div>'
    return f'<div class="{kind}"><h3>{title}</h3><p class="caption">{caption}</p>{plot}</div>'


def meaning(name: str) -> str:
    """What METRICS says about a name; the name itself when it says nothing."""
    metric = describe(name)
    return metric.meaning if metric else name


def _table(rows: Sequence[Row]) -> str:
    """The newest rows first, in a box that scrolls by itself."""
    columns = [
        column for column in (*COLUMNS, *_MORE_COLUMNS) if any(column.value(row) is not None for row in rows)
    ]
    tips = (escape("; ".join(meaning(name) for name in column.names)) for column in columns)
    heads = (
        f'<th scope="col" title="{tip}">{escape(c.title)}</th>' for tip, c in zip(tips, columns, strict=True)
    )
    lines = (
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in cells(row, columns))}</tr>"
        for row in reversed(rows[-_TABLE_ROWS:])
    )
    title = "Iterations" if len(rows) <= _TABLE_ROWS else f"Newest {_TABLE_ROWS} iterations"
    table = f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    box = f'<div class="card scroll" tabindex="0" role="region" aria-label="{title}">{table}</div>'
    return f"<section><h2>{title}</h2>{box}</section>"


def _samples(run: Run, iteration: int, samples: Sequence[Sample]) -> str:
    chosen = choose_samples(samples)
    if chosen:
        text = f"From the first shard of iteration {iteration}, by total reward."
    else:
        text = f"The responses of iteration {iteration} are no longer in {run.paths.root}, or cannot be read."
    cards = "".join(_card(word, sample) for word, sample in chosen)
    head = f'<h2>Sample responses</h2><p class="caption">{escape(text)}</p>'
    return f'<section>{head}<div class="grid">{cards}</div></section>'


def _card(word: str, sample: Sample) -> str:
    response = escape(sample.response) or "<i>empty</i>"
    return (
        f'<article class="card"><h3>{escape(word)} <span>reward {number(sample.reward)}</span></h3>'
        f'<pre class="prompt" tabindex="0" aria-label="prompt">{escape(sample.prompt)}</pre>'
        f'<pre tabindex="0" aria-label="response">{response}</pre></article>'
    )


def _configuration(run: Run) -> str:
    identity = run.identity
    made = datetime.fromtimestamp(identity.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = f"Run {identity.id}, made {made} by slurm-ppo {identity.version}."
    details = f"<summary>Resolved configuration</summary><pre>{escape(to_yaml(run.config))}</pre>"
    return f'<section><details>{details}</details></section><footer class="caption">{escape(text)}</footer>'


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
 script-src 'unsafe-inline'; img-src data: blob:; font-src data:">
<link rel="icon" href="data:,"><style>{style}</style></head>
"""

_STYLE = """
:root { --bg: #f6f7f8; --panel: #fff; --ink: #1d2126; --soft: #565f6b; --line: #e4e7ea; --axis: #b3bac2;
  --c0: #0072b2; --c1: #c65200; --c2: #00855f; --c3: #a8487f; --c4: #946200; --c5: #636b76;
  --c0-soft: rgba(0, 114, 178, .16); }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14171b; --panel: #1c2026; --ink: #e8eaed; --soft: #a9b1bc; --line: #2e343c; --axis: #58616c;
    --c0: #56b4e9; --c1: #f5894a; --c2: #34c99a; --c3: #e08fc2; --c4: #e6b84a; --c5: #b3bac4;
    --c0-soft: rgba(86, 180, 233, .2); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 20px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0; }
h3 span { font-weight: 400; color: var(--soft); }
dl { display: flex; flex-wrap: wrap; gap: 16px 40px; margin: 0 0 12px; }
dt, .caption { color: var(--soft); font-size: 13px; }
dd { margin: 0; font-size: 20px; font-variant-numeric: tabular-nums; }
p { margin: 0; }
code, pre { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
header code { background: var(--line); padding: 1px 5px; border-radius: 4px; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
section > .caption { margin: -8px 0 12px; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 16px;
  min-width: 0; }
.wide { grid-column: 1 / -1; }
.plot { margin: 4px -8px -8px; }
.scroll { overflow: auto; max-height: 460px; padding: 0; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--panel); font-weight: 600; }
tr:last-child td { border-bottom: 0; }
pre { white-space: pre-wrap; margin: 8px 0 0; max-height: 260px; overflow: auto; }
.prompt { color: var(--soft); border-left: 3px solid var(--line); padding-left: 10px; }
details pre { max-height: none; }
summary { cursor: pointer; font-weight: 600; margin-top: 40px; }
footer { margin-top: 16px; }
:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
@media (max-width: 800px) { main { padding: 20px 12px 32px; } .grid { grid-template-columns: minmax(0, 1fr); }
  .card { padding: 12px; } dl { gap: 12px 28px; } dd { font-size: 18px; } .scroll { padding: 0; } }
"""

_SCRIPT = """
const source = document.getElementById("figures").textContent;
const options = { responsive: true, displayModeBar: false };
function draw() {
  const style = getComputedStyle(document.documentElement);
  const text = source.replace(/var\\((--[\\w-]+)\\)/g, (_, name) => style.getPropertyValue(name).trim());
  for (const [id, figure] of Object.entries(JSON.parse(text))) {
    if (matchMedia("(pointer: coarse)").matches) figure.layout.dragmode = false;  // leave swipes to the page
    Plotly.react(id, figure.data, figure.layout, options);
  }
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""
