"""docs/reference/peers.md: words of other systems, from the table that a mistyped key is looked up in."""

from docs.generate.markdown import code, page, table
from pipeline.config.peers import OPTIONS, PEERS, peer_table

ABOUT = """\
What users of verl, OpenRLHF, TRL and ms-swift know by another name. One of these words, on the command
line or in a file, is answered with the key: `lr: unknown key 'lr' at the top; here: update.learning_rate`.
OpenRLHF, TRL and ms-swift take theirs as `--word`; here they are `key=value`, or lie in
[files of yours](../howto/settings.md#groups-of-your-own).
[Choose an algorithm](../howto/algorithm.md#defaults-beside-those-of-others) compares defaults."""
GROUPS = """\
Options of groups. Upper and lower case do not matter to the advice, but they do to the option."""


def peer_page() -> str:
    rows = [
        (
            ", ".join(map(code, row.here)) or "-",
            *(", ".join(map(code, getattr(row, peer))) for peer in PEERS),
            row.note,
        )
        for row in peer_table()
        if any(getattr(row, peer) for peer in PEERS)
    ]
    options = [(code(here), code(word)) for word, here in OPTIONS.items()]
    return page(
        "Coming from verl, OpenRLHF, TRL or ms-swift",
        ABOUT,
        table(("here", *PEERS.values(), "what differs"), rows),
        "## Groups",
        GROUPS,
        table(("here", "elsewhere"), options),
    )
