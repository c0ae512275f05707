"""Pages made from templates. Text that goes into them may be anything: it is escaped, and made visible."""

import functools
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.text import duration, visible


class Head(NamedTuple):
    """Title of a table's column."""

    title: str
    tip: str = ""
    """Meaning, shown when the pointer is over it."""
    colour: str = ""
    """Colour of a swatch before the title; none if empty."""


def render(template: str, **context: Any) -> str:
    """Fill a template of ``templates/``. Text in ``context`` may be anything."""
    return environment().get_template(template).render(context)


@functools.cache
def environment() -> Environment:
    """Make the templates' environment: what they print is made visible and escaped, unless it is markup."""
    made = Environment(
        loader=PackageLoader("pipeline.report"),
        autoescape=True,
        finalize=lambda value: value if hasattr(value, "__html__") else visible(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.globals |= {"own": _own, "plotly": _plotly}
    made.filters |= {"duration": duration, "moment": moment}
    return made


def _own(name: str) -> str:
    """Read a style sheet or script of this package."""
    return files("pipeline.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def moment(time: float) -> str:
    """Write a unix time as a date and a time of day in UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")
