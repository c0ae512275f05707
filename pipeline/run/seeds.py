"""Seeds as a pure function of what is being done, so that any task can be run again anywhere."""

import xxhash


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from the run's seed and the names of what is being done.

    Parts are typed and separated, so that ``(1, "2")`` and ``("1", 2)`` and ``(12,)`` give unrelated seeds.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
