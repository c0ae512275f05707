"""Engines: made by name, and kept (:mod:`stages.engines.kept`) as long as they serve."""

import importlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.engines import Engine
from pipeline.config.schema import Config
from pipeline.config.update import TrainingEngine
from pipeline.plugins.load import PluginError, load_plugin
from pipeline.plugins.trial import too_many_ranks
from stages.engines.base import CannotAdapt, Generator, PolicyTrainer, Scorer
from stages.engines.kept import Wanted as Wanted
from stages.engines.kept import Weights
from stages.engines.kept import engine as engine
from stages.engines.kept import engines_closed as engines_closed
from stages.engines.kept import release as release
from stages.engines.kept import release_all as release_all
from stages.engines.kept import take_facts as take_facts
from stages.files.node_folders import remove_node_folder
from stages.files.policy import PolicyFiles
from stages.logs import log

_folders: "weakref.WeakKeyDictionary[Generator, weakref.finalize[..., Generator]]" = (
    weakref.WeakKeyDictionary()
)
"""What removes the merged model of each engine that was given one."""


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
    if _puts_on_adapters(config, maker):
        try:
            return _checked(maker(config, directory, adapter), Generator, name)
        except CannotAdapt as error:
            log.info(f"rollout.engine={name} gets the adapter merged into a whole model: {error}")

    def make(folder: Path) -> Generator:
        return _checked(maker(config, str(folder)), Generator, name)

    made = _of_merged(config, Path(directory), Path(adapter), make)
    assert made is not None
    return made


def reload_generator(config: Config, generator: Generator, files: PolicyFiles, had: Weights) -> bool:
    """Put another policy into an engine that :func:`make_generator` made. Returns whether that was done.

    Args:
        had: fingerprints of the policy that it has.
    """
    base = files.weights[0]
    if files.adapter is None:
        is_done = (had[1] == "" or had[0] == base) and generator.reload(str(files.base))
        _remove_folder(generator if is_done else None)
        return is_done
    if had[0] != base:
        return False
    takes = _puts_on_adapters(config, _maker("rollout.engine", config.rollout.engine, "make_generator"))
    if takes and generator not in _folders:
        return generator.reload(str(files.base), str(files.adapter))
    found = _of_merged(
        config, files.base, files.adapter, lambda folder: generator if generator.reload(str(folder)) else None
    )
    return found is not None


def _puts_on_adapters(config: Config, maker: Callable[..., Any]) -> bool:
    return getattr(maker, "takes_adapters", False) and not config.rollout.merge_adapters


def _of_merged(
    config: Config, base: Path, adapter: Path, make: Callable[[Path], Generator | None]
) -> Generator | None:
    """Return what ``make`` makes of a merged model; the folder goes with it, or at once if there is none."""
    from stages.models.merging import merged_folder

    folder, made = merged_folder(config, base, adapter), None
    try:
        made = make(folder)
    finally:
        if made is None:
            remove_node_folder(folder)
    if made is not None:
        _remove_folder(made)
        _folders[made] = weakref.finalize(made, remove_node_folder, folder)
    return made


def _remove_folder(generator: Generator | None) -> None:
    """Remove the merged model that an engine had before, if it had one."""
    if generator is not None and generator in _folders:
        _folders.pop(generator)()


def make_scorer(config: Config, name: str, directory: str) -> Scorer:
    """Make an engine ``name`` for the reward model in ``directory``. Raises as :func:`make_generator`."""
    return _checked(_maker("reward.engine", name, "make_scorer")(config, directory), Scorer, name)


def make_trainer(config: Config) -> PolicyTrainer:
    """Make the trainer of ``update.engine``. Raises as :func:`make_generator`."""
    name = config.update.engine
    maker = _maker("update.engine", name, "make_trainer")
    if config.scheduler.num_update_ranks > 1 and not (_is_ours(name) or getattr(maker, "takes_ranks", False)):
        raise too_many_ranks(config)
    return _checked(maker(config), PolicyTrainer, name)


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
