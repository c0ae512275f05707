"""Text files of prompts: JSON Lines and CSV, plain or compressed, as rows one after the other."""

import contextlib
import csv
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import pyarrow as pa

from pipeline.data.rows import RejectReason, Unusable
from pipeline.data.tables import Choose, PromptError, first_line
from pipeline.text import listing

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Arrow's names of compressions by the end of a file's name."""
_HEAD_BYTES = 1 << 16
"""Bytes of a file's beginning and end that say whether it holds lines."""
_BLOCK_BYTES = 1 << 20
_LONGEST_FIELD = 16 << 20
"""Characters of a field of CSV: a quote that is never closed takes in all that follows."""
WANTED = "JSON Lines are wanted: an object on each line"
_QUOTING = "put text with commas, quotes or line breaks in double quotes, and double the quotes in it"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Line = tuple[int | str, dict[str, object] | Unusable]
"""1-based number of a line, or another name of the row, and its object, or why there is none."""


class RawLine(NamedTuple):
    """A row as it is read, of JSON Lines not parsed yet."""

    number: int
    """1-based number of the line, of several the first."""
    size: int
    """Bytes, roughly."""
    content: bytes | dict[str, object] | Unusable

    @property
    def parsed(self) -> dict[str, object] | Unusable:
        return _parse_line(self.content) if isinstance(self.content, bytes) else self.content


def is_text(path: Path) -> bool:
    """Whether a file's name is that of a text file with rows."""
    return _bare_suffix(path) in (*_JSON_LINES, *_DELIMITERS)


def is_csv(path: Path) -> bool:
    """Whether a file's name is that of CSV, whose first row is a header."""
    return _bare_suffix(path) in _DELIMITERS


def raw_lines(path: Path, limit: int | None = None) -> Iterator[RawLine]:
    """Yield the rows of a text file, the first ``limit`` of them: lines that are not blank.

    Raises:
        PromptError: it is CSV with a wrong header or wrong quotes.
    """
    with _opened(path) as file:
        rows = _csv_rows(path, file) if is_csv(path) else _json_lines(file)
        yield from itertools.islice(rows, limit)


def read_lines(path: Path, choose: Choose | None, limit: int | None) -> tuple[tuple[Line, ...], int]:
    """Read the rows of a text file, and count them; twice for some of them, so that it is never in memory
    whole.

    Args:
        choose: chooses rows. Default: all.
        limit: the most to read, the first ones. Default: all.

    Raises:
        PromptError: it holds no lines of JSON, or is CSV with a wrong header or wrong quotes.
    """
    if _bare_suffix(path) in _JSON_LINES:
        _check_is_lines(path)
    if choose is None:
        filled = tuple((line.number, line.parsed) for line in raw_lines(path, limit))
        return filled, len(filled)
    num_rows = num_bytes = 0
    for line in raw_lines(path, limit):
        num_rows, num_bytes = num_rows + 1, num_bytes + line.size
    wanted = set(choose(num_rows, num_bytes))
    chosen = (line for row, line in enumerate(raw_lines(path, limit)) if row in wanted)
    return tuple((line.number, line.parsed) for line in chosen), num_rows


def _bare_suffix(path: Path) -> str:
    """Return the end of a file's name before that of its compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSIONS else suffix


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed if its name says so."""
    compression = _COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        with path.open("rb") as file:
            yield file
        return
    with pa.input_stream(str(path), compression=compression) as stream, io.BufferedReader(stream) as file:
        yield file


# --- JSON Lines ---


def _json_lines(file: IO[bytes]) -> Iterator[RawLine]:
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        if line.strip():
            yield RawLine(number, len(line), line.removesuffix(b"\n"))


def _parse_line(line: bytes) -> dict[str, object] | Unusable:
    try:
        value = json.loads(line.decode())
        if b"\\u" in line:  # an escape can name half a character, which no UTF-8 file can hold
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return Unusable(RejectReason.BAD_UTF8, f"not UTF-8 text: {error.reason}")
    except (ValueError, RecursionError) as error:
        return Unusable(RejectReason.BAD_JSON, f"not JSON: {first_line(error)}")
    if not isinstance(value, dict):
        return Unusable(RejectReason.NOT_OBJECT, f"a JSON {type(value).__name__}, not an object")
    return value


def _check_is_lines(path: Path) -> None:
    """Raise PromptError for a file that is one JSON array, or one object, on several lines."""
    with _opened(path) as file:
        head = file.read(_HEAD_BYTES).removeprefix(_BYTE_ORDER_MARK).lstrip()
    first = head.split(b"\n", 1)[0].strip()
    goes_on = first == b"[" or first.endswith((b",", b"{")) or (b"\n" not in head and b"{" in first)
    if first.startswith(b"[") and goes_on and _tail(path).rstrip().endswith(b"]"):
        raise PromptError(
            f"{path} is one JSON array, and {WANTED}; jq -c '.[]' FILE > FILE.jsonl makes it so"
        )
    if first == b"{" and _tail(path).rstrip().endswith(b"\n}"):
        raise PromptError(f"{path} is one JSON object on several lines, and {WANTED}")


def _tail(path: Path) -> bytes:
    """Return the last bytes of a file; of a compressed one after reading all of it."""
    with _opened(path) as file:
        if file.seekable():
            file.seek(max(0, file.seek(0, io.SEEK_END) - _HEAD_BYTES))
        last = b""
        for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
            last = (last + block)[-_HEAD_BYTES:]
        return last


# --- CSV ---


def _csv_rows(path: Path, file: IO[bytes]) -> Iterator[RawLine]:
    """Yield the rows of CSV with a header, all values as text. A column without a name, as pandas writes for
    the numbers of rows, is left out. Raises PromptError."""
    csv.field_size_limit(_LONGEST_FIELD)
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter=_DELIMITERS[_bare_suffix(path)], strict=True)
    header, start = None, 1
    try:
        for fields in reader:
            if fields and header is None:
                header = _checked_header(path, fields)
            elif fields and header is not None:
                yield RawLine(start, sum(map(len, fields)), _csv_row(header, fields))
            start = reader.line_num + 1
    except csv.Error as error:
        message = f"{path} is no CSV from line {start} on ({first_line(error)}); {_QUOTING}"
        raise PromptError(message) from error


def _checked_header(path: Path, names: Sequence[str]) -> Sequence[str]:
    """Return the header. Raises PromptError where it is not text, or names two columns alike."""
    if _is_no_utf8(names):
        raise PromptError(f"{path}: its header is not UTF-8 text; save it as UTF-8")
    if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
        raise PromptError(f"{path} has several columns of the name {listing(repeated)}; keep one of each")
    return names


def _csv_row(header: Sequence[str], fields: Sequence[str]) -> dict[str, object] | Unusable:
    if len(fields) != len(header):
        said = f"{len(fields)} fields, and the header has {len(header)}; {_QUOTING}"
        return Unusable(RejectReason.BAD_CSV, said)
    if _is_no_utf8(fields):
        return Unusable(RejectReason.BAD_UTF8, "not UTF-8 text")
    return {name: field for name, field in zip(header, fields, strict=True) if name}


def _is_no_utf8(fields: Sequence[str]) -> bool:
    """Whether bytes were no text, of which reading has made half characters."""
    try:
        "".join(fields).encode()
    except UnicodeEncodeError:
        return True
    return False
