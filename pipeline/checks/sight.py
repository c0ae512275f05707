"""What jobs must see of the filesystem, and how to show it to those that run in an image."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.config.algorithm import ReferenceStage
from pipeline.config.engine_rules import has_reference_in
from pipeline.config.hub import with_blobs
from pipeline.config.job_kinds import parts_of
from pipeline.config.reward import ENVIRONMENT_RULE, Component, RemoteConfig, RewardModelConfig
from pipeline.config.rollout import ENVIRONMENT_SCHEDULER
from pipeline.config.scheduler import ResourcesConfig
from pipeline.config.schema import Config
from pipeline.executors.slurm.resources import SRUN
from pipeline.run.tasks import Stage

_SPANK_IMAGE = "container-image"
_MOST_SHOWN = 60
"""Length of a container command that is shown whole, so that a message has room for what it says of it."""
_BIND = {
    "apptainer": "--bind {0}",
    "singularity": "--bind {0}",
    "ch-run": "--bind {0}",
    "docker": "--volume {0}:{0}",
    "podman": "--volume {0}:{0}",
    "shifter": "--volume={0}:{0}",
    "enroot": "--mount {0}:{0}",
    SRUN: "--container-mounts={0}:{0}",
}
"""Programs that enter an image -> the words that show it a path."""
_GPU = {
    "apptainer": "--nv",
    "singularity": "--nv",
    "docker": "--gpus all",
    "podman": "--device nvidia.com/gpu=all",
}
"""Programs that enter an image -> the words that show it the driver of GPUs."""


# --- what is read where ---


def paths_of(config: Config, job_kind: str, folder: Path) -> Iterator[str]:
    """Yield the paths of models, data and programs that jobs of a kind read; the driver's read none.

    Args:
        folder: where the run is started: rules may be files of it.
    """
    yield from map(with_blobs, _paths_of(config, job_kind, folder))


def _paths_of(config: Config, job_kind: str, folder: Path) -> Iterator[str]:
    stage, pool = parts_of(job_kind)
    model, reward = config.model, config.reward
    if stage == Stage.PREPARE:  # it tries and hashes everything that the user gave
        yield from filter(None, (*config.data.prompt_keys.values(), *config.data.heldout_sets.values()))
        yield from _of_environments(config, folder)
        yield from filter(None, (model.policy, model.reference, model.critic))
        yield from _of_components(config, reward.components, folder)
        yield from (teacher.path for teacher in reward.teachers.values())
        yield from _samples(reward.components)
    elif stage == Stage.ROLLOUT:
        yield model.policy
        yield from _of_conversations(config, folder)
    elif stage == Stage.SCORE:
        yield from _of_components(config, reward.components_of(pool), folder)
        yield from (teacher.path for teacher in reward.teachers_of(pool).values())
    elif stage == Stage.REWARD:
        yield from _of_components(config, reward.components_of(None), folder)
        yield from (teacher.path for teacher in reward.teachers_of(None).values())
        yield from _reference(config, ReferenceStage.REWARD)
    elif stage == Stage.UPDATE:
        yield from filter(None, (model.policy, model.critic))
        yield from _reference(config, ReferenceStage.UPDATE)
    elif stage == Stage.EVALUATE:
        yield model.policy
        yield from _of_components(config, reward.components, folder)
        yield from _of_conversations(config, folder)
    elif stage == Stage.BENCHMARK:
        yield model.policy
        yield from (word for word in (config.evaluate.command or ())[:1] if Path(word).is_absolute())


def _of_components(config: Config, components: Mapping[str, Component], folder: Path) -> Iterator[str]:
    """Yield directories of reward models and of services' tokenizers, and files of rules, and of environments
    that score, which lie in the folder of the run's start."""
    for component in components.values():
        if isinstance(component, RewardModelConfig):
            yield component.path
        elif isinstance(component, RemoteConfig):
            yield from filter(None, [component.tokenizer])
        elif component.function == ENVIRONMENT_RULE:
            yield from _of_environments(config, folder)
        else:
            yield from _files_of(component.function, folder)


def _of_conversations(config: Config, folder: Path) -> Iterator[str]:
    """Yield what the environments need that converse with the policy."""
    multi_turn = config.rollout.multi_turn
    if multi_turn and multi_turn.scheduler == ENVIRONMENT_SCHEDULER:
        yield from _of_environments(config, folder)


def _of_environments(config: Config, folder: Path) -> Iterator[str]:
    made = config.data.environment
    for component in made.components.values() if made else ():
        yield from _files_of(component.source, folder)
        if component.python:
            yield str(Path(component.python).parents[1])


def _files_of(function: str, folder: Path) -> Iterator[str]:
    """Yield the file or folder of a function's module, where it lies in ``folder``."""
    if ":" in function:
        name = function.partition(":")[0].partition(".")[0]
        yield from (str(path) for path in (folder / f"{name}.py", folder / name) if path.exists())


def _samples(components: Mapping[str, Component]) -> Iterator[str]:
    for component in components.values():
        if isinstance(component, RewardModelConfig) and component.normalization:
            yield from filter(None, [component.normalization.reference_samples])


def _reference(config: Config, stage: ReferenceStage) -> Iterator[str]:
    if has_reference_in(config, stage):
        yield config.model.reference or config.model.policy
        if config.algorithm.kl.sync_interval and config.update.lora:  # adapters of it
            yield config.model.policy


# --- images ---


def image_of(given: ResourcesConfig) -> str:
    """Return what brings jobs into an image, as it was given but cut to the program and the image where it is
    long; empty where nothing does."""
    if not given.container or len(given.container) <= _MOST_SHOWN:
        return given.container or str(given.options.get(_SPANK_IMAGE, ""))
    program, *words = shlex.split(given.container)
    named = [word for word in words if word.startswith(f"--{_SPANK_IMAGE}")]
    others = [word for word in words if not word.startswith("-")]
    return f"{program} ... {(named or others[-1:] or [''])[0]}"


def image_key(given: ResourcesConfig, key: str) -> str:
    """Return the key that names the image of a stage whose resources have ``key``."""
    return f"{key}.container" if given.container else f"{key}.options.{_SPANK_IMAGE}"


def way_in(given: ResourcesConfig, path: str) -> str:
    """Return, in words, how to show a path to the processes in an image."""
    if not given.container:
        return f"bind it: {path}:{path} among options.container-mounts"
    words = _BIND.get(_launcher(given))
    return f"bind it: {words.format(shlex.quote(path))}" if words else "bind it"


def way_to_gpus(given: ResourcesConfig) -> str:
    """Return, in words, how to show the driver of GPUs to the processes in an image."""
    words = _GPU.get(_launcher(given))
    return f"add {words}" if words else "let your container program pass the driver on"


def _launcher(given: ResourcesConfig) -> str:
    """Return the name of the program that enters the image: the first, or one that srun starts."""
    words = shlex.split(given.container or "")
    names = [Path(word).name for word in words if not word.startswith("-")] or [""]
    if names[0] != SRUN or any(word.startswith(f"--{_SPANK_IMAGE}") for word in words):
        return names[0]
    return next((name for name in names[1:] if name in _BIND), SRUN)
