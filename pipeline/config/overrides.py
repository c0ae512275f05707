"""Words of a command that set something: which of them Hydra would misunderstand, drop or let through."""

from collections.abc import Mapping, Sequence

from pipeline.config.home import why_no_home
from pipeline.config.issue import Mistake
from pipeline.config.keys import LONGEST_VALUE, cut, mistake_in_key, with_legal
from pipeline.config.peers import OPTIONS


def sorted_out(
    overrides: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[Mistake]]:
    """Return the overrides that can be composed, and what is wrong with the others: an unknown key (with or
    without +), a deletion, a sweep, or not of the form KEY=VALUE.

    Args:
        groups: options of each config group.
    """
    found = {text: _mistake(text, groups) for text in overrides}
    return [text for text in overrides if found[text] is None], [one for one in found.values() if one]


def _mistake(text: str, groups: Mapping[str, Sequence[str]]) -> Mistake | None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError):  # ValueError: a number of thousands of digits
        name, _, value = text.partition("=")
        if why := why_no_home(value):
            return Mistake(name.lstrip("+"), f"{name}={value[:LONGEST_VALUE]}: {why}")
        why = "is not an override; write KEY=VALUE (quote values with special characters: \"KEY='a=b'\")"
        return Mistake(text.partition("=")[0].lstrip("+~"), f"{cut(text)} {why}")
    key = override.key_or_group
    if not key:
        return Mistake("", f"{cut(text)} names no key; write KEY=VALUE")
    if override.is_delete():
        return Mistake(key, f"{text!r}: keys cannot be deleted; give {key} another value instead")
    if override.is_sweep_override():
        why = "one value per key; slurm-ppo sweep takes several; else quote the comma"
        return Mistake(key, f"{text!r}: {why}")
    if key not in groups:
        return mistake_in_key(key, groups)
    if override.value() in groups[key]:
        return None
    return Mistake(key, _no_option(key, str(override.value()), groups[key]))


def _no_option(group: str, given: str, options: Sequence[str]) -> str:
    """Say that a group has no such option, and which is meant where that is clear."""
    own = {option.lower(): f"{group}={option}" for option in options}
    meant = own.get(given.lower()) or OPTIONS.get(f"{group}={given}".lower())
    text = f"{group}={given[:LONGEST_VALUE]}: no such option"
    return f"{text}; here: {meant}" if meant else with_legal(text, given[:LONGEST_VALUE], options)
