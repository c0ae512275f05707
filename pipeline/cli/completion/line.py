"""A command line that is being typed in bash: its words, and which part of the last one bash replaces."""


def split_line(line: str) -> tuple[list[str], int | None]:
    """Split the part of a line before the cursor into words, as a shell does, quotes and backslashes undone.

    Returns:
        The words; the last is the one being typed, perhaps empty. And where in it a quote was opened that is
        not closed yet; None without one.
    """
    words, quote, quote_at = [""], "", None
    is_escaped = False
    for letter in line:
        if is_escaped:
            words[-1] += letter
            is_escaped = False
        elif letter == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            quote = _add(words, letter, quote)
        elif letter in "'\"":
            quote, quote_at = letter, len(words[-1])
        elif letter.isspace():
            words += [""] if words[-1] or quote_at is not None else []
            quote_at = None
        else:
            words[-1] += letter
    return words, quote_at if quote else None


def _add(words: list[str], letter: str, quote: str) -> str:
    """Add a letter that stands in quotes. Returns the quote that is open behind it."""
    if letter == quote:
        return ""
    words[-1] += letter
    return quote


_KEPT = "@$"
"""Breaks with which bash begins the word that it replaces; behind any other it begins after the sign."""


def remainder(word: str, typed: str, breaks: str, quote_at: int | None) -> str:
    """Return the part of an offered word that bash puts in place of what it takes for the typed one.

    bash begins a new word at each of its COMP_WORDBREAKS, such as = and @, and behind an open quote.
    """
    if quote_at is not None:
        return word[quote_at:]
    last = max((typed.rfind(sign) for sign in breaks if not sign.isspace()), default=-1)
    return word[last:] if last >= 0 and typed[last] in _KEPT else word[last + 1 :]
