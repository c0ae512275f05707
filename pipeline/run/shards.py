"""Arrow shards: written once through a hashing sink, read once, and verified before use.

The IPC *file* format is used because a cut *stream* reads as a shorter table without an error. Arrow itself
has no checksum: the commit record's hash is the only guard against flipped bits. So no byte comes before
Arrow's reader, which trusts what it reads and may end the process, until all of the file is in memory and has
the recorded hash. Nothing is read a second time, when the file might be another.

To hold less in memory than a file and what is made of it, read by batches (:func:`read_batches`): the
verified bytes go batch by batch, and what was given out is no longer held.
"""

import contextlib
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.run.commits import CorruptData, FileEntry, Record, check_digest, read_output
from pipeline.run.durable import naming
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import check_schema
from pipeline.run.wide import take
from slurm.sharedfiles import NotAFile, make_folder, opened_file, persistently

_BATCH_BYTES = 4 << 20
"""Bytes of a record batch, roughly: so many that their number costs little, and so few that a reader may
have some of them in memory beside what it makes of them."""

_PIECE = 1 << 18
"""Bytes that are read and hashed at once, so few that the processor's cache still has them."""
_LARGE, _LARGE_PIECE = 64 << 20, 8 << 20
"""Bytes of a file from which another thread hashes, which takes a while to start, and of what it gets at
once."""

MAGIC_BYTES = 8
"""Bytes before the stream in an Arrow file, which is one but for these and its footer."""

_HUGE_PAGE = 2 << 20
"""Bytes that the kernel maps at once where it can, and gets back only together."""


class HashingFile:
    """A file that hashes what is written to it, so that the data is passed over once. Small pieces, of which
    Arrow writes dozens in a file, are written together: on a network filesystem each write is a message."""

    closed = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self._pending = bytearray()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._size += len(view)
        if len(self._pending) + len(view) > _PIECE:
            self._write_pending()
        if len(view) > _PIECE:
            self._put(view)
        else:
            self._pending += view
        return len(view)

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, bytearray()
        self._put(memoryview(pending))

    def _put(self, view: memoryview) -> None:
        written = 0
        while written < len(view):  # a raw write may take only a part (2 GiB, signals, full disks)
            written += self._file.write(view[written:])

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing: what is pending is written with more, or by :meth:`finish`."""

    def finish(self, name: str) -> FileEntry:
        self._write_pending()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(name, self._size, self._digest.hexdigest())

    def close(self) -> None:
        """Close the file; what is pending is lost unless :meth:`finish` was called."""
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
    make_folder(path.parent, paths.root)
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
        buffer, size, digest = persistently(path, lambda: _read_and_hash(path, pa.allocate_buffer))
        buffer = buffer.slice(0, size)
    except (FileNotFoundError, NotAFile):
        content = read_output(paths, record, entry)
        buffer, digest = pa.py_buffer(content), xxhash.xxh3_128_hexdigest(content)
    check_digest(record, entry, buffer.size, digest)
    with pa.ipc.open_file(pa.BufferReader(buffer)) as reader:
        table = reader.read_all()
    check_schema(table.schema, schema, entry.path)
    return table


def read_batches(paths: RunPaths, record: Record, schema: pa.Schema, part: str = "") -> Iterator[pa.Table]:
    """Return the record batches of :func:`read_shard`'s table, one by one. The whole file is verified before
    this returns, and raises as there; its memory becomes less with each batch, which has its own.
    """
    entry = record.output(part)
    try:
        path = paths.root / entry.path
        memory, size, digest = persistently(path, lambda: _read_and_hash(path, _anonymous_memory))
    except (FileNotFoundError, NotAFile):  # packed: it comes out of the archive whole
        whole = read_shard(paths, record, schema, part)
        return (pa.Table.from_batches([batch]) for batch in whole.to_batches())
    check_digest(record, entry, size, digest)
    reader = pa.ipc.open_stream(pa.PythonFile(_Shrinking(memory, MAGIC_BYTES), mode="r"))
    check_schema(reader.schema, schema, entry.path)
    return (pa.Table.from_batches([batch]) for batch in reader)


class _Shrinking:
    """A file in memory that is read once, from its start, and that gives back what was read."""

    closed = False

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory, self._place, self._kept = memory, start, 0
        """``_kept`` is where the memory begins that was not given back."""

    def read(self, count: int) -> pa.Buffer:
        """Return a copy of the next bytes, fewer than ``count`` only at the end."""
        count = min(count, len(self._memory) - self._place)
        copy, done = pa.allocate_buffer(count), 0
        target, source = memoryview(copy).cast("B"), memoryview(self._memory)
        while done < count:  # by parts, so that a batch as large as the file is not there twice
            size = min(count - done, _HUGE_PAGE)
            target[done : done + size] = source[self._place : self._place + size]
            done, self._place = done + size, self._place + size
            stop = self._place // _HUGE_PAGE * _HUGE_PAGE
            if stop > self._kept:
                self._memory.madvise(mmap.MADV_DONTNEED, self._kept, stop - self._kept)
                self._kept = stop
        return copy

    def close(self) -> None:
        """Do nothing: the memory goes with the last who has this."""


def _anonymous_memory(size: int) -> mmap.mmap:
    """Allocate memory of the process's own, of which parts can be given back."""
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # which are there sooner than so many small ones
    return memory


