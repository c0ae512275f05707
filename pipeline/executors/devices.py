"""The GPUs of this machine that a run may use. Opens no driver."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.issue import ConfigError
from pipeline.config.scheduler import LocalConfig
from pipeline.gpus import OTHERS, VISIBLE, has_gpus, visible_names
from pipeline.process import said_within

ONLY = "SLURM_PPO_GPUS"
"""Variable with the names of GPUs that a run may give to its tasks, of all that it finds. A sweep sets it, so
that runs side by side have GPUs of their own."""
_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)")
_MIG = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)")
_LIST_SECONDS = 20.0


@dataclass(frozen=True)
class Devices:
    """GPUs that tasks are given."""

    names: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them."""
    are_given: bool = False
    """Whether tasks see what they are given only. Else all of them see what this process does."""
    why: str = ""
    """Where the names are from, in words."""

    def variables(self, given: Iterable[str]) -> dict[str, str]:
        """Return what shows a worker the GPUs that it is given and no others."""
        if not self.are_given:
            return {}
        shown = ",".join(given)
        return {VISIBLE: shown, **{name: shown for name in OTHERS if name in os.environ}}


def devices_of(
    config: LocalConfig,
    environment: Mapping[str, str] = os.environ,
    is_gpu_here: Callable[[], bool] = has_gpus,
    list_all: Callable[[], tuple[str, ...]] | None = None,
) -> Devices:
    """Return the GPUs of a run on this machine.

    Raises:
        ConfigError: there are fewer than scheduler.gpus asks for, or it names one that CUDA_VISIBLE_DEVICES
            does not.
    """
    asked, limit = config.gpus, visible_names(environment)
    if asked == "shared":
        return Devices()
    if isinstance(asked, tuple):
        return _named(asked, limit, environment)
    found: tuple[str, ...]
    if not is_gpu_here():
        found, why = (), "this machine has none"
    elif limit is not None:
        found, why = limit, f"{VISIBLE}={','.join(limit)}"
    else:
        found, why = (list_all or listed_gpus)(), "all of this machine"
    if asked == "auto":
        left = _left(found, environment)
        return Devices(left, bool(left), f"{ONLY}={environment[ONLY]}" if ONLY in environment else why)
    if asked > len(found):
        raise ConfigError(f"scheduler.gpus={asked}: there are {len(found)} here ({why}); give at most that")
    return Devices(_left(found[:asked], environment), True, f"scheduler.gpus={asked}")


def _named(asked: tuple[str, ...], limit: tuple[str, ...] | None, environment: Mapping[str, str]) -> Devices:
    shown = ",".join(asked)
    if len(set(asked)) < len(asked):
        raise ConfigError(f"scheduler.gpus={shown}: names a GPU twice; name each once")
    if limit is not None and (wrong := [name for name in asked if name not in limit]):
        visible = ",".join(limit)
        raise ConfigError(
            f"scheduler.gpus={shown}: {VISIBLE}={visible} lacks {wrong[0]}; give auto, or some of these"
        )
    return Devices(_left(asked, environment), True, f"scheduler.gpus={shown}")


def _left(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a sweep leaves to this run."""
    only = environment.get(ONLY)
    return names if only is None else tuple(name for name in names if name in only.split(","))


def parts(devices: Devices, count: int) -> list[tuple[str, ...]]:
    """Divide GPUs among so many runs; the first ones get those that are left over. Returns nothing where
    tasks are given no GPUs.

    Raises:
        ConfigError: there are fewer.
    """
    names = devices.names
    if not devices.are_given or not names:
        return []
    if len(names) < count:
        raise ConfigError(
            f"--at-once={count}: each run needs a GPU of its own, and there are {len(names)} "
            f"({devices.why}); give at most that, or scheduler.gpus=shared"
        )
    least, more = divmod(len(names), count)
    ends = [least * n + min(n, more) for n in range(count + 1)]
    return [names[begin:end] for begin, end in itertools.pairwise(ends)]


def listed_gpus(
    devices: Path = Path("/dev"), topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")
) -> tuple[str, ...]:
    """Return all GPUs of this machine by ``nvidia-smi -L``, and parts of GPUs where they are divided; without
    that program by its device files, AMD's by the kernel's list."""
    done = None
    with contextlib.suppress(OSError):
        done = said_within(["nvidia-smi", "-L"], _LIST_SECONDS)
    if done and not done.exit_code and (names := parse_list(done.text)):
        return names
    nvidia = [file for file in devices.glob("nvidia[0-9]*") if file.name.removeprefix("nvidia").isdigit()]
    amd = list(filter(_is_gpu, topology.glob("*/gpu_id")))
    return tuple(map(str, range(len(nvidia or amd))))


def _is_gpu(file: Path) -> bool:
    """Whether a file of the kernel's list is of a GPU, and not of a processor. Of GPUs that a job was not
    given it may not be read."""
    with contextlib.suppress(OSError):
        return file.read_text().strip() not in ("", "0")
    return False


def parse_list(text: str) -> tuple[str, ...]:
    """Parse ``nvidia-smi -L``: the numbers of all GPUs; or their ids, where one is divided, and those of its
    parts (MIG) in its place, as CUDA knows no other name for a part."""
    wholes: list[tuple[str, str]] = []
    of_parts: dict[str, list[str]] = {}
    for line in text.splitlines():
        if whole := _GPU.match(line):
            wholes.append((whole[1], whole[2]))
        elif (part := _MIG.match(line)) and wholes:
            of_parts.setdefault(wholes[-1][1], []).append(part[1])
    if not of_parts:
        return tuple(number for number, _ in wholes)
    return tuple(name for _, id_ in wholes for name in of_parts.get(id_, [id_]))
