"""A cache of engines, made once per task and configuration: one is kept until another model of the same role
is requested, so that neither start-up nor memory is paid twice.
"""

import contextlib
import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.engines import Engine
from pipeline.config.schema import Config
from pipeline.config.update import TrainingEngine
from pipeline.plugins.load import PluginError, load_plugin
from pipeline.plugins.trial import too_many_ranks
from stages.engines.base import CannotAdapt, Generator, Scorer, Trainer
from stages.logs import log


@dataclass(frozen=True)
class _Kept:
    key: Any
    name: str
    engine: Any


_kept: dict[str, _Kept] = {}


def engine(role: str, key: Any, make: Callable[[], Any], name: str = Engine.TRANSFORMERS) -> Any:
    """Return the engine of ``role`` for ``key`` (what it was made from); drop the role's previous engine.

    Engines of transformers stay side by side. Any other takes the GPU's memory for itself, so that nothing
    else fits beside it.
    """
    if role not in _kept or _kept[role].key != key:
        release(role)
        for other, kept in list(_kept.items()):
            if {kept.name, name} != {Engine.TRANSFORMERS}:
                release(other)
        _kept[role] = _Kept(key, name, make())
    return _kept[role].engine


def release(role: str) -> None:
    """Drop the engine of ``role``, if there is one, and what it holds."""
    kept = _kept.pop(role, None)
    if kept is None:
        return
    if isinstance(kept.engine, Generator | Scorer):
        kept.engine.close()
    del kept
    gc.collect()
    torch = sys.modules.get("torch")  # engines that do not use it leave nothing in its cache
    if torch and torch.cuda.is_initialized():  # another process may be about to look how much is free
        torch.cuda.empty_cache()


@contextlib.contextmanager
def engines_closed() -> Iterator[None]:
    """Drop every engine at the end. Errors of that are logged only: the task's result is committed, and a
    failed job would keep those that depend on it waiting."""
    try:
        yield
    finally:
        for role in list(_kept):
            try:
                release(role)
            except (OSError, RuntimeError):  # of disks, worker processes, GPUs that are gone
                log.exception(f"closing the {role} failed; what the task has done stands:")


def make_generator(config: Config, directory: str, adapter: str | None = None) -> Generator:
    """Make an engine of ``rollout.engine`` for the policy in ``directory``, or for the adapter of that model.

    An engine that cannot put the adapter on gets a merged model, in a folder of the node that goes with it.

    Raises:
        PluginError: ``module:function`` cannot be imported, or made something else.
        OSError: there is no room for the merged model.
    """
    name = config.rollout.engine
    maker = _maker("rollout.engine", name, "make_generator")
    if adapter is None:
        return _checked(maker(config, directory), Generator, name)
    if getattr(maker, "takes_adapters", False) and not config.rollout.merge_adapters:
        try:
            return _checked(maker(config, directory, adapter), Generator, name)
        except CannotAdapt as error:
            log.info(f"rollout.engine={name} gets the adapter merged into a whole model: {error}")
    return _of_merged(config, maker, Path(directory), Path(adapter))


def _of_merged(config: Config, maker: Callable[..., Any], base: Path, adapter: Path) -> Generator:
    from stages.merging import merged_folder, remove_merged

    folder = merged_folder(config, base, adapter)
    try:
        made = _checked(maker(config, str(folder)), Generator, config.rollout.engine)
    except BaseException:
        remove_merged(folder)
        raise
    weakref.finalize(made, remove_merged, folder)
    return made


def make_scorer(config: Config, name: str, directory: str) -> Scorer:
    """Make an engine ``name`` for the reward model in ``directory``. Raises as :func:`make_generator`."""
    return _checked(_maker("reward.engine", name, "make_scorer")(config, directory), Scorer, name)


def make_trainer(config: Config) -> Trainer:
    """Make the trainer of ``update.engine``. Raises as :func:`make_generator`."""
    name = config.update.engine
    maker = _maker("update.engine", name, "make_trainer")
    if config.scheduler.num_update_ranks > 1 and not (_is_ours(name) or getattr(maker, "takes_ranks", False)):
        raise too_many_ranks(config)
    return _checked(maker(config), Trainer, name)


def needs_torch(key: str, name: str) -> bool:
    """Whether an engine uses torch: those that come with slurm-ppo do, and a user's unless it says otherwise.

    Args:
        key: configuration key that gave the name.
    """
    return _is_ours(name) or getattr(load_plugin(key, name), "needs_torch", True)


def _is_ours(name: str) -> bool:
    return name in (*Engine, *TrainingEngine)


def _maker(key: str, name: str, function: str) -> Callable[..., Any]:
    if _is_ours(name):
        found: Callable[..., Any] = getattr(importlib.import_module(f"stages.engines.{name}"), function)
        return found
    return load_plugin(key, name)


def _checked(made: Any, kind: type[Any], name: str) -> Any:
    if not isinstance(made, kind):
        raise PluginError(f"{name} made {type(made).__name__}, not a stages.engines.base.{kind.__name__}")
    return made
