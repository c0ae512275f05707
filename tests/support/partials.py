"""Generation that is asked to stop, or saves at every step."""

import functools

from stages.engines.base import Request
from tests.support import ROOT, processes


def saving_always(arguments: list[str], log: str) -> None:
    """A rollout that saves after each batch."""
    from stages.tasks import rollout

    rollout.run = functools.partial(rollout.run, save_every=0.0)  # type: ignore[assignment]
    processes._main(arguments, log, str(ROOT))


def stopping(arguments: list[str], log: str, steps: int) -> None:
    """A task that is warned before a certain token."""
    from stages.generation import responding

    asked = iter(range(10**6))
    responding.warned = lambda: next(asked) >= steps  # type: ignore[assignment]
    processes._main(arguments, log, str(ROOT))


def asked(count: int = 9) -> list[Request]:
    return [Request([2 + i] * (1 + 5 * i % 7), 12, seed=i) for i in range(count)]
