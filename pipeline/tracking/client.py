"""The W&B run of a pipeline: opened the same way every time, with every metric defined; what the server has.

Facts about the client are of wandb 0.31.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.compose import to_mapping
from pipeline.config.evaluate import COMMAND_PREFIX
from pipeline.config.schema import WandbMode
from pipeline.metrics.catalogue import METRICS, SAMPLE_TABLE
from pipeline.metrics.samples import Choice, Sample, choose, read_samples, sample_seed
from pipeline.run.benchmarks import Measured
from pipeline.run.directory import Run
from pipeline.run.journal import Row
from pipeline.run.wandb_place import SETTINGS, WandbPlace
from pipeline.tracking.place import place_of
from pipeline.tracking.refusal import told_apart
from pipeline.tracking.state import wandb_id

MEASURED_STEP = f"{COMMAND_PREFIX}iteration"
"""x-axis of the numbers of evaluate.command: the version of the policy that they are of."""
_INIT_SECONDS = 30.0
_FINISH_SECONDS = 60
_ASK_SECONDS = 20
"""Seconds that a server may take for an answer."""
_FLUSH_SECONDS = 0.2
"""Seconds of rows that are lost when a machine goes down; the client's own default is 15."""
_CELL = 4000
"""Characters of a prompt or response that a table shows."""


@dataclass(frozen=True)
class Opened:
    """One opening of the W&B run."""

    handle: Any
    """The ``wandb.Run``."""
    folder: Path
    """Folder of its files."""

    @property
    def path(self) -> str:
        """``entity/project/id``, on the server."""
        return f"{self.handle.entity}/{self.handle.project}/{self.handle.id}"

    def log(self, run: Run, row: Row) -> None:
        """Send a row as one step, with its sample table if it has one.

        Numbers that are not finite are left out: W&B would turn them into words.
        """
        content: dict[str, Any] = {name: value for name, value in row.items() if math.isfinite(value)}
        if "iteration" in row and (table := sample_table(run, int(row["iteration"]))):
            content[SAMPLE_TABLE] = table
        self.handle.log(content)


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


def open_run(run: Run, mode: WandbMode) -> Opened:
    """Open the pipeline's W&B run under its own id, and define every metric over our own x-axis.

    A resumed run lacks definitions of earlier openings, and offline the step too: neither is relied on.

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

    with told_apart():
        use_place(place_of(run, os.environ))
        handle = wandb.init(
            id=wandb_id(run),
            dir=str(run.paths.root),
            config=recorded_config(run),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(mode=str(mode), **_SETTINGS),
        )
    _define_metrics(handle, run)
    return Opened(handle, Path(handle.settings.sync_dir))


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


def held_by_server(opened: Opened, measures: bool = False) -> Counter[int]:
    """Count the rows that the server has, by :func:`number_of`.

    Args:
        measures: whether to ask for numbers of evaluate.command too.
    """
    import wandb

    # Without it the environment's address would go before that of the place.
    server = {"base_url": opened.handle.settings.base_url}
    found = wandb.Api(server, timeout=_ASK_SECONDS).run(opened.path)
    keys = ("iteration", MEASURED_STEP) if measures else ("iteration",)
    return Counter(number_of(row) for key in keys for row in found.scan_history(keys=[key], use_cache=False))


def number_of(row: Row) -> int:
    """Return what tells a row from all others: its iteration, or for numbers of evaluate.command a negative
    number for the policy's version."""
    return int(row["iteration"]) if "iteration" in row else -1 - int(row[MEASURED_STEP])


def measured_rows(measured: Iterable[Measured]) -> list[Row]:
    """Return what evaluate.command wrote of policies as rows with an x-axis of their own."""
    return [{MEASURED_STEP: one.policy_version, **one.numbers} for one in measured if one.numbers]


def sample_table(run: Run, iteration: int) -> Any:
    """Build a ``wandb.Table`` of the best, the worst and some other responses.

    None where an iteration's row comes without, by ``samples_every``, or none can be read.
    """
    every = run.config.tracking.wandb.samples_every
    is_due = every and (iteration in (run.plan.start + 1, run.plan.iterations) or iteration % every == 0)
    chosen = choose(read_samples(run, iteration), seed=sample_seed(run, iteration)) if is_due else []
    if not chosen:
        return None
    import wandb

    components = sorted(chosen[0][1].components)
    columns: list[str | int] = ["iteration", "chosen", "prompt", "response", "reward"]
    columns += [*(f"reward/{name}" for name in components), "kl", "length", "finish_reason", "num_turns"]
    return wandb.Table(columns=columns, data=[_cells(*one, components) for one in chosen])


def _cells(choice: Choice, sample: Sample, components: list[str]) -> list[Any]:
    texts = (sample.prompt[-_CELL:], sample.response[:_CELL])
    rewards = (sample.components.get(name) for name in components)
    last = (sample.kl, sample.length, sample.finish_reason, sample.num_turns)
    return [sample.iteration, str(choice), *texts, sample.reward, *rewards, *last]
