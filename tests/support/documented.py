"""The commands of docs/ and README.md: found, and made to run in a folder with tiny models.

A fenced block is ``bash`` (run here), ``bash slurm`` (run on a practice cluster), ``bash check`` (needs what
tests do not have: composed and planned), or ``bash elsewhere`` (run by CI in another place). ``file=NAME``
makes a block of any language a file of the sandbox.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from tests.support import ROOT, warm_client

DOCS = ROOT / "docs"


class Kind(StrEnum):
    """How a test covers a command."""

    RUN = "run"
    SLURM = "slurm"
    CHECK = "check"
    ELSEWHERE = "elsewhere"


ELSEWHERE = {
    r"make quickstart(_vllm)?( .*)?": "tests/end_to_end/test_wheel.py",
    r"make quickstart_real.*|.*[ =]runs/real.*": "tests/end_to_end/test_arithmetic.py",
    r"python -m stages.models.gguf .*": "tests/stages/test_gguf.py",
    r"srun python -m stages.ppo.pretraining .*": "tests/stages/test_pretraining.py",
    r".*examples/recipes.*|slurm-ppo status runs/gsm8k-7b": "tests/end_to_end/test_recipes.py",
    r"make test": ".ci/run",
    r"sbatch examples/slurm/allocation.sh .*": "tests/cluster/test_allocation.py",
    r"exec slurm-ppo sweep .* scheduler=allocation .*": "tests/sweep/test_carrying_out.py",
    r"slurm-ppo completion install": "tests/cli/test_completion.py",
    r"slurm-ppo sync RUN.*|wandb sync DIR/wandb": "tests/tracking/test_mirror.py",
    r"tensorboard --logdir RUN/tensorboard": "tests/tracking/test_other_trackers.py",
    r"slurm-ppo dashboard push .*": "tests/tracking/test_dashboard.py",
    r"(srun )?slurm-ppo export runs/lora .*": "tests/end_to_end/test_lora_run.py",
    r"sudo slurm-ppo devcluster up --network-filesystem": "tests/cluster/test_network.py",
    r"sudo slurm-ppo devcluster (up --host|kill|revive) .*": "tests/cluster/test_machines.py",
    r"(slurm-ppo cancel|slurm-ppo resume|mv) runs/first( /.*)?": "tests/run/test_inside.py",
    r"slurm-ppo (resume|submit) runs/first [a-z]+\..*=.*": "tests/cli/test_settings.py",
    r"slurm-ppo config runs/first --history": "tests/cli/test_settings.py",
    r".* --take-over scheduler.account=my_account": "tests/cli/test_settings.py",
    r".* --take-over|(mkdir|chgrp lab|chmod 2775) /scratch/lab/runs": "tests/cluster/test_other_users.py",
    r"(chmod -R|find|slurm-ppo fork) .*/scratch/lab/.*": "tests/cli/test_people.py",
    r"(cp -a|rsync -a|tar -C) runs.*": "tests/cluster/test_copies.py",
    r"slurm-ppo try.*": "tests/cli/test_try.py",
    r"slurm-ppo doctor --time-candidates .*": "tests/checks/test_candidates.py",
    r".*source=verifiers .*": "tests/plugins/test_verifiers.py",
    r"slurm-ppo rehearse.*": "tests/checks/test_rehearsal.py",
    r"chromium .*": "tests/report/test_report_browser.py",
    r"source .venv/bin/activate": "Makefile",
    r"(apptainer|podman|hf) .*": "tests/end_to_end/test_images.py",
    r"(python3.11 -m venv|tar -C|cp) .*/scratch/.*": "tests/end_to_end/test_packed_environment.py",
    r"(/scratch/venv/bin/)?pip .*": "tests/end_to_end/test_installs.py",
}
"""Commands (regular expressions) that take minutes, or change the tests' environment -> what covers them."""

