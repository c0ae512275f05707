"""Parquet and Arrow files, and the directories that Hugging Face writes, as tables of prompts."""

import bisect
import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipeline.data.arrow_types import check_buffers, plain
from pipeline.text import listing
from slurm.errors import UserError
from slurm.sharedfiles import is_special

if TYPE_CHECKING:
    import pyarrow.parquet as pq

ARROW = (".arrow", ".feather")
LEGAL = (
    "a .jsonl, .ndjson, .json, .csv or .tsv file, or one with .gz or .zst after that, a .parquet, .arrow or "
    ".feather file, or a folder of save_to_disk or parquet"
)
KEEP = "name the columns to keep in data.columns"
_SPLITS = {"train", "test", "validation"}
_BATCH_ROWS, _BATCH_BYTES = 1 << 16, 64 << 20
"""Rows, and bytes roughly, of a Parquet file that are read at once where some of them are wanted."""


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class PromptError(UserError, ValueError):
    """The source of prompts as a whole cannot be used; the message says why and what to do."""


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong while reading ``path`` into a :class:`PromptError` that names it."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read ({first_line(error)}); write it again, or check its permissions"
        raise PromptError(message) from error


def check_is_no_pipe(path: Path) -> None:
    """Raise PromptError for what would be waited for: a pipe, a socket or a device."""
    if is_special(path):
        raise PromptError(f"{path} is a pipe, socket or device; write the rows into a file, and name {LEGAL}")


Choose = Callable[[int, int], Sequence[int]]
"""Function that returns which rows to read, in order, given their number and the bytes of all."""


@dataclass(frozen=True)
class Found:
    """The rows of a source that were read."""

    table: pa.Table
    """The wanted columns, in plain types (:mod:`pipeline.data.arrow_types`)."""
    names: list[str]
    """Names of all columns of the source."""
    places: Sequence[int]
    """The table's rows in the source."""
    num_total: int


def read_files(
    path: Path, files: Sequence[Path], wanted: Collection[str] | None, choose: Choose | None
) -> Found:
    """Read the rows of Parquet and Arrow files, one after the other.

    Args:
        path: what people named, for messages.
        wanted: the only columns to read. Default: all.
        choose: chooses rows. Default: all; with it, a large file is never in memory whole.

    Raises:
        PromptError: a file cannot be read, or columns differ in type.
    """
    opened = [_size_of(file) for file in files]
    total = sum(size.num_rows for size in opened)
    places = range(total) if choose is None else choose(total, sum(size.num_bytes for size in opened))
    is_whole, start = len(places) == total, 0
    tables = []
    for file, size in zip(files, opened, strict=True):
        first, last = (bisect.bisect_left(places, row) for row in (start, start + size.num_rows))
        rows = None if is_whole else np.array(places[first:last], np.int64) - start
        with readable(file):
            tables.append(plain(_only(_rows_of(file, wanted, rows), wanted)))
        start += size.num_rows
    first_names = opened[0].names
    more = dict.fromkeys(name for size in opened for name in size.names if name not in first_names)
    return Found(_joined(path, tables), [*first_names, *more], places, total)


@dataclass(frozen=True)
class _Size:
    num_rows: int
    num_bytes: int
    names: list[str]


def _size_of(path: Path) -> _Size:
    """Return what a file holds, without reading its rows where that can be."""
    check_is_no_pipe(path)
    with readable(path):
        if path.suffix.lower() in ARROW:
            with _open_arrow(path) as reader:
                # not nbytes, which follows offsets that may be corrupt
                sizes = [(batch.num_rows, batch.get_total_buffer_size()) for batch in _batches(reader)]
                num_rows, num_bytes = (sum(one) for one in zip((0, 0), *sizes, strict=True))
                return _Size(num_rows, num_bytes, list(reader.schema.names))
        with _opened_parquet(path) as file:
            return _Size(file.metadata.num_rows, _num_bytes(file), list(file.schema_arrow.names))


def _opened_parquet(path: Path) -> "pq.ParquetFile":
    import pyarrow.parquet as pq  # brings clients of object stores along: tasks of other prompts do without

    return pq.ParquetFile(path)


def _num_bytes(file: "pq.ParquetFile") -> int:
    """Return the bytes of all columns, uncompressed. Not column by column: of what a damaged file says of its
    columns Arrow may end the process."""
    groups = range(file.metadata.num_row_groups)
    return sum(max(0, file.metadata.row_group(index).total_byte_size) for index in groups)


