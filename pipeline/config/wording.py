"""Words for what pydantic refuses: ``key: what is wrong (got value)``, and what is legal."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.config.choices import known_groups
from pipeline.config.issue import Mistake
from pipeline.config.keys import LONGEST_VALUE, SURE, cut, leaves, nearest, siblings, unknown, with_legal
from pipeline.config.peers import UNSET, peer_words
from pipeline.config.reward import KINDS

_WORDING = {
    "function": "module:function, or the name of a ready rule such as exact_match",
    "source": "module:function, or the name of an environment such as reasoning_gym",
    "url": "an address such as http://gpu07:8000/classify, without user name and password",
    "mail_user": "an address such as me@example.org, or a user's name",
    "api_key_env": "the name of an environment variable; the key itself belongs into no file",
    "scheduler": "module:function, or environment",
    "engine": "transformers, vllm, or module:function of an engine of yours",
    "policy_loss": "ppo, gspo, gspo-token, cispo, sapo, gmpo, or module:function of a loss of yours",
    "device_map": "auto, balanced, balanced_low_0, sequential, or a device such as cuda:0",
    "pool": "a word of lower-case letters, digits and '_'",
    "options": "the option's long name, in lower-case letters and without dashes before it",
    "time": "D-HH:MM:SS or HH:MM:SS, in quotes because YAML takes 4:00:00 for the number 14400",
    "mem": "a number with K, M, G or T behind it, such as 64G",
    "gpus_per_node": "COUNT or TYPE:COUNT, such as 4 or a100:4; null for none",
}
_UNKNOWN, _MISSING = "unexpected_keyword_argument", ("missing", "missing_argument")


def mistakes_in(problems: Sequence[Any]) -> tuple[list[Mistake], list[Mistake]]:
    """Describe pydantic's errors: those of unknown keys, and others, the missing ones first."""
    unknown_ones = [mistake for one in problems if one["type"] == _UNKNOWN for mistake in _unknown(one)]
    others = sorted((p for p in problems if p["type"] != _UNKNOWN), key=is_missing, reverse=True)
    groups: dict[tuple[str, ...], list[Any]] = {}
    for number, one in enumerate(others):
        *where, last = map(str, one["loc"] or ("",))
        key = (*where, "") if _MEMBER.fullmatch(last) else (*where, last, str(number))
        groups.setdefault(key, []).append(one)
    return unknown_ones, [_mistake(some[0]) if len(some) == 1 else _of_none(some) for some in groups.values()]


_MEMBER = re.compile(r"(?:constrained-)?(?P<type>str|int|float|bool)|literal\['(?P<word>.*)'\]")
"""Last part of the place of an error of one of several types that a value may have."""
_TYPES = {"str": "text of one line", "int": "a number", "float": "a number", "bool": "true or false"}


def _of_none(problems: Sequence[Any]) -> Mistake:
    """Describe a value that is of none of the types that it may have, of each of which there is an error."""
    location, _ = location_of(problems[0])
    wanted = dict.fromkeys(_member_in_words(one) for one in problems)
    key, given = ".".join(location[:-1]), cut(problems[0]["input"])
    return Mistake(key, f"{key}: write {' or '.join(wanted)} (got {given})")


def _member_in_words(problem: Any) -> str:
    found, bounds = _MEMBER.fullmatch(str(problem["loc"][-1])), problem.get("ctx", {})
    assert found
    if found["word"]:
        return str(found["word"])
    least = bounds.get("ge", bounds["gt"] + 1 if "gt" in bounds else None)
    return _TYPES[found["type"]] + (f" from {least} on" if least is not None else "")


def location_of(problem: Any) -> tuple[list[str], str]:
    """Return the parts of the key of a pydantic error, and the union's tag among them, where there is one."""
    location = [str(part) for part in problem["loc"] if part != "[key]"]  # marks an invalid name in a mapping
    if location[:2] == ["reward", "components"] and len(location) > 3:
        return location, location.pop(3)
    if location[:1] == ["scheduler"] and len(location) > 1:
        return location, location.pop(1)
    return location, ""


