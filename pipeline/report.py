"""One HTML file about a run: opens from disk, loads nothing, reads in light and dark, wide and narrow.

Colours in the charts are names of CSS variables; a small script puts in the values of the reader's colour
scheme and draws again when the scheme changes.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from pipeline import journal
from pipeline.charts import CHARTS, Chart, figure, meaning
from pipeline.commits import CorruptData, read_record, replace_durably
from pipeline.compose import to_yaml
from pipeline.metrics import Section, evaluation_metrics
from pipeline.runs import Run
from pipeline.tasks import Stage, Task
from pipeline.views import COLUMNS, Column, Row, cells, duration, number

_TABLE_ROWS = 500
"""Iterations that the table holds."""


@dataclass(frozen=True)
class Sample:
    """One response, as the reward stage saw it."""

    prompt: str
    response: str
    reward: float


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

    Before them, if the policy that the run begins with was evaluated, a row with that evaluation alone.
    """
    rows: dict[int, Row] = {}
    first = run.plan.start
    try:
        start = read_record(run.paths, Task(first, Stage.EVALUATE))
    except CorruptData:
        start = None
    if start is not None:
        rows[first] = {"iteration": first, **evaluation_metrics(start)}
    rows |= {row["iteration"]: row for row in journal.read(run.paths.metrics) if "iteration" in row}
    return [rows[iteration] for iteration in sorted(rows)]


def read_samples(run: Run, iteration: int) -> list[Sample]:
    """Samples of the iteration's first shard with their rewards; none if they are gone or corrupt."""
    from pipeline.schemas import REWARD, ROLLOUT, is_sampled
    from pipeline.shards import read_shard

    try:
        rollout = read_record(run.paths, Task(iteration, Stage.ROLLOUT))
        reward = read_record(run.paths, Task(iteration, Stage.REWARD))
        if rollout is None or reward is None:
            return []
        texts, scores = read_shard(run.paths, rollout, ROLLOUT), read_shard(run.paths, reward, REWARD)
        texts, scores = texts.filter(is_sampled(texts)), scores.filter(is_sampled(scores))
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
    if rows and rows[-1]["iteration"] > run.plan.start:
        parts.append(_samples(run, int(rows[-1]["iteration"]), samples))
    parts.append(_configuration(run))
    if shown:
        data = json.dumps({key: made for key, (_, made) in shown.items()}).replace("<", "\\u003c")
        parts.append(f'<script type="application/json" id="figures">{data}</script>')
        parts += [f"<script>{get_plotlyjs()}</script>", f"<script>{_SCRIPT}</script>"]
    head = _HEAD.format(title=escape(run.identity.name), style=_STYLE)
    return f"{head}<body><main>{''.join(parts)}</main></body></html>\n"


def _header(run: Run, rows: Sequence[Row]) -> str:
    """Name, outcome, and what to do next."""
    start = run.plan.start
    done = int(rows[-1]["iteration"]) if rows else start
    facts = {"iterations": f"{done} of {run.config.iterations}", **_outcome(run, rows)}
    items = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(text)}</dd></div>" for key, text in facts.items()
    )
    command = escape(f"slurm-ppo resume {shlex.quote(str(run.paths.root))}")
    if done == start:
        note = f"No iteration is committed yet. To start or continue the run: <code>{command}</code>"
    elif done < run.config.iterations:
        left = duration(rows[-1]["seconds/remaining"])
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
    if identity.parent:
        text += f" Forked from run {identity.parent.id} after iteration {identity.parent.iteration}."
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
