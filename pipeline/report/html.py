"""Small pieces of HTML. Everything that goes into them as text is escaped here."""

import json
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories that show nothing, or change how what follows is shown."""
_KEPT = frozenset("\n\t\u200c\u200d")
"""Characters of those categories to keep: line ends, tabs, and the joiners that scripts and emoji need."""


def visible(text: str) -> str:
    """Spell out control and direction characters, so that a text cannot look like another."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(letter) for letter in text)


def _shown(letter: str) -> str:
    if letter in _KEPT or unicodedata.category(letter) not in _INVISIBLE:
        return letter
    return f"⟨U+{ord(letter):04X}⟩"


def words(text: object) -> str:
    """Make a text visible and escape it, for an element or an attribute."""
    return escape(visible(str(text)))


def embedded(key: str, data: Any) -> str:
    """Embed data for a script, as JSON that no text in it can end."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{key}">{text}</script>'


def section(key: str, title: str, *parts: str) -> str:
    return f'<section id="{key}"><h2>{words(title)}</h2>{"".join(parts)}</section>'


def caption(text: str) -> str:
    return f'<p class="caption">{words(text)}</p>'


def table(
    label: str,
    heads: Sequence[tuple[str, str]],
    rows: Iterable[Sequence[str]],
    kind: str = "",
    colours: Sequence[str | None] = (),
) -> str:
    """Render a table in a box that scrolls by itself.

    Args:
        heads: titles and what they mean.
        kind: a class of the style sheet.
        colours: colour of a swatch before each title.
    """
    swatches = [_swatch(colour) for colour in colours] or [""] * len(heads)
    titles = "".join(
        f'<th scope="col" title="{words(tip)}">{swatch}{words(title)}</th>'
        for swatch, (title, tip) in zip(swatches, heads, strict=True)
    )
    lines = "".join(f"<tr>{''.join(f'<td>{words(cell)}</td>' for cell in row)}</tr>" for row in rows)
    inside = f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"
    box = f'class="card scroll {kind}"' if kind else 'class="card scroll"'
    return f'<div {box} tabindex="0" role="region" aria-label="{words(label)}">{inside}</div>'


def _swatch(colour: str | None) -> str:
    return f'<span class="swatch" style="background: {words(colour)}"></span>' if colour else ""


def facts(pairs: Iterable[tuple[str, str]], kind: str = "facts") -> str:
    items = "".join(f"<div><dt>{words(key)}</dt><dd>{words(text)}</dd></div>" for key, text in pairs)
    return f'<dl class="{kind}">{items}</dl>'


def folded(title: str, inside: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{words(title)}</summary>{inside}</details>"
