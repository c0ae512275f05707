"""Tables of cases: a sample of each is tried in the suite, all of it by ``make soak``.

Which ones is said by the commit that is checked out, so that every row has its turn. Whole tests are rows
where they have the mark ``trial``, of a table of their file or of one that is named, as those below. All run
where files or tests are named.
"""

import math
import os
import subprocess
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeVar

import pytest

from tests.support import ROOT

_Any = TypeVar("_Any")
IS_SOAK = "SOAK_ROUNDS" in os.environ
ON_CLUSTER = pytest.mark.trial(1 / 10, "cluster")
"""Half a minute and more of the practice cluster: a fault, or a way of sharing it."""
LONG = pytest.mark.trial(1 / 6, "long")
"""Half a minute and more of both cores: real models that are killed, split or told apart."""


def _commit() -> str:
    """Return the commit that is checked out; nothing where there is no repository, nor git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


SEED = os.environ.setdefault("TABLE_SEED", _commit())
"""Processes that tests start have the same, also if somebody commits meanwhile."""


def sample(table: Sequence[_Any], share: float, key: Callable[[_Any], str] = repr) -> list[_Any]:
    """Return a share of the rows of a table, at least one, in their order."""
    if IS_SOAK:
        return list(table)
    by_chance = sorted(table, key=lambda row: blake2b(f"{SEED}/{key(row)}".encode()).digest())
    chosen = {key(row) for row in by_chance[: max(1, math.ceil(share * len(table)))]}
    return [row for row in table if key(row) in chosen]


def without_trials_left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of the whole suite: of trials a share of each table. A test keeps all of its rows."""
    tables: dict[tuple[str, float], set[str]] = {}
    for item in items:
        if mark := item.get_closest_marker("trial"):
            share, table = (*mark.args, item.path.name)[:2]
            tables.setdefault((table, share), set()).add(row_of(item))
    chosen = {row for (_, share), rows in tables.items() for row in sample(sorted(rows), share)}
    return [one for one in items if not is_trial(one) or row_of(one) in chosen]


def is_trial(item: pytest.Item) -> bool:
    return item.get_closest_marker("trial") is not None


def row_of(item: pytest.Item) -> str:
    """Return the file and name of a test, whose own rows stay together."""
    return f"{item.path.name}/{item.name.partition('[')[0]}"
