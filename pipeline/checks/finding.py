"""Findings of checks: a verdict, what was measured, and what to do; and their text for people."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from pipeline.config.issue import ConfigError

WIDTH = 80
_INDENT = 11
SCHEMA = 1


class Verdict(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    """A run works, and this is to be known."""
    PROBLEM = "problem"
    """A run would fail, or be wrong."""
    SKIPPED = "skipped"
    """Nothing was measured."""


class CheckGroup(StrEnum):
    """Subject of a check; the order is that of the output."""

    SETTINGS = "Settings"
    MACHINE = "Machine"
    SPACE = "Space"
    FILES = "Files"
    SLURM = "Slurm"
    WANDB = "W&B"
    REHEARSAL = "Rehearsal"
    RUN = "Run"


@dataclass(frozen=True)
class Finding:
    """Result of looking at one thing."""

    title: str
    verdict: Verdict
    measured: str
    """Measurement in words, with its numbers."""
    advice: str = ""
    """Instruction in a line; empty where nothing is to be done."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measurements for scripts; units are in the names."""


def ok(title: str, measured: str, **numbers: float) -> Finding:
    return Finding(title, Verdict.OK, measured, numbers=numbers)


def warning(title: str, measured: str, advice: str, **numbers: float) -> Finding:
    return Finding(title, Verdict.WARNING, measured, advice, numbers)


def problem(title: str, measured: str, advice: str, **numbers: float) -> Finding:
    return Finding(title, Verdict.PROBLEM, measured, advice, numbers)


def skipped(title: str, why: str, advice: str = "") -> Finding:
    return Finding(title, Verdict.SKIPPED, why, advice)


Look = Callable[[], Finding | Iterable[Finding]]


def findings_of(look: Look) -> Iterator[Finding]:
    """Yield what a look finds, each finding once it is made: an error later on does not lose it."""
    found = look()
    yield from [found] if isinstance(found, Finding) else found


@dataclass(frozen=True)
class Check:
    """One look at one thing, which may hang."""

    group: CheckGroup
    title: str
    """Title of the finding where the check itself gives none: it hung or broke down."""
    look: Look
    limit: float = 10.0
    """Seconds after which it counts as hung."""
    place: str = ""
    """The folder or service that it asks: once one check of it hung, the others are not tried."""
    gate: str = ""
    """Name of what counts as missing unless all findings of this check are ok."""
    needs: str = ""
    """Gate that must be open: if it is closed, the check would only say the same again."""


Grouped = tuple[CheckGroup, Finding]
_BEGINNINGS = {Verdict.WARNING: "warning: ", Verdict.SKIPPED: "not checked: "}


def line(finding: Finding) -> str:
    """Render a finding for commands that print a line for each."""
    beginning = _BEGINNINGS.get(finding.verdict, "")
    is_titled = finding.title and finding.verdict is not Verdict.SKIPPED
    return f"{beginning}{finding.title}: {finding.measured}" if is_titled else beginning + finding.measured


def of_line(text: str, verdict: Verdict = Verdict.OK) -> Finding:
    """Return the finding of a line that a room below says: of ``verdict``, unless it begins as others do."""
    for other, beginning in _BEGINNINGS.items():
        if text.startswith(beginning):
            verdict, text = other, text.removeprefix(beginning)
            break
    title, colon, rest = text.partition(": ")
    is_titled = colon and verdict is not Verdict.SKIPPED
    return Finding(title, verdict, rest) if is_titled else Finding("", verdict, text)


def refuse(found: Iterable[Finding]) -> None:
    """Raise ConfigError with every problem."""
    if problems := [one.measured for one in found if one.verdict is Verdict.PROBLEM]:
        raise ConfigError("\n".join(problems))


def count(found: Sequence[Grouped], verdict: Verdict) -> int:
    return sum(finding.verdict is verdict for _, finding in found)


_WORST = (Verdict.PROBLEM, Verdict.WARNING, Verdict.OK, Verdict.SKIPPED)


def to_json(subject: str, found: Sequence[Grouped]) -> dict[str, Any]:
    """Return an object with stable keys. The worst findings come first."""
    ranked = sorted(found, key=lambda grouped: _WORST.index(grouped[1].verdict))
    return {
        "schema": SCHEMA,
        "subject": subject,
        "problems": count(found, Verdict.PROBLEM),
        "warnings": count(found, Verdict.WARNING),
        "findings": [{"group": str(group), **asdict(finding)} for group, finding in ranked],
    }


_COLOURS = {Verdict.OK: 32, Verdict.WARNING: 33, Verdict.PROBLEM: 31, Verdict.SKIPPED: 2}


def describe(group: CheckGroup | None, finding: Finding, in_colour: bool = False) -> str:
    """Render a finding in a few lines of at most 80 characters, under its group's name where that is new."""
    verdict = str(finding.verdict).ljust(_INDENT - 2)
    if in_colour:
        verdict = f"\x1b[{_COLOURS[finding.verdict]}m{verdict}\x1b[0m"
    lines = _wrapped(f"{finding.title}: {finding.measured}", _INDENT)
    if finding.advice:
        lines += _wrapped(f"-> {finding.advice}", _INDENT + 3)
    head = f"\n{group}\n" if group else ""
    return f"{head}  {verdict}{lines[0].strip()}" + "".join(f"\n{line}" for line in lines[1:])


def _wrapped(text: str, indent: int) -> list[str]:
    """Break a text into lines; those after the first are indented."""
    first, rest = " " * _INDENT, " " * indent
    lines = textwrap.TextWrapper(WIDTH, first, rest, break_long_words=False, break_on_hyphens=False)
    return lines.wrap(text)


def conclusion(found: Sequence[Grouped], next_command: str) -> str:
    """Render the last lines."""
    numbers = {verdict: count(found, verdict) for verdict in (Verdict.PROBLEM, Verdict.WARNING)}
    counted = ", ".join(f"{n} {verdict}{'s' * (n != 1)}" for verdict, n in numbers.items())
    return f"\n{counted}\nnext: {next_command}"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
