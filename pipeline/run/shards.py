"""Arrow shards: written once through a hashing sink, read whole and verified before use.

The IPC *file* format is used because a cut *stream* reads as a shorter table without an error. Arrow itself
has no checksum: the commit record's hash is the only guard against flipped bits.
"""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from pipeline.run.commits import FileEntry, Record, check_digest, read_output
from pipeline.run.durable import naming
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import check_schema
from slurm.sharedfiles import persistently

_BATCH_BYTES = 64 << 20
"""Bytes of a record batch, roughly: large enough to cost nothing, small enough to stream."""


_SMALLEST_PIECE, _LARGEST_PIECE = 1 << 20, 8 << 20
"""Bounds in bytes of one read, which is a quarter of the file in between: most of a small file is then hashed
while the rest is read."""


class HashingFile:
    """A file that hashes what is written to it, so that the data is passed over once."""

    closed = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._digest = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        written = 0
        while written < len(view):  # a raw write may take only a part (2 GiB, signals, full disks)
            written += self._file.write(view[written:])
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing, since writes are unbuffered."""

    def finish(self, name: str) -> FileEntry:
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(name, self._size, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def removed_on_error(sink: HashingFile) -> Iterator[None]:
    """Close a file at the block's end; after an OSError, which then names it, remove it."""
    try:
        with naming(sink.path):
            yield
    except OSError:
        sink.path.unlink()  # the part that was written would only keep a full disk full
        raise
    finally:
        sink.close()


def write_shard(paths: RunPaths, path: Path, table: pa.Table) -> FileEntry:
    """Write ``table`` durably under an attempt's own name. The folder is made when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows_per_batch = max(1, table.num_rows * _BATCH_BYTES // max(1, table.nbytes))
    sink = HashingFile(path)
    with removed_on_error(sink):
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), table.schema) as writer:
            writer.write_table(table, max_chunksize=rows_per_batch)
        return sink.finish(paths.relative(path))


def read_shard(paths: RunPaths, record: Record, schema: pa.Schema, part: str = "") -> pa.Table:
    """Return an Arrow file of a commit as a table, verified: size, hash and schema.

    Args:
        part: part of the file's name, where a task commits several (:meth:`Record.output`).

    Raises:
        CorruptData: the file is not what was committed.
        SchemaError: its schema is of another version.
    """
    entry = record.output(part)
    try:
        path = paths.root / entry.path
        buffer, digest = persistently(path, lambda: _read_and_hash(path))
    except FileNotFoundError:
        content = read_output(paths, record, entry)
        buffer, digest = pa.py_buffer(content), xxhash.xxh3_128_hexdigest(content)
    check_digest(record, entry, buffer.size, digest)
    with pa.ipc.open_file(pa.BufferReader(buffer)) as reader:
        table = reader.read_all()
    check_schema(table.schema, schema, entry.path)
    return table


def _read_and_hash(path: Path) -> tuple[pa.Buffer, str]:
    """Return a whole file and its xxh3_128, hashed by another thread while the next piece is read.

    The kernel's copies do not lie in the processor's cache, so hashing them right away would take as long.
    """
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as other:
        buffer = pa.allocate_buffer(os.fstat(file.fileno()).st_size)
        view, digest, size = memoryview(buffer), xxhash.xxh3_128(), 0
        piece = min(max(len(view) // 4, _SMALLEST_PIECE), _LARGEST_PIECE)
        while size < len(view) and (count := file.readinto(view[size : size + piece])):
            other.submit(digest.update, view[size : size + count])  # one worker: in order
            size += count
    return buffer.slice(0, size), digest.hexdigest()
