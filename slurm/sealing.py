"""JSON objects with a checksum, so that a flipped bit in a file is found when it is read.

Here and not in pipeline/, because :mod:`slurm.element` reads such a file.
"""

import json
from collections.abc import Mapping
from typing import Any

import xxhash


def sealed(content: Mapping[str, Any]) -> str:
    """Return a JSON object with a checksum over its values, as text of one line."""
    return json.dumps({**content, "checksum": checksum(content)}) + "\n"


def from_json(data: bytes | str) -> Any:
    """Parse JSON. Raises ValueError where it is none, also where it is nested too deeply for any of ours."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unsealed(data: bytes) -> dict[str, Any]:
    """Undo :func:`sealed`.

    Raises:
        ValueError: it is truncated or corrupt.
    """
    content = from_json(data)
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    if content.pop("checksum", None) != checksum(content):
        raise ValueError("its content does not have the checksum that it was written with")
    return content


def checksum(content: Mapping[str, Any]) -> str:
    """Compute a checksum over the values, not the text: the file's layout may change, its content may not."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
