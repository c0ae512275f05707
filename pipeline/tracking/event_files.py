"""TensorBoard's event files as a mirror of the rows: one file for each generation, ``tensorboard/ID/``.

A row is one record, an ``Event`` with a value for each number, which carries its length and checksums. So a
kill leaves a whole row or a part that is recognised; the next opening cuts that off and writes the row
again. The format is that of TensorFlow's ``RecordWriter``; facts are of tensorboard 2.21.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.run.directory import Run
from pipeline.run.durable import flush
from pipeline.run.journal import Row
from pipeline.tracking.destination import Destination
from pipeline.tracking.state import finite, iteration_of, mirror_id, written_at

_VERSION = "brain.Event:2"
"""First record of every event file."""
_HEADER, _FOOTER = 12, 4
"""Bytes before a record's data, its length and that one's checksum, and after it, the data's checksum."""


@dataclass(frozen=True)
class OpenedEvents:
    """An event file that rows are appended to."""

    path: Path
    first_step: int

    @property
    def url(self) -> str:
        """Folder to give to ``tensorboard --logdir``."""
        return str(self.path.parent.parent)

    def log(self, run: Run, row: Row, step: int) -> None:
        """Append a row durably, as one record."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in finite(row).items()]
        event = Event(wall_time=written_at(run, row), step=iteration_of(row), summary=Summary(value=values))
        _append(self.path, event.SerializeToString())

    def finish(self, exit_code: int) -> None:
        """Do nothing: every row is durable, and the format has no end."""

    def confirmed(self) -> int:
        return _cut_to_whole(self.path)


def open_events(run: Run) -> OpenedEvents:
    """Open the event file of the run's generation; a new one gets its first record."""
    own = mirror_id(run, Destination.TENSORBOARD)
    path = run.paths.tensorboard / own / f"events.out.tfevents.{int(run.identity.created)}.{own}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    rows = _cut_to_whole(path)
    if not path.stat().st_size:
        from tensorboard.compat.proto.event_pb2 import Event

        _append(path, Event(wall_time=run.identity.created, file_version=_VERSION).SerializeToString())
    return OpenedEvents(path, rows)


def _append(path: Path, data: bytes) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("ab") as file:
        RecordWriter(file).write(data)
        flush(file)


def _cut_to_whole(path: Path) -> int:
    """Cut off what follows the last whole record. Returns the number of rows that are left."""
    with path.open("rb+") as file:
        ends = whole_records(file)
        if ends[-1] < os.fstat(file.fileno()).st_size:
            file.truncate(ends[-1])
            flush(file)
    return max(0, len(ends) - 2)


def whole_records(file: BinaryIO) -> list[int]:
    """Return the offsets of the start and of the end of each whole record, up to the first that is none.

    The data of the last alone is hashed: each is on disk before the next is written.
    """
    size, ends = os.fstat(file.fileno()).st_size, [0]
    while (end := _end_of_record(file, ends[-1], size)) is not None:
        ends.append(end)
    if len(ends) > 1 and not _is_whole(file, *ends[-2:]):
        ends.pop()
    return ends


def _end_of_record(file: BinaryIO, start: int, size: int) -> int | None:
    """Return where a record ends, by its header; None where none is, or the file is shorter."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    file.seek(start)
    header = file.read(_HEADER)
    if len(header) < _HEADER or masked_crc32c(header[:8]) != struct.unpack("<I", header[8:])[0]:
        return None
    end = start + _HEADER + int(struct.unpack("<Q", header[:8])[0]) + _FOOTER
    return end if end <= size else None


def _is_whole(file: BinaryIO, start: int, end: int) -> bool:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    file.seek(start + _HEADER)
    data, footer = file.read(end - start - _HEADER - _FOOTER), file.read(_FOOTER)
    return bool(masked_crc32c(data) == struct.unpack("<I", footer)[0])
