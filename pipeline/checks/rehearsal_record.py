"""The record of the last rehearsal, shown by doctor, and what rehearsals have measured of each kind of card,
by which needs of memory are corrected: beside what else is cached for this user."""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline.checks.finding import Finding, Grouped, Verdict, ok, to_json, warning
from pipeline.forecast.cards import kind_of
from pipeline.forecast.corrections import CPU, PREFIX, Correction
from pipeline.run.durable import replace_durably
from pipeline.text import duration
from pipeline.workers.looking import cache_home

_AGAIN = "fix it, and run slurm-ppo rehearse again with the same words"


def record_path() -> Path | None:
    """Return the file of the record; None where the user has no folder for it."""
    return _path("rehearsal.json")


def _path(name: str) -> Path | None:
    home = cache_home(os.environ)
    return home / "slurm-ppo" / name if home else None


def keep_record(subject: str, found: Sequence[Grouped]) -> None:
    """Keep the findings of a rehearsal, in place of the last one's, and what they say of cards, beside what
    is known of others. Where that fails, doctor says nothing."""
    now, known = time.time(), corrections()
    _keep("rehearsal.json", {"made": now, **to_json(subject, found)})
    measured = corrections_in([one for _, one in found], now)
    kinds = {kind: merged(known.get(kind), one) for kind, one in measured.items()}
    if kinds:
        _keep("cards.json", {kind: asdict(one) for kind, one in (known | kinds).items()})


def _keep(name: str, content: Mapping[str, Any]) -> None:
    if (path := _path(name)) is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_durably(path, json.dumps(content) + "\n")


def corrections() -> dict[str, Correction]:
    """Return what rehearsals have measured, by kind of card; nothing where none is known."""
    path = _path("cards.json")
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        if path is not None:
            return {kind: Correction(**one) for kind, one in json.loads(path.read_text()).items()}
    return {}


def corrections_in(found: Sequence[Finding], now: float) -> dict[str, Correction]:
    """Return the corrections that findings name among their numbers, by kind of card. Pure."""
    values: dict[str, dict[str, float]] = {}
    for name, value in (item for one in found for item in one.numbers.items()):
        if name.startswith(PREFIX):
            card, _, what = name.removeprefix(PREFIX).rpartition("/")
            values.setdefault(card if card == CPU else kind_of(card), {})[what] = value
    return {kind: Correction(kind, numbers, now) for kind, numbers in values.items()}


def merged(before: Correction | None, found: Correction) -> Correction:
    """Return what is known of a card when something more was measured. Pure."""
    return replace(found, numbers={**before.numbers, **found.numbers}) if before else found


def last_rehearsal() -> list[Finding]:
    """Return what the last rehearsal found, in one line; nothing where none is known."""
    path = record_path()
    with contextlib.suppress(OSError, ValueError, KeyError):
        if path is not None:
            return [judge_record(json.loads(path.read_text()), time.time())]
    return []


def judge_record(record: dict[str, Any], now: float) -> Finding:
    """Judge a record. Pure."""
    found = record["findings"]
    failed = [one["title"] for one in found if one["verdict"] == Verdict.PROBLEM]
    number = sum(one["verdict"] == Verdict.OK for one in found)
    measured = f"of {record['subject']}, {duration(now - record['made'])} ago: {number} checks ok"
    if failed:
        return warning("rehearsal", f"{measured}, failed: {', '.join(failed)}", _AGAIN)
    return ok("rehearsal", measured)
