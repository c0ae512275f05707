"""The command line. Thin: every command composes, loads or asks, and prints.

Exit codes: 0 complete, 1 failed, 2 usage or configuration, 3 incomplete.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli import dashboard as dashboard_cli
from pipeline.cli import devcluster as devcluster_cli
from pipeline.cli import many
from pipeline.cli.arguments import (
    config_in_part,
    config_of,
    existing_run,
    is_sweep,
    load,
    planned_run,
    run_to_come,
    typed_words,
)
from pipeline.cli.completion import commands as completion_cli
from slurm.errors import ServiceError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.run.directory import Run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="PPO post-training of language models as batch jobs. "
    "Exit codes: 0 complete, 1 failed, 2 usage or configuration, 3 incomplete.",
)

app.add_typer(devcluster_cli.app, name="devcluster")
app.add_typer(dashboard_cli.app, name="dashboard")
app.add_typer(completion_cli.app, name="completion")

EXIT_FAILED, EXIT_USAGE, EXIT_INCOMPLETE, EXIT_INTERRUPTED = 1, 2, 3, 130

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Hydra overrides, e.g. experiment=quickstart seed=3 update.learning_rate=1e-5"),
]
ConfigDir = Annotated[
    Path | None, typer.Option("--config-dir", help="Folder with config groups of your own, searched first.")
]
Source = Annotated[
    str, typer.Argument(metavar="RUN[@ITERATION]", help="Run directory and iteration; @best for the best.")
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from pipeline.run.directory import version

        typer.echo(f"slurm-ppo {version()}")
        raise typer.Exit


@app.callback()
def slurm_ppo(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def run(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """Start a run and carry it to its end: on this machine, or on Slurm while you watch."""
    from pipeline.cli.run import start

    raise typer.Exit(start(*config_in_part(overrides, config_dir), watch=True))


@app.command()
def submit(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch scripts; submit nothing.")
    ] = False,
) -> None:
    """Start a run on Slurm and return at once: it goes on by itself. Takes overrides, or a run directory."""
    from pipeline.cli.run import resume_run, start

    existing = existing_run(overrides)
    if dry_run:
        from pipeline.preflight.dry_run import scripts

        typer.echo(scripts(existing or run_to_come(config_of(overrides, config_dir))))
        return
    if existing:
        raise typer.Exit(resume_run(existing, watch=False))
    raise typer.Exit(start(*config_in_part(overrides, config_dir), watch=False))


@app.command()
def resume(
    run_dir: RunDir,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STAGE[@ITERATION]",
            help="Go back to a stage first; what it supersedes is moved aside, never deleted.",
        ),
    ] = None,
) -> None:
    """Continue a run where it stopped, or from an earlier stage."""
    from pipeline.cli.run import resume_run

    raise typer.Exit(resume_run(load(run_dir), watch=True, back_to=from_))


@app.command()
def cancel(run_dir: RunDir) -> None:
    """Cancel the run's jobs on Slurm, and only these; of a sweep those of all its runs.

    Nothing that was committed is lost.
    """
    if is_sweep(run_dir):
        from pipeline.cli.sweep import cancel_sweep

        raise typer.Exit(cancel_sweep(run_dir.absolute()))
    from pipeline.cli.queue import cancel_run

    typer.echo(cancel_run(load(run_dir)))


@app.command(hidden=True)
def advance(
    run_dir: RunDir,
    asked: Annotated[
        bool, typer.Option("--asked", help="As a worker's child: whenever workers ask for it.")
    ] = False,
) -> None:
    """What driver jobs do: look once, submit what is due, repair what failed."""
    from pipeline.cli.queue import asked_passes, driver_job

    raise typer.Exit((asked_passes if asked else driver_job)(run_dir))


@app.command()
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
    from pipeline.status.text import describe

    found = read_status(load(run_dir), cost)
    typer.echo(json.dumps(found.to_json(), indent=1) if as_json else describe(found))
    raise exit_of(found.state)


@app.command()
def watch(
    run_dir: RunDir,
    interval: Annotated[
        float,
        typer.Option("--interval", min=1, max=86_400, help="Seconds between two questions to Slurm."),
    ] = 5.0,
) -> None:
    """Look at a run, or a sweep, until it has ended or you press q. Exit codes as of status."""
    if is_sweep(run_dir):
        from pipeline.cli.sweep_views import watch as look_on_all

        raise exit_of(look_on_all(run_dir, interval))
    from pipeline.watch.command import watch as look_on

    raise exit_of(look_on(load(run_dir), interval))


@app.command()
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


@app.command()
def plan(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every task and why, on Slurm also the batch scripts that are due.")
    ] = False,
) -> None:
    """Say what would run and why, by stage, and what is due now; run nothing.

    Takes overrides, or one run directory.
    """
    for line in _plan_lines(planned_run(overrides, config_dir), all_):
        typer.echo(line)


def _plan_lines(run: "Run", every: bool) -> "Iterator[str]":
    from pipeline.status.plan import describe_plan, every_task

    if not every:
        return describe_plan(run)
    if run.config.slurm:
        from pipeline.preflight.dry_run import scripts

        typer.echo(f"{scripts(run)}\n")
    return every_task(run)


@app.command()
def config(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """Print the resolved configuration, every key, as YAML."""
    from pipeline.config.compose import to_yaml

    typer.echo(to_yaml(config_of(overrides, config_dir)), nl=False)


@app.command()
def validate(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    probe: Annotated[
        bool,
        typer.Option(help="On Slurm: look at compute nodes by a tiny job each, for two minutes at most."),
    ] = True,
) -> None:
    """Check configuration, models, prompts, plug-ins and the cluster; start nothing."""
    from pipeline.cli.run import check

    given, found = config_in_part(overrides, config_dir)
    check(given, found, say=typer.echo, with_weights=True)
    if given.slurm:
        from pipeline.preflight.probe import probe_cluster

        for line in probe_cluster(given, probe):
            typer.echo(line)


@app.command()
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN|OVERRIDES", help="A run directory, or settings. Default: here."),
    ] = None,
    config_dir: ConfigDir = None,
    probe: Annotated[
        bool, typer.Option(help="On Slurm: look at compute nodes by a tiny job each, two minutes at most.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with stable keys.")] = False,
) -> None:
    """Check what a run needs, by trying it: packages, disk, filesystem, Slurm, W&B, the run itself.

    Leaves nothing behind. Exit code 1 if there is a problem; warnings do not count.
    """
    from pipeline.doctor.examine import doctor as examine
    from pipeline.doctor.examine import patient_of
    from pipeline.run.directory import imagined_run

    words = overrides or []
    is_folder = len(words) == 1 and "=" not in Path(words[0]).name
    run = None if is_folder or not words else imagined_run(config_of(words, config_dir))
    patient = patient_of(Path(words[0]) if is_folder else None, run)
    raise typer.Exit(0 if examine(patient, probe, as_json) else EXIT_FAILED)


@app.command()
def notify(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """Send a test event to notify.command and notify.webhook, and say whether it arrived.

    Takes overrides, or one run directory. Exit code 1 if it did not arrive everywhere.
    """
    from pipeline.notify.events import send_trial
    from pipeline.run.directory import imagined_run

    existing = existing_run(overrides)
    lines, has_arrived = send_trial(existing or imagined_run(config_of(overrides, config_dir)))
    typer.echo("\n".join(lines))
    raise typer.Exit(0 if has_arrived else EXIT_FAILED)


@app.command()
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
    from pipeline.api.responses import Selection
    from pipeline.cli.samples import show_samples
    from pipeline.cli.sweep_views import of_one_run

    show_samples(
        of_one_run(source, is_best_wanted=False),
        Selection(best, worst, at_random, prompt, seed),
        full,
        as_json,
    )


@app.command()
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


@app.command()
def sync(
    run_dir: RunDir,
    anew: Annotated[
        bool,
        typer.Option("--anew", help="Send every row to a new W&B run, where this shell's W&B variables say."),
    ] = False,
    project: Annotated[str | None, typer.Option(help="With --anew: the project of the new W&B run.")] = None,
    entity: Annotated[str | None, typer.Option(help="With --anew: its user or team.")] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, max=604_800, help="Seconds after which to give up.")
    ] = 600,
) -> None:
    """Bring W&B to exactly one row per iteration, after a crash, an outage or days offline."""
    from pipeline.tracking.sync import Anew
    from pipeline.tracking.sync import sync as bring_up_to_date

    new = Anew.asked(anew, project, entity)
    typer.echo(bring_up_to_date(load(run_dir), timeout, new, say=lambda text: typer.echo(text, err=True)))


@app.command()
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


@app.command()
def fork(
    source: Source,
    new_run: Annotated[Path, typer.Argument(metavar="NEW_RUN", help="Directory of the new run.")],
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
) -> None:
    """Make a new run that goes on from a policy of another, with settings of its own."""
    from pipeline.cli.run import fork_run
    from pipeline.cli.sweep_views import of_one_run

    typer.echo(fork_run(of_one_run(source, is_best_wanted=False), new_run, overrides or [], config_dir))


many.add_to(app)


def exit_of(state: str) -> typer.Exit:
    return typer.Exit({"complete": 0, "failed": EXIT_FAILED}.get(state, EXIT_INCOMPLETE))


def main() -> None:
    """Run the command line: errors of the user's are one readable message and exit code 2."""
    from pipeline.cli.errors import is_passing, refusal, say_error, system_error

    try:
        app(args=typed_words(sys.argv[1:]))
    except UserError as error:
        say_error(refusal(error, next(iter(sys.argv[1:]), "")))
        sys.exit(EXIT_USAGE)
    except ServiceError as error:
        say_error(f"{error}; nothing is lost, ask again later")
        sys.exit(EXIT_FAILED)
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        sys.stderr.close()
        sys.exit(EXIT_FAILED)
    except OSError as error:
        say_error(system_error(error))
        sys.exit(EXIT_FAILED if is_passing(error) else EXIT_USAGE)
    except SystemExit as error:
        if error.code == EXIT_INTERRUPTED:  # Typer has caught it
            raise KeyboardInterrupt from None
        raise