_Memory = TypeVar("_Memory", pa.Buffer, mmap.mmap)


def _read_and_hash(path: Path, allocate: Callable[[int], _Memory]) -> tuple[_Memory, int, str]:
    """Return a whole file in memory, how many bytes were read, and their xxh3_128."""
    with opened_file(path) as file:
        length = os.fstat(file.fileno()).st_size
        memory, digest, size = allocate(length), xxhash.xxh3_128(), 0
        view = memoryview(memory)[:length]
        piece = _PIECE if length < _LARGE else _LARGE_PIECE
        with _beside_if(length >= _LARGE, digest.update) as update:
            while size < length and (count := file.readinto(view[size : size + piece])):
                update(view[size : size + count])
                size += count
    return memory, size, digest.hexdigest()


@contextlib.contextmanager
def _beside_if(
    is_wanted: bool, update: Callable[[memoryview], None]
) -> Iterator[Callable[[memoryview], object]]:
    """Yield ``update``, or a function by which another thread calls it, which has done so at the end."""
    if not is_wanted:
        yield update
        return
    with ThreadPoolExecutor(1) as other:  # one worker: in order
        yield lambda part: other.submit(update, part)


# --- chunks ----------------------------------------------------------------------------------------------

# Rows of a committed file, read and verified without the rest of it. Its writer lists its record batches in
# a JSON file of the same commit, with bytes and hash of each. A reader needs those that hold its rows, and
# the first, before which the schema and the dictionaries stand: an Arrow file without its magic number and
# its footer is a stream, and so are these parts of it.


LISTING = "chunks"
"""Part of the name of the JSON file that lists the chunks of a commit's main Arrow file."""
SOURCES = "sources"
"""Key of that listing with name and number of rows of each file of prompts, in their order; for files that
have names."""

_ROWS = 64
"""Rows of a chunk. A reader of a few rows reads so many for each, and the listing of some 60 bytes a chunk:
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
            done = 0
            while done < len(part) and (count := os.preadv(file.fileno(), [part[done:]], chunk.start + done)):
                done += count
            if (digest := xxhash.xxh3_128_hexdigest(part)) != chunk.xxh3_128:
                span = f"{entry.path}, bytes {chunk.start} to {chunk.start + chunk.bytes}"
                raise CorruptData(record.task, f"{span}: xxh3_128 {digest} instead of {chunk.xxh3_128}")
            place += chunk.bytes
    return buffer
