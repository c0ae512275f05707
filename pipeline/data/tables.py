"""Parquet and Arrow files, and the directories that Hugging Face writes, as tables of prompts."""

import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.text import listing
from slurm.errors import UserError

ARROW = (".arrow", ".feather")
LEGAL = "a .jsonl, .ndjson, .json, .parquet, .arrow or .feather file, or a folder of save_to_disk or parquet"
KEEP = "name the columns to keep in data.columns"
_SPLITS = {"train", "test", "validation"}


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


Part = tuple[pa.Table, list[str]]
"""Table of the wanted columns, and the names of all columns."""


def read_part(path: Path, wanted: Collection[str] | None) -> Part:
    return _read_arrow(path, wanted) if path.suffix.lower() in ARROW else _read_parquet(path, wanted)


def _only(table: pa.Table, wanted: Collection[str] | None) -> pa.Table:
    return table.select([i for i, name in enumerate(table.column_names) if wanted is None or name in wanted])


def _read_parquet(path: Path, wanted: Collection[str] | None) -> Part:
    # read_table would make columns of folders named "key=value"
    with readable(path), pq.ParquetFile(path) as file:
        names = list(file.schema_arrow.names)
        chosen = None if wanted is None else [name for name in names if name in wanted]
        return _only(file.read(columns=chosen), wanted), names


def _read_arrow(path: Path, wanted: Collection[str] | None = None) -> Part:
    """Read an Arrow IPC file or stream, whichever its first bytes say."""
    with readable(path), pa.OSFile(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file) as reader:
            table = reader.read_all()
            return _only(table, wanted), list(table.column_names)


def _joined(parts: Sequence[Part], **options: str) -> Part:
    """Concatenate the rows of parts; the names are those that any of them has, in order."""
    names = parts[0][1]
    more = dict.fromkeys(name for _, others in parts for name in others if name not in names)
    return pa.concat_tables([table for table, _ in parts], **options), [*names, *more]


def read_directory(path: Path, split: str, wanted: Collection[str] | None) -> Part:
    if (path / "dataset_dict.json").is_file():
        splits = _saved_names(path / "dataset_dict.json", "splits")
        if split not in splits:
            raise PromptError(f"{path} has no split {split!r}; set data.split to one of {listing(splits)}")
        return _read_saved_dataset(path / split, wanted)
    if (path / "state.json").is_file():
        return _read_saved_dataset(path, wanted)
    files = sorted(one for one in path.iterdir() if one.suffix.lower() == ".parquet")
    if not files:
        found = listing(sorted(one.name for one in path.iterdir()))
        raise PromptError(f"{path} is a directory with {found}; name {LEGAL}")
    parts = [_read_parquet(file, wanted) for file in _of_split(path, files, split)]
    try:
        return _joined(parts, promote_options="permissive")
    except pa.ArrowException as error:
        why = f"the columns of its files differ in type ({first_line(error)})"
        raise PromptError(f"{path}: {why}; write them alike, or {KEEP}") from error


def _of_split(path: Path, parts: list[Path], split: str) -> list[Path]:
    """Return the files named after ``split``, or all if none is. Raises PromptError for several splits."""
    if named := [part for part in parts if part.name.startswith(f"{split}-") or part.stem == split]:
        return named
    found = sorted({part.stem.split("-")[0] for part in parts} & _SPLITS)
    if len(found) > 1:
        way_out = "set data.split to one of them, or name a single file"
        raise PromptError(f"{path} has files of the splits {listing(found)}, none of {split!r}; {way_out}")
    return parts


def _read_saved_dataset(path: Path, wanted: Collection[str] | None) -> Part:
    """Read a directory of ``datasets.Dataset.save_to_disk``: state.json names Arrow streams, in order.

    Before ``datasets`` 1.15, a filtered or shuffled dataset was saved whole, with the indices of its rows
    in a file beside it.
    """
    state = path / "state.json"
    files = _saved_names(state, "_data_files")
    if not files:
        raise PromptError(f"{state} names no data files; save the dataset again with save_to_disk")
    table, names = _joined([_read_arrow(path / name, wanted) for name in files])
    parts = [_read_arrow(path / name)[0] for name in _saved_names(state, "_indices_data_files")]
    return (table.take(pa.concat_tables(parts).column(0)) if parts else table), names


def _saved_names(path: Path, key: str) -> list[str]:
    """Return file or split names under ``key`` in a JSON file of ``save_to_disk``; none where it is null."""
    try:
        items = json.loads(path.read_bytes()).get(key) or []
        return [str(item["filename"] if isinstance(item, dict) else item) for item in items]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        message = f"{path} is not what save_to_disk writes ({error!r}); save the dataset again"
        raise PromptError(message) from error
