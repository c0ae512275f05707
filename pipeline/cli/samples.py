"""``slurm-ppo samples``: an iteration's responses in the terminal."""

import json
import math
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from pipeline.cli.errors import clipped
from pipeline.metrics.responses import Selection, check_iteration, newest_scored, read_samples
from pipeline.metrics.samples import Choice, Sample, Samples
from pipeline.run.directory import Run, load_run
from pipeline.run.identity import RunError
from pipeline.run.records import find_frontier
from pipeline.run.versions import choose, split
from pipeline.text import number, visible

_OF_EACH = Selection(best=2, worst=2, at_random=2)
"""What is shown where nothing is asked for."""
_LONGEST = 24
"""Lines of a prompt or a response that are shown."""
_WIDEST = 120


def show_samples(source: str, selection: Selection, is_full: bool, is_json: bool) -> None:
    """Print responses of a run's iteration; on standard error which shards could not be read.

    Args:
        source: ``RUN``, ``RUN@ITERATION`` or ``RUN@best``. Default: the newest iteration with rewards.

    Raises:
        RunError: no such run, iteration or prompt; or nothing of the iteration has rewards that can be read.
    """
    root, word = split(source)
    run = load_run(root)
    iteration = choose(run.paths, word, 0) if word else newest_scored(run)
    if iteration is None:
        raise RunError(f"{root} has no responses with rewards yet; {_how_far(run)}")
    if selection == Selection(seed=selection.seed):
        selection = Selection(_OF_EACH.best, _OF_EACH.worst, _OF_EACH.at_random, seed=selection.seed)
    check_iteration(run, iteration)
    found = read_samples(run, iteration, selection)
    for damage in found.damage:
        say([clipped(f"left out: {damage}")], sys.stderr)
    if not found.rows:
        raise RunError(_why_none(run, found))
    width = min(shutil.get_terminal_size((80, 24)).columns, _WIDEST)
    say(as_json(found) if is_json else as_text(found, str(root), width, None if is_full else _LONGEST))


def say(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines; characters that the terminal's encoding does not have are spelled out."""
    file = file or sys.stdout
    encoding = file.encoding or "utf-8"
    for line in lines:
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=file)


def _why_none(run: Run, found: Samples) -> str:
    """Say why an iteration shows no responses, and what to do."""
    where, root = f"iteration {found.iteration} of {run.paths.root}", shlex.quote(str(run.paths.root))
    if found.damage:
        return f"none of the responses of {where} can be read; to look closer: slurm-ppo doctor {root}"
    if found.iteration <= find_frontier(run.plan, run.paths).updated:
        return f"the responses of {where} are no longer there"
    return f"{where} has no rewards yet; {_how_far(run)}"


def _how_far(run: Run) -> str:
    return f"how far it is: slurm-ppo status {shlex.quote(str(run.paths.root))}"


# --- text: what a model wrote is shown, and never obeyed ---

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
        yield json.dumps(finite(content), allow_nan=False)


def finite(value: Any) -> Any:
    """Return the value with null for numbers that are not finite, which JSON has not."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _heading(samples: Samples, title: str) -> str:
    scored = f"{samples.num_scored} responses" if samples.num_scored != 1 else "1 response"
    pending = f", {samples.num_pending} shards to come" if samples.num_pending else ""
    mean = number(samples.reward_mean)
    writer = f"by policy {samples.writer}"
    return (
        f"{visible(title)}, iteration {samples.iteration}, {writer}: {len(samples.rows)} of {scored}, "
        f"mean reward {mean}{pending}{_refill(samples)}"
    )


def _refill(samples: Samples) -> str:
    """Say how many prompts the update learned from, where it may leave some for later; else nothing."""
    found = samples.refill
    if not found:
        return ""
    return (
        f"; the update learned from {found['taken']} of {found['taken'] + found['missing']} prompts, "
        f"{found['carried']} of them carried; {found['flat']} without spread, {found['spare']} left for later"
    )


def _one(choice: Choice | None, sample: Sample, width: int, longest: int | None) -> Iterator[str]:
    yield from wrapped(_facts(choice, sample), width)
    yield f"{_INDENT}prompt:"
    yield from foreign_lines(sample.prompt, width, longest)
    yield from response_lines(sample, width, longest)


def response_lines(sample: Sample, width: int, longest: int | None) -> Iterator[str]:
    """Yield the lines of a response, turn by turn where it has several; see :func:`as_text`."""
    for who, text in [(turn.role, turn.text) for turn in sample.turns] or [("response", sample.response)]:
        yield f"{_INDENT}{_on_one_line(who)}:"
        yield from foreign_lines(text, width, longest)


def foreign_lines(text: str, width: int, longest: int | None, indent: str = _DEEPER) -> Iterator[str]:
    """Yield the lines of a foreign text, indented, without anything that a terminal would obey."""
    lines = [line for row in _rows_of(text) for line in wrapped(row, width - len(indent))]
    yield from (f"{indent}{line}".rstrip() for line in _without_middle(lines, longest))


def _facts(choice: Choice | None, sample: Sample) -> str:
    """Return what is known about a sample, in one line."""
    where = f"prompt {_on_one_line(sample.prompt_id)}, sample {sample.sample_index}"
    return f"{choice or 'sample'}: {facts_of(sample)}, {where}"


def facts_of(sample: Sample) -> str:
    """Return a response's reward, length and end, in one line."""
    scores = ", ".join(f"{_on_one_line(name)} {number(s)}" for name, s in sample.components.items())
    facts = [f"reward {number(sample.reward)}" + (f" ({scores})" if scores else "")]
    if sample.kl is not None:
        facts.append(f"KL {number(sample.kl)}")
    facts.append(f"{sample.length} token{'' if sample.length == 1 else 's'}")
    if sample.turns:
        facts.append(f"{sample.num_turns} turn{'' if sample.num_turns == 1 else 's'}")
    return ", ".join([*facts, _on_one_line(sample.finish_reason)])


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