def _rows_of(path: Path, wanted: Collection[str] | None, rows: np.ndarray | None) -> pa.Table:
    """Return rows of a file, all of them for None, batch by batch."""
    if path.suffix.lower() in ARROW:
        with _open_arrow(path) as reader:
            return _picked(reader.schema, _batches(reader), rows)
    # read_table would make columns of folders named "key=value"
    with _opened_parquet(path) as file:
        chosen = None if wanted is None else [n for n in file.schema_arrow.names if n in wanted]
        if rows is None:
            return file.read(columns=chosen)
        schema = (
            file.schema_arrow if chosen is None else pa.schema([file.schema_arrow.field(n) for n in chosen])
        )
        size = min(_BATCH_ROWS, max(1, file.metadata.num_rows * _BATCH_BYTES // max(1, _num_bytes(file))))
        return _picked(schema, file.iter_batches(size, columns=chosen, use_threads=False), rows)


def _picked(schema: pa.Schema, batches: Iterator[pa.RecordBatch], rows: np.ndarray | None) -> pa.Table:
    """Return the chosen rows, in order, of batches that follow each other."""
    if rows is None:
        return pa.Table.from_batches(batches, schema)
    found, start = [plain(schema.empty_table())], 0
    for batch in batches:
        first, last = np.searchsorted(rows, (start, start + batch.num_rows))
        if first < last:
            table = pa.Table.from_batches([batch])
            for column in table.columns:
                check_buffers(column)
            table = plain(table)
            found.append(table.take(pa.array(rows[first:last] - start)))
        start += batch.num_rows
    return pa.concat_tables(found)


@contextlib.contextmanager
def _open_arrow(path: Path) -> Iterator[Any]:
    """Open an Arrow IPC file or stream, whichever its first bytes say."""
    with pa.OSFile(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file) as reader:
            yield reader


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return iter(reader)


def _only(table: pa.Table, wanted: Collection[str] | None) -> pa.Table:
    return table.select([i for i, name in enumerate(table.column_names) if wanted is None or name in wanted])


def _joined(path: Path, tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate tables. Raises PromptError where columns of one name differ in type."""
    if len(tables) == 1:
        return tables[0]
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        why = f"the columns of its files differ in type ({first_line(error)})"
        raise PromptError(f"{path}: {why}; write them alike, or {KEEP}") from error


def read_directory(path: Path, split: str, wanted: Collection[str] | None, choose: Choose | None) -> Found:
    """Read a folder of ``save_to_disk``, or of Parquet files, also in the one folder within it that has some,
    as data sets on the hub are laid out. Raises PromptError."""
    if (path / "dataset_dict.json").is_file():
        splits = _saved_names(path / "dataset_dict.json", "splits")
        if split not in splits:
            raise PromptError(f"{path} has no split {split!r}; set data.split to one of {listing(splits)}")
        return _read_saved_dataset(path / split, wanted, choose)
    if (path / "state.json").is_file():
        return _read_saved_dataset(path, wanted, choose)
    folder = path if _parquet_files(path) else _folder_within(path)
    return read_files(path, _of_split(folder, _parquet_files(folder), split), wanted, choose)


def _parquet_files(folder: Path) -> list[Path]:
    """Return a folder's Parquet files; what Spark and others hide (``_``, ``.``) are none."""
    found = (one for one in folder.iterdir() if one.suffix.lower() == ".parquet" and one.is_file())
    return sorted(one for one in found if not one.name.startswith(("_", ".")))


def _folder_within(path: Path) -> Path:
    """Return the only folder of a folder that has Parquet files. Raises PromptError for none and several."""
    entries = sorted(one.name for one in path.iterdir())
    folders = [name for name in entries if name[:1] not in "_." and (path / name).is_dir()]
    having = [name for name in folders if _parquet_files(path / name)]
    if len(having) == 1 and "=" not in having[0]:  # a value of a column is in that name
        return path / having[0]
    if having:
        raise PromptError(f"{path} has Parquet files in the folders {listing(having)}; name one of them")
    raise PromptError(
        f"{path} is a directory with {listing(entries) if entries else 'nothing'}; name {LEGAL}"
    )


def _of_split(path: Path, parts: list[Path], split: str) -> list[Path]:
    """Return the files named after ``split``, or all if none is. Raises PromptError for several splits."""
    if named := [part for part in parts if part.name.startswith(f"{split}-") or part.stem == split]:
        return named
    found = sorted({part.stem.split("-")[0] for part in parts} & _SPLITS)
    if len(found) > 1:
        way_out = "set data.split to one of them, or name a single file"
        raise PromptError(f"{path} has files of the splits {listing(found)}, none of {split!r}; {way_out}")
    return parts


def _read_saved_dataset(path: Path, wanted: Collection[str] | None, choose: Choose | None) -> Found:
    """Read a directory of ``datasets.Dataset.save_to_disk``: state.json names Arrow streams, in order.

    Before ``datasets`` 1.15, a filtered or shuffled dataset was saved whole, with the indices of its rows
    in a file beside it.
    """
    state = path / "state.json"
    files = _saved_names(state, "_data_files")
    if not files:
        raise PromptError(f"{state} names no data files; save the dataset again with save_to_disk")
    indices = [path / name for name in _saved_names(state, "_indices_data_files")]
    if not indices:
        return read_files(path, [path / name for name in files], wanted, choose)
    whole = read_files(path, [path / name for name in files], wanted, None)
    with readable(path):
        order = read_files(path, indices, None, None).table.column(0).to_numpy()
        places = (
            range(len(order)) if choose is None else choose(len(order), whole.table.get_total_buffer_size())
        )
        for column in whole.table.columns:
            check_buffers(column)
        table = whole.table.take(pa.array(order[list(places)], pa.uint64()))
    return Found(table, whole.names, places, len(order))


def _saved_names(path: Path, key: str) -> list[str]:
    """Return file or split names under ``key`` in a JSON file of ``save_to_disk``; none where it is null."""
    try:
        items = json.loads(path.read_bytes()).get(key) or []
        return [str(item["filename"] if isinstance(item, dict) else item) for item in items]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        message = f"{path} is not what save_to_disk writes ({error!r}); save the dataset again"
        raise PromptError(message) from error
