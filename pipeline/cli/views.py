"""Commands that show what a run is, does and has made: status, watch, logs, samples, report, sync, export."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.arguments import RunDir, Source, exit_of, is_sweep, load


def status(
    run_dir: RunDir,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with stable keys.")] = False,
    cost: Annotated[
        bool, typer.Option("--cost", help="GPU and CPU hours per stage, from Slurm's accounting.")
    ] = False,
) -> None:
    """Show the state of a run, or of each run of a sweep. Exit code 0 complete, 1 failed, 3 incomplete."""
    if is_sweep(run_dir):
        from pipeline.cli.sweep_views import show_status

        raise exit_of(show_status(run_dir, as_json, cost))
    from pipeline.status.snapshot import read_status
    from pipeline.status.text import describe, to_json

    found = read_status(load(run_dir), cost)
    typer.echo(json.dumps(to_json(found), indent=1) if as_json else describe(found))
    raise exit_of(found.state)


def watch(
    run_dir: RunDir,
    interval: Annotated[
        float, typer.Option("--interval", min=1, max=86_400, help="Seconds between two queries of Slurm.")
    ] = 5.0,
) -> None:
    """Show a run, or a sweep, on screen until it ends or you press q. Exit codes are those of status."""
    if is_sweep(run_dir):
        from pipeline.cli.sweep_views import watch as look_on_all

        raise exit_of(look_on_all(run_dir, interval))
    from pipeline.watch.run import watch as look_on

    raise exit_of(look_on(load(run_dir), interval))


def logs(
    run_dir: RunDir,
    stage: Annotated[
        str | None,
        typer.Argument(
            metavar="[STAGE[@ITERATION]]", help="E.g. rollout, reward@3 or driver. Default: newest."
        ),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed attempts, newest first.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Print new lines until the run ends, or Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", min=0, help="Number of last lines of each log.")] = 20,
) -> None:
    """Show the logs of a run's tasks and driver jobs."""
    from pipeline.status.logs import show_logs

    show_logs(load(run_dir), stage, failed, follow, lines)


def samples(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@ITERATION]", help="Run directory and iteration. Default: the newest with rewards."
        ),
    ],
    best: Annotated[
        int, typer.Option("--best", min=0, help="Number of responses with the highest rewards.")
    ] = 0,
    worst: Annotated[int, typer.Option("--worst", min=0, help="Number with the lowest rewards.")] = 0,
    at_random: Annotated[int, typer.Option("--random", min=0, help="Number of others, at random.")] = 0,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", metavar="ID|TEXT", help="Only responses to one prompt: its id, or part of its text."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="N", help="Seed of the random choice. Default: from run and iteration."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long texts.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line, with stable keys.")
    ] = False,
) -> None:
    """Show responses of an iteration, with rewards and KL. Default: two best, two worst, two others.

    For a sweep: those of its best run, which is named.
    """
    from pipeline.cli.samples import show_samples
    from pipeline.cli.sweep_views import of_one_run
    from pipeline.metrics.responses import Selection

    show_samples(
        of_one_run(source, is_best_wanted=False),
        Selection(best, worst, at_random, prompt, seed),
        full,
        as_json,
    )


def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders of sweeps.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Output file. Default: report.html in RUN; for several runs report-compare.html."),
    ] = None,
) -> None:
    """Write a page about a run, one HTML file that needs no network, and print its path.

    For several runs: one page that compares them; a sweep among them counts as its runs. For a sweep alone:
    mean and spread over seeds.
    """
    from pipeline.cli.sweep_views import runs_of
    from pipeline.report import write_comparison, write_report, write_sweep_report

    if len(run_dirs) == 1 and is_sweep(run_dirs[0]):
        typer.echo(write_sweep_report(run_dirs[0].absolute(), out))
        return
    runs = runs_of(run_dirs)
    typer.echo(write_report(runs[0], out) if len(run_dirs) == 1 else write_comparison(runs, out))


def sync(
    run_dir: RunDir,
    to: Annotated[
        Literal["wandb", "tensorboard", "mlflow"], typer.Option("--to", help="Tracker that gets the rows.")
    ] = "wandb",
    new_run: Annotated[
        bool,
        typer.Option(
            "--new-run",
            help="Send every row to a new run there; of W&B as this shell's W&B variables name it.",
        ),
    ] = False,
    project: Annotated[
        str | None, typer.Option(help="With --new-run: the project of the new W&B run.")
    ] = None,
    entity: Annotated[str | None, typer.Option(help="With --new-run: its user or team.")] = None,
    offline: Annotated[
        Path | None,
        typer.Option(
            "--offline", metavar="DIR", help="Write an offline W&B run to upload elsewhere; send nothing."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, max=604_800, help="Seconds after which to give up.")
    ] = 600,
) -> None:
    """Send every row to W&B, TensorBoard or MLflow exactly once, after a crash, an outage or days offline."""
    from pipeline.tracking.destination import Destination
    from pipeline.tracking.sync import NewRun, SyncOptions
    from pipeline.tracking.sync import sync as bring_up_to_date

    asked = SyncOptions(Destination(to), NewRun.asked(new_run, project, entity), offline)
    run = load(run_dir)
    typer.echo(bring_up_to_date(run, asked, timeout, lambda text: typer.echo(text, err=True)))


def export(
    source: Source,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder, or an empty one.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Copy the LoRA adapter instead of the whole model.")
    ] = False,
) -> None:
    """Copy a policy out of a run as a plain model directory, verified. Default: the newest.

    For a sweep: from its best run, which is named; by default that run's best policy.
    """
    from pipeline.cli.sweep_views import of_one_run
    from pipeline.run.export import export as copy_out

    typer.echo(copy_out(of_one_run(source), folder, adapter, say=lambda text: typer.echo(text, err=True)))
