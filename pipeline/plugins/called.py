"""What runs in the processes of plug-ins (:mod:`pipeline.plugins.sandbox`): their import, their calls, and
what is wrong with either. Imports nothing but the standard library, so that the processes start fast.
"""

import atexit
import contextlib
import faulthandler
import functools
import inspect
import itertools
import math
import operator
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.plugins.interpreter.contract import raised
from pipeline.plugins.load import ENVIRONMENTS, VERIFIERS, MissingImport, PluginError, load_plugin
from pipeline.plugins.marks import CHECK, NAMED_ARGUMENTS, PREPARE, TIMEOUT_SCORE

LARGEST_SCORE = 3.4028234663852886e38
"""The largest number of single precision."""
STUCK = "stuck"
"""Name of the file that gets the traceback of an import that took too long."""
_WANTED = "one entry for each row is wanted: None, or text that says why the row cannot be used"
_IMPORTED = "imported"


@dataclass(frozen=True)
class Plugin:
    """A function of the user's."""

    key: str
    """Key of the configuration that names it."""
    name: str
    group: str | None = None
    """Entry point group of names without a module."""
    import_limit: float = 60.0
    """Seconds that importing it may take."""
    python: str | None = None
    """Interpreter of an environment that is not to be imported in this one."""

    @property
    def is_hosted(self) -> bool:
        """Whether it is an environment in a process of another interpreter, or of its own."""
        return self.python is not None or (self.group == ENVIRONMENTS and self.name == VERIFIERS)


@dataclass(frozen=True)
class PluginFailure:
    """The reason that a plug-in gave no answer."""

    text: str
    """Description; of a failed call, to be read after the plug-in's name, else with that name in it."""
    index: int | None = None
    """Index of the row, where one is to blame."""
    trace: str = ""
    """Traceback of an exception that the plug-in raised."""
    is_users: bool = False
    """Whether the user has to fix it, since trying again cannot help."""
    is_late: bool = False
    is_elsewhere: bool = False
    """Whether the plug-in imports something that this machine lacks."""

    @property
    def is_of_response(self) -> bool:
        """Whether a response is to blame: a call failed at it, or returned no finite number for it."""
        return not self.is_late and (not self.is_users or self.index is not None)


@functools.cache
def loaded(plugin: Plugin) -> Callable[..., Any] | PluginFailure:
    """Return the function, imported once in each process, or why it cannot be."""
    try:
        if plugin.is_hosted:
            from pipeline.plugins.hosted import connect  # subprocesses, which other plug-ins do not need

            return connect(plugin.key, plugin.name, plugin.python)
        return load_plugin(plugin.key, plugin.name, plugin.group)
    except PluginError as error:
        return PluginFailure(str(error), is_users=True, is_elsewhere=isinstance(error, MissingImport))
    except BaseException as error:  # a module that exits at import must not take the process along
        return PluginFailure(f"{plugin.key}={plugin.name}: its import {raised(error)}", is_users=True)


def load(plugin: Plugin, folder: str) -> None:
    """Import the plug-in when a process starts, so that the import does not count as part of a call. What it
    prints goes to standard error: standard output is for what the command says, which may be JSON.

    An import that takes too long ends the process, and the file ``stuck`` gets its traceback. The process's
    own file is empty until the import has ended.
    """
    # A process that ends as its pipe is closed may be sent SIGTERM as well: while Python takes itself down it
    # would complain of that.
    atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})
    with contextlib.suppress(OSError):  # it has no standard error
        os.dup2(2, 1)
    own = Path(folder, str(os.getpid()))
    own.touch()
    with Path(folder, STUCK).open("a") as file:
        faulthandler.dump_traceback_later(plugin.import_limit, exit=True, file=file)
        loaded(plugin)
        faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(OSError):  # a full disk: then the message about a slow import outlives it
        own.write_text(_IMPORTED)


Steps = tuple[tuple[int, float], ...]
"""Rewards of the steps of a response: turn (0-based) or number of characters, and number."""


