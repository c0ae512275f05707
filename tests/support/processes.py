"""Stages as processes of their own, cheap enough for many tests: forks of a server that imported everything.

The local scheduler runs tasks the same way.
"""

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from pipeline.config.resolve import resolve
from pipeline.config.schema import Config
from pipeline.run.directory import Run, create_run
from tests.support import ROOT
from tests.support.composed import composed_of


@dataclass(frozen=True)
class Done:
    """How a process ended."""

    code: int | None
    log: str
    """Standard output and error, in the order they came."""


def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    llama = "transformers.models.llama.modeling_llama"  # of which all tiny models are
    context.set_forkserver_preload(["stages.preload", "stages.preload.models", llama])
    return context


def make_run(inputs: Path, run_dir: Path, *more: str) -> Run:
    return create_run(config_of(inputs, run_dir, *more))


def config_of(inputs: Path, run_dir: Path, *more: str) -> Config:
    return resolve(composed_of(inputs, run_dir, *more))


def stage_arguments(run: Run | Path, stage: str, iteration: int = 0, shard: int = 0) -> list[str]:
    root = run if isinstance(run, Path) else run.paths.root
    return [stage, "--run-dir", str(root), "--iteration", str(iteration), "--shard", str(shard)]


def start_stage(arguments: Sequence[str], log: Path, cwd: Path = ROOT) -> Any:
    """Begin ``python -m stages ARGUMENTS`` in a fork; its output goes to ``log``."""
    given = (list(arguments), str(log), str(cwd), dict(os.environ))  # the server's is older
    process = fork_server().Process(target=_main, args=given)
    process.start()
    return process


def stage(
    run: Run, name: str, iteration: int = 0, shard: int = 0, cwd: Path = ROOT, more: Sequence[str] = ()
) -> Done:
    """Run one task to its end."""
    log = run.paths.root / f"test-{os.urandom(4).hex()}.log"
    process = start_stage([*stage_arguments(run, name, iteration, shard), *more], log, cwd)
    process.join(timeout=120)
    return Done(process.exitcode, log.read_text())


def python_m_stages(arguments: Sequence[str], environment: dict[str, str], cwd: Path = ROOT) -> Done:
    """The real command, in a new interpreter."""
    path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "stages", *arguments],
        env=environment | {"PYTHONPATH": path},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return Done(done.returncode, done.stdout)


def script(path: Path, *arguments: object, cwd: Path = ROOT) -> Done:
    """``python PATH ARGUMENTS`` to its end, in a fork."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        code = in_process_of_its_own(_run_script, str(path), [*map(str, arguments)], str(log), str(cwd))
        return Done(code, log.read_text())


def _run_script(path: str, arguments: list[str], log: str, cwd: str) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    os.chdir(cwd)
    with _output_to(log):
        runpy.run_path(path, run_name="__main__")


def in_process_of_its_own(function: Callable[..., None], *arguments: object) -> int | None:
    """Call a module's function in a fork. Returns the exit code."""
    process = fork_server().Process(target=function, args=arguments)
    process.start()
    process.join(timeout=600)
    return process.exitcode


def _main(arguments: list[str], log: str, cwd: str, environment: Mapping[str, str] = os.environ) -> None:
    from stages.attempts.runner import main

    os.environ.update(environment)
    os.chdir(cwd)
    with _output_to(log):
        code = main(arguments)
    sys.exit(code)


def stopping(arguments: list[str], log: str, steps: int) -> None:
    """A task that is warned before a certain token."""
    from stages.generation import responding

    asked = iter(range(10**6))
    responding.warned = lambda: next(asked) >= steps  # type: ignore[assignment]
    _main(arguments, log, str(ROOT))


@contextlib.contextmanager
def _output_to(log: str) -> Iterator[None]:
    """Standard output and error of this process, also of what it starts."""
    with Path(log).open("w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield
