"""How many tasks of a run go on at once on this machine, and what each of them is given."""

from collections.abc import Iterator

from pipeline.config.engines import Engine
from pipeline.config.issue import ConfigError
from pipeline.config.reward import RewardConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.config.scheduler import LocalConfig, LocalStageConfig, key_of
from pipeline.config.schema import Config
from pipeline.config.types import Linger
from pipeline.decide.staying import ALWAYS
from pipeline.executors.devices import Devices, devices_of
from pipeline.executors.limits import HERE, IN_TURN, Limits, need_of, node_of
from pipeline.gpus import has_gpus, unknown_to_vllm
from pipeline.run.engine_use import engines_of, uses_vllm
from pipeline.run.gpus import fork_hazard
from pipeline.run.tasks import Stage, Task

_SLOTS_BESIDE_GPUS = 2
"""Tasks of all stages at once, beside one for each GPU."""
_SLOTS = {Stage.ROLLOUT: 2, Stage.REWARD: 2}
"""Tasks of a stage at once, where they need no GPU; of every other stage one."""
_ASIDE = (Stage.PREPARE, Stage.EVALUATE, Stage.BENCHMARK)
"""What nothing waits for once a run has begun."""


def local_limits(config: Config) -> Limits:
    """Return the limits of a run on this machine.

    Raises:
        ConfigError: a task needs more GPUs than there are, or scheduler.gpus cannot be met.
    """
    given = config.scheduler
    assert isinstance(given, LocalConfig)
    devices = devices_of(given)
    check_names(config, devices)
    needs = gpus_of_tasks(config, len(devices.names))
    check_suffice(config, needs, devices)
    slots = {
        kind: slots_of(share, kind, needs[kind], len(devices.names))
        for kind, share in shares_of(config).items()
    }
    slots["prepare"] = 1
    slots_of_all = _SLOTS_BESIDE_GPUS + len(devices.names) if given.slots == "auto" else given.slots
    return Limits(
        slots,
        given.time_limit,
        slots_of_all,
        beside=frozenset({Stage.BENCHMARK}),
        linger=lingers(config, needs, slots, devices),
        of_one_task={kind for kind, share in shares_of(config).items() if share.linger == 0},
        nodes=(node_of(HERE, len(devices.names), 0),) if devices.names else (),
        gpus={HERE: devices.names},
        needs={kind: need_of(gpus=count) for kind, count in needs.items() if count},
        all_need_places=all(count for kind, count in needs.items() if kind not in _ASIDE),
        show=lambda grant: devices.variables([name for share in grant for name in share.gpus]),
        ranks={Stage.UPDATE: given.num_update_ranks},
    )


def describe_gpus(config: Config) -> Iterator[str]:
    """Say who gets how many GPUs, where tasks of this machine are given some.

    Raises:
        ConfigError: as :func:`local_limits`.
    """
    if not isinstance(config.scheduler, LocalConfig):
        return
    devices = devices_of(config.scheduler)
    check_names(config, devices)
    needs = gpus_of_tasks(config, len(devices.names))
    check_suffice(config, needs, devices)
    if devices.are_given:
        each = ", ".join(f"{kind} {count}" for kind, count in needs.items() if count)
        yield f"GPUs: {len(devices.names)} ({devices.why}); of each task: {each or 'none'}"
    if hazard := fork_hazard():
        yield f"each process imports its libraries by itself, which takes seconds: {hazard}"


def shares_of(config: Config) -> dict[str, LocalStageConfig]:
    """Return this machine's share for each job kind but prepare."""
    given = config.scheduler
    assert isinstance(given, LocalConfig)
    shares: dict[str, LocalStageConfig] = {
        Stage.ROLLOUT: given.rollout,
        Stage.REWARD: given.reward,
        Stage.UPDATE: given.update,
        Stage.EVALUATE: given.evaluate,
        Stage.BENCHMARK: given.benchmark,
    }
    for pool in config.reward.pools:
        shares[Task(0, Stage.SCORE, pool=pool).job_kind] = given.pools.get(pool, LocalStageConfig())
    return {str(kind): share for kind, share in shares.items()}


def gpus_of_tasks(config: Config, total: int) -> dict[str, int]:
    """Return the GPUs that a task of each job kind needs.

    Args:
        total: GPUs that there are.
    """
    needs = {str(Stage.PREPARE): _by_engines(config, Stage.PREPARE, "", total)}
    for kind, share in shares_of(config).items():
        needs[kind] = _automatic(config, kind, total) if share.gpus == "auto" else share.gpus
    return needs