def is_missing(problem: Any) -> bool:
    """Whether a pydantic error is that something must be given."""
    return problem["type"] in _MISSING


def _unknown(problem: Any) -> Iterator[Mistake]:
    """Describe an unknown key; of a section of others, the keys that they have in it."""
    location, kind = location_of(problem)
    key, given, legal = ".".join(location), problem["input"], siblings(location, kind)
    rows = {leaf: peer_words(leaf) for leaf in leaves(given, key)} if isinstance(given, dict) else {}
    if not any(rows.values()) or nearest(location[-1], legal, SURE):
        text = f"{key}: unknown key {location[-1]!r}"
        yield unknown(key, text, location[:-1], location[-1], legal, given) if legal else Mistake(key, text)
        return
    for leaf, row in rows.items():
        advice = row.advice if row else UNSET
        yield Mistake(leaf, f"{leaf}: unknown key; {advice}", tuple(row.here) if row else ())


def _mistake(problem: Any) -> Mistake:
    location, kind = location_of(problem)
    key = ".".join(location) or "config"
    if is_missing(problem):
        example = f", e.g. {key}=..." if re.fullmatch(r"[A-Za-z]\w*", location[-1]) else ""
        return Mistake(key, f"{key}: must be given{example}")
    return Mistake(key, _wrong_value(problem, key, location, kind))


def _wrong_value(problem: Any, key: str, location: Sequence[str], kind: str) -> str:
    """Describe a value that is none of those that are legal."""
    sort, given = problem["type"], problem["input"]
    got = f"(got {cut(given)})"
    if sort == "dataclass_type":
        keys = ", ".join(siblings([*location, ""], kind))
        return f"{key}: holds several keys; set one of them: {keys} {got}"
    if sort == "dict_type":
        return f"{key}: holds entries that you name; write {key}.NAME=... {got}"
    if sort == "string_pattern_mismatch" or (sort == "string_type" and location[-1] in _WORDING):
        is_pool = location[:2] == ["scheduler", "pools"] and len(location) == 3
        name = "pool" if is_pool else "options" if "options" in location[:-1] else location[-1]
        wanted = _WORDING.get(name, "letters, digits, '_', '.' and '-'")
        return f"{key}: write {wanted} {got}"
    if sort in ("union_tag_not_found", "union_tag_invalid") and (text := _wrong_kind(problem, key, location)):
        return text
    if sort == "too_short" and key == "reward.components":
        return f"{key}: must be given; choose {_options('reward')}"
    wrong = f"write a list, such as {key}=[a,b]" if sort in ("tuple_type", "list_type") else problem["msg"]
    return f"{key}: {wrong.removeprefix('Value error, ')} {got}"


def _wrong_kind(problem: Any, key: str, location: Sequence[str]) -> str | None:
    """Describe a scheduler or a component of the reward that says no kind, or one that there is not."""
    given = problem["input"]
    if problem["type"] == "union_tag_invalid":
        tag = str(problem["ctx"]["tag"])[:LONGEST_VALUE]
        is_component = location[:2] == ["reward", "components"]
        return with_legal(f"{key}.kind={tag}: no such kind", tag, KINDS) if is_component else None
    if key == "scheduler":
        return f"scheduler: has no kind; choose {_options('scheduler')}"
    named = (", ".join(map(str, given)) if isinstance(given, dict) else repr(given))[:LONGEST_VALUE]
    return (
        f"{key}: has no kind, only {named}; add {key}.kind=model (with path), "
        "kind=rule (with function) or kind=remote (with url), or choose reward=model, rule or remote"
    )


def _options(group: str) -> str:
    return ", ".join(f"{group}={option}" for option in known_groups(None)[group])