PLACES = {"/models/": "models/", "/data/": "data/", "/scratch/": "scratch/", "/path/to/": ""}
"""Folders that the pages pretend -> theirs in the sandbox."""

PARTITIONS = {"a100": "rollout", "l40s": "reward"}
"""Partitions that the pages pretend -> those of the practice cluster."""

SMALL = {
    "iterations": "2",
    "data.prompts_per_iteration": "8",
    "data.max_prompt_tokens": "48",
    "model.context_length": "64",
    "rollout.max_new_tokens": "12",
    "update.minibatches": "2",
    "update.epochs": "1",
    "tracking.wandb.mode": "disabled",
}
"""Settings of every run that a page starts, unless it says otherwise."""

COMPOSING = frozenset({"run", "submit", "validate", "plan", "config", "sweep", "try"})
SMALLER = "DOCS_SMALLER"
"""Variable with more of them, as JSON."""

RECORD, NUMBER = "DOCS_RECORD", "DOCS_NUMBER"
"""Variables that name a file and a command: the shim then notes how it was called and does nothing."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def file(self) -> str | None:
        """Name of the file that it makes."""
        return next((word[5:] for word in self.words if word.startswith("file=")), None)

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command of a page, continued lines joined."""

    where: str
    page: str
    text: str
    kind: Kind


def pages() -> list[Path]:
    """README.md, the tutorial in its order, the other pages by name."""
    names = ("quickstart", "real_model", "your_model", "slurm", "reading")
    tutorial = [DOCS / "tutorial" / f"{name}.md" for name in names]
    return [ROOT / "README.md", *tutorial, *sorted(set(DOCS.rglob("*.md")) - set(tutorial))]


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks, indented ones too."""
    name, opened, body = str(page.relative_to(ROOT)), None, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = re.match(r"(\s*)(```+)(.*)$", line)
        if opened is None and fence:
            opened, body = (number, fence[1], fence[2], fence[3].split() or [""]), []
        elif opened and fence and fence[2] == opened[2] and not fence[3].strip():
            language, *words = opened[3]
            yield Block(name, opened[0], language, tuple(words), "".join(body))
            opened = None
        elif opened:
            body.append(line.removeprefix(opened[1]) + "\n")
    assert opened is None, f"{name}:{opened[0]}: a fence that nothing closes"


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks(page)]


def commands(block: Block) -> Iterator[Command]:
    """Of a ``bash`` or ``console`` block; in the latter lines without ``$`` are output."""
    if block.language not in ("bash", "console") or block.file:
        return
    kind = next((Kind(word) for word in block.words if word in tuple(Kind)), Kind.RUN)
    for text in re.sub(r"\\\n\s*", "", block.text).splitlines():
        if block.language == "console" and not text.startswith("$ "):
            continue
        text = text.removeprefix("$ ").strip()
        if text and not text.startswith("#"):
            yield Command(block.where, block.page, text, kind)


def all_commands() -> list[Command]:
    return [command for block in all_blocks() for command in commands(block)]


# --- the sandbox ---


def make_sandbox(folder: Path, inputs: Path) -> Path:
    """A folder that has what the pages say a reader has, made of tiny models; but no run."""
    for name, place in (("my-sft", "policy"), ("my-rm", "reward_model")):
        shutil.copytree(inputs / place, folder / "models" / name)
        shutil.copytree(inputs / place, folder / ".cache" / "quickstart" / place)
    for data in (folder / "data", folder / ".cache" / "quickstart"):
        data.mkdir(exist_ok=True)
        for name in ("prompts.jsonl", "heldout.jsonl"):
            shutil.copy(inputs / name, data / name)
    samples = [{"id": f"r{i}", "prompt": f"say {i}", "response": "a" * (1 + i)} for i in range(4)]
    (folder / "data/reference_samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in all_blocks():
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(adapted(block.text, folder))
    _write_shim(folder / "bin")
    return folder


def adapted(text: str, sandbox: Path) -> str:
    """With folders and partitions that exist here, and responses that fit small models."""
    for pretended, place in PLACES.items():
        text = re.sub(rf"(?<![\w.]){re.escape(pretended)}", f"{sandbox}/{place}", text)
    for pretended, partition in PARTITIONS.items():
        text = re.sub(rf"(partition[:=] ?){pretended}\b", rf"\g<1>{partition}", text)
    text = re.sub(r"(?<=rollout\.max_new_tokens=)\d{2,}", SMALL["rollout.max_new_tokens"], text)
    return re.sub(r"\bRUN[12]?(?=\s|@|/|$)", "runs/first", text)


_SHIM = """\
#!{python} -S
import json, os, sys
sys.path.insert(0, {checkout!r})
from tests.support.documented import enlarge
arguments = enlarge(sys.argv[1:])
if record := os.environ.get({variable!r}):
    with open(record, "a") as file:
        file.write(json.dumps([os.environ[{number!r}], arguments]) + "\\n")
