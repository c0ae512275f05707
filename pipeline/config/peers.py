"""What words of other systems are called here: keys, by :data:`TABLE`, and options of groups."""

from functools import cache

from pipeline.config.peer_table import TABLE
from pipeline.config.peer_words import PeerWords

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


def peer_words(key: str) -> PeerWords | None:
    """Return the row of a key as others have it: whole, or its last words. None for one that nobody has."""
    parts = key.lower().replace("-", "_").split(".")
    by_word = _by_word()
    endings = (".".join(parts[place:]) for place in range(len(parts)))
    return next((by_word[ending] for ending in endings if ending in by_word), None)


@cache
def _by_word() -> dict[str, PeerWords]:
    """Return rows by their words, and by the ends of words with dots, of two parts at least: people leave out
    where something lies."""
    found: dict[str, PeerWords] = {}
    for row in TABLE:
        for word in row.words:
            found.setdefault(word, row)
    for row in TABLE:
        for word in row.words:
            parts = word.split(".")
            for place in range(1, len(parts) - 1):
                found.setdefault(".".join(parts[place:]), row)
    return found