def score(
    plugin: Plugin, arguments: Mapping[str, Any], num_rows: int, steps: str | None = None
) -> list[float | None] | list[Steps | None] | PluginFailure:
    """Call the function and return a finite number or None for each row, or why there is none.

    Args:
        steps: the rule's ``steps``: then its steps or None for each row.
    """
    function = loaded(plugin)
    if isinstance(function, PluginFailure):
        return function
    try:
        returned = function(**arguments)
        # Entries in a defined order.
        if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping | Set):
            why = f"returned {type(returned).__name__} instead of a list of numbers"
            return PluginFailure(why, is_users=True)
        if steps is not None:
            return judged_steps(list(returned), num_rows, has_ends=steps == "characters")
        return judged(list(returned), num_rows)
    except BaseException as error:  # also SystemExit: the message has to name the row
        return PluginFailure(raised(error), trace=traceback.format_exc())


def prepare(plugin: Plugin, columns: Mapping[str, Sequence[Any]], folder: str, workers: int) -> None:
    """Have the function prepare itself in this process, and wait until it has in all: so each is asked once.
    What goes wrong shows at the first score."""
    with contextlib.suppress(BaseException):
        getattr(loaded(plugin), PREPARE)(**columns)
    Path(folder, f"{PREPARE}-{os.getpid()}").touch()
    until = time.monotonic() + plugin.import_limit
    while len(list(Path(folder).glob(f"{PREPARE}-*"))) < workers and time.monotonic() < until:
        time.sleep(0.01)


def judged(answer: Sequence[Any], num_rows: int) -> list[float | None] | PluginFailure:
    """Return the answer as floats if it is one finite number or None per row, else what is wrong with it."""
    if len(answer) != num_rows:
        return PluginFailure(f"returned {len(answer)} scores instead of {num_rows}", is_users=True)
    for index, number in enumerate(answer):
        if number is not None and (why := why_no_score(number)):
            return PluginFailure(f"returned {number!r:.200} {why}", index, is_users=True)
    return [None if number is None else float(number) for number in answer]


def judged_steps(answer: Sequence[Any], num_rows: int, has_ends: bool) -> list[Steps | None] | PluginFailure:
    """Return the answer as steps if it is a list of them or None per row, else what is wrong with it.

    Args:
        has_ends: whether each step is a pair: the number of characters up to its end, which grows, and its
            number.
    """
    if len(answer) != num_rows:
        return PluginFailure(f"returned {len(answer)} lists instead of {num_rows}", is_users=True)
    found: list[Steps | None] = []
    for index, given in enumerate(answer):
        steps = None if given is None else _steps_of(given, has_ends)
        if given is not None and steps is None:
            each = "pairs (characters, number) in order" if has_ends else "numbers, one for each turn"
            return PluginFailure(f"returned {given!r:.200} instead of a list of {each}", index, is_users=True)
        found.append(steps)
    return found


def _steps_of(given: Any, has_ends: bool) -> Steps | None:
    """Return the steps that a rule gave for a response; None where these are none."""
    try:
        pairs = [(operator.index(end), number) for end, number in (given if has_ends else enumerate(given))]
    except (TypeError, ValueError):
        return None
    ends = [end for end, _ in pairs]
    is_ordered = all(one < other for one, other in itertools.pairwise([0 if has_ends else -1, *ends]))
    if isinstance(given, str | bytes | Mapping | Set) or not is_ordered:
        return None
    if any(why_no_score(number) for _, number in pairs):
        return None
    return tuple((end, float(number)) for end, number in pairs)


def why_no_score(number: Any) -> str:
    """Return why a value is no score; empty if it is one: a finite scalar of Python, NumPy or torch that
    single precision holds, in which scores are stored. Text and arrays of several are none."""
    try:
        value = math.nan if isinstance(number, str | bytes) else float(number)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        return "instead of a finite number"
    return "" if abs(value) <= LARGEST_SCORE else f"instead of a number up to {LARGEST_SCORE:.4g}"


