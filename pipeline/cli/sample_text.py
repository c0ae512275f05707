"""Samples as text for a terminal, or as JSON lines. Pure. What a model wrote is shown, and never obeyed."""

import json
import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.api.values import Samples
from pipeline.metrics.samples import Choice, Sample
from pipeline.text import number, visible

_INDENT, _DEEPER = "  ", "    "
_NARROWEST = 20
_ZERO_WIDTH = frozenset({"Mn", "Me", "Cf"})
"""Unicode categories of characters that take no column: marks upon others, and joiners."""


def as_text(samples: Samples, title: str, width: int, longest: int | None) -> Iterator[str]:
    """Yield the lines that show samples.

    Args:
        title: name of the run.
        width: columns of the terminal.
        longest: most lines of a text; of longer ones the middle is left out. None: all of it.
    """
    yield from wrapped(_heading(samples, title), width)
    for choice, sample in zip(samples.choices, samples.rows, strict=True):
        yield ""
        yield from _one(choice, sample, width, longest)


def as_json(samples: Samples) -> Iterator[str]:
    """Yield a line of JSON for each sample, in ASCII. A number that is not finite is null."""
    for choice, sample in zip(samples.choices, samples.rows, strict=True):
        content = {"choice": choice} | asdict(sample)
        content["turns"] = [turn._asdict() for turn in sample.turns]
        yield json.dumps(_finite(content), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _heading(samples: Samples, title: str) -> str:
    scored = f"{samples.num_scored} responses" if samples.num_scored != 1 else "1 response"
    pending = f", {samples.num_pending} shards to come" if samples.num_pending else ""
    mean = number(samples.reward_mean)
    writer = f"by policy {samples.iteration - 1}"
    return (
        f"{visible(title)}, iteration {samples.iteration}, {writer}: {len(samples.rows)} of {scored}, "
        f"mean reward {mean}{pending}"
    )


def _one(choice: Choice | None, sample: Sample, width: int, longest: int | None) -> Iterator[str]:
    yield from wrapped(_facts(choice, sample), width)
    parts = [("prompt", sample.prompt)]
    parts += [(turn.role, turn.text) for turn in sample.turns] or [("response", sample.response)]
    for who, text in parts:
        yield f"{_INDENT}{_on_one_line(who)}:"
        lines = [line for row in _rows_of(text) for line in wrapped(row, width - len(_DEEPER))]
        yield from (f"{_DEEPER}{line}".rstrip() for line in _without_middle(lines, longest))


def _facts(choice: Choice | None, sample: Sample) -> str:
    """Return what is known about a sample, in one line."""
    scores = ", ".join(f"{_on_one_line(name)} {number(s)}" for name, s in sample.components.items())
    facts = [f"reward {number(sample.reward)}" + (f" ({scores})" if scores else "")]
    if sample.kl is not None:
        facts.append(f"KL {number(sample.kl)}")
    facts.append(f"{sample.length} token{'' if sample.length == 1 else 's'}")
    if sample.turns:
        facts.append(f"{sample.num_turns} turn{'' if sample.num_turns == 1 else 's'}")
    facts += [_on_one_line(sample.finish_reason), f"prompt {_on_one_line(sample.prompt_id)}"]
    return f"{choice or 'sample'}: {', '.join(facts)}, sample {sample.sample_index}"


def _on_one_line(text: str) -> str:
    return " ".join(_rows_of(text))


def _rows_of(text: str) -> list[str]:
    """Return the lines of a foreign text, without anything that a terminal would obey."""
    return [row.expandtabs(4) for row in visible(text.replace("\r\n", "\n")).split("\n")]


def _without_middle(lines: Sequence[str], longest: int | None) -> list[str]:
    if longest is None or len(lines) <= longest:
        return list(lines)
    first, last = longest * 2 // 3, longest - longest * 2 // 3
    note = f"[{len(lines) - first - last} lines left out; --full shows them]"
    return [*lines[:first], note, *lines[len(lines) - last :]]


def wrapped(row: str, width: int) -> list[str]:
    """Break a line between words where there are any, so that no piece takes more columns than ``width``.

    At least one piece; a piece is as wide as a terminal shows it: East Asian letters take two columns.
    """
    pieces, width = [], max(width, _NARROWEST)
    while (end := _room(row, width)) < len(row):
        space = row.rfind(" ", 1, end + 1)
        cut = space if space > 0 and row[:space].strip() else end
        pieces.append(row[:cut].rstrip())
        row = row[cut:].lstrip(" ") if cut == space else row[cut:]
    return [*pieces, row]


def _room(row: str, width: int) -> int:
    """Return how many characters of a line fit into so many columns, at least one."""
    taken = 0
    for count, letter in enumerate(row):
        taken += _columns(letter)
        if taken > width:
            return max(count, 1)
    return len(row)


def _columns(letter: str) -> int:
    if letter.isascii():
        return 1
    if unicodedata.category(letter) in _ZERO_WIDTH:
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
