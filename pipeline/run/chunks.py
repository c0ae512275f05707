"""Rows of a committed Arrow file, read and verified without the rest of it.

Whoever writes such a file lists its record batches in a JSON file of the same commit, with bytes and hash of
each. A reader needs those that hold its rows, and the first, before which the schema and the dictionaries
stand: an Arrow file without its magic number and its footer is a stream, and so are these parts of it.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.run.commits import CorruptData, FileEntry, Record
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import check_schema
from pipeline.run.shards import MAGIC_BYTES, HashingFile, removed_on_error
from pipeline.run.wide import take
from slurm.sharedfiles import NotAFile, make_folder, opened_file, persistently

LISTING = "chunks"
"""Part of the name of the JSON file that lists the chunks of a commit's main Arrow file."""

_ROWS = 64
"""Rows of a chunk. Whoever wants a few rows reads so many for each, and the listing of some 60 bytes a chunk:
for a hundred of a million prompts of 1 kB, 6 MB and 1 MB."""


@dataclass(frozen=True)
class Chunk:
    """One record batch of a file; the first one with all that is before it."""

    rows: int
    start: int
    """Offset in the file, in bytes."""
    bytes: int
    xxh3_128: str


class _FileInChunks(HashingFile):
    """A file that also hashes the parts that are written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._start, self._part = 0, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self._part.update(memoryview(data).cast("B"))
        return super().write(data)

    def end_chunk(self, rows: int) -> Chunk:
        """Return what was written since the chunk before, as one that holds ``rows``."""
        chunk = Chunk(rows, self._start, self.tell() - self._start, self._part.hexdigest())
        self._start, self._part = self.tell(), xxhash.xxh3_128()
        return chunk


def write_in_chunks(
    paths: RunPaths, path: Path, table: pa.Table, rows: int = _ROWS
) -> tuple[FileEntry, list[Chunk]]:
    """Write ``table`` as :func:`pipeline.run.shards.write_shard`, in chunks of at most ``rows``."""
    make_folder(path.parent, paths.root)
    sink, chunks = _FileInChunks(path), []
    with removed_on_error(sink):
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), table.schema) as writer:
            for batch in table.to_batches(max_chunksize=rows):
                writer.write_batch(batch)
                chunks.append(sink.end_chunk(batch.num_rows))
        return sink.finish(paths.relative(path)), chunks


def listing(chunks: Sequence[Chunk]) -> dict[str, list[Any]]:
    """Return what the JSON file of a commit says of its chunks."""
    return {name: [getattr(chunk, name) for chunk in chunks] for name in ("rows", "bytes", "xxh3_128")}


def listed(content: Mapping[str, list[Any]]) -> list[Chunk]:
    """Undo :func:`listing`."""
    starts = itertools.accumulate(content["bytes"], initial=0)
    return [
        Chunk(rows, start, size, digest)
        for rows, start, size, digest in zip(
            content["rows"], starts, content["bytes"], content["xxh3_128"], strict=False
        )
    ]


def read_rows(
    paths: RunPaths, record: Record, schema: pa.Schema, chunks: Sequence[Chunk], indices: Sequence[int]
) -> pa.Table:
    """Return rows of a commit's main Arrow file, in the order of ``indices``; what is read is verified.

    Raises:
        CorruptData: the file is cut or gone, or one of the chunks that were read is not what was committed.
        SchemaError: its schema is of another version.
    """
    entry, rows, sought = record.output(), np.array([chunk.rows for chunk in chunks]), np.array(indices)
    ends = rows.cumsum()
    holders = np.searchsorted(ends, sought, side="right")  # of each index, the chunk
    read = np.union1d([0], holders)
    path = paths.root / entry.path
    try:
        buffer = persistently(path, lambda: _read(path, record, entry, [chunks[i] for i in read]))
    except (FileNotFoundError, NotAFile):
        raise CorruptData(record.task, f"{entry.path} is gone") from None
    with pa.ipc.open_stream(buffer.slice(MAGIC_BYTES)) as reader:
        table = reader.read_all()
    check_schema(table.schema, schema, entry.path)
    skipped = (ends - rows)[read] - (rows[read].cumsum() - rows[read])  # rows before a chunk not read
    return take(table, sought - skipped[np.searchsorted(read, holders)])


def _read(path: Path, record: Record, entry: FileEntry, chunks: Sequence[Chunk]) -> pa.Buffer:
    """Return some chunks of a file, end to end. Raises CorruptData."""
    with opened_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) != entry.bytes:
            raise CorruptData(record.task, f"{entry.path} has {size} bytes instead of {entry.bytes}")
        buffer = pa.allocate_buffer(sum(chunk.bytes for chunk in chunks))
        place = 0
        for chunk in chunks:
            part = memoryview(buffer)[place : place + chunk.bytes]
            _fill(part, file.fileno(), chunk.start)
            if (digest := xxhash.xxh3_128_hexdigest(part)) != chunk.xxh3_128:
                span = f"{entry.path}, bytes {chunk.start} to {chunk.start + chunk.bytes}"
                raise CorruptData(record.task, f"{span}: xxh3_128 {digest} instead of {chunk.xxh3_128}")
            place += chunk.bytes
    return buffer


def _fill(part: memoryview, descriptor: int, start: int) -> None:
    """Read from an offset of an open file; where the file ends before, the rest stays as it is."""
    done = 0
    while done < len(part) and (count := os.preadv(descriptor, [part[done:]], start + done)):
        done += count
