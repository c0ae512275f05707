"""What is made from the code and committed: the pages of docs/reference, and what the Tab key offers.

``python -m docs.generate`` writes it.
"""

from pathlib import Path

from docs.generate.command_page import command_page
from docs.generate.completion_words import PATH as COMPLETION_WORDS
from docs.generate.completion_words import completion_words
from docs.generate.config_page import config_page
from docs.generate.file_page import file_page
from docs.generate.metric_page import metric_page
from docs.generate.peer_page import peer_page
from docs.generate.python_page import python_page
from docs.generate.shard_page import shard_page

FOLDER = Path(__file__).parent.parent / "reference"

PAGES = {
    "config.md": config_page,
    "commands.md": command_page,
    "metrics.md": metric_page,
    "files.md": file_page,
    "shards.md": shard_page,
    "python.md": python_page,
    "peers.md": peer_page,
}


def make_pages() -> dict[Path, str]:
    """Text of every generated file, by its path."""
    pages = {FOLDER / name: make() for name, make in PAGES.items()}
    return pages | {COMPLETION_WORDS: completion_words()}


def stale_pages() -> list[Path]:
    """Files on disk that are not what the code says now."""
    return [path for path, text in make_pages().items() if not path.is_file() or path.read_text() != text]
