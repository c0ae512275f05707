"""Arrow without pandas. Where pandas is installed, pyarrow imports it at the first array that it makes, to
know its types from others: a third of a worker's start, and 40 MB.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _WithoutPandas(MetaPathFinder):
    """Finds no pandas."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)


def spare_pandas() -> None:
    """Have pyarrow make its first array while there is no pandas to be found: it looks for it just once.

    Code of the user's may still import pandas. Arrow knows its types then as soon as a table was converted to
    or from one of its frames; before that, an array made of a series is made as of any other sequence.
    """
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    finder = _WithoutPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(finder)
