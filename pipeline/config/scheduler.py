"""The configuration of what runs tasks: this machine, a Slurm cluster, or one allocation of it."""

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pipeline.config.allocation import AllocationConfig, DrivenConfig, StepConfig
from pipeline.config.job_kinds import DRIVER, parts_of
from pipeline.config.types import (
    Count,
    EnvironmentName,
    Gpus,
    Line,
    Linger,
    LocalGpus,
    Memory,
    OptionName,
    PoolName,
    PositiveInt,
    SbatchWord,
    Slots,
    Text,
    TimeLimit,
)
from slurm.limits import parse_duration, parse_gres


def _split_at_commas(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class LocalStageConfig:
    """This machine's share for one stage."""

    slots: Slots = "auto"
    """Processes of this stage that may exist at once, each with one task. auto: on a machine with GPUs as
    many as find theirs free; without, two of rollout and reward, and one of every other stage."""
    gpus: Count = "auto"
    """GPUs of each task, which no other task sees. auto: one if it computes with a model, or as many as its
    engine splits the model over (vLLM's sizes; all of them with a device_map)."""
    linger: Linger = "auto"
    """Seconds that a process of this stage waits for its next task, with all that it has loaded, and its
    GPUs, unless another task lacks its place or memory; 0: each task has a process of its own. auto: as long
    as the run goes on; where GPUs are shared, or are too few for the slots of all stages together, a process
    with GPUs takes what is ready and does not wait."""


@dataclass(frozen=True, kw_only=True)
class LocalUpdateConfig(LocalStageConfig):
    """This machine's share for the update."""

    gpus: Count = "auto"
    """GPUs of one update, of which every rank sees all. auto: one for each rank."""
    ranks: PositiveInt = 1
    """Processes that share the work of one update, each with update.num_threads threads or a GPU of its own.
    Together they take one slot."""


@dataclass(frozen=True, kw_only=True)
class LocalConfig(DrivenConfig):
    """Tasks as processes of this machine: how many at once, on which GPUs, and how often one is tried."""

    kind: Literal["local"] = "local"
    """Processes on this machine."""
    gpus: LocalGpus = "auto"
    """GPUs that tasks are given, each task its own. auto: those that CUDA_VISIBLE_DEVICES names where it is
    set, else all of this machine. A number: the first N of them. A list: these, as nvidia-smi or
    CUDA_VISIBLE_DEVICES name them; whether they exist is not checked.
    shared: every task sees all, and none is given any."""
    slots: Slots = "auto"
    """Tasks of all stages that may run at once; processes that wait for a task take no slot, and of those
    that wait for a slot the later stage gets it. auto: two, and one more for each GPU."""
    rollout: LocalStageConfig = LocalStageConfig()
    """Slots and GPUs of the rollout stage."""
    reward: LocalStageConfig = LocalStageConfig()
    """Slots and GPUs of the reward stage."""
    update: LocalUpdateConfig = LocalUpdateConfig()
    """Slots, GPUs and ranks of the update stage."""
    evaluate: LocalStageConfig = LocalStageConfig()
    """Slots and GPUs of the evaluate stage."""
    benchmark: LocalStageConfig = LocalStageConfig(linger=0)
    """Slots and GPUs of evaluate.command, beside scheduler.slots: a program that hangs keeps no other task
    waiting, unless that needs its GPU."""
    pools: dict[PoolName, LocalStageConfig] = field(default_factory=dict)
    """Slots and GPUs of the pools that reward components name."""

    @property
    def num_update_ranks(self) -> int:
        """Processes that make one update together."""
        return self.update.ranks


Names = Annotated[tuple[SbatchWord, ...], BeforeValidator(_split_at_commas)]
"""Several names: a YAML list, or text with commas between them."""


class MailType(StrEnum):
    """Events that Slurm sends mail about, as in sbatch --mail-type: one mail for a whole array."""

    BEGIN = "BEGIN"
    END = "END"
    FAIL = "FAIL"
    REQUEUE = "REQUEUE"
    ALL = "ALL"
    """BEGIN, END, FAIL, INVALID_DEPEND, REQUEUE and STAGE_OUT."""
    INVALID_DEPEND = "INVALID_DEPEND"
    """The job's dependency can never be satisfied."""
    STAGE_OUT = "STAGE_OUT"
    """The job's burst buffer has been written back."""
    TIME_LIMIT = "TIME_LIMIT"
    TIME_LIMIT_90 = "TIME_LIMIT_90"
    """The job has used 90 percent of its time limit."""
    TIME_LIMIT_80 = "TIME_LIMIT_80"
    TIME_LIMIT_50 = "TIME_LIMIT_50"
    ARRAY_TASKS = "ARRAY_TASKS"
    """Mail about each array element instead of the whole array: as many mails as shards."""


def _in_capitals(value: object) -> object:
    """Return mail types in capitals: sbatch takes them in any case, and with commas between them."""
    words = _split_at_commas(value)
    if not isinstance(words, list | tuple):
        return words
    return [word.strip().upper() if isinstance(word, str) else word for word in words]


MailTypes = Annotated[tuple[MailType, ...], BeforeValidator(_in_capitals)]
"""Mail types: a YAML list, or text with commas between them."""


@dataclass(frozen=True, kw_only=True)
class ResourcesConfig(StepConfig):
    """Resources that the jobs of one stage ask Slurm for. A null key is left to the cluster's defaults."""

    partition: Names = ()
    """Partition, or several of which Slurm takes the first that has room."""
    account: SbatchWord | None = None
    """Account. Default: scheduler.account."""
    qos: SbatchWord | None = None
    """Quality of service. Default: scheduler.qos."""
    time: TimeLimit = "4:00:00"
    """Time limit of one job, D-HH:MM:SS or HH:MM:SS."""
    gpus_per_node: Gpus | None = None
    """GPUs on each node: a count, or TYPE:COUNT. Not together with gres."""
    gres: SbatchWord | None = None
    """Generic resources as sbatch --gres writes them, where a cluster has no --gpus-per-node."""
    mem: Memory | None = None
    """Memory on each node, e.g. 64G. A task that ran out of memory is tried again with twice as much,
    up to eight times; with this where Slurm refuses that."""
    constraint: Line | None = None
    """Node features, as sbatch --constraint writes them."""
    exclude: Names = ()
    """Nodes not to use."""
    reservation: SbatchWord | None = None
    """Reservation."""
    array_parallelism: PositiveInt | None = None
    """Array elements that may run at once (the % of sbatch --array). Default: all."""
    requeue: bool = True
    """Let Slurm start a job again that was preempted or lost its node."""
    signal: PositiveInt = 120
    """Seconds before the time limit at which a task is warned, so that it can save what it has."""
    setup: tuple[Text, ...] | None = None
    """Shell lines before the task: modules, conda. Default: scheduler.setup."""
    container: Text | None = None
    """Words put before the task's command, e.g. "apptainer exec --nv /images/ppo.sif". Default:
    scheduler.container. For pyxis: "srun --container-image=..."."""
    linger: Linger = "auto"
    """Seconds for which a job waits for the next task of its stage after one, with its model loaded; auto: as
    long as a new start would take, at most linger_max; 0: not at all. Not for prepare and driver."""
    start_early: bool = True
    """Submit a stage's next job so early that it has started when its input is there.
    false, with linger 0: each task has a job of its own, even if another is ready. Not for prepare and
    driver."""
    task_time: TimeLimit | None = None
    """Time limit of one task of a job that does several. Default: ten times the median of the stage,
    and a minute at least."""
    options: dict[OptionName, Line | int | bool] = field(default_factory=dict)
    """Any other sbatch option, without its dashes: {comment: ppo, exclusive: true}."""

    @property
    def task_seconds(self) -> float | None:
        """Time limit of one task; None where none is set."""
        return None if self.task_time is None else parse_duration(self.task_time)

    @property
    def num_gpus(self) -> int | None:
        """GPUs on each node; None where neither gpus_per_node nor gres names any."""
        return super().num_gpus if self.gres is None else parse_gres(self.gres).get("gpu")

    @property
    def has_gpus(self) -> bool:
        """Whether its jobs ask for GPUs."""
        return self.gpus_per_node is not None or (self.gres is not None and "gpu" in self.gres)

    @property
    def does_one_task(self) -> bool:
        """Whether each of its jobs ends after one task, even if another is ready."""
        return self.linger == 0 and not self.start_early


SLURM_STAGES = ("prepare", "rollout", "reward", "update", "evaluate", "benchmark", "driver")
"""Stages whose jobs have resources of their own, and the driver."""
CLUSTERS = "clusters"
"""sbatch option that holds for every command of a run, and so is the run's and of no stage."""
_ONE_TASK = ("prepare", "driver")
"""Jobs that have one task: there is nothing to stay or to start early for."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Tasks as elements of Slurm array jobs, which continue with the next task, or start early for it."""

    kind: Literal["slurm"] = "slurm"
    """Array jobs of a Slurm cluster."""
    prepare: ResourcesConfig = ResourcesConfig()
    """Jobs that check and tokenise the prompts, once per run."""
    rollout: ResourcesConfig = ResourcesConfig()
    """Rollout jobs."""
    reward: ResourcesConfig = ResourcesConfig()
    """Reward jobs."""
    update: ResourcesConfig = ResourcesConfig()
    """Update jobs."""
    evaluate: ResourcesConfig = ResourcesConfig(start_early=False)
    """Evaluate jobs, where rollout jobs that ask for the same do not evaluate while they wait. Training does
    not wait for them, so that none starts before its input is there."""
    benchmark: ResourcesConfig = ResourcesConfig(linger=0, start_early=False)
    """Jobs of evaluate.command, which does not benefit from a job that stays."""
    driver: ResourcesConfig = ResourcesConfig(time="0:15:00")
    """Small jobs that submit what comes next and retry what failed; they need no GPU."""
    pools: dict[PoolName, ResourcesConfig] = field(default_factory=dict)
    """Jobs of the reward components that name a pool, by that name."""
    account: SbatchWord | None = None
    """Account of every job that names none of its own."""
    qos: SbatchWord | None = None
    """Quality of service of every job that names none of its own."""
    options: dict[OptionName, Line | int | bool] = field(default_factory=dict)
    """Any other sbatch option of every job, without its dashes, e.g. {export: NONE}; a stage's options come
    over them. clusters: the one cluster that all jobs go to, at sites with several. Default:
    SLURM_CLUSTERS."""
    setup: tuple[Text, ...] = ()
    """Shell lines before every job's command. One that fails ends the job, unless it ends with || true."""
    container: Text | None = None
    """Container command of every stage that names none of its own; driver jobs run outside it unless
    driver.container says otherwise."""
    python: Text | None = None
    """Python interpreter of every job. Default: the one that submits."""
    environment: dict[EnvironmentName, Line] = field(default_factory=dict)
    """Environment variables of every job."""
    mail_user: SbatchWord | None = None
    """Address that Slurm writes to. Default: the account that submits."""
    mail_type: MailTypes = ()
    """Events that Slurm sends mail about, once for each array of every stage, e.g. [FAIL, TIME_LIMIT_80].
    Default: none. A stage's own: in its options, {mail-type: END} or {mail-type: NONE}. Driver jobs, of which
    there is one every few minutes, are left out, unless driver.options asks for it."""
    linger_max: PositiveInt = 3600
    """Limit on the seconds that a job waits with linger=auto: sites may cancel jobs whose GPUs are idle."""
    max_attempts: PositiveInt = 3
    """Tries per task and per call of submit, run or resume, before the run stops as failed. Preemption,
    lost nodes and missing inputs are not counted, up to five times as many."""
    max_submitted: PositiveInt | None = None
    """Array elements of this run's stages in the queue at once, those that run among them. Default: what the
    cluster's limits allow."""
    check_minutes: PositiveInt = 15
    """Limit on the minutes between two driver jobs, even if every other one was lost."""

    @property
    def cluster(self) -> str:
        """Name of the cluster that all jobs go to, as Slurm shows it; empty: the one of the machine that
        submits."""
        return str(self.options.get(CLUSTERS, "")).lower()

    @property
    def resources(self) -> dict[str, ResourcesConfig]:
        """Resources of jobs of each stage, the driver and each pool, by their keys below ``scheduler``."""
        stages = {stage: getattr(self, stage) for stage in SLURM_STAGES}
        return stages | {f"pools.{name}": given for name, given in self.pools.items()}

    @property
    def num_update_ranks(self) -> int:
        """Processes that make one update together."""
        return self.update.num_ranks

    @property
    def qos_named(self) -> frozenset[str]:
        """Names of the QOS that jobs are submitted with, where they name one."""
        return frozenset(q for q in (self.qos, *(one.qos for one in self.resources.values())) if q)

    @property
    def update_seconds(self) -> float:
        """Seconds that an update may take."""
        return parse_duration(self.update.time) or math.inf


SchedulerConfig = Annotated[LocalConfig | SlurmConfig | AllocationConfig, Field(discriminator="kind")]


def key_of(job_kind: str) -> str:
    """Return the key of a job kind's resources: scheduler.reward, or scheduler.pools.big for score-big."""
    return f"scheduler.pools.{pool}" if (pool := parts_of(job_kind)[1]) else f"scheduler.{job_kind}"


def _options_of(config: SlurmConfig, job_kind: str) -> dict[str, str | int | bool]:
    """Return further sbatch options of a job kind. Mails about each driver job would be too many."""
    left_out = (CLUSTERS, "mail-type") if job_kind == DRIVER else (CLUSTERS,)
    shared = {name: value for name, value in config.options.items() if name not in left_out}
    types = () if job_kind == DRIVER else config.mail_type
    given = config.resources[key_of(job_kind).removeprefix("scheduler.")].options
    options = ({"mail-type": ",".join(types)} if types else {}) | shared | given
    if config.mail_user and "mail-type" in options:
        return {"mail-user": config.mail_user, **options}
    return options


def resources_of(config: SlurmConfig, job_kind: str) -> ResourcesConfig:
    """Return a job kind's resources (a stage, score-POOL, driver), the scheduler's settings filled in."""
    key = key_of(job_kind).removeprefix("scheduler.")
    given, may_stay = config.resources[key], key not in _ONE_TASK
    # Driver jobs call sbatch, which images for training do not have.
    container = None if job_kind == DRIVER else config.container
    return dataclasses.replace(
        given,
        account=given.account or config.account,
        qos=given.qos or config.qos,
        options=_options_of(config, job_kind),
        setup=config.setup if given.setup is None else given.setup,
        container=given.container or container,
        python=given.python or config.python or sys.executable,
        environment={**config.environment, **given.environment},
        linger=given.linger if may_stay else 0,
        start_early=given.start_early and may_stay,
    )
