"""Whether W&B can be reached, and whether that matters: rows that cannot be sent are kept in files."""

import importlib.util
import os
import subprocess
import time
from pathlib import Path

from pipeline.config.schema import WandbConfig, WandbMode
from pipeline.doctor.findings import Check, Finding, Group, milliseconds, ok, problem, warning
from pipeline.run.directory import Run
from pipeline.run.wandb_place import settled
from pipeline.tracking.mode import has_key, wandb_mode
from pipeline.tracking.place import place_of

_REACH_SECONDS = 5.0


def wandb_checks(run: Run | None) -> list[Check]:
    """Return the checks of W&B, for a run those of its mode and its server."""
    config = run.config.tracking.wandb if run else WandbConfig()
    place = place_of(run, os.environ) if run else settled(config, "", os.environ, Path.cwd())
    asked, url = config.mode, place.base_url
    mode = wandb_mode(asked, os.environ)
    checks = [Check(Group.WANDB, "mode", lambda: judge_mode(asked, mode))]
    if mode is not WandbMode.DISABLED:
        checks.append(Check(Group.WANDB, "client", look_at_client, limit=20))
    if mode is WandbMode.ONLINE:
        checks.append(Check(Group.WANDB, "server", lambda: look_at_server(url), limit=_REACH_SECONDS + 1))
    return checks


def judge_mode(asked: WandbMode, mode: WandbMode) -> Finding:
    """Judge the mode and say why it applies. The key itself is never shown."""
    why = f"tracking.wandb.mode={asked}"
    if asked is WandbMode.AUTO and os.environ.get("WANDB_MODE"):
        why += f", WANDB_MODE={os.environ['WANDB_MODE']}"
    elif asked is WandbMode.AUTO:
        why += ", an API key is present" if has_key(os.environ) else ", no API key"
    if mode is WandbMode.ONLINE and not has_key(os.environ):
        advice = "wandb login, or set WANDB_API_KEY; until then rows go to files"
        return warning("mode", f"{mode} ({why}), but there is no API key", advice)
    ends = {
        WandbMode.OFFLINE: "; that is fine: rows are kept in files, slurm-ppo sync RUN sends them",
        WandbMode.DISABLED: "; metrics.jsonl and the report have everything",
    }
    return ok("mode", f"{mode} ({why}){ends.get(mode, '')}")


def look_at_client() -> Finding:
    """Start the client's own program, which a noexec mount or another processor refuses."""
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:
        return problem("client", "wandb is not installed", "pip install slurm-ppo, or tracking=none")
    program = Path(found.origin).parent / "bin" / "wandb-core"
    try:
        done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=15)
    except OSError as error:
        told = f"{program} cannot be started: {error.strerror}"
        advice = "install where programs may be run (no noexec mount), or tracking=none"
        return problem("client", told, advice)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("Version")]
    return ok("client", f"wandb-core runs{', ' + lines[0].lower() if lines else ''}")


def look_at_server(url: str) -> Finding:
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
        advice = "rows go to files until it can be reached; slurm-ppo sync RUN sends them from where it can"
        return warning("server", f"{url} cannot be reached: {why}", advice)
    seconds = time.perf_counter() - started
    return ok("server", f"{url} answers in {milliseconds(seconds)}", seconds=seconds)
