"""``slurm-ppo devcluster``: a real Slurm on this machine, to try batch runs on. Thin."""

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.arguments import EXIT_FAILED

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Start and stop a real Slurm on this machine, for development and tests.",
)

DEFAULT_FOLDER = Path(".slurm-ppo-devcluster")
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node, as in sinfo.")]

Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Folder for all files of the cluster: configuration, logs, sockets."),
]


@app.command()
def up(
    folder: Folder = DEFAULT_FOLDER,
    accounting: Annotated[
        bool,
        typer.Option(help="Run slurmdbd and MariaDB too, so that sacct answers. Needs two more packages."),
    ] = False,
    network_filesystem: Annotated[
        bool,
        typer.Option(
            "--network-filesystem",
            help="Make a GlusterFS volume in DIR/shared, which each node mounts. Needs root.",
        ),
    ] = False,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE=NAME",
            help="Host name of a node. Its jobs then see it as a separate machine, with its own process ids "
            "and boot id, even if another node has the same name. May be repeated. Needs root.",
        ),
    ] = None,
    clock: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE=SECONDS",
            help="Seconds by which jobs on a node see the clock ahead. May be repeated. Needs a C compiler.",
        ),
    ] = None,
) -> None:
    """Start a cluster in a new folder: four nodes with simulated GPUs."""
    from slurm.devcluster import Layout, start

    began = time.monotonic()
    layout = Layout(network_filesystem=network_filesystem).with_machines(host or (), clock or ())
    cluster = start(folder, layout, accounting)
    partitions = ", ".join(partition.name for partition in cluster.layout.partitions)
    typer.echo(f"{len(cluster.layout.nodes)} nodes are up after {time.monotonic() - began:.1f} s")
    typer.echo(f"partitions: {partitions}")
    if cluster.shared:
        typer.echo(f"put runs below:        {cluster.shared}")
    where = "" if folder == DEFAULT_FOLDER else f" {shlex.quote(str(folder))}"
    typer.echo(f'use it in this shell:  eval "$(slurm-ppo devcluster env{where})"; sinfo')
    typer.echo(f"show its daemons:      slurm-ppo devcluster status{where}")
    typer.echo(f"remove it:             slurm-ppo devcluster down{where}")


@app.command()
def down(folder: Folder = DEFAULT_FOLDER) -> None:
    """End a cluster's daemons and jobs, and remove its folder."""
    from slurm.devcluster import attach

    cluster = attach(folder)
    cluster.stop()
    typer.echo(f"removed {cluster.folder}")


@app.command()
def kill(node: NodeName, folder: Folder = DEFAULT_FOLDER) -> None:
    """Kill a node: its daemon and every process of its jobs, at once, as when its power fails."""
    from slurm.devcluster import attach

    attach(folder).kill_node(node)
    where = "" if folder == DEFAULT_FOLDER else f" {shlex.quote(str(folder))}"
    typer.echo(f"{node} is down; the controller notices within half a minute")
    typer.echo(f"bring it back:  slurm-ppo devcluster revive {node}{where}")


@app.command()
def revive(node: NodeName, folder: Folder = DEFAULT_FOLDER) -> None:
    """Start a node that was killed, and return it to service."""
    from slurm.devcluster import attach

    attach(folder).start_node(node)
    typer.echo(f"{node} is up")


@app.command()
def status(folder: Folder = DEFAULT_FOLDER) -> None:
    """Show daemons and nodes. Exit code 1 if a daemon has ended."""
    from slurm.devcluster import attach

    found = attach(folder).status()
    for daemon in found.daemons:
        typer.echo(f"{daemon.name:20} {f'pid {daemon.pid}' if daemon.alive else 'has ended'}")
    for node, state in found.nodes.items():
        typer.echo(f"{f'node {node}':20} {state}")
    if not all(daemon.alive for daemon in found.daemons):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def env(folder: Folder = DEFAULT_FOLDER) -> None:
    """Print the shell commands after which sbatch, squeue and sinfo mean this cluster."""
    from slurm.devcluster import attach

    for name, value in attach(folder).environment().items():
        typer.echo(f"export {name}={shlex.quote(value)}")
