"""Findings section: the advice, with links to the charts of its numbers."""

from collections.abc import Mapping, Sequence

from pipeline.metrics.advice import Advice, Severity
from pipeline.metrics.catalogue import describe
from pipeline.metrics.charts import CHARTS, Chart
from pipeline.report.html import caption, section, words

_ABOUT = "Rules that read the newest iterations; each says what it saw and what to change."


def findings(advice: Sequence[Advice], places: Mapping[str, Chart], enough: bool) -> str:
    """Render the section.

    Args:
        places: the charts on the page by the ids of their places.
        enough: whether the run has the rows that rules need.
    """
    if not advice:
        nothing = "Nothing was noticed." if enough else "Too few iterations to say anything yet."
        return section("findings", "What to look at", caption(nothing))
    items = "".join(_item(found, places) for found in advice)
    return section("findings", "What to look at", caption(_ABOUT), f'<ul class="findings">{items}</ul>')


def _item(found: Advice, places: Mapping[str, Chart]) -> str:
    links = "".join(
        f' <a href="#{words(key)}">{words(chart.title)}</a>'
        for key, chart in _charts_of(found, places).items()
    )
    return (
        f'<li class="card {found.severity}"><h3><span class="badge">{words(_WORDS[found.severity])}</span> '
        f"{words(found.title)}</h3><p>{words(found.what)}</p>"
        f"<p><b>What to change:</b> {words(found.remedy)}</p>"
        f'<p class="caption">{words(", ".join(found.metrics))}{links}</p></li>'
    )


_WORDS = {Severity.NOTE: "note", Severity.WARNING: "warning", Severity.PROBLEM: "problem"}


def _charts_of(found: Advice, places: Mapping[str, Chart]) -> dict[str, Chart]:
    """Find the charts on the page that show the numbers that a finding rests on."""
    patterns = {metric.name for name in found.metrics if (metric := describe(name))}
    return {
        key: chart
        for key, chart in places.items()
        if patterns & {*chart.names.split(), *chart.lower.split()} and chart in CHARTS
    }
