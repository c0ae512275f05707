"""Rollout against update, for every family of models: how far apart their log-probabilities are.

    python benchmarks/families.py [--out docs/explanation/families.md]

Each family's model is tiny and random, in fp32 on the CPU. Its prompts are of several lengths, and answered
in one call by the transformers engine; the update computes the same tokens in one micro-batch. Ends with exit
code 1 where a family is further apart than 1e-5.
"""

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import __version__  # noqa: E402
from transformers.utils import logging  # noqa: E402

from stages.engines.padding import Batching  # noqa: E402
from stages.engines.transformers import TransformersGenerator  # noqa: E402
from tests.support.families import CONTEXT, FAMILIES, Gaps, family, gaps_of  # noqa: E402

LIMIT = 1e-5
"""Nats per token."""
BUDGET = 1 << 20
PAGE = """# Families of models

`python benchmarks/families.py --out docs/explanation/families.md`: {number} families of transformers
{version}, each a tiny random model in fp32. The numbers are the largest difference of a token's
log-probability between rollout (the transformers engine) and update, in nats: with prompts of several lengths
in one call, with each alone, and with prompts padded whatever the model is.

Before its first batch the engine compares a row alone with the same row padded on the left beside a longer
one and, if the answers differ, beside one of its own length. So these are found not to bear padding:
{apart}. Some read padding as text, some count positions from it,
and RWKV mixes up the rows of any batch when it generates. They go in batches of one length, or row by row,
which is exact and slower. The update pads on the right, where no causal model looks.

Reward models are tried in the same way, with two rows scored alone and together: FNet, ConvBERT,
Nystromformer, YOSO and CANINE, which mix tokens with the padding behind them, score rows of one length
together. Padded batches of others, such as BERT, have the same scores."""
APART = """| not padded | batches | together | alone | padded by force |
|---|---|---|---|---|"""
PADDED = """| together | alone | padded by force | families that are padded |
|---|---|---|---|"""


@dataclass(frozen=True)
class Measured:
    """One family."""

    name: str
    batching: Batching
    as_run: Gaps
    padded: float
    """Gap where prompts are padded whatever the check says."""


class Padding(TransformersGenerator):
    """An engine that pads prompts of whatever model."""

    def batching(self) -> Batching:
        return Batching.PADDED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="page of the documentation to write the table into")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # some models print
        found = [measure(name) for name in sorted(FAMILIES)]
    text = "\n".join(page(found)) + "\n"
    if given.out:
        given.out.write_text(text)
    else:
        print(text)
    apart = [one.name for one in found if not max(one.as_run.together, one.as_run.alone) <= LIMIT]
    sys.exit(f"further apart than {LIMIT}: {', '.join(apart)}" if apart else 0)


def measure(name: str) -> Measured:
    model = family(name)
    generator = TransformersGenerator(model, BUDGET, CONTEXT)
    as_run = gaps_of(generator, model)
    padded = gaps_of(Padding(model, BUDGET, CONTEXT), model).together
    return Measured(name, generator.batching(), as_run, padded)


def page(found: Sequence[Measured]) -> Iterator[str]:
    apart = [one for one in found if one.batching is not Batching.PADDED]
    names = ", ".join(one.name for one in apart)
    yield from (PAGE.format(number=len(found), version=__version__, apart=names), "", APART)
    yield from (f"| {one.name} | {one.batching} | {numbers(one)} |" for one in apart)
    yield from ("", PADDED)
    alike: dict[str, list[str]] = {}
    for one in found:
        if one.batching is Batching.PADDED:
            alike.setdefault(numbers(one), []).append(one.name)
    for cells, families in sorted(alike.items(), key=lambda row: -len(row[1])):
        yield f"| {cells} | {', '.join(families)} |"
    yield from ("", "Next: [what was measured besides](benchmarks.md).")


def numbers(one: Measured) -> str:
    return " | ".join(map(short, (one.as_run.together, one.as_run.alone, one.padded)))


def short(gap: float) -> str:
    return f"{gap:.0e}" if gap < 0.001 else f"{gap:.2g}"


if __name__ == "__main__":
    main()
