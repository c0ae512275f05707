"""The W&B workspace of a project, built from the tables that the report and the rows are made of.

The charts of :data:`pipeline.metrics.catalogue.CHARTS` come first in each section, then a panel for every
other metric of METRICS. All of it is pure; :mod:`pipeline.tracking.push` carries it to W&B.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.evaluate import COMMAND_PREFIX
from pipeline.metrics.catalogue import CHARTS, METRICS, SAMPLE_TABLE, Chart, Metric, Section
from pipeline.run.tasks import WORK_STAGES, Stage
from pipeline.tracking.state import MEASURED_STEP

NAME = "slurm-ppo"
"""Initial name of the workspace; people may rename it."""
SAMPLES = "samples"
"""Section of the responses; it holds no numbers."""
X_AXIS = "iteration"
NOT_SHOWN = frozenset({X_AXIS, "policy_version", "slurm/job_id/*"})
"""Numbers without a panel: the x-axis, what follows from it, and ids that happen to be numbers."""

Spec = dict[str, Any]
"""A workspace as W&B stores it."""

_MARK = "slurmppo-"
"""Prefix of the ids of our panels, which tells them from panels that people have added."""
_OPEN = (Section.OBJECTIVE, Section.REWARDS, Section.HEALTH)
_COLUMNS = ("summary:iteration", "summary:reward/mean", "summary:evaluate/reward")
"""Columns pinned in the list of runs."""
_MOST_PINNED = 20
"""Most runs that W&B keeps in view (pinned) at once."""
_JOB_KINDS = f"({'|'.join(s for s in WORK_STAGES if s is not Stage.SCORE)}|{Stage.SCORE}-[^/]+)"
_STANDS_FOR = {"seconds/*": _JOB_KINDS, "eval/*": ".+"}
"""Pattern for ``*`` where other metrics would match, too; elsewhere it is anything without a slash."""


@dataclass(frozen=True)
class Panel:
    """Curves over iterations, of every run that is shown."""

    section: Section
    title: str
    names: tuple[str, ...]
    """Names of METRICS; ``*`` is a curve per match."""
    from_zero: bool = False

    @property
    def regex(self) -> str | None:
        """Regular expression by which W&B finds the curves; None when their names are known.

        ``reward/*/mean`` also finds ``reward/greedy/mean`` and the like: there is no way to leave them out.
        """
        if not any("*" in name for name in self.names):
            return None
        pattern = "|".join(map(_pattern, self.names))
        return f"^{pattern}$" if len(self.names) == 1 else f"^({pattern})$"


def _pattern(name: str) -> str:
    return _STANDS_FOR.get(name, "[^/]+").join(map(re.escape, name.split("*")))


def panels(charts: Sequence[Chart] = CHARTS, metrics: Sequence[Metric] = METRICS) -> list[Panel]:
    """Make the charts' panels, then one for each metric that is in none of them."""
    known = {metric.name for metric in metrics}
    drawn = [panel for chart in charts for panel in _of_chart(chart, known)]
    shown = {name for panel in drawn for name in panel.names} | NOT_SHOWN
    return drawn + [Panel(m.section, m.name, (m.name,)) for m in metrics if m.name not in shown]


def _of_chart(chart: Chart, known: Iterable[str]) -> list[Panel]:
    """Make a panel, and one more for curves of another unit, without what only the report computes."""
    upper = tuple(name for name in chart.names.split() if name in known)
    lower = tuple(name for name in chart.lower.split() if name in known)
    made = [Panel(chart.section, chart.title, upper, chart.from_zero)] if upper else []
    return made + ([Panel(chart.section, f"{chart.title}: {chart.lower}", lower)] if lower else [])


def build(charts: Sequence[Chart] = CHARTS, metrics: Sequence[Metric] = METRICS) -> Spec:
    """Build the whole workspace. The same tables give the same bytes: nothing in it is random."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports.v2.interface import WeavePanelSummaryTable

    drawn = panels(charts, metrics)
    inside = {section: [panel for panel in drawn if panel.section is section] for section in Section}
    sections = [_section(section, held, metrics) for section, held in inside.items() if held]
    names = [section.name for section in sections]
    place = names.index(Section.EVALUATION) if Section.EVALUATION in names else len(names)
    # The newest table of every run that is shown.
    layout, table = (
        ws.SectionLayoutSettings(columns=1, rows=1),
        WeavePanelSummaryTable(table_name=SAMPLE_TABLE),
    )
    sections.insert(place, ws.Section(name=SAMPLES, panels=[table], layout_settings=layout))
    workspace = ws.Workspace(
        entity="",
        project="",
        name=NAME,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=X_AXIS),
        runset_settings=ws.RunsetSettings(pinned_columns=list(_COLUMNS)),
        auto_generate_panels=False,
    )
    spec: Spec = workspace._to_model().spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    for section in sections_of(spec):
        for panel in section["panels"]:
            panel["__id__"] = _id(section["name"], panel)
    return spec


def _section(section: Section, held: Sequence[Panel], metrics: Sequence[Metric]) -> Any:
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports.v2.interface import MarkdownPanel

    curves = [_line_plot(panel) for panel in held]
    meanings = "\n".join(f"- `{m.name}`: {m.meaning}" for m in metrics if m.section is section)
    return ws.Section(
        name=str(section),
        is_open=section in _OPEN,
        panels=[*curves, MarkdownPanel(markdown=meanings)],
        layout_settings=ws.SectionLayoutSettings(columns=3, rows=2),
        panel_settings=ws.SectionPanelSettings(x_axis=X_AXIS),
    )


def _line_plot(panel: Panel) -> Any:
    """Plot a panel. The x-axis is given each time: a panel does not inherit its section's."""
    from wandb_workspaces.reports.v2.interface import LinePlot

    curves = {"metric_regex": panel.regex} if panel.regex else {"y": list(panel.names)}
    range_y = (0.0 if panel.from_zero else None, None)
    x = MEASURED_STEP if panel.names[0].startswith(COMMAND_PREFIX) else X_AXIS
    return LinePlot(title=panel.title, x=x, range_y=range_y, **curves)


def _id(section: str, panel: Mapping[str, Any]) -> str:
    """Derive a panel's id from section and title only, so that what people set on a panel stays."""
    title = panel["config"].get("chartTitle") or panel["viewType"]
    return _MARK + hashlib.sha256(f"{section}/{title}".encode()).hexdigest()[:8]


def sections_of(spec: Spec) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = spec["section"]["panelBankConfig"]["sections"]
    return found


def merged(existing: Spec, ours: Spec) -> Spec:
    """Update our panels in ``existing``. Pure.

    Everything else stays as people have it: other sections, panels of theirs in ours, the order of sections,
    which are open, the list of runs and its filters, and all settings.
    """
    wanted = {section["name"]: section for section in sections_of(ours)}
    updated = (_with_panels(section, wanted.get(section["name"])) for section in sections_of(existing))
    sections = [section for section in updated if section is not None]
    names = [section["name"] for section in sections]
    place = 0
    for name, section in wanted.items():
        if name in names:
            place = names.index(name) + 1
        else:
            sections.insert(place, section)
            names.insert(place, name)
            place += 1
    bank = existing["section"]["panelBankConfig"] | {"sections": sections}
    return existing | {"section": existing["section"] | {"panelBankConfig": bank}}


def _with_panels(existing: dict[str, Any], ours: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Join our panels and other people's in a section; None if it was ours and nothing is left of it."""
    theirs = [panel for panel in existing["panels"] if not is_ours(panel)]
    if ours is None and not theirs and existing["panels"]:
        return None
    return existing | {"panels": [*(ours["panels"] if ours else ()), *theirs]}


def is_ours(panel: Mapping[str, Any]) -> bool:
    return str(panel.get("__id__", "")).startswith(_MARK)


def pinned(spec: Spec, runs: Sequence[str]) -> Spec:
    """Keep these runs (ids of W&B's database) in view, besides earlier ones; at most the newest. Pure."""
    first, *others = spec["section"]["runSets"]
    if not runs:
        return spec
    before = [run for run in first.get("pinnedRunIds", ()) if run not in runs]
    first = first | {"pinnedRunIds": [*before, *runs][-_MOST_PINNED:]}
    return spec | {"section": spec["section"] | {"runSets": [first, *others]}}
