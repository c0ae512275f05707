"""What a quota of inodes counts: the files and folders of one iteration of a run."""

from collections import Counter
from pathlib import Path


def of_iteration(root: Path, iteration: int) -> list[Path]:
    """Every file and folder, but for policies and trainers' states, which retention decides on."""
    number = f"{iteration:05d}"
    folders = (root / "iterations" / number, *root.glob(f"logs/{number}-*"), root / "slurm" / number)
    below = [path for folder in folders if folder.exists() for path in (folder, *folder.rglob("*"))]
    return [*below, *root.glob(f"rows/{number}.json")]


def by_kind(root: Path, iteration: int) -> Counter[str]:
    """How many of each kind: in a folder of a stage by their names, elsewhere by the folder they are in."""
    return Counter(_kind(path.relative_to(root), path.is_dir()) for path in of_iteration(root, iteration))


def _kind(path: Path, is_folder: bool) -> str:
    if is_folder:
        return "folders"
    place, name = path.parts[0], path.name
    if place != "iterations":
        return place if path.suffix != ".sh" else "scripts"
    return next((what for mark, what in _KINDS.items() if mark in name), "records")


_KINDS = {
    ".claim-": "claims",
    ".partial.": "saves",
    ".zip": "archives",
    ".thinned.": "markers",
    ".arrow": "data",
    ".learned.": "data",
}