def signature_error(plugin: Plugin, names: Sequence[str], num_positional: int) -> PluginFailure | None:
    """Return why the function cannot be called with these arguments; None where it can or may.

    Args:
        names: names of the keyword arguments.
    """
    function = loaded(plugin)
    if isinstance(function, PluginFailure):
        return function
    if twice := sorted({name for name in names if names.count(name) > 1}):
        text = f"{plugin.key}={plugin.name}: {', '.join(twice)}: both a column of the prompts and an argument"
        return PluginFailure(text, is_users=True)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a few built-in functions have none
        return None
    try:
        signature.bind(*[None] * num_positional, **dict.fromkeys(names))
    except TypeError as error:
        given = f"{num_positional} arguments" if num_positional else ", ".join(names)
        text = f"{plugin.key}={plugin.name}: cannot be called with {given}: {error}"
        if "unexpected keyword" in str(error):
            text += "; have it take **columns too, or name the columns to keep in data.columns"
        return PluginFailure(text, is_users=True)
    return None


def rule_error(plugin: Plugin, names: Sequence[str], arguments: Sequence[str]) -> PluginFailure | None:
    """Return why the function cannot be called as a rule, or what of its marks is wrong; None if nothing is.

    Args:
        names: names of columns, and of what is passed besides.
        arguments: names of the keyword arguments that the configuration gives.
    """
    if why := signature_error(plugin, [*names, *arguments], 0):
        return why
    function = loaded(plugin)
    if what := _wrong_mark(function) or _unknown_argument(function, arguments):
        return PluginFailure(f"{plugin.key}={plugin.name}: {what}", is_users=True)
    return None


def _wrong_mark(function: Any) -> str:
    check, late_score = (getattr(function, name, None) for name in (CHECK, TIMEOUT_SCORE))
    if check is not None and not callable(check):
        return f"its attribute {CHECK} is {check!r:.80}, no function of rows"
    if late_score is not None and why_no_score(late_score):
        return f"its attribute {TIMEOUT_SCORE} is {late_score!r:.80}, no finite number"
    return ""


def _unknown_argument(function: Any, arguments: Sequence[str]) -> str:
    if not getattr(function, NAMED_ARGUMENTS, False):
        return ""
    parameters = inspect.signature(function).parameters.values()
    known = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name != "responses"]
    unknown = [name for name in arguments if name not in known]
    return f"has no argument {unknown[0]!r}; it has: {', '.join(known)}" if unknown else ""


def import_error(plugin: Plugin) -> PluginFailure | None:
    """Return why the function cannot be imported; None where it can."""
    function = loaded(plugin)
    return function if isinstance(function, PluginFailure) else None


def has_mark(plugin: Plugin, name: str) -> bool | PluginFailure:
    """Whether a decorator of slurm-ppo has marked the function with ``name``."""
    function = loaded(plugin)
    return function if isinstance(function, PluginFailure) else getattr(function, name, False) is True


def has_check(plugin: Plugin) -> bool:
    """Whether the function can be imported and has a check of the prompt file's rows."""
    return callable(getattr(loaded(plugin), CHECK, None))


def check_rows(
    plugin: Plugin, columns: Mapping[str, Sequence[Any]], arguments: Mapping[str, Any]
) -> list[tuple[int, str]] | PluginFailure:
    """Return index and problem of each row that the function's check finds one in."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    check = getattr(loaded(plugin), CHECK)
    try:
        with contextlib.suppress(ValueError):  # a few built-in functions have no signature
            inspect.signature(check).bind(rows, **arguments)
    except TypeError as error:
        given = ", ".join(["rows", *arguments])
        why = f"cannot be called with {given}: {error}; write it as check(rows, **arguments)"
        return PluginFailure(why, is_users=True)
    try:
        answer = list(check(rows, **arguments))
    except BaseException as error:  # also SystemExit: the message has to name the check
        return PluginFailure(raised(error), trace=traceback.format_exc(), is_users=True)
    if len(answer) != len(rows):
        why = f"returned {len(answer)} entries for {len(rows)} rows; {_WANTED}"
        return PluginFailure(why, is_users=True)
    for why in answer:
        if not (why is None or isinstance(why, str)):
            return PluginFailure(f"returned {why!r:.200} instead of None or text; {_WANTED}", is_users=True)
    return [(index, why) for index, why in enumerate(answer) if why is not None]


def timeout_score(plugin: Plugin) -> float | None:
    """Return the score that the function itself gives a response that takes too long; None if it has none."""
    found = getattr(loaded(plugin), TIMEOUT_SCORE, None)
    return None if found is None or why_no_score(found) else float(found)
