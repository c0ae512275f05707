"""Commands that show what a run is, does and has made: status, watch, logs, samples, report, sync, export."""

import json
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.arguments import RunDir, Source, exit_of, is_sweep, load


def status(
    run_dir: RunDir,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with stable keys.")] = False,
    cost: Annotated[
        bool, typer.Option("--cost", help="Hours of GPUs and CPUs per stage, from Slurm's accounting.")
    ] = False,
) -> None:
    """Where a run stands, or each run of a sweep. Exit code 0 complete, 1 failed, 3 incomplete."""
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
        float, typer.Option("--interval", min=1, max=86_400, help="Seconds between two questions to Slurm.")
    ] = 5.0,
) -> None:
    """Look at a run, or a sweep, until it has ended or you press q. Exit codes as of status."""
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
    failed: Annotated[bool, typer.Option("--failed", help="Of failed attempts, newest first.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show what is written until the run has ended, or Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", min=0, help="Last lines of each log.")] = 20,
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
    best: Annotated[int, typer.Option("--best", min=0, help="So many of the highest rewards.")] = 0,
    worst: Annotated[int, typer.Option("--worst", min=0, help="So many of the lowest.")] = 0,
    at_random: Annotated[int, typer.Option("--random", min=0, help="So many others, by chance.")] = 0,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", metavar="ID|TEXT", help="Only responses to one prompt: its id, or part of its text."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Of the random ones. Default: by run and iteration."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Long texts whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line, with stable keys.")] = False,
) -> None:
    """Show responses of an iteration, with rewards and KL. Default: two best, two worst, two others.

    Of a sweep: those of its best run, which is named.
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
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, and folders of sweeps.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write it. Default: report.html in RUN; of several report-compare.html."),
    ] = None,
) -> None:
    """Write a page about a run, one HTML file that needs no network, and print its path.

    Of several runs: one page that compares them, of a sweep among them its runs. Of a sweep alone: mean and
    spread over seeds.
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
    anew: Annotated[
        bool,
        typer.Option("--anew", help="Send every row to a new W&B run, where this shell's W&B variables say."),
    ] = False,
    project: Annotated[str | None, typer.Option(help="With --anew: the project of the new W&B run.")] = None,
    entity: Annotated[str | None, typer.Option(help="With --anew: its user or team.")] = None,
    offline: Annotated[
        Path | None,
        typer.Option(
            "--offline", metavar="DIR", help="Write an offline run of W&B to carry away, send nothing."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, max=604_800, help="Seconds after which to give up.")
    ] = 600,
) -> None:
    """Bring every row to W&B exactly once, after a crash, an outage or days offline."""
    from pipeline.tracking.sync import Anew
    from pipeline.tracking.sync import sync as bring_up_to_date

    new = Anew.asked(anew, project, entity)
    run = load(run_dir)
    typer.echo(bring_up_to_date(run, timeout, new, lambda text: typer.echo(text, err=True), offline))


def export(
    source: Source,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder, or an empty one.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The LoRA adapter instead of the whole model.")
    ] = False,
) -> None:
    """Copy a policy out of a run as a plain model directory, verified. Default: the newest.

    Of a sweep: of its best run, which is named; by default that run's best policy.
    """
    from pipeline.cli.sweep_views import of_one_run
    from pipeline.run.export import export as copy_out

    typer.echo(copy_out(of_one_run(source), folder, adapter, say=lambda text: typer.echo(text, err=True)))
