"""The picture of ``benchmarks/gang.py``: a line a case, a dot a way to run it."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LEFT, RIGHT, TOP, LINE = 760, 300, 20, 56, 30
MOST = 1.3
"""Right end of the axis, in times of the published gang."""
STYLE = """
.figure { --ink: #1b2430; --soft: #55606e; --edge: #c9d1db; --a: #b4610c; --b: #7a52b3; --c: #1769c4; }
@media (prefers-color-scheme: dark) { .figure { --ink: #e8ecf1; --soft: #a5b0bd; --edge: #434d59;
--a: #f0a357; --b: #b99be8; --c: #6db1ff; } }
.figure text { font-family: system-ui, sans-serif; font-size: 14px; fill: var(--soft); }
.figure .grid { stroke: var(--edge); } .figure .par { stroke: var(--ink); stroke-dasharray: 4 3; }
.figure .a { fill: var(--a); } .figure .b { fill: var(--b); } .figure .c { fill: var(--c); }
.figure text.a { fill: var(--a); } .figure text.b { fill: var(--b); } .figure text.c { fill: var(--c); }
"""


def across(value: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * min(value, MOST) / MOST, 1)


def picture(found: Mapping[str, Mapping[str, float]], ways: Sequence[str]) -> str:
    """Draw the wall time of each case's ways, three at most, against the published gang, as SVG."""
    down = TOP + LINE * len(found)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" class="figure" role="img" '
        f'viewBox="0 0 {WIDTH} {down + 30}">',
        "<title>seconds of an iteration, against the published gang</title>",
        f"<style>{STYLE}</style>",
        *_legend(ways),
        *_axis(down),
    ]
    for number, (name, values) in enumerate(found.items()):
        y = TOP + LINE * number + LINE // 2
        parts.append(f'<text x="{LEFT - 12}" y="{y + 5}" text-anchor="end">{escape(name)}</text>')
        parts += [
            f'<circle class="{style}" cx="{across(values[way])}" cy="{y}" r="6"/>'
            for style, way in zip("abc", ways, strict=True)
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(ways: Sequence[str]) -> list[str]:
    return [
        f'<text class="{style}" x="{LEFT + 150 * number}" y="22">● {escape(way)}</text>'
        for number, (style, way) in enumerate(zip("abc", ways, strict=True))
    ]


def _axis(down: int) -> list[str]:
    parts = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0, 1.25):
        style = "par" if value == 1 else "grid"
        x = across(value)
        parts.append(f'<line class="{style}" x1="{x}" y1="{TOP - 14}" x2="{x}" y2="{down}"/>')
        parts.append(f'<text x="{x}" y="{down + 20}" text-anchor="middle">{value:g}</text>')
    return parts
