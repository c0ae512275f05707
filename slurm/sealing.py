"""JSON objects with a checksum: a bit that flips in a file is seen where it is read.

Here and not in pipeline/, because what every array element runs reads such a file.
"""

import json
from collections.abc import Mapping
from typing import Any

import xxhash


def sealed(content: Mapping[str, Any]) -> str:
    """A JSON object with a checksum over its values, as text of one line."""
    return json.dumps({**content, "checksum": checksum(content)}) + "\n"


def unsealed(data: bytes) -> dict[str, Any]:
    """Inverse of :func:`sealed`. An object without a checksum, of an earlier version, is taken as it is.

    Raises:
        ValueError: it is cut, or a bit has flipped in it.
    """
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    given = content.pop("checksum", None)
    if given is not None and given != checksum(content):
        raise ValueError("its content does not have the checksum that it was written with")
    return content


def checksum(content: Mapping[str, Any]) -> str:
    """Checksum over the values, not the text: a file may be laid out differently, but not changed."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
