"""The pages of docs/reference, made from the code that they describe: ``python -m docs.generate``."""

from pathlib import Path

from docs.generate.command_page import command_page
from docs.generate.config_page import config_page
from docs.generate.file_page import file_page
from docs.generate.metric_page import metric_page
from docs.generate.shard_page import shard_page

FOLDER = Path(__file__).parent.parent / "reference"

PAGES = {
    "config.md": config_page,
    "commands.md": command_page,
    "metrics.md": metric_page,
    "files.md": file_page,
    "shards.md": shard_page,
}


def make_pages() -> dict[Path, str]:
    """Text of every generated page, by its path."""
    return {FOLDER / name: make() for name, make in PAGES.items()}


def stale_pages() -> list[Path]:
    """Pages on disk that are not what the code says now."""
    return [path for path, text in make_pages().items() if not path.is_file() or path.read_text() != text]
