"""Engines that are kept: until another model of the same role is requested, or their process ends.

So neither start-up nor memory is paid twice. A process that stays keeps them from task to task: an engine
serves again with the weights that it has, or others are put into it. What it gives never depends on what it
was used for before.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pipeline.config.engines import Engine
from stages.engines.base import Generator, Scorer
from stages.logs import log
from stages.process.kept import drop_value, kept_names

Weights = tuple[str, ...]
"""Fingerprints of a model's files: equal only for equal bytes, wherever they are."""


class Resettable(Protocol):
    """An engine: a generator, a scorer, a model."""

    def reset(self) -> bool:
        """Forget what earlier tasks left behind. False: it cannot."""


@dataclass(frozen=True)
class Wanted:
    """An engine that a task asks for."""

    role: str
    attempt: str
    """Attempt at the task."""
    settings: Any
    """All that the engine is made from, but for the weights."""
    weights: Weights
    name: str = Engine.TRANSFORMERS


@dataclass(frozen=True)
class _Kept:
    wanted: Wanted
    engine: Any


_UNKNOWN = object()
_kept: dict[str, _Kept] = {}


def engine(
    wanted: Wanted,
    make: Callable[[], Resettable],
    reload: Callable[[Any, Weights], bool] = lambda engine, had: False,
) -> Any:
    """Return the engine of a role: the one that is kept if it is the same, or can become it, or a new one.

    Engines of transformers stay side by side. Any other sets up its process for itself, and takes the GPU's
    memory: without a GPU those of transformers stay beside one such, else nothing does.

    Args:
        reload: puts the weights into an engine of the same settings; is given the fingerprints of those that
            it has. Returns whether it has done so.
    """
    if _can_serve(wanted, reload):
        _kept[wanted.role] = replace(_kept[wanted.role], wanted=wanted)
    else:
        release(wanted.role)
        for role in [role for role, kept in _kept.items() if not _fit(kept.wanted.name, wanted.name)]:
            release(role)
        _kept[wanted.role] = _Kept(wanted, make())
    return _kept[wanted.role].engine


def _fit(one: str, other: str) -> bool:
    """Whether engines of two names can stay side by side."""
    of_transformers = (one, other).count(Engine.TRANSFORMERS)
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_available()
    return of_transformers == 2 or (of_transformers == 1 and not has_gpu)


def _can_serve(wanted: Wanted, reload: Callable[[Any, Weights], bool]) -> bool:
    """Whether there is an engine of the role that is what a new one would be; it is changed to be so."""
    kept = _kept.get(wanted.role)
    if kept is None or kept.wanted == wanted:  # the same task asks again
        return kept is not None
    had = kept.wanted
    if replace(had, attempt=wanted.attempt, weights=wanted.weights) != wanted:
        return False
    _kept[wanted.role] = replace(kept, wanted=replace(had, settings=_UNKNOWN))  # until it is changed wholly
    try:
        return bool(
            kept.engine.reset() and (had.weights == wanted.weights or reload(kept.engine, had.weights))
        )
    except Exception:  # whatever an engine does about it, a new one can be made
        log.exception(f"the {wanted.role} could not be used again, and is made again:")
        return False


def release(role: str) -> None:
    """Drop the engine of ``role``, if there is one, and what it holds."""
    if role in _kept:
        _close(role)
        _collect()


def release_all(ends: bool = False) -> None:
    """Drop all that is kept: after a task that failed, and before the process ends. Errors of that are logged
    only: what was committed stands, and a failed job would keep those that depend on it waiting.

    Args:
        ends: whether the process ends: garbage goes with it, and to look for it takes a second of a core
            where others still compute.
    """
    for drop, names in ((drop_value, kept_names()), (_close, list(_kept))):
        for name in names:
            try:
                drop(name)
            except (OSError, RuntimeError):  # of disks, worker processes, GPUs that are gone
                log.exception(f"closing the {name} failed; what the task has done stands:")
    if not ends:
        _collect()


def _close(role: str) -> None:
    engine = _kept.pop(role).engine
    if isinstance(engine, Generator | Scorer):
        engine.close()


def _collect() -> None:
    """Give back what dropped engines held. Without torch that is not worth the time to look for garbage."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    gc.collect()
    if torch.cuda.is_initialized():  # another process may be about to look how much is free
        torch.cuda.empty_cache()


@contextlib.contextmanager
def engines_closed() -> Iterator[None]:
    """Drop all that is kept at the end, with which the process ends."""
    try:
        yield
    finally:
        release_all(ends=True)
