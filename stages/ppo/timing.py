"""Seconds of updates, on the device too."""

import time
from collections.abc import Callable

import torch

from stages.context import Stopwatch
from stages.ppo.experience import Experience
from stages.ppo.learner import update
from stages.ppo.math.shaping import RunningMoments
from stages.ppo.training import Learner


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that something takes, on the card too."""
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def timed_updates(learner: Learner, experience: Experience, number: int, warm_up: int = 1) -> list[float]:
    """Return the seconds of each of so many updates after some that warm up."""
    moments = RunningMoments().including(experience.outcome.scores)

    def seconds_of(iteration: int) -> float:
        return timed(lambda: update(learner, experience, iteration, 0.0, moments, Stopwatch()))

    return [seconds_of(iteration) for iteration in range(1, warm_up + number + 1)][warm_up:]
