"""HTML page about a run: opens from disk, loads nothing, reads in light and dark, wide and narrow.

Colours in the charts are names of CSS variables; the script puts in the values of the reader's colour scheme
and draws again when the scheme changes.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.config.compose import to_yaml
from pipeline.metrics.advice_input import MIN_ROWS
from pipeline.metrics.catalogue import Section
from pipeline.metrics.charts import CHARTS, Chart
from pipeline.metrics.terminal import COLUMNS, Column, Row, cells
from pipeline.report.browser import sample_browser, samples_data
from pipeline.report.data import Best, ReportData
from pipeline.report.figures import figure, meaning
from pipeline.report.findings import findings
from pipeline.report.html import embedded, facts, folded, section, table, words
from pipeline.report.settings import plain_text, settings_apart
from pipeline.report.timeline import timeline
from pipeline.report.usage import usage
from pipeline.run.directory import Run
from pipeline.text import duration, number

_TABLE_ROWS = 500
"""Most iterations that the table holds."""

MORE_COLUMNS = (
    Column("KL coef", ("objective/kl_coef",)),
    Column("cut %", ("response_length/clip_ratio",), 1, scale=100),
    Column("grad norm", ("policy/grad_norm",)),
    Column("expl. var.", ("value/explained_variance",)),
)


@dataclass(frozen=True)
class Shown:
    """A chart that the page has numbers for."""

    chart: Chart
    figure: dict[str, Any]


def page(data: ReportData) -> str:
    """Render the whole document."""
    charts = charts_of(data.rows)
    used, used_figure = usage(data)
    figures = {key: shown.figure for key, shown in charts.items()}
    if used_figure:
        figures["usage-plot"] = used_figure
    places = {key: shown.chart for key, shown in charts.items()}
    is_old_enough = len(data.trained) >= MIN_ROWS
    sections = {
        "Configuration": settings(data.run),
        "What to look at": findings(data.advice, places, is_old_enough) if data.trained else "",
        "Curves": curves(charts),
        "Timeline": timeline(data),
        "Where the time went": used,
        "Samples": sample_browser(data),
        "Iterations": iteration_table(data.rows),
    }
    parts = [header(data), contents(sections), *sections.values(), footer(data)]
    data_parts = [embedded("figures", figures), samples_data(data.samples)]
    return document(data.run.identity.name, parts, data_parts, has_charts=bool(figures or data.spans))


def document(title: str, parts: Sequence[str], data_parts: Sequence[str], has_charts: bool) -> str:
    """Assemble head, body, data and scripts; plotly only where there is something to draw."""
    from plotly.offline import get_plotlyjs

    scripts = [get_plotlyjs()] if has_charts else []
    scripts.append(_own("script.js"))
    tail = "".join((*data_parts, *(f"<script>{script}</script>" for script in scripts)))
    head = _HEAD.format(title=words(title), style=_own("style.css"))
    return f"{head}<body><main>{''.join(parts)}</main>{tail}</body></html>\n"


def _own(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
 script-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'">
<link rel="icon" href="data:,"><style>{style}</style></head>
"""


# --- top -------------------------------------------------------------------------------------------------


def header(data: ReportData) -> str:
    """Render name, outcome, and what to do next."""
    run, done = data.run, data.done
    command = words(f"slurm-ppo resume {shlex.quote(str(run.paths.root))}")
    if done == run.plan.start:
        note = f"No iteration is committed yet. To start or continue the run: <code>{command}</code>"
    elif done < run.config.iterations:
        note = f"{remaining(data.rows[-1])}If the run has stopped: <code>{command}</code>"
    else:
        note = "The run is complete."
    outcome = facts(outcome_of(run, data.rows, data.best).items())
    return f"<header><h1>{words(run.identity.name)}</h1>{outcome}<p>{note}</p></header>"


def remaining(row: Row) -> str:
    left = row.get("seconds/remaining")
    return "" if left is None else f"About {duration(left)} remain at the recent pace. "


def outcome_of(run: Run, rows: Sequence[Row], best: Best | None) -> dict[str, str]:
    """Sum up how far a run came, and its results. ``rows`` as :func:`read_rows` gives them."""
    rows = [row for row in rows if row["iteration"] > run.plan.start]
    done = int(rows[-1]["iteration"]) if rows else run.plan.start
    found = {"iterations": f"{done} of {run.config.iterations}"}
    if means := [row["reward/mean"] for row in rows if "reward/mean" in row]:
        found["mean reward, first → last"] = f"{number(means[0])} → {number(means[-1])}"
    if best:
        found["best on held-out prompts"] = f"{number(best.reward)} (policy {best.iteration})"
    for name, title in (("objective/kl", "KL"), ("response_length/mean", "response length")):
        if rows and name in rows[-1]:
            found[title] = number(rows[-1][name])
    if hours := gpu_hours(rows):
        found["GPU hours"] = number(hours)
    if rows and "seconds/elapsed" in rows[-1]:
        found["elapsed"] = duration(rows[-1]["seconds/elapsed"])
    return found


