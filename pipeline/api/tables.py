"""Rows and samples as Arrow tables, and as pandas frames where pandas is installed. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline.metrics.samples import Choice, Sample
from slurm.errors import UserError

if TYPE_CHECKING:
    import pandas

INDEX = "iteration"
_TURNS = pa.list_(pa.struct([("role", pa.string()), ("text", pa.string())]))
_TYPES = {
    "iteration": pa.int64(),
    "prompt_id": pa.string(),
    "sample_index": pa.int64(),
    "prompt": pa.string(),
    "response": pa.string(),
    "reward": pa.float64(),
    "kl": pa.float64(),
    "length": pa.int64(),
    "finish_reason": pa.string(),
    "num_turns": pa.int64(),
    "turns": _TURNS,
}
"""Type of the column of each attribute of a sample but ``components``."""


class MissingPackage(UserError, ImportError):
    """A package that is not among the requirements of slurm-ppo is needed, and is not installed."""


def metric_table(rows: Sequence[Mapping[str, float]]) -> pa.Table:
    """Return rows of metrics.jsonl as a table: a row per iteration, a column per number that any row has.

    The first column is ``iteration``; others come in the order in which the rows have them. A column is int64
    where all its numbers are integers, else float64. What a row does not have is null.
    """
    names = dict.fromkeys([INDEX, *(name for row in rows for name in row)])
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: Sequence[float | None]) -> pa.Array:
    is_whole = all(value is None or isinstance(value, int) for value in values)
    return pa.array(values, pa.int64() if is_whole else pa.float64())


def sample_table(samples: Sequence[Sample], choices: Sequence[Choice | None]) -> pa.Table:
    """Return samples as :meth:`pipeline.Samples.table` does."""
    assert {*_TYPES, "components"} == {field.name for field in fields(Sample)}
    columns = {name: pa.array([getattr(s, name) for s in samples], kind) for name, kind in _TYPES.items()}
    columns["turns"] = pa.array([[turn._asdict() for turn in s.turns] for s in samples], _TURNS)
    for component in _names(sample.components for sample in samples):
        scores = [sample.components.get(component) for sample in samples]
        columns[f"reward/{component}"] = pa.array(scores, pa.float64())
    columns["choice"] = pa.array([choice and str(choice) for choice in choices], pa.string())
    return pa.table(columns)


def _names(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the keys of all mappings, each once, in the order in which they come."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def frame(table: pa.Table) -> "pandas.DataFrame":
    """Return a table of metrics as a frame, with ``iteration`` as its index.

    Raises:
        MissingPackage: pandas is not installed here.
    """
    try:
        import pandas  # noqa: F401
    except ImportError:
        raise MissingPackage(
            "pandas is not installed here: pip install pandas; or take metrics(), which is an Arrow table"
        ) from None
    return table.to_pandas().set_index(INDEX)
