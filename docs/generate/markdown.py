"""Pieces of Markdown that read alike on the site and on GitHub."""

import re
from collections.abc import Iterable, Sequence

NOTICE = "<!-- Made by `make docs` from the code. Edit the code. -->"


def page(title: str, *parts: str) -> str:
    return "\n\n".join([NOTICE, f"# {title}", *(part.strip() for part in parts if part.strip())]) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cell(text: str) -> str:
    """One line, in which no bar ends the cell."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: roles and double backticks become single ones, and no text a tag."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", docstring or "")
    text = re.sub(r"``([^`]+)``", r"`\1`", text).strip()
    return re.sub(r"`[^`]*`|<", lambda found: "\\<" if found[0] == "<" else found[0], text)


def slug(heading: str) -> str:
    """The anchor that GitHub and MyST give a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.lower())
    return kept.strip().replace(" ", "-")