def gpu_hours(rows: Sequence[Row]) -> float:
    """Sum the GPU hours of all stages and iterations for which accounting answered."""
    return sum(value for row in rows for name, value in row.items() if name.startswith("slurm/gpu_hours/"))


def contents(sections: Mapping[str, str]) -> str:
    """Render links to the sections that are there."""
    found = {title: re.match(r'<section id="([^"]+)"', text) for title, text in sections.items()}
    links = "".join(f'<a href="#{match[1]}">{words(title)}</a>' for title, match in found.items() if match)
    return f'<nav aria-label="Sections">{links}</nav>' if links else ""


def settings(run: Run) -> str:
    """Render the settings that are not the defaults, and all of the configuration, folded."""
    apart = settings_apart(run.config)
    rows = [(key, plain_text(value)) for key, value in apart.items()]
    given = table("Settings", (("key", ""), ("value", "")), rows, "settings")
    title = f"Set apart from the defaults: {len(rows)} keys"
    whole = f'<div class="card scroll"><pre>{words(to_yaml(run.config))}</pre></div>'
    return section(
        "configuration",
        "Configuration",
        folded(title, given, is_open=True),
        folded("All settings", whole),
    )


def footer(data: ReportData) -> str:
    identity = data.run.identity
    text = f"Run {identity.id} in {data.run.paths.root}, made {_moment(identity.created)} by slurm-ppo "
    text += f"{identity.version}; this page {_moment(data.now)}."
    if identity.parent:
        text += f" Forked from run {identity.parent.id} after iteration {identity.parent.iteration}."
    return f'<footer class="caption">{words(text)}</footer>'


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")


# --- curves ----------------------------------------------------------------------------------------------


def charts_of(rows: Sequence[Row]) -> dict[str, Shown]:
    """Find the charts that have numbers, by the ids of their places."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    figures = ((chart, figure(chart, rows, names)) for chart in CHARTS)
    return {chart_id(chart): Shown(chart, made) for chart, made in figures if made}


def chart_id(chart: Chart) -> str:
    """Return the id of the chart's place, to which links elsewhere lead."""
    return "chart-" + re.sub(r"[^a-z0-9]+", "-", chart.title.lower()).strip("-")


def curves(charts: Mapping[str, Shown]) -> str:
    """Render the charts' places, under a heading for each section that has any."""
    if not charts:
        return ""
    parts = []
    for part in Section:
        inside = [_place(key, shown) for key, shown in charts.items() if shown.chart.section is part]
        if inside:
            title = words(part[0].upper() + part[1:])
            parts.append(f'<h3 class="part">{title}</h3><div class="grid">{"".join(inside)}</div>')
    return section("curves", "Curves", *parts, "<noscript><p>The charts need JavaScript.</p></noscript>")


def _place(key: str, shown: Shown) -> str:
    chart = shown.chart
    text = chart.caption or meaning(chart.names.split()[0])
    if not chart.caption and "yaxis2" in shown.figure["layout"]:
        text += f"; below: {meaning(chart.lower.split()[0])}"
    title, text = words(chart.title), words(text)
    kind = "card wide" if chart is CHARTS[0] else "card"
    plot = f'<div class="plot" id="{key}" role="img" aria-label="{title}: {text}"></div>'
    return f'<div class="{kind}"><h4>{title}</h4><p class="caption">{text}</p>{plot}</div>'


def iteration_table(rows: Sequence[Row]) -> str:
    """Render the newest rows first, in a box that scrolls by itself."""
    if not rows:
        return ""
    columns = [
        column for column in (*COLUMNS, *MORE_COLUMNS) if any(column.value(row) is not None for row in rows)
    ]
    heads = [(column.title, "; ".join(map(meaning, column.names))) for column in columns]
    lines = (cells(row, columns) for row in reversed(rows[-_TABLE_ROWS:]))
    title = "Iterations" if len(rows) <= _TABLE_ROWS else f"Newest {_TABLE_ROWS} iterations"
    return section("iterations", title, table(title, heads, lines))
