"""W&B as a mirror of metrics.jsonl: one run per pipeline, one writer, the driver.

metrics.jsonl is the truth. W&B being absent, slow, refused or broken is said once and never stops training.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipeline.commits import replace_durably
from pipeline.compose import to_mapping
from pipeline.config import WandbMode
from pipeline.metrics import METRICS
from pipeline.paths import RunPaths
from pipeline.runs import Run

_INIT_SECONDS = 30.0
"""How long an unreachable server may hold the driver up before the rows go to files instead."""
_FLUSH_SECONDS = 1.0
_WRITTEN_AFTER_SECONDS = 20.0
"""A row that was logged this long ago outlives the driver being killed."""

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
    """Rows on W&B, each as one ``log`` call with our own ``iteration`` as x-axis.

    Duplicates at the same x are harmless, gaps are not. So the cursor follows a row only when W&B has surely
    written it, and after a row that W&B refused no other is sent: the next driver goes on from the cursor.
    """

    run: Run
    wandb_run: Any
    note: Note
    _unwritten: deque[tuple[float, int]] = field(default_factory=deque)
    """Rows that W&B may still hold in memory: when they were logged, and their iterations."""
    _is_broken: bool = False

    def replay(self, rows: Sequence[Row]) -> None:
        done = logged_iterations(self.run.paths)
        for row in rows:
            if row["iteration"] > done:
                self.log(row)

    def log(self, row: Row) -> None:
        if self._safely(lambda: self.wandb_run.log(row)):
            self._unwritten.append((time.monotonic(), int(row["iteration"])))
            self._move_cursor(logged_before=time.monotonic() - _WRITTEN_AFTER_SECONDS)

    def finish(self, exit_code: int) -> None:
        if self._safely(lambda: self.wandb_run.finish(exit_code=exit_code)):
            self._move_cursor(logged_before=math.inf)

    def _move_cursor(self, logged_before: float) -> None:
        done = None
        while self._unwritten and self._unwritten[0][0] <= logged_before:
            _, done = self._unwritten.popleft()
        if done is not None:
            replace_durably(_cursor(self.run.paths), f"{done}\n")

    def _safely(self, call: Callable[[], Any]) -> bool:
        if self._is_broken:
            return False
        try:
            call()
        except Exception as error:  # whatever W&B does, training goes on
            self._is_broken = True
            self.note(f"W&B stopped taking rows ({_first_line(error)}); metrics.jsonl has them all")
        return not self._is_broken


def open_tracker(run: Run, note: Note) -> Tracker:
    """The tracker that the configuration and the environment ask for. ``note`` is told what goes wrong."""
    mode = wandb_mode(run.config.tracking.wandb.mode, os.environ)
    if mode is WandbMode.DISABLED:
        return NoTracker()
    try:
        return open_wandb(run, mode, note)
    except Exception as error:  # refused, unreachable, misconfigured or not even importable
        if mode is WandbMode.ONLINE:
            note(
                f"W&B could not be reached ({_first_line(error)}); writing its files under {run.paths.wandb}"
            )
            return _open_offline(run, note)
        return _without(error, note)


def _open_offline(run: Run, note: Note) -> Tracker:
    import wandb

    try:
        wandb.teardown()  # else the run's id stays in use by the start that failed
        return open_wandb(run, WandbMode.OFFLINE, note)
    except Exception as error:
        return _without(error, note)


def _without(error: Exception, note: Note) -> NoTracker:
    note(f"W&B is off, it could not start ({_first_line(error)}); metrics.jsonl has every row")
    return NoTracker()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _cursor(paths: RunPaths) -> Path:
    """Holds the last iteration that W&B has written."""
    return paths.wandb / "logged_iterations"


def logged_iterations(paths: RunPaths) -> int:
    try:
        return int(_cursor(paths).read_text())
    except (FileNotFoundError, ValueError):
        return 0


def is_behind(run: Run, rows: Sequence[Row]) -> bool:
    """Whether there are rows that W&B should have and has not."""
    mode = wandb_mode(run.config.tracking.wandb.mode, os.environ)
    newest = rows[-1]["iteration"] if rows else 0
    return mode is not WandbMode.DISABLED and logged_iterations(run.paths) < newest


def rewind(paths: RunPaths, iteration: int) -> None:
    """Let the next driver log again what comes after ``iteration``."""
    if logged_iterations(paths) > iteration:
        replace_durably(_cursor(paths), f"{iteration}\n")


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
    try:
        return "wandb" in netrc.read_text(errors="replace")
    except OSError:
        return False


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
            x_transaction_log_flush_interval=_FLUSH_SECONDS,
            init_timeout=_INIT_SECONDS,
            finish_timeout=60,
        ),
    )
    wandb_run.define_metric("iteration")
    for section in sorted({metric.name.split("/")[0] for metric in METRICS} - {"iteration"}):
        wandb_run.define_metric(f"{section}*", step_metric="iteration")
    return WandbTracker(run, wandb_run, note)
