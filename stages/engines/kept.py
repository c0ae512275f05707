"""Engines that are kept: until another model of the same role is requested, or their process ends.

So neither start-up nor memory is paid twice. A process that stays keeps them from task to task: an engine
serves again with the weights that it has, or others are put into it. What it gives never depends on what it
was used for before.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pipeline.config.engines import Engine, VllmConfig
from stages.engines.base import EngineFacts, Generator, Scorer
from stages.logs import log
from stages.models.numerics import free_gib
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
    vllm: VllmConfig | None = None
    """Its settings if it is vLLM: see :func:`pipeline.config.engine_rules.vllm_in`."""

    @property
    def share(self) -> float | None:
        """Share of a GPU's memory that it keeps to, in a process of its own; None if it does not."""
        given = self.vllm
        if given is None or not (has_gpu() if given.own_process is None else given.own_process):
            return None
        return given.gpu_memory_utilization


@dataclass(frozen=True)
class _KeptEngine:
    wanted: Wanted
    engine: Any
    others: frozenset[str]
    """Roles that were kept when it was made."""
    free_gib: float
    """Memory that was free then, where it is vLLM: see :func:`stages.models.numerics.free_gib`."""


_UNKNOWN = object()
_kept: dict[str, _KeptEngine] = {}
_asked: set[str] = set()
"""Roles whose engines were asked for since :func:`take_facts`."""
_noted: list[EngineFacts] = []
"""Facts for it, of engines that were dropped."""


def engine(
    wanted: Wanted,
    make: Callable[[], Resettable],
    reload: Callable[[Any, Weights], bool] = lambda engine, had: False,
) -> Any:
    """Return the engine of a role: the one that is kept if it is the same, or can become it, or a new one.

    Which engines stay side by side says :func:`fit`. If one cannot be made beside the others after all, these
    are dropped, and it is made again.

    Args:
        reload: puts the weights into an engine of the same settings; is given the fingerprints of those that
            it has. Returns whether it has done so.
    """
    if _can_serve(wanted, reload):
        _kept[wanted.role] = replace(_kept[wanted.role], wanted=wanted)
    else:
        release(wanted.role)
        _make_room(wanted)
        if not _fits_beside(wanted, make):
            for role in list(_kept):
                release(role)
            _collect()
            _keep(wanted, make)
    _asked.add(wanted.role)
    return _kept[wanted.role].engine


def _fits_beside(wanted: Wanted, make: Callable[[], Resettable]) -> bool:
    """Make an engine beside those that are kept. False where there are some and it cannot be made; when that
    is returned the error is gone, and with it what its traceback held of the GPU's memory."""
    try:
        _keep(wanted, make)
    except RuntimeError:  # of torch or vLLM, for want of memory
        if not has_gpu() or not _kept:
            raise
        log.exception(f"the {wanted.role} is made again, without {', '.join(_kept)} beside it:")
        return False
    return True


def _keep(wanted: Wanted, make: Callable[[], Resettable]) -> None:
    others, free = frozenset(_kept), free_gib() if wanted.name == Engine.VLLM else 0.0
    _kept[wanted.role] = _KeptEngine(wanted, make(), others, free)


def _make_room(wanted: Wanted) -> None:
    """Drop engines that cannot stay beside one, those of transformers last."""
    for role in sorted(_kept, key=lambda role: _kept[role].wanted.name == Engine.TRANSFORMERS):
        if not fit([*(kept.wanted for kept in _kept.values()), wanted]):
            release(role)


FULL, LEFT_TO_TRANSFORMERS = 0.95, 0.35
"""Shares of a GPU's memory: what engines of vLLM may have together, and what of it engines of transformers
need beside them."""


def fit(engines: Sequence[Wanted]) -> bool:
    """Whether engines can stay side by side in a process.

    Those of transformers can. Engines of vLLM in processes of their own can where the shares of the GPU's
    memory that they are given (gpu_memory_utilization) leave enough for all. Any other engine sets up the
    process for itself, and takes the GPU's memory: without a GPU those of transformers stay beside one such,
    else nothing does.
    """
    others = [wanted for wanted in engines if wanted.name != Engine.TRANSFORMERS]
    shares = [wanted.share for wanted in others if wanted.share is not None]
    room = FULL - (LEFT_TO_TRANSFORMERS if len(others) < len(engines) else 0.0)
    if not others or (len(shares) == len(others) > 0 and sum(shares) <= room):
        return True
    return len(engines) == 1 or (len(others) == 1 and not has_gpu())


def has_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


def take_facts() -> EngineFacts:
    """Return facts of the engines that were asked for since the last call, and of those that were dropped."""
    for role in _asked.intersection(_kept):
        _note_facts(role)
    found = EngineFacts(
        {name: value for facts in _noted for name, value in facts.numbers.items()},
        max((facts.memory_gib for facts in _noted), default=0.0),
        max((facts.gpu_memory_gib for facts in _noted), default=0.0),
    )
    _asked.clear()
    _noted.clear()
    return found


def _note_facts(role: str) -> None:
    """Note what the engine of a role says of itself."""
    engine = _kept[role].engine
    if not isinstance(engine, Generator | Scorer):
        return
    try:
        facts = engine.facts()
    except RuntimeError:  # of a process that has ended; what it computed is there
        log.exception(f"the {role} does not say how it has computed:")
        return
    named = {f"engine/{name}/{role}": value for name, value in facts.numbers.items()}
    _noted.append(replace(facts, numbers=named))


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
    """Drop the engine of ``role``, if there is one, and what it holds. How much memory has not come back is
    noted, where nothing else was loaded or dropped meanwhile."""
    if role not in _kept:
        return
    kept = _kept[role]
    if role in _asked:
        _note_facts(role)
    _close(role)
    _collect()
    if kept.wanted.name == Engine.VLLM and kept.others == frozenset(_kept):
        lost = kept.free_gib - free_gib()
        log.info(f"the {role} is closed; of the memory that it took {lost:.2f} GiB have not come back")
        _noted.append(EngineFacts({f"engine/unreturned_gib/{role}": lost}))


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
    _asked.clear()
    _noted.clear()
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
