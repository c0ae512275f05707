"""What words of verl, OpenRLHF, TRL and ms-swift are called here: keys, by a table, and options of groups.

A page of the reference is made from them.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

UNSET = "nothing here is set so; leave it out"
"""Way out for a word of others that has no key."""


@dataclass(frozen=True)
class PeerWords:
    """What others call a key. Several words of one peer are of its versions, trainers or algorithms."""

    here: list[str]
    """The key, or the keys that share what others have in one; none where nothing is set so."""
    verl: list[str]
    openrlhf: list[str]
    trl: list[str]
    swift: list[str]
    loose: list[str]
    """Words that people type and no documentation has."""
    note: str
    """What differs, beside the name."""

    @property
    def advice(self) -> str:
        """The way out, as the end of a line."""
        here = f"here: {' and '.join(self.here)}" if self.here else UNSET
        return here + (f" ({self.note})" if self.note else "")

    @property
    def words(self) -> Iterator[str]:
        """All words, of all peers."""
        for peer in (*PEERS, "loose"):
            yield from getattr(self, peer)


PEERS = {"verl": "verl", "openrlhf": "OpenRLHF", "trl": "TRL", "swift": "ms-swift"}
"""Names of the peers by their fields."""
OPTIONS = {
    "algorithm=gae": "algorithm=ppo",
    "algorithm=group_norm": "algorithm=grpo",
    "algorithm=drgrpo": "algorithm=dr_grpo",
    "algorithm=reinforce": "algorithm=reinforce_plus_plus",
    "algorithm=reinforce++": "algorithm=reinforce_plus_plus",
    "algorithm=reinforce_baseline": "algorithm=reinforce_plus_plus_baseline",
    "algorithm=reinforce++-baseline": "algorithm=reinforce_plus_plus_baseline",
    "algorithm=reinforce_plus_plus-baseline": "algorithm=reinforce_plus_plus_baseline",
    "rollout=hf": "rollout=transformers",
    "reward=function": "reward=rule",
    "update=deepspeed": "update=zero2",
    "tracking=w&b": "tracking=wandb",
}
"""Options of groups that others, or people, call otherwise, in lower case."""


@cache
def peer_table() -> tuple[PeerWords, ...]:
    """Return the rows of peers.csv in their order. Words in a cell have blanks between them."""
    found = []
    with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            note = row.pop("note")
            found.append(PeerWords(**{name: words.split() for name, words in row.items()}, note=note))
    return tuple(found)


def peer_words(key: str) -> PeerWords | None:
    """Return the row of a key as others have it: whole, or its last words. None for one of ours."""
    parts = key.lower().replace("-", "_").split(".")
    by_word = _by_word()
    endings = (".".join(parts[place:]) for place in range(len(parts)))
    return next((by_word[ending] for ending in endings if ending in by_word), None)


@cache
def _by_word() -> dict[str, PeerWords]:
    """Return rows by their words, and by the ends of words with dots, of two parts at least: people leave out
    where something lies."""
    found: dict[str, PeerWords] = {}
    for row in peer_table():
        for word in row.words:
            found.setdefault(word, row)
    for row in peer_table():
        for word in row.words:
            parts = word.split(".")
            for place in range(1, len(parts) - 1):
                found.setdefault(".".join(parts[place:]), row)
    return found
