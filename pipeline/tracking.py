"""W&B as a mirror of metrics.jsonl: one run per pipeline, one writer, the driver.

metrics.jsonl is the truth. W&B being absent, slow, refused or broken is said once and never stops training.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.commits import replace_durably
from pipeline.compose import to_mapping
from pipeline.config import WandbMode
from pipeline.metrics import METRICS
from pipeline.runs import Run

Row = dict[str, float | int]
Note = Callable[[str], None]


class Tracker(Protocol):
    """Takes rows in order of their iterations."""

    def replay(self, rows: Sequence[Row]) -> None:
        """Rows of earlier drivers, of which some may not have arrived."""

    def log(self, row: Row) -> None: ...

    def finish(self, exit_code: int) -> None: ...


class NoTracker:
    """Takes rows nowhere."""

    def replay(self, rows: Sequence[Row]) -> None:
        pass

    def log(self, row: Row) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        pass


@dataclass
class WandbTracker:
    """Rows on W&B, each as one ``log`` call with our own ``iteration`` as x-axis."""

    run: Run
    wandb_run: Any
    cursor: Path
    """Holds the last iteration that was logged; rows after it are replayed. Duplicates at the same x are
    harmless, gaps are not."""
    note: Note

    def replay(self, rows: Sequence[Row]) -> None:
        done = int(self.cursor.read_text()) if self.cursor.exists() else 0
        for row in rows:
            if row["iteration"] > done:
                self.log(row)

    def log(self, row: Row) -> None:
        if self._safely(lambda: self.wandb_run.log(row)):
            replace_durably(self.cursor, f"{row['iteration']}\n")

    def finish(self, exit_code: int) -> None:
        self._safely(lambda: self.wandb_run.finish(exit_code=exit_code))

    def _safely(self, call: Callable[[], Any]) -> bool:
        from wandb.errors import Error

        try:
            call()
        except (Error, OSError) as error:
            self.note(f"W&B did not take a row ({error}); metrics.jsonl has it")
            return False
        return True


def open_tracker(run: Run, note: Note) -> Tracker:
    """The tracker that the configuration and the environment ask for. ``note`` is told what goes wrong."""
    mode = wandb_mode(run.config.tracking.wandb.mode, os.environ)
    if mode is WandbMode.DISABLED:
        return NoTracker()
    from wandb.errors import Error

    try:
        return open_wandb(run, mode, note)
    except (Error, OSError) as error:
        if mode is WandbMode.OFFLINE:
            note(f"W&B is off, it could not start ({error}); metrics.jsonl has every row")
            return NoTracker()
        note(f"W&B could not be reached ({error}); writing its files under {run.paths.wandb} instead")
        return open_wandb(run, WandbMode.OFFLINE, note)


def wandb_mode(asked: WandbMode, environment: "os._Environ[str] | dict[str, str]") -> WandbMode:
    """The configuration decides; when it says auto, WANDB_MODE does; without it, whether there is a key."""
    if asked is not WandbMode.AUTO:
        return asked
    named = environment.get("WANDB_MODE", "")
    if named in tuple(WandbMode) and named != WandbMode.AUTO:
        return WandbMode(named)
    has_key = bool(environment.get("WANDB_API_KEY")) or _has_netrc_key()
    return WandbMode.ONLINE if has_key else WandbMode.OFFLINE


def _has_netrc_key() -> bool:
    netrc = Path.home() / ".netrc"
    return netrc.is_file() and "wandb" in netrc.read_text(errors="replace")


def open_wandb(run: Run, mode: WandbMode, note: Note) -> WandbTracker:
    """Open the pipeline's W&B run, the same id every time, and define every metric anew."""
    run.paths.wandb.mkdir(exist_ok=True)
    # Its caches belong to the run, not to a home directory that compute nodes may not have.
    os.environ["WANDB_CACHE_DIR"] = str(run.paths.wandb / "cache")
    os.environ["WANDB_DATA_DIR"] = str(run.paths.wandb / "data")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    given = run.config.tracking.wandb
    wandb_run = wandb.init(
        project=given.project,
        entity=given.entity,
        id=run.identity.id,
        name=run.identity.name,
        tags=list(given.tags),
        dir=str(run.paths.root),
        config={**to_mapping(run.config), "run_dir": str(run.paths.root)},
        resume="allow",
        reinit="create_new",
        settings=wandb.Settings(
            mode=str(mode),
            console="off",
            silent=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
            x_transaction_log_flush_interval=1.0,
            init_timeout=30,
            finish_timeout=60,
        ),
    )
    wandb_run.define_metric("iteration")
    for section in sorted({metric.name.split("/")[0] for metric in METRICS} - {"iteration"}):
        wandb_run.define_metric(f"{section}*", step_metric="iteration")
    return WandbTracker(run, wandb_run, run.paths.wandb / "logged_iterations", note)
