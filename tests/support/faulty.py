"""Light engines, and a trainer, on a pretended GPU.

It fails with the text of ``FAULT`` while more is computed at once than ``FITS`` allows (tokens; by default
always), unless the environment has what ``FAULT_CURE`` names (NAME=VALUE). Where ``FAULT_KILLS`` is set they
print it and abort, as NCCL's watchdog does; with ``FAULT_MEMORY`` it is the host's memory that is too small.
``FAULT_NODE`` names a file: the node is broken that the first process writes into it, and no other.
``FAULT_RATE`` is a learning rate from which on losses are not finite. With ``FAULT_LATER`` nothing of this is
so while the policy is the user's own.
"""

import contextlib
import os
import sys
from pathlib import Path

from pipeline.run.failures import FailureKind
from stages.context import NumericalError, OutOfMemory
from stages.engines.base import without_torch
from tests.support import light

WORDS = (
    "rollout.engine=tests.support.faulty:make_generator",
    "reward.engine=tests.support.faulty:make_scorer",
)
TRAINER = "update.engine=tests.support.faulty:make_trainer"
FAULT, FITS, KILLS, IN_REWARD = "FAULT", "FITS", "FAULT_KILLS", "FAULT_IN_REWARD"
NODE, CURE, MEMORY, RATE = "FAULT_NODE", "FAULT_CURE", "FAULT_MEMORY", "FAULT_RATE"
LATER = "FAULT_LATER"


class AcceleratorError(RuntimeError):
    """In place of torch's, which these tests do not import."""


def compute(tokens: int) -> None:
    if tokens <= int(os.environ.get(FITS, "0")) or is_cured() or not is_broken():
        return
    if MEMORY in os.environ:
        raise OutOfMemory(os.environ[FAULT], FailureKind.MEMORY)
    if KILLS in os.environ:
        print(os.environ[FAULT], file=sys.stderr, flush=True)
        os.abort()
    raise AcceleratorError(os.environ[FAULT])


def is_cured() -> bool:
    name, _, value = os.environ.get(CURE, "").partition("=")
    return os.environ.get(name) == value


def is_early(is_first: bool) -> bool:
    return is_first and LATER in os.environ


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
    if IN_REWARD not in os.environ and not is_early(directory == config.model.policy):
        made.__class__, made.tokens = Generator, config.rollout.tokens_per_batch
    return made


@without_torch
def make_scorer(config, directory):
    made = light.make_scorer(config, directory)
    if IN_REWARD in os.environ:
        made.__class__, made.tokens = Scorer, config.reward.tokens_per_batch
    return made


@without_torch
def make_trainer(config):
    from tests.support.light_training import LightTrainer

    class Trainer(LightTrainer):
        def update(self, context, iteration):
            is_on = not is_early(iteration == 1)
            if is_on and config.update.learning_rate >= float(os.environ.get(RATE, "inf")):
                raise NumericalError("the loss is nan")
            if is_on and FAULT in os.environ:
                compute(config.update.minibatches)
            return super().update(context, iteration)

    return Trainer()
