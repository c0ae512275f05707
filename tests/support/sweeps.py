"""Sweeps made by hand, for what only reads them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config.compose import to_mapping
from pipeline.config.schema import Config
from pipeline.config.update import UpdateConfig
from pipeline.run import journal
from pipeline.run.directory import Run
from pipeline.sweep.manifest import Sweep, SweepPoint, write_sweep
from pipeline.sweep.naming import point_name
from tests.support.reportrun import START, commit_shard, make_row, make_run

RATE = "update.learning_rate"


def make_sweep(
    root: Path, rates: Sequence[str], seeds: int, begun: int | None = None, **more: object
) -> tuple[Sweep, list[Run]]:
    """A sweep of learning rates and seeds; the first ``begun`` runs have rows of 12 to 20 iterations.

    Args:
        more: further settings of all runs.
    """
    points: list[SweepPoint] = []
    runs = []
    for rate in rates:
        for seed in range(seeds):
            settings = {RATE: rate, "seed": str(seed)}
            name = point_name(settings, [point.name for point in points], 80)
            update = UpdateConfig(learning_rate=float(rate))
            if begun is None or len(points) < begun:
                run = make_run(root / name, name=f"lr-{name}", seed=seed, update=update, **more)
                write_rows(run, len(points), 20 if seed == 0 else 12 + 4 * (seed % 3))
                runs.append(run)
                config = run.config
            else:
                config = replace(runs[0].config, seed=seed, update=update)
            points.append(point_of(name, settings, config))
    sweep = Sweep("lr", START, "1.0", str(root), ("experiment=first",), tuple(points))
    write_sweep(root, sweep)
    return sweep, runs


def point_of(name: str, settings: Mapping[str, str], config: Config) -> SweepPoint:
    return SweepPoint(name, dict(settings), to_mapping(config))


def write_rows(run: Run, number: int, count: int) -> None:
    """Rows that differ from run to run, and samples of the newest iteration, to the same prompts by seed."""
    chance = random.Random(number)
    lift = 0.15 * (number // 3)
    rows = [make_row(i) for i in range(1, count + 1)]
    for row in rows:
        row["reward/mean"] += lift + chance.gauss(0, 0.05)
        row["objective/kl"] += chance.gauss(0, 0.3)
    journal.rewrite(run.paths.metrics, rows)
    commit_shard(
        run,
        count,
        0,
        responses=[f"Answer {i} of run {number}, with a few words more. " * (1 + i % 3) for i in range(8)],
        rewards=[lift + i / 8 for i in range(8)],
        prompts=[f"Question {i} of seed {run.config.seed}?" for i in range(8)],
        reasons=["length" if i % 4 == 0 else "stop" for i in range(8)],
    )
