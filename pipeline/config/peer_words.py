"""What a key here is called by other systems, as a value."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class PeerWords:
    """What others call a key. Several words of one peer are of its versions, trainers or algorithms."""

    here: list[str]
    """The key, or the keys that share what others have in one."""
    verl: list[str]
    openrlhf: list[str]
    trl: list[str]
    swift: list[str]
    loose: list[str]
    """Words that people type and nobody's documentation has."""
    note: str
    """What differs, beside the name."""

    @property
    def advice(self) -> str:
        """The way out, as the end of a line."""
        return f"here: {' and '.join(self.here)}" + (f" ({self.note})" if self.note else "")

    @property
    def words(self) -> Iterator[str]:
        """All words, of all peers."""
        for peer in (*PEERS, "loose"):
            yield from getattr(self, peer)


PEERS = {"verl": "verl", "openrlhf": "OpenRLHF", "trl": "TRL", "swift": "ms-swift"}
"""Names of the peers by their fields."""
