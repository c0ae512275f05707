"""Learning rates over the optimizer steps of a run."""

import torch

from pipeline.config.update import Schedule, UpdateConfig


def learning_rate(peak: float, position: int, total: int, config: UpdateConfig) -> float:
    """Return the learning rate of a mini-batch, by its 0-based position among all that the run plans: a
    function of counters, so there is nothing to save, and steps not taken do not delay the schedule.
    """
    if position < config.warmup_steps:
        return peak * (position + 1) / config.warmup_steps
    done = (position - config.warmup_steps) / max(1, total - config.warmup_steps)
    match config.schedule:
        case Schedule.CONSTANT:
            return peak
        case Schedule.LINEAR:
            return peak * (1 - done)
        case Schedule.COSINE:
            return peak * 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * done))))
