"""Curriculum: prompts in the order of a column of numbers. Pure."""

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pipeline.run.seeds import derive_seed
from pipeline.text import shown


def number_of(value: object) -> float | None:
    """Return a value as a number, also of text, as CSV has it; None where it is none, or not finite."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def unordered(columns: pa.Table, name: str) -> dict[int, str]:
    """Return, by index, why rows have no place in the order of a column."""
    values = enumerate(columns[name].to_pylist())
    return {i: f"{name} is {shown(one)}, not a number" for i, one in values if number_of(one) is None}


def curriculum_order(
    values: Sequence[object], files: Sequence[str] | None, seed: int, shuffle: bool, descends: bool = False
) -> list[int]:
    """Return the indices of rows from the least value to the greatest; the other way round if it descends.

    Args:
        values: numbers, or text of them.
        files: name of each row's file, to put each file in an order of its own, one after the other.
        shuffle: whether rows of one value are in an order by the seed; else they keep theirs.
    """
    raw = np.random.Philox(key=derive_seed(seed, "curriculum")).random_raw(len(values))
    ties = raw if shuffle else np.arange(len(values))
    numbers = np.array([number_of(value) for value in values], dtype=np.float64) * (-1 if descends else 1)
    place = {name: index for index, name in enumerate(dict.fromkeys(files or ()))}
    groups = np.array([place[name] for name in files]) if files else np.zeros(len(values), dtype=np.int64)
    order: list[int] = np.lexsort((ties, numbers, groups)).tolist()
    return order