elif {warm!r} in os.environ:
    from tests.support.warm_client import run_here
    sys.exit(run_here(arguments))
else:
    os.execv(sys.executable, [sys.executable, "-m", "pipeline", *arguments])
"""


def _write_shim(folder: Path) -> None:
    folder.mkdir()
    shim = folder / "slurm-ppo"
    settings = {
        "python": sys.executable,
        "checkout": str(ROOT),
        "variable": RECORD,
        "number": NUMBER,
        "warm": warm_client.ADDRESS,
    }
    shim.write_text(_SHIM.format(**settings))
    shim.chmod(0o755)


def enlarge(arguments: list[str]) -> list[str]:
    """The words of a command, with small settings where it composes a run and does not say itself."""
    if not arguments or arguments[0] not in COMPOSING or not any("=" in word for word in arguments):
        return arguments
    given = {word.partition("=")[0] for word in arguments}
    small = SMALL | json.loads(os.environ.get(SMALLER, "{}"))
    return [*arguments, *(f"{key}={value}" for key, value in small.items() if key not in given)]


def environment(sandbox: Path, base: dict[str, str]) -> dict[str, str]:
    path = f"{sandbox / 'bin'}:{Path(sys.executable).parent}:{base['PATH']}"
    return base | {"PATH": path, "PYTHONPATH": str(ROOT)}


def tell(story: list[Command], sandbox: Path, env: dict[str, str], timeout: float) -> str:
    """Run commands in one shell, one after the other, and give back what they print.

    Raises:
        AssertionError: naming the command that ended with another exit code than 0 (of status also 3).
    """
    lines = ["set -uo pipefail"]
    for command in story:
        legal = "0 3" if command.text.startswith("slurm-ppo status") else "0"
        lines += [
            f"printf '%s\\n' {shlex.quote('$ ' + command.text)}",
            adapted(command.text, sandbox),
            f'code=$?; case " {legal} " in *" $code "*) ;; '
            f'*) echo "exit code $code at {command.where}"; exit 1;; esac',
        ]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=sandbox,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def once(story: list[Command]) -> list[Command]:
    """Without commands that the same words have run before, on another page."""
    first = {command.text: command for command in reversed(story)}
    return [command for command in story if first[command.text] is command]


def recorded(story: list[Command], sandbox: Path, env: dict[str, str]) -> dict[Command, list[list[str]]]:
    """How the shell would call slurm-ppo for each command, its quotes undone by the shell itself."""
    record = sandbox / "recorded.jsonl"
    numbered = [replace(c, text=f"export {NUMBER}={i}; {c.text}") for i, c in enumerate(story)]
    tell(numbered, sandbox, env | {RECORD: str(record)}, timeout=300)
    calls: dict[Command, list[list[str]]] = {command: [] for command in story}
    for line in record.read_text().splitlines():
        number, words = json.loads(line)
        calls[story[int(number)]].append(words)
    return calls
