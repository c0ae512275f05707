"""docs/reference/metrics.md: every number of metrics.jsonl."""

from docs.generate.docstrings import member_docs
from docs.generate.markdown import code, page, prose, table
from pipeline.metrics.catalogue import METRICS, Section

ABOUT = """\
`metrics.jsonl` has one flat row per iteration; these are its numbers, and the metrics of the report and of
W&B. `*` stands for a component of the reward, a stage or a reason. A number is absent where what it measures
is not in the run."""


def metric_page() -> str:
    return page("Metrics", ABOUT, *(_section(section) for section in Section))


def _section(section: Section) -> str:
    rows = [(code(metric.name), metric.meaning) for metric in METRICS if metric.section is section]
    heading = f"## {section[0].upper()}{section[1:]}\n\n{prose(member_docs(Section)[section])}"
    return f"{heading}\n\n{table(('metric', 'meaning'), rows)}" if rows else ""
