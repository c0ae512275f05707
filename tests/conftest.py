"""What runs where, and fixtures that are made once: models, prompts, runs, the command line."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from filelock import FileLock

from tests.support import ROOT, light, tables, tiny, warm

if TYPE_CHECKING:
    from stages.ppo.training import Learner

SLOW_FILES = (
    "test_quickstart.py",
    "test_engine_contract.py",
    "test_remote_vllm.py",
    "test_docs_commands.py",
    "test_calculator.py",
    "test_trainer.py",
    "test_wheel.py",
    "test_kill.py",
)
"""Begun first, after the cluster's, lest one worker is left with them at the end."""
COSTLY = frozenset(
    {"models", "complete_real_run", "browser", "cluster", "cluster_with_accounting", "own_cluster"}
)
"""Fixtures that ``--fast`` does without."""
_LEFT_OUT = """
bare batching calculator conversations critics docs docs_commands engine_contract engine_guards engines
forward health invariance modeltrial learner local_ranks lora partial ppo_advantages ppo_golden ppo_math
ppo_mismatch ppo_shaping prepare quickstart ranks reference remax replay remote remote_vllm report_browser
rewards rules run shaping_and_kl stage_runner state_files trainer wheel dashboard fork kill pools repair sync
tracking watch ahead light rows rewind doctor notify agreement adapters lora_run states
killed_updates used_workers pulling kept benchmarks row_checks special_tokens families model_folders
adaptable modelcheck any_refusal vllm_arguments own_process planted two_people crossed what_a_run_reads
likelihood try distillation distillation_run step_models
"""
LEFT_OUT = frozenset(_LEFT_OUT.split())
"""Files that ``--fast`` leaves out: they need torch, a browser, an installation, W&B or many runs."""
WHOLE_SUITE = "WHOLE_SUITE"
"""A variable that the test runner's own processes find when nobody has named files."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
Cli = Callable[..., subprocess.CompletedProcess[str]]

# Else each of the thousands of processes that tests start would compile every module of ours again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="without torch, cluster and browser")


def pytest_configure(config: pytest.Config) -> None:
    """What a shell starts in the background ignores SIGINT, under nohup SIGHUP, and so would all that tests
    start. How long an example takes says nothing on a machine that runs other tests too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    hypothesis.settings.register_profile("busy machine", parent=hypothesis.settings(), deadline=None)
    hypothesis.settings.load_profile("busy machine")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        os.environ.setdefault(WHOLE_SUITE, "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.suffix == ".py" and collection_path.stem.removeprefix("test_") in LEFT_OUT
    is_left_out = collection_path.name == "cluster" or is_test
    return True if config.getoption("--fast") and is_left_out else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A worker takes a file at a time, but all tests of the cluster: much of their time is waiting."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "cluster" if "cluster/" in nodeid else nodeid.partition("::")[0]

    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        items[:] = [item for item in items if not COSTLY.intersection(getattr(item, "fixturenames", ()))]
    for item in items:
        if tables.is_trial(item):
            item.add_marker("soak")
    if WHOLE_SUITE in os.environ:
        items[:] = tables.without_trials_left_out(items)
    ranks = {name: rank for rank, name in enumerate(SLOW_FILES, 1)}
    items.sort(key=lambda item: 0 if is_of_cluster(item) else ranks.get(item.path.name, len(ranks) + 1))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and collected tests stay: the collector, and forks, need not look through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def is_of_cluster(item: pytest.Item) -> bool:
    return item.path.parent.name == "cluster"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--fast") and "torch" in sys.modules:
        raise pytest.UsageError(
            "a test that --fast runs has imported torch; see LEFT_OUT in tests/conftest.py"
        )


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """What a test does about signals ends with it: what tests start later would ignore them too."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of day that are the same everywhere."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real models of a few thousand weights, and prompts, that no test changes."""
    return shared(tmp_path_factory, "models", tiny.make_inputs)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directories for light tasks (see tests/support/light.py), and prompts, that no test changes."""
    return shared(tmp_path_factory, "inputs", light.make_inputs)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of the user's shell, without what would point a test at a network or a scheduler."""
    hidden = ("WANDB_", "SLURM_", "HF_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"WANDB_MODE": "offline", "NO_COLOR": "1", "COLUMNS": "80", "PYTHONPATH": path}


@pytest.fixture(scope="session")
def warm_commands(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[warm.WarmCommands]:
    """A process that has imported the command line."""
    commands = warm.WarmCommands(environment, tmp_path_factory.mktemp("warm"))
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def slurm_ppo(environment: dict[str, str], warm_commands: warm.WarmCommands) -> Cli:
    """Run the command line as a user does: ``slurm_ppo("status", run)``."""

    def call(*arguments: object, timeout: float = 300, **options: object) -> subprocess.CompletedProcess[str]:
        settings: dict = {"env": environment, "cwd": ROOT} | options
        words = list(map(str, arguments))
        if settings.keys() == {"env", "cwd"} and warm_commands.fits(settings["env"]):
            return warm_commands.run(words, settings["env"], settings["cwd"], timeout)
        command = [sys.executable, "-m", "pipeline", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **settings)

    return call


@pytest.fixture(scope="session")
def complete_run(inputs: Path, slurm_ppo: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of light tasks: two iterations, two shards, evaluated. Tests must not change it."""
    return shared(tmp_path_factory, "complete", lambda folder: carry_out(slurm_ppo, inputs, folder)) / "run"


@pytest.fixture
def copied_run(complete_run: Path, tmp_path: Path) -> Path:
    """A copy of it, which the test may change."""
    return Path(shutil.copytree(complete_run, tmp_path / "run", symlinks=True))


@pytest.fixture(scope="session")
def complete_real_run(models: Path, slurm_ppo: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of real models."""
    return (
        shared(tmp_path_factory, "complete_real", lambda folder: carry_out(slurm_ppo, models, folder)) / "run"
    )


def carry_out(slurm_ppo: Cli, inputs: Path, folder: Path) -> None:
    heldout = (f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1")
    done = slurm_ppo("run", *tiny.overrides(inputs, folder / "run", *heldout))
    assert done.returncode == 0, done.stderr


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that one worker of the test runner makes for all."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, is_made = root / f"shared-{name}", root / f"shared-{name}.made"
    with FileLock(root / f"shared-{name}.lock"):
        if not is_made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            make(folder)
            is_made.touch()
    return folder


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """DeepSpeed's group of one rank, for tests that train in their own process."""
    from tests.support import learning

    with learning.process_group():
        yield


@pytest.fixture
def make(models: Path, tmp_path: Path, process_group: None) -> "Callable[..., Learner]":
    """A learner of the given settings, from the same policy each time."""
    from tests.support import learning

    return lambda *more: learning.make_learner(models, tmp_path / "run", *more)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that only sleeping spends; files that need not survive a power cut."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return now
