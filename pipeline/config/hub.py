"""Names on the Hugging Face hub, found in the cache that its tools keep here. Nothing is downloaded.

A snapshot of a repository lies there as ``models--ORG--NAME/snapshots/COMMIT``, with links to files beside
it, and ``refs/REVISION`` says which commit a branch or tag is
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>\w[\w.-]*))?(?P<inside>(?:/[^/]+)*)"
)
_FILE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|arrow|feather|gguf)(\.(gz|zst))?$", re.IGNORECASE)
_MAIN = "main"
_EXAMPLES = {
    ".cache/quickstart": "slurm-ppo quickstart",
    ".cache/arithmetic": "python examples/arithmetic/make_model.py --out .cache/arithmetic/policy",
    ".cache/calculator": "python examples/calculator/make_calculator.py --out .cache/calculator",
    "data/gsm8k": "python examples/recipes/gsm8k.py data/openai-gsm8k --out data/gsm8k",
}
"""Folders of the examples' files, and the commands that make them."""
_FOLDERS = ("models/", "data/")
"""Beginnings of users' own folders, as the recipes have them; no account of the hub."""


class Kind(StrEnum):
    """Kind of repository, as ``hf download --repo-type`` has it."""

    MODEL = "model"
    DATASET = "dataset"


def cache_of(environ: Mapping[str, str]) -> Path:
    """Return the folder that Hugging Face's tools keep snapshots in, with these variables."""
    above = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{above}/huggingface"
    given = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(given)).expanduser().absolute()


def located(given: str, kind: Kind | None) -> str:
    """Return the absolute path that a setting means: a file or folder of this name, or else, where a kind is
    given, a repository's snapshot, ``ORG/NAME``, ``ORG/NAME@REVISION``, or something in it,
    ``ORG/NAME/FOLDER``. What may be such a name, and is not in the cache, stays as it is."""
    name = _name_in(given)
    if kind is None or name is None or Path(given).exists():
        return str(Path(given).absolute())
    folder = cache_of(os.environ) / f"{kind}s--{name['repo'].replace('/', '--')}"
    snapshot = folder / "snapshots" / _commit_of(folder, name["revision"] or _MAIN)
    if snapshot.is_dir():
        return f"{snapshot}{name['inside']}"
    # the folder above is the user's, and the name rather a wrong one in it
    return str(Path(given).absolute()) if Path(given).parent.is_dir() else given


def _commit_of(folder: Path, revision: str) -> str:
    """Return the commit of a branch or tag; a commit is its own."""
    try:
        return (folder / "refs" / revision).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return revision


def way_to_have(given: str, kind: Kind) -> str:
    """Return, for what :func:`located` has left as it is, where it was looked for, and the command that
    fetches it; for what is an example's, the command that makes it; empty for any other path."""
    for folder, command in _EXAMPLES.items():
        if f"/{folder}/" in f"/{given}/":
            return f"made by: {command}"
    name = _name_in(given)
    if name is None:
        return ""
    words = [name["repo"]]
    words += ["--repo-type", kind] if kind is Kind.DATASET else []
    words += ["--revision", name["revision"]] if name["revision"] else []
    where = f"nor is it in the Hugging Face cache {cache_of(os.environ)}"
    return f"{where}; with network, as on a login node: hf download {' '.join(words)}"


def with_blobs(path: str) -> str:
    """Return what jobs must see of a path: of one in a snapshot the repository, where its links lead."""
    for folder in Path(path).parents:
        if folder.name == "snapshots" and folder.parent.name.startswith(tuple(f"{one}s--" for one in Kind)):
            return str(folder.parent)
    return path


def _name_in(given: str) -> re.Match[str] | None:
    """Return the parts of what may be a name on the hub; None for what looks like a file of the user's."""
    name = _NAME.fullmatch(given)
    is_own = name is None or given.startswith(_FOLDERS) or _FILE.search(name["repo"])
    return None if is_own else name
