"""The column routed_experts: the experts that the tokens of a response went through, as numpy arrays.

Of a response with P tokens of the prompt and R of its own [P + R - 1, layers x top_k]: nothing was computed
of the last token. 0 rows where the response is empty.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Routes = npt.NDArray[np.integer[Any]]
_BYTE = 256


def routes_column(routes: Sequence[Routes | None], num_experts: int = _BYTE + 1) -> pa.ListArray:
    """Make the column, of one byte for each expert where there are no more of them than that counts.

    Args:
        routes: None for an empty response.
        num_experts: experts of a layer; by default more than a byte counts.
    """
    given = [one for one in routes if one is not None and len(one)]
    width = given[0].shape[1] if given else 1
    offsets = np.cumsum([0, *(0 if one is None else len(one) for one in routes)])
    kind = np.uint8 if num_experts <= _BYTE else np.uint16
    flat = np.concatenate([np.empty(0, kind), *(one.astype(kind).ravel() for one in given)])
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.FixedSizeListArray.from_arrays(pa.array(flat), width)
    )


def routes_in(column: pa.ChunkedArray) -> list[Routes]:
    """Return each row's experts: views of one array for each chunk."""
    found: list[Routes] = []
    for chunk in column.chunks:
        flat = chunk.flatten().flatten().to_numpy(zero_copy_only=False)
        whole = flat.reshape(-1, chunk.type.value_type.list_size)
        found += np.split(whole, np.diff(chunk.offsets.to_numpy()).cumsum()[:-1]) if len(chunk) else []
    return found
