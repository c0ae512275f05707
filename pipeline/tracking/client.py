"""The W&B run of a pipeline: opened the same way every time, with every metric defined; what the server has.

Facts about the client are of wandb 0.31.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.compose import to_mapping
from pipeline.config.evaluate import COMMAND_PREFIX
from pipeline.config.schema import WandbMode
from pipeline.metrics.catalogue import METRICS, SAMPLE_TABLE
from pipeline.metrics.responses import Selection, read_samples
from pipeline.metrics.samples import Choice, Sample
from pipeline.run.directory import Run
from pipeline.run.journal import Row
from pipeline.run.wandb_place import SETTINGS, WandbPlace
from pipeline.tracking.destination import Destination
from pipeline.tracking.refusal import told_apart
from pipeline.tracking.state import MEASURED_STEP, finite, keep_entity, mirror_id, place_of

_INIT_SECONDS = 30.0
_FINISH_SECONDS = 60
_ASK_SECONDS = 20
"""Seconds that a server may take for an answer."""
_FLUSH_SECONDS = 0.2
"""Seconds of rows that are lost when a machine goes down; the client's own default is 15."""
_CELL = 4000
"""Characters of a prompt or response that a table shows."""
_LOGGED, _LOGGED_BYTES = Selection(best=4, worst=4, at_random=8), 64 << 20
"""Responses of a table, and bytes of rollout data that are read for it: a few justify no further shards."""


@dataclass(frozen=True)
class OpenedWandb:
    """One opening of the W&B run."""

    handle: Any
    """The ``wandb.Run``."""
    is_online: bool
    """Whether the server is sent rows and sample tables; a run that is carried away would miss the tables'
    files, kept elsewhere."""
    files: Path
    """The client's own folder."""

    @property
    def first_step(self) -> int:
        """Step after the last that the server has; offline 0."""
        return int(self.handle.starting_step)

    @property
    def url(self) -> str:
        return self.handle.url or ""

    def log(self, run: Run, row: Row, step: int) -> None:
        """Send a row as one step, with its sample table if it has one."""
        content: dict[str, Any] = dict(finite(row))
        if self.is_online and "iteration" in row and (table := sample_table(run, int(row["iteration"]))):
            content[SAMPLE_TABLE] = table
        self.handle.log(content, step=step, commit=True)  # else the last row waits for the next step

    def finish(self, exit_code: int) -> None:
        self.handle.finish(exit_code=exit_code)
        if self.is_online:
            remove_files(self.files)

    def confirmed(self) -> int:
        """Return the step after the last that the server has."""
        import wandb

        handle = self.handle
        # Without it the environment's address would go before that of the place.
        api = wandb.Api({"base_url": handle.settings.base_url}, timeout=_ASK_SECONDS)
        return int(api.run(f"{handle.entity}/{handle.project}/{handle.id}").lastHistoryStep) + 1


_SETTINGS: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
    "disable_git": True,
    "disable_code": True,
    "x_transaction_log_flush_interval": _FLUSH_SECONDS,
    "init_timeout": _INIT_SECONDS,
    "finish_timeout": _FINISH_SECONDS,
}
"""W&B's settings besides the mode: it records what the pipeline gives it, and nothing of the machine."""


def open_online(run: Run) -> OpenedWandb:
    """Open the pipeline's W&B run on the server, and keep whose project it is in. Raises RunRefused."""
    remove_files(run.paths.wandb)
    opened = open_run(run, WandbMode.ONLINE)
    keep_entity(run, opened.handle.entity)
    return opened


def remove_files(files: Path) -> None:
    """Remove what the client has written while it was online: thousands would pile up."""
    for folder in files.glob("run-*"):
        shutil.rmtree(folder, ignore_errors=True)


def open_run(run: Run, mode: WandbMode, folder: Path | None = None) -> OpenedWandb:
    """Open the pipeline's W&B run under its own id, and define every metric over our own x-axis.

    A resumed run lacks definitions of earlier openings.

    Args:
        folder: parent of the client's folder ``wandb``. Default: the run directory.

    Raises:
        RunRefused: as the run is set, W&B will never take it.
    """
    run.paths.wandb.mkdir(exist_ok=True)
    # Its caches belong to the run: compute nodes may have no home directory.
    os.environ["WANDB_CACHE_DIR"] = str(run.paths.wandb / "cache")
    os.environ["WANDB_DATA_DIR"] = str(run.paths.wandb / "data")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.pop("WANDB_SERVICE", None)  # another process's service, which would end our client's with it
    import wandb

    folder = folder or run.paths.root
    with told_apart():
        use_place(place_of(run, os.environ))
        handle = wandb.init(
            id=mirror_id(run, Destination.WANDB),
            dir=str(folder),
            config=recorded_config(run),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(mode=str(mode), **_SETTINGS),
        )
    _define_metrics(handle, run)
    return OpenedWandb(handle, mode is WandbMode.ONLINE, folder / run.paths.wandb.name)


def use_place(place: WandbPlace) -> None:
    """Make the client's own settings those of the place, whatever the environment and its files say.

    Arguments of ``wandb.init`` could not: one that is None leaves what is there.
    """
    import wandb

    settings = wandb.setup().settings
    for field, setting in SETTINGS.items():
        setattr(settings, setting, getattr(place, field) or None)


def _define_metrics(handle: Any, run: Run) -> None:
    handle.define_metric("iteration")
    for section in sorted({metric.name.split("/")[0] for metric in METRICS} - {"iteration", "eval"}):
        handle.define_metric(f"{section}*", step_metric="iteration")
    if run.plan.benchmark_every:  # they come later than the rows of their policies
        handle.define_metric(f"{COMMAND_PREFIX}*", step_metric=MEASURED_STEP)


def recorded_config(run: Run) -> dict[str, Any]:
    """Return the whole configuration, and where the run is and comes from, without the environment."""
    identity = run.identity
    facts = {
        "run_dir": str(run.paths.root),
        "git_commit": identity.git_commit or None,
        "slurm_ppo_version": identity.version,
        "forked_from": f"{identity.parent.id}@{identity.parent.iteration}" if identity.parent else None,
    }
    return {**to_mapping(run.config), **facts}


def sample_table(run: Run, iteration: int) -> Any:
    """Build a ``wandb.Table`` of the best, the worst and some other responses.

    None where an iteration's row comes without, by ``samples_every``, or none can be read.
    """
    every = run.config.tracking.wandb.samples_every
    is_due = every and (iteration in (run.plan.start + 1, run.plan.iterations) or iteration % every == 0)
    found = read_samples(run, iteration, _LOGGED, _LOGGED_BYTES) if is_due else None
    if found is None or not found.rows:
        return None
    import wandb

    components = sorted(found.rows[0].components)
    columns: list[str | int] = ["iteration", "chosen", "prompt", "response", "reward"]
    columns += [*(f"reward/{name}" for name in components), "kl", "length", "finish_reason", "num_turns"]
    chosen = zip(found.choices, found.rows, strict=True)
    return wandb.Table(columns=columns, data=[_cells(*one, components) for one in chosen])


def _cells(choice: Choice | None, sample: Sample, components: list[str]) -> list[Any]:
    texts = (sample.prompt[-_CELL:], sample.response[:_CELL])
    rewards = (sample.components.get(name) for name in components)
    last = (sample.kl, sample.length, sample.finish_reason, sample.num_turns)
    return [sample.iteration, str(choice), *texts, sample.reward, *rewards, *last]
