"""Memory of GPUs, by the names that clusters give them. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_CARDS = {
    "b200": (180, 180),
    "h200": (141, 141),
    "gh200": (96, 144),
    "h100": (80, 94),
    "h800": (80, 80),
    "a100": (40, 80),
    "a800": (40, 80),
    "a40": (48, 48),
    "a30": (24, 24),
    "a10": (24, 24),
    "a6000": (48, 48),
    "l40s": (48, 48),
    "l40": (48, 48),
    "l4": (24, 24),
    "v100": (16, 32),
    "p100": (12, 16),
    "t4": (16, 16),
    "rtx_6000": (24, 48),
    "rtx_4090": (24, 24),
    "rtx_3090": (24, 24),
    "mi300x": (192, 192),
    "mi300a": (128, 128),
    "mi250x": (64, 64),
    "mi250": (64, 64),
    "mi210": (64, 64),
    "mi100": (32, 32),
}
"""Least and most GB of the cards that are sold by a name. An MI250 is two GPUs."""
_PEAK_TFLOPS = {
    "b200": 2250,
    "h200": 989,
    "gh200": 989,
    "h100": 989,
    "h800": 989,
    "a100": 312,
    "a800": 312,
    "a40": 150,
    "a30": 165,
    "a10": 125,
    "a6000": 155,
    "l40s": 362,
    "l40": 181,
    "l4": 121,
    "v100": 125,
    "t4": 65,
    "mi300x": 1307,
    "mi250x": 191,
    "mi250": 181,
    "mi210": 181,
}
"""Dense TFLOP/s in bf16 by makers' data sheets, of V100 and T4 in fp16: an H100 as SXM, an MI250 one of its
two GPUs."""
_SIZE = re.compile(r"(?<![0-9])(\d+)gi?b(?![a-z0-9])")
"""Memory that a name says, as in a100_80gb and in 1g.10gb, a part of a GPU."""
_RESERVED = 0.97
"""Share of a card's GB that a program sees, as the driver and error correction take some of it."""


@dataclass(frozen=True)
class Card:
    """Memory of one GPU. In bytes; least and most where the name of the GPU leaves it open."""

    least: float
    most: float
    why: str
    """Source of the numbers, in words."""
    kind: str = ""
    """Its name, as :func:`kind_of` has it; empty where that is not known, or not one."""


def card_named(name: str) -> Card | None:
    """Return the memory of a GPU by its type in a cluster's GRES or its product name; None if unknown."""
    if sizes := _SIZE.findall(_plain(name)):
        return _card(float(sizes[-1]), float(sizes[-1]), name)
    kind = kind_of(name)
    return _card(*_CARDS[kind], name) if kind in _CARDS else None


def peak_flops(kind: str) -> float | None:
    """Return the FLOP/s in half precision that a kind of card, as :func:`kind_of` has it, is sold with; None
    where that is not known."""
    return _PEAK_TFLOPS[kind] * 1e12 if kind in _PEAK_TFLOPS else None


def kind_of(name: str) -> str:
    """Return one name for all that clusters and drivers call the same card; that given for an unknown one."""
    plain = _plain(name)
    found = [known for known in _CARDS if re.search(rf"(?<![a-z0-9]){known}(?![0-9])", plain)]
    return max(found, key=len) if found else plain


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


def _card(least: float, most: float, name: str) -> Card:
    return Card(least * 1e9 * _RESERVED, most * 1e9 * _RESERVED, name, kind_of(name))


def any_of(cards: Iterable[Card | None]) -> Card | None:
    """Return what is known of a GPU that may be any of several; None where one of these is not known."""
    found = list(cards)
    known = [card for card in found if card is not None]
    if not known or len(known) < len(found):
        return None
    names = ", ".join(dict.fromkeys(card.why for card in known))
    kinds = {card.kind for card in known}
    least, most = min(card.least for card in known), max(card.most for card in known)
    return Card(least, most, names, kinds.pop() if len(kinds) == 1 else "")
