"""Light engines on a pretended GPU.

It fails with the text of ``FAULT`` while more is computed at once than ``FITS`` allows (tokens; by default
always). Where ``FAULT_KILLS`` is set they print it and abort, as NCCL's watchdog does. ``FAULT_NODE`` names a
file: the node is broken that the first process writes into it, and no other.
"""

import contextlib
import os
import sys
from pathlib import Path

from stages.engines.base import without_torch
from tests.support import light

WORDS = (
    "rollout.engine=tests.support.faulty:make_generator",
    "reward.engine=tests.support.faulty:make_scorer",
)
FAULT, FITS, KILLS, IN_REWARD = "FAULT", "FITS", "FAULT_KILLS", "FAULT_IN_REWARD"
NODE = "FAULT_NODE"


class AcceleratorError(RuntimeError):
    """In place of torch's, which these tests do not import."""


def compute(tokens: int) -> None:
    if tokens <= int(os.environ.get(FITS, "0")) or not is_broken():
        return
    if KILLS in os.environ:
        print(os.environ[FAULT], file=sys.stderr, flush=True)
        os.abort()
    raise AcceleratorError(os.environ[FAULT])


def is_broken() -> bool:
    """Whether this node has the broken GPU."""
    if NODE not in os.environ:
        return True
    path, own = Path(os.environ[NODE]), os.environ["SLURMD_NODENAME"]
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(own)
    return path.read_text() == own


class Generator(light.LightGenerator):
    tokens = 0

    def _stream(self, *given):
        compute(self.tokens)
        yield from super()._stream(*given)


class Scorer(light.LightScorer):
    tokens = 0

    def _score(self, sequences):
        compute(self.tokens)
        return super()._score(sequences)


@without_torch
def make_generator(config, directory):
    made = light.make_generator(config, directory)
    if IN_REWARD not in os.environ:
        made.__class__, made.tokens = Generator, config.rollout.tokens_per_batch
    return made


@without_torch
def make_scorer(config, directory):
    made = light.make_scorer(config, directory)
    if IN_REWARD in os.environ:
        made.__class__, made.tokens = Scorer, config.reward.tokens_per_batch
    return made
