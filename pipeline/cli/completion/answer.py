"""``slurm-ppo complete FORM ...``: what a shell's script calls at each press of Tab.

It must be quick, and never disturb the line that is being typed: whatever goes wrong, nothing is offered.
"""

import json
import os
import re
import sys

from pipeline.cli.completion.line import remainder, split_line
from pipeline.cli.completion.offers import Table, offers

WORDS = os.path.join(os.path.dirname(__file__), "words.json")
_UNSAFE = re.compile(r"([^\w@%+=:,./~-])")
"""Characters of a word to put a backslash before, for bash and zsh."""


def main(arguments: list[str]) -> None:
    """Print what fits, a word a line; nothing where anything goes wrong."""
    try:
        found = answer(arguments[0], arguments[1:], read_table())
    except Exception:  # a message would land in the line that is being typed
        return
    text = "".join(f"{word}\n" for word in found if word.isprintable())
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.flush()


def read_table() -> Table:
    with open(WORDS, encoding="utf-8") as file:
        table: Table = json.load(file)
    return table


def answer(form: str, given: list[str], table: Table) -> list[str]:
    """Return what fits, as the shell takes it.

    Args:
        form: bash, zsh, or plain for words that the shell itself quotes.
        given: from bash the command's name, COMP_WORDBREAKS and the line up to the cursor; from the others
            the words after the command up to the cursor, unquoted.
    """
    if form != "bash":
        found = offers(given[:-1], given[-1], table)
        return found if form == "plain" else [escaped(word) for word in found]
    name, breaks, line = given
    words, quote_at = split_line(line)
    start = words.index(name) + 1 if name in words else 1
    typed = words[-1]
    found = offers(words[start:-1], typed, table)
    rest = [remainder(word, typed, breaks, quote_at) for word in found]
    return rest if quote_at is not None else [escaped(word) for word in rest]


def escaped(word: str) -> str:
    return _UNSAFE.sub(r"\\\1", word)
