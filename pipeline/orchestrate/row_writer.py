"""``metrics.jsonl``: a line for each iteration, which no two drivers can write twice, or differently.

A row is published under its number in ``rows/``, once, by hard link as a task's commit is. Its line follows
from that file, and its place from the lines before it: any writer, however late, writes the same.
Both are reached through descriptors that were opened under the lease. Going back moves the folder away and
replaces the file, so that a driver that has lost its lease writes into what was moved aside.
"""

import contextlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.run import journal
from pipeline.run.durable import link_once_in, naming, read_in
from pipeline.run.inside import open_to_write
from pipeline.run.journal import Row
from pipeline.run.paths import RunPaths
from slurm.sharedfiles import (
    NotAFile,
    from_json,
    make_folder,
    persistently,
    read_newest,
    read_shared,
    sealed,
    unsealed,
)

_RECENT = 20
"""Number of newest lines that every driver compares; all lines of a long run would be a thousand files."""


@dataclass
class RowWriter:
    """Rows of a run, and the place of the next one in metrics.jsonl."""

    paths: RunPaths
    rows: list[Row]
    """Rows by ascending iteration, from the first of the run on, without gaps."""
    first: int
    """Number of the first row."""
    _folder: int
    _file: int
    _size: int
    """Size of the lines of ``rows`` in bytes."""

    mended: int | None = None
    """Number of the first row whose line differed from what was published when the file was opened."""

    @staticmethod
    def open(paths: RunPaths, first: int, compared: int = _RECENT) -> "RowWriter":
        """Open the file and load its rows; the caller holds the lease. A line that is not the row of its
        place is written again, if that row was published; rows behind one that is lost are dropped, and made
        again from their records.

        Args:
            compared: how many of the newest lines to compare with what was published; each costs a read.
        """
        make_folder(
            paths.rows, paths.root
        )  # lists the run's folder: what another machine replaced in it is known then
        folder = persistently(paths.rows, lambda: os.open(paths.rows, os.O_RDONLY))
        book = RowWriter(paths, [], first, folder, _open_file(paths), 0)
        with naming(paths.metrics):
            content = _read(book._file)
        book._take_up(content, compared)
        return book

    def close(self) -> None:
        os.close(self._folder)
        os.close(self._file)

    @property
    def newest(self) -> int:
        """Newest iteration that has a row; before the first row, the iteration that the run begins after."""
        return self.first + len(self.rows) - 1

    def add(self, row: Row) -> Row:
        """Publish and write the next row, durably. Returns it as published, maybe by another driver."""
        number = self.newest + 1
        published = self._published(number)
        if published is None:
            self._publish(number, row)
            published = self._published(number) or row
        line = _line(published)
        self._put(line, self._size)
        self._append(published, line)
        return published

    def _take_up(self, content: bytes, compared: int) -> None:
        there = content.splitlines(keepends=True)
        for line in there:
            number = self.newest + 1
            if (row := _row_of(line, number)) is None:
                break
            if len(there) - len(self.rows) <= compared and self._differs(number, row):
                self.mended = number
                break
            self._append(row, line)
        lines = [content[: self._size]]
        while (row := self._published(self.newest + 1)) is not None:
            lines.append(_line(row))
            self._append(row, lines[-1])
        wanted = b"".join(lines)
        if not wanted.startswith(content):  # spoilt, or of rows that were taken back
            journal.rewrite(self.paths.metrics, self.rows)
            os.close(self._file)
            self._file = _open_file(self.paths)
            self._size = os.fstat(self._file).st_size
        elif wanted != content:
            self._put(wanted[len(content) :], len(content))

    def _append(self, row: Row, line: bytes) -> None:
        self.rows.append(row)
        self._size += len(line)

    def _put(self, data: bytes, place: int) -> None:
        with naming(self.paths.metrics):
            while data:
                written = os.pwrite(self._file, data, place)
                data, place = data[written:], place + written
            os.fsync(self._file)

    def _publish(self, number: int, row: Row) -> None:
        name = _name(number)
        text = sealed({"row": row})
        with naming(self.paths.rows / name):
            if not link_once_in(self._folder, name, text) and self._published(number) is None:
                os.unlink(name, dir_fd=self._folder)  # a bit has flipped in it
                link_once_in(self._folder, name, text)

    def _differs(self, number: int, row: Row) -> bool:
        """Whether the published row differs from ``row``. A corrupt file is published again from ``row``."""
        if (content := self._content(number)) is None:
            return False
        if (published := _checked(content, number)) is None:
            self._publish(number, row)
        return published is not None and _line(published) != _line(row)

    def _published(self, number: int) -> Row | None:
        content = self._content(number)
        return None if content is None else _checked(content, number)

    def _content(self, number: int) -> bytes | None:
        with naming(self.paths.rows / _name(number)):
            return read_in(self._folder, _name(number))


def _name(number: int) -> str:
    return f"{number:05d}.json"


def _open_file(paths: RunPaths) -> int:
    descriptor = open_to_write(paths.metrics, os.O_RDWR)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise NotAFile(f"{paths.metrics} is not a file; move it away, and the next pass writes it again")


def _read(descriptor: int) -> bytes:
    parts, place = [], 0
    while part := os.pread(descriptor, 1 << 20, place):
        parts.append(part)
        place += len(part)
    return b"".join(parts)


def _line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _row_of(line: bytes, number: int) -> Row | None:
    """Return the row in a whole line, or None if it is not row ``number``."""
    try:
        row = from_json(line)
    except ValueError:
        return None
    return row if line.endswith(b"\n") and isinstance(row, dict) and row.get("iteration") == number else None


def differing(paths: RunPaths, first: int) -> list[int]:
    """Find iterations whose line differs from the published row, or whose published row is corrupt.

    Args:
        first: number of the first row. Every published file from it on is read.
    """
    content = read_newest(paths.metrics) if paths.metrics.exists() else b""
    found = []
    for number, line in enumerate(content.splitlines(keepends=True), first):
        with contextlib.suppress(FileNotFoundError):
            row = _published(paths, number)
            found += [number] if row is None or _line(row) != line else []
    return found


def differing_rows(paths: RunPaths, rows: Sequence[Row], newest: int) -> list[int]:
    """Find iterations among the last rows of metrics.jsonl, as they were read, that differ from what was
    published; as many are looked at as a driver compares.

    Args:
        newest: number of the last of them.
    """
    recent = rows[-_RECENT:]
    found = []
    for number, row in enumerate(recent, newest + 1 - len(recent)):
        with contextlib.suppress(FileNotFoundError):  # of a version that published none, or purged
            published = _published(paths, number)
            found += [number] if published is not None and _line(published) != _line(row) else []
    return found


def _published(paths: RunPaths, number: int) -> Row | None:
    """Return the published row; None where its file is corrupt, or something else lies there. Raises
    FileNotFoundError."""
    try:
        return _checked(read_shared(paths.rows / _name(number)), number)
    except NotAFile:
        return None


def _checked(content: bytes, number: int) -> Row | None:
    """Return the row in a published file, or None where it is corrupt."""
    try:
        row: Row = unsealed(content)["row"]
        return row if row["iteration"] == number else None
    except (KeyError, TypeError, ValueError):
        return None