def _automatic(config: Config, job_kind: str, total: int) -> int:
    if not total:
        return 0
    if job_kind == Stage.UPDATE:
        return config.scheduler.num_update_ranks
    if job_kind == Stage.BENCHMARK:
        return 1 if config.evaluate.command else 0
    name, _, pool = job_kind.partition("-")
    return _by_engines(config, Stage(name), pool, total)


def _by_engines(config: Config, stage: Stage, pool: str, total: int) -> int:
    """Return the GPUs that the largest model of a task is split over; 0 where it has none."""
    return max(_of_engines(config, stage, pool, total), default=0) if total else 0


def _of_engines(config: Config, stage: Stage, pool: str, total: int) -> Iterator[int]:
    for key, engine in engines_of(config, stage, pool):
        if key.startswith("update."):
            continue  # prepare makes the adapters, from what the model's files say
        section: RolloutConfig | RewardConfig = (
            config.rollout if key.startswith("rollout.") else config.reward
        )
        if engine == Engine.VLLM:
            yield section.vllm.tensor_parallel_size * section.vllm.pipeline_parallel_size
        else:
            yield total if section.device_map in _SPREADING else 1


_SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of device_map that spread a model over all GPUs that a task sees."""


def check_suffice(config: Config, needs: dict[str, int], devices: Devices) -> None:
    """Raise ConfigError where a task needs more GPUs than there are."""
    total, shares = len(devices.names), shares_of(config)
    for kind, count in needs.items():
        if count <= total:
            continue
        key, share = key_of(kind), shares.get(kind)
        if share is None or share.gpus == "auto":
            ranks = kind == Stage.UPDATE and config.scheduler.num_update_ranks
            asked = f"{key}.ranks={ranks}" if ranks else f"{kind}: its engine is split over {count} GPUs"
        else:
            asked = f"{key}.gpus={count}"
        there = f"{total} ({devices.why or 'scheduler.gpus=shared gives none'})"
        raise ConfigError(f"{asked}: a task needs {count} GPUs, and there are {there}; ask for at most that")
    check_side_by_side(config, needs, total)


def check_side_by_side(config: Config, needs: dict[str, int], total: int) -> None:
    """Raise ConfigError where rollouts cannot go on beside an update, which is all that staleness is for."""
    both, given = needs[Stage.ROLLOUT] + needs[Stage.UPDATE], config.scheduler
    if not config.rollout.staleness:
        return
    has_one_slot = isinstance(given, LocalConfig) and given.slots == 1
    if has_one_slot or (needs[Stage.ROLLOUT] and needs[Stage.UPDATE] and both > total):
        where = (
            "one task at a time is done here (scheduler.slots=1)"
            if has_one_slot
            else (f"a rollout and the update need {both} GPUs at once, and there are {total}")
        )
        raise ConfigError(f"rollout.staleness={config.rollout.staleness}: {where}; {IN_TURN}")


def check_names(config: Config, devices: Devices) -> None:
    """Raise ConfigError where vLLM cannot use the names of the GPUs that tasks are given."""
    if uses_vllm(config) and (problem := unknown_to_vllm(devices.names)):
        raise ConfigError(f"scheduler.gpus ({devices.why}): {problem}, or take engine=transformers")


def slots_of(share: LocalStageConfig, kind: str, need: int, total: int) -> int:
    """Return how many tasks of a job kind may run at once: with GPUs as many as find theirs."""
    if share.slots != "auto":
        return share.slots
    if kind == Stage.UPDATE or not need:
        return {str(stage): number for stage, number in _SLOTS.items()}.get(kind, 1)
    return max(1, total // need)


def lingers(
    config: Config, needs: dict[str, int], slots: dict[str, int], devices: Devices
) -> dict[str, Linger]:
    """Return the seconds that idle workers of each job kind stay. ``auto``: always, if the GPUs suffice for
    all slots of all stages side by side, so that none has to make place for another. Else not at all, as an
    idle one would keep a GPU's memory."""
    shares = shares_of(config)
    wanted = sum(needs[kind] * slots[kind] for kind, share in shares.items() if share.linger != 0)
    are_shared, are_few = has_gpus() and not devices.are_given, wanted > len(devices.names)
    auto = {kind: 0 if are_shared or (needs[kind] and are_few) else ALWAYS for kind in shares}
    return {kind: auto[kind] if share.linger == "auto" else share.linger for kind, share in shares.items()}
