"""State of a run at one moment: what ``slurm-ppo status`` and ``watch`` show. Data only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.metrics.advice_input import Advice
from pipeline.status.budgets import SmallerBudget
from pipeline.status.lanes import Lane
from pipeline.status.trainer_state import Missing
from pipeline.workers.summary import WorkersOf

if TYPE_CHECKING:
    from pipeline.metrics.costs import Costs
    from pipeline.status.slurm import SlurmStatus


@dataclass(frozen=True)
class StageStatus:
    """Progress of one stage of the iteration at hand, or of one pool's scores (``score-big``)."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Status:
    """State of a run at one moment. ``slurm-ppo status --json`` prints these keys, but for those
    that only views need."""

    schema: int = 3
    run: str
    state: str
    """State: complete, running, failed (the last driver gave up) or incomplete (nothing is active); of a run
    on Slurm: complete, running (jobs are in the queue), failed (a task was given up), cancelled, paused (its
    jobs were cancelled by hand), stopped (nothing is in the queue) or unknown (Slurm does not answer)."""
    iterations_done: int
    """Iterations that are done; of a fork including its parent's."""
    iterations: int
    evaluations_done: int
    evaluations: int
    current: tuple[StageStatus, ...] = ()
    """Stages of the first iteration that is not done."""
    driver: str | None = None
    """Running driver, in words."""
    stopped: str | None = None
    """End of the last driver, how and when; None while one is running or when none was."""
    last_row: dict[str, Any] | None = None
    last_failure: dict[str, Any] | None = None
    remedy: str = ""
    """How to go on after it, with the whole command; empty while a driver is running, and where no setting is
    known to help."""
    slurm: "SlurmStatus | None" = None
    """State of the jobs; None for a run of this machine."""
    cost: "Costs | None" = None
    """Costs from accounting; None unless asked for."""
    forked_from: str | None = None
    """Parent and iteration like ``/runs/first@7``, if the run is a fork."""
    settings_changed: str = ""
    """Last change of the run's settings, in words, and how many there were; empty where there was none."""
    copy_of: str | None = None
    """Directory of the run that this one is a copy of, as long as it has not gone on by itself."""
    kept: tuple[int, ...] | None = None
    """Iterations whose policy and trainer's state are kept; None where all are, or for the view."""
    best: int | None = None
    """Iteration of the best policy, which is kept too; None where none was evaluated, or for the view."""
    advice: tuple[Advice, ...] = ()
    """Findings of the advice rules, worst first."""
    rows_missing: int = 0
    """Iterations that are done and have no row yet."""
    ways_on: tuple[str, ...] = ()
    """What to type against what is in the run's way and no task's failure says: refused and held jobs, a full
    disk, W&B that is away."""
    troubles: tuple[str, ...] = ()
    """Failures of drivers that are not overcome yet, and files that are about to be removed, in words."""
    state_lost: int | None = None
    """Newest iteration that is done, if its trainer's state was lost."""
    workers: tuple[WorkersOf, ...] = ()
    """Workers of a run on Slurm, by job kind; none for a run whose jobs do not stay, or of this machine."""
    benchmarks_done: int = 0
    """Policies that evaluate.command has measured, or that were left out."""
    benchmarks: int = 0
    """Policies that it is to measure."""
    benchmarks_missing: tuple[int, ...] = ()
    """Versions of policies that were left out, whose numbers are missing."""
    benchmarks_told: str = ""
    """The same in words, with the reason of the last one that is missing."""
    paused: str = ""
    """What has made the run pause, or stop, in words: its jobs were cancelled by hand."""
    held_back: tuple[str, ...] = ()
    """Stages that could go on and are not in the queue, as it takes no more of the run: why, in words."""
    smaller_budgets: tuple[SmallerBudget, ...] = ()
    """Stages at hand with tasks that compute less at once, as tries ran out of GPU memory."""
    missing_state: Missing | None = None
    """Trainer's state of that iteration, if it is promised and not committed."""
    time: float = 0.0
    """Unix time of the look."""
    created: float = 0.0
    awaited: str | None = None
    """Lease that cannot be read and may be held, in words: views wait for its end."""
    answered: float | None = None
    """Unix time of Slurm's last answer; None: it was not asked yet, or never answered."""
    finish: float | None = None
    """Unix time at which the run will be complete at the recent pace."""
    lanes: tuple[Lane, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    """The newest rows of metrics.jsonl."""
    events: tuple[dict[str, Any], ...] = ()
    """The newest events of events.jsonl."""

    @property
    def has_ended(self) -> bool:
        return self.state not in ("running", "unknown")
