"""Append-only JSON lines: ``events.jsonl`` (what the driver did), ``metrics.jsonl`` (a row per iteration)."""

import json
import os
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.run.durable import flush, replace_durably
from pipeline.run.inside import open_to_write
from pipeline.text import printable
from slurm.sharedfiles import from_json, is_there, opened_file, persistently, read_newest, size_of

Row = dict[str, float | int]
"""Line of metrics.jsonl: numbers of one iteration by name."""


def append(path: Path, *rows: Mapping[str, Any]) -> None:
    """Append lines durably. A line cut by an earlier crash is ended first, so that it spoils no other.

    Raises:
        UserError: a link lies there.
    """
    with os.fdopen(open_to_write(path, os.O_RDWR | os.O_APPEND), "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        flush(file)


def read(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines, parsed. One cut by a crash is left out: it never counted as written."""
    try:
        return parse(read_newest(path))
    except FileNotFoundError:
        return []


def read_tail(path: Path, num_bytes: int = 1 << 18) -> list[dict[str, Any]]:
    """Return the last lines only, so that the cost does not grow with the run."""
    return parse(read_end(path, num_bytes))


def read_last(path: Path, num_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """Return the last whole line alone, if there is one among the last bytes."""
    lines = read_end(path, num_bytes).splitlines()
    return next((found for line in reversed(lines) if (found := parse(line))), [])


def read_end(path: Path, num_bytes: int) -> bytes:
    """Return the last bytes of a file that others append to; none where there is no file."""

    def read() -> bytes:
        with opened_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            return file.read()

    return persistently(path, read) if is_there(path) else b""


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events at the end of a journal. Lines that are none, as after a bit flip, are skipped."""
    return [
        row
        for row in read_tail(path)
        if isinstance(row.get("time"), int | float) and isinstance(row.get("event"), str)
    ]


def read_since(path: Path, moment: float) -> list[dict[str, Any]]:
    """Return the events from ``moment`` (unix time) on, and some before, reading only the journal's end."""
    size = size_of(path) if is_there(path) else 0
    num_bytes = 1 << 16
    while True:
        rows = read_tail(path, num_bytes)
        if num_bytes >= size or (rows and rows[0].get("time", moment) < moment):
            return rows
        num_bytes *= 4


def read_named(path: Path, names: Collection[str]) -> list[dict[str, Any]]:
    """Return all events of these names. Of the others, which may be millions, no line is parsed."""
    marks = [f'"event": "{name}"'.encode() for name in names]

    def read() -> bytes:
        with opened_file(path) as file:
            return b"".join(line for line in file if any(mark in line for mark in marks))

    return parse(persistently(path, read)) if is_there(path) else []


def parse(text: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        try:
            row = from_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def rewrite(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the whole file in one step."""
    replace_durably(path, "".join(json.dumps(row) + "\n" for row in rows))


def event(path: Path, name: str, **fields: Any) -> None:
    """Append an event: what the driver did, with the time."""
    append(path, event_row(name, **fields))


def event_row(name: str, **fields: Any) -> dict[str, Any]:
    return {"time": time.time(), "event": name, **fields}


ROWS_BYTES = 1 << 20
"""Bytes read from the end of metrics.jsonl: as many rows as advice looks at, and more."""


_LOG_TAIL_BYTES = 1 << 16
"""Bytes read from a log's end: enough for its last lines, however long it is."""


def tail(log: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log."""
    return last_lines(read_end(log, _LOG_TAIL_BYTES), num_lines)


def last_lines(content: bytes, num_lines: int) -> list[str]:
    """Return the last lines of a log's content, or of its end, as they may be shown."""
    end = content[-_LOG_TAIL_BYTES:]
    lines = end.decode(errors="replace").splitlines()
    whole = lines if len(end) < _LOG_TAIL_BYTES else lines[1:]
    return [printable(line) for line in whole[-num_lines:]] if num_lines else []
