"""Files that are kept twice, because no other file says the same: ``NAME.json`` and ``NAME.copy.json``.

Readers take the first that can be read. The holder of the run's lease writes both, and writes them again
where one is spoilt, missing, or older than the other.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pipeline.run.durable import replace_durably
from slurm.sharedfiles import make_folder, read_newest, sealed, unsealed

Content = TypeVar("Content")
Parse = Callable[[dict[str, Any]], Content]
"""Function that makes a content of a JSON object. Raises ValueError, TypeError or AttributeError where it
holds none."""


def both_of(path: Path) -> tuple[Path, Path]:
    """Return the file and its copy."""
    return path, path.with_suffix(".copy.json")


def read_one(path: Path, parse: Parse[Content]) -> Content | str | None:
    """Return what one file says, why it cannot be read, or None where there is none."""
    try:
        return parse(unsealed(read_newest(path)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        return f"{path} cannot be read ({' '.join(str(error).split())})"


def read_either(path: Path, parse: Parse[Content]) -> Content | str | None:
    """Return what the file or else its copy says; where neither does, why one of them cannot be read, or None
    where there are none."""
    spoilt = None
    for one in both_of(path):
        found = read_one(one, parse)
        if found is not None and not isinstance(found, str):
            return found
        spoilt = found or spoilt
    return spoilt


def why_spoilt(path: Path, parse: Parse[Content]) -> str | None:
    """Return what is wrong with one of the two files, in words; None where both say the same."""
    first, copy = (read_one(one, parse) for one in both_of(path))
    for one, found in zip(both_of(path), (first, copy), strict=True):
        if isinstance(found, str):
            return found
        if found is None and first != copy:
            return f"{one} is missing"
    return None if first == copy else f"{both_of(path)[1]} is older than what it is a copy of"


def write_both(path: Path, root: Path, content: Mapping[str, Any]) -> None:
    """Write the file, and then its copy. Makes their folder in the run's directory ``root``. A folder in the
    place of one of them is moved aside, as ``NAME.json.in-the-way.TIME``."""
    make_folder(path.parent, root)
    text = sealed(content)
    for one in both_of(path):
        if one.is_dir() and not one.is_symlink():
            one.rename(one.with_name(f"{one.name}.in-the-way.{time.time_ns()}"))
        replace_durably(one, text)
