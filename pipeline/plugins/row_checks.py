"""Checks of prompt files by the rules that will score their responses, before anything is generated.

A rule says by its attribute ``check`` (:mod:`pipeline.plugins.marks`) which rows it can score responses to.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.plugins.called import PluginFailure, check_rows, has_check
from pipeline.plugins.load import PluginError
from pipeline.plugins.trial import OpenRule

CHUNK_ROWS = 5000
"""Most rows of one call."""
CHUNK_BYTES = 16 << 20
_SECONDS = 60.0
"""Seconds that a check of so many rows may take."""

Chunk = Mapping[str, Sequence[Any]]
"""Values of some rows by column."""


def chunks_of(table: pa.Table) -> Iterator[Chunk]:
    """Yield the rows of a table in chunks that a check may get at once."""
    size = max(1, min(CHUNK_ROWS, CHUNK_BYTES * table.num_rows // max(table.nbytes, 1)))
    for start in range(0, table.num_rows, size):
        yield table.slice(start, size).to_pydict()


def row_problems(
    rules: Sequence[OpenRule], chunks: Iterable[Chunk], source: str
) -> Iterator[tuple[int, str]]:
    """Yield index and problem of every row that a rule with a check cannot score responses to, in order; of
    several problems of a row the first rule's.

    Args:
        source: the file, for messages.

    Raises:
        PluginError: a check failed, or did not give one answer per row.
    """
    checking = [rule for rule in rules if rule.calls.call(_SECONDS, has_check) is True]
    start, asked = 0, None
    for chunk in chunks if checking else ():
        # While this one is made, the rules look at the one before.
        ahead = [
            (rule, rule.calls.ask(_SECONDS, check_rows, chunk, rule.config.arguments)) for rule in checking
        ]
        if asked:
            yield from _answers(*asked, source)
        asked = start, ahead
        start += len(next(iter(chunk.values()), ()))
    if asked:
        yield from _answers(*asked, source)


def _answers(start: int, asked: Sequence[tuple[OpenRule, Any]], source: str) -> Iterator[tuple[int, str]]:
    found: dict[int, str] = {}
    for rule, future in asked:
        answer = rule.calls.answer(future, _SECONDS)
        if isinstance(answer, PluginFailure):
            raise PluginError(f"{rule.key}={rule.config.function}: its check of {source} {answer.text}")
        for index, why in answer:
            found.setdefault(start + index, f"reward {rule.name}: {why}")
    yield from sorted(found.items())
