"""Words of a command as fixed settings and axes: keys with several values, whose product is the grid."""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm.errors import UserError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

SEED = "seed"
MOST_POINTS = 1000
"""Most points that a command may ask for: more are usually a slip, such as a range without a step."""
_OF_THE_WHOLE = ("name", "run_dir")
"""Keys that name the whole sweep; its runs get names and folders of their own."""
_EXPONENT = re.compile(r"(-?\d+(?:\.\d+)?)e([+-]?)0*(\d+)")


class SweepError(UserError, ValueError):
    """What is asked of a sweep cannot be done."""


@dataclass(frozen=True)
class Axis:
    """A key that takes several values."""

    key: str
    """Key without a prefix such as ``+``."""
    prefix: str
    values: tuple[str, ...]
    """Values as the command line takes them."""


@dataclass(frozen=True)
class Grid:
    """What a command asks for."""

    fixed: tuple[str, ...]
    """Settings that all points share, as words."""
    axes: tuple[Axis, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(axis.key for axis in self.axes)

    def points(self) -> Iterator[tuple[dict[str, str], list[str]]]:
        """Yield the settings of every point, by key, and the words that make them; the last axis is the
        fastest."""
        for values in itertools.product(*(axis.values for axis in self.axes)):
            chosen = list(zip(self.axes, values, strict=True))
            words = [f"{axis.prefix}{axis.key}={value}" for axis, value in chosen]
            yield {axis.key: value for axis, value in chosen}, words


def parse_grid(
    words: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    num_seeds: int | None = None,
    swept: Collection[str] = (),
) -> Grid:
    """Read the words of a command, and check that there is something to sweep.

    Args, Raises: see :func:`read_words`; also SweepError where there is nothing to sweep, or too much.
    """
    return _checked(read_words(words, groups, num_seeds, swept))


def read_words(
    words: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    num_seeds: int | None = None,
    swept: Collection[str] = (),
) -> Grid:
    """Read the words of a command. Values are those of ``KEY=A,B``, and of Hydra's ``choice``, ``range`` and
    ``glob`` (of a group's options).

    Args:
        groups: options of each config group.
        num_seeds: runs of each setting, of seeds from ``seed`` on (default 0); None: one, unless words say.
        swept: keys that are axes even with one value, as those of the sweep that is there.

    Raises:
        SweepError: no values can be read from a word, or two words say different ones.
    """
    axes: dict[str, Axis] = {}
    fixed: dict[str, str] = {}
    for word in words:
        override = _parsed(word)
        key = override.key_or_group
        if key in axes or (override.is_sweep_override() and any(_key_of(w) == key for w in fixed.values())):
            raise SweepError(f"{key} is given twice; give all its values in one word: {key}=A,B")
        if override.is_sweep_override() or key in swept:
            prefix = word[: len(word) - len(word.lstrip("+"))]
            axes[key] = Axis(key, prefix, _values(word, override, groups))
        else:
            fixed[word] = word
    if num_seeds is not None:
        _add_seeds(axes, fixed, num_seeds)
    elif SEED in swept and SEED not in axes:
        axes[SEED] = Axis(SEED, "", ("0",))
    return Grid(tuple(fixed), tuple(axes.values()))


def _parsed(word: str) -> "Override":
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except (HydraException, ValueError):
        raise SweepError(
            f"{word[:80]!r} is not KEY=VALUE or KEY=A,B; quote values with special characters: \"KEY='a=b'\""
        ) from None


def _values(word: str, override: "Override", groups: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the values of a word, each once, in their order."""
    from hydra.core.override_parser.types import Glob

    key = override.key_or_group
    if not override.is_sweep_override():
        return (plain_number(override.get_value_element_as_str()),)
    if override.is_interval_sweep():
        raise SweepError(
            f"{word!r}: an interval is not a list of values; write {key}=range(FROM,TO,STEP) or {key}=A,B"
        )
    if isinstance(override.value(), Glob):
        return _matching(word, override, groups)
    return _listed(word, override)


def _listed(word: str, override: "Override") -> tuple[str, ...]:
    """Return the values of a list or a range."""
    from hydra.errors import HydraException

    try:
        found = itertools.islice(override.sweep_string_iterator(), MOST_POINTS + 1)
        values = tuple(dict.fromkeys(map(plain_number, found)))
    except (HydraException, ValueError) as error:  # a step of 0
        key = override.key_or_group
        raise SweepError(f"{word!r} has no values ({error}); write {key}=range(FROM,TO,STEP)") from None
    if not values:
        raise SweepError(f"{word!r} has no values; a range's end is not part of it")
    return values


def _matching(word: str, override: "Override", groups: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the options of a config group that a pattern matches."""
    key = override.key_or_group
    options = groups.get(key)
    if options is None:
        raise SweepError(
            f"{word!r}: glob is for groups ({', '.join(groups)}), and {key} is not one; write {key}=A,B"
        )
    found = tuple(override.value().filter(list(options)))  # type: ignore[union-attr]
    if not found:
        raise SweepError(f"{word!r} matches no option of {key}; there are: {', '.join(options)}")
    return found


def plain_number(text: str) -> str:
    """Write numbers such as 1e-06, as Python prints them, as people do: 1e-6. Other text stays."""
    match = _EXPONENT.fullmatch(text)
    return f"{match[1]}e{'-' if match[2] == '-' else ''}{match[3]}" if match else text


def _add_seeds(axes: dict[str, Axis], fixed: dict[str, str], count: int) -> None:
    """Make an axis of so many seeds, from the one that is given on."""
    if SEED in axes and len(axes[SEED].values) > 1:
        raise SweepError("seed=... and --seeds both say which seeds; leave one out")
    given = next((word for word in fixed if _key_of(word) == SEED), None)
    first = axes[SEED].values[0] if SEED in axes else given.partition("=")[2] if given else "0"
    if not first.isdecimal():
        raise SweepError(f"seed={first}: a whole number of 0 or more, from which --seeds counts on")
    if given:
        del fixed[given]
    axes.pop(SEED, None)  # last, so that runs of one setting follow each other
    axes[SEED] = Axis(SEED, "", tuple(str(int(first) + i) for i in range(count)))


def _checked(grid: Grid) -> Grid:
    for key in grid.keys:
        if key in _OF_THE_WHOLE:
            raise SweepError(f"{key}= names the whole sweep, so it takes one value; runs get their own names")
    if not grid.axes:
        raise SweepError(
            "nothing to sweep: give a key several values (update.learning_rate=1e-6,3e-6), or --seeds N; for "
            "one run: slurm-ppo run"
        )
    size = 1
    for axis in grid.axes:
        size *= len(axis.values)
    if size > MOST_POINTS:
        counts = " x ".join(f"{len(axis.values)} or more of {axis.key}" for axis in grid.axes)
        raise SweepError(f"more than {MOST_POINTS} runs ({counts}); give fewer values, in several sweeps")
    return grid


def _key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def fixed_differences(one: Iterable[str], other: Iterable[str], apart: Collection[str]) -> list[str]:
    """Return the keys whose words are not the same in both, but for those of ``apart``. Pure."""
    first, second = ({_key_of(word): word.lstrip("+") for word in words} for words in (one, other))
    keys = dict.fromkeys([*first, *second])
    return [key for key in keys if key not in apart and first.get(key) != second.get(key)]
