"""docs/reference/python.md: the stable names of the package, from their docstrings."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pipeline
from docs.generate.docstrings import attribute_docs, member_docs
from docs.generate.markdown import code, page, prose, table

ABOUT = """\
Names that notebooks and scripts may import from `pipeline`. They stay; attributes that are added later come
behind those that there are. `import pipeline` itself imports nothing, and none of this imports torch. Nothing
is written. Times are unix times in seconds.
[A run in Python](../howto/samples.md#in-python) has an example."""

_FIRST = ("open_run", "OpenedRun")
_LONGEST = 110
"""Length of a line of code."""
_SECTIONS = ("Args:", "Returns:", "Raises:")


def python_page() -> str:
    names = [*_FIRST, *(name for name in pipeline.__all__ if name not in _FIRST)]
    return page("Python", ABOUT, *(_entry(name, getattr(pipeline, name)) for name in names))


def _entry(name: str, found: Any) -> str:
    if not isinstance(found, type):
        return _function(f"## {name}", name, found)
    parts = [f"## {name}", _text(found.__doc__)]
    if issubclass(found, Enum):
        rows = [(code(value), prose(doc)) for value, doc in member_docs(found).items()]
        return "\n\n".join([*parts, table(("value", "means"), rows)])
    if issubclass(found, Exception):
        kinds = ", ".join(code(base.__name__) for base in found.__bases__)
        return "\n\n".join([*parts, f"A {kinds}."])
    rows = [(code(attribute), code(_type(kind)), doc) for attribute, kind, doc in _attributes(found)]
    methods = [_function(f"### {name}.{m}", m, each) for m, each in _methods(found)]
    shown = [table(("attribute", "type", "meaning"), rows)] if rows else []
    return "\n\n".join([*parts, *shown, *methods])


def _attributes(owner: type) -> Iterator[tuple[str, Any, str]]:
    """Fields of a dataclass or a named tuple, and properties: name, type, meaning."""
    docs = attribute_docs(owner)
    for name in [*(f.name for f in _fields(owner)), *getattr(owner, "_fields", ())]:
        yield name, owner.__annotations__[name], prose(docs.get(name))
    for name, found in vars(owner).items():
        if isinstance(found, property) and not name.startswith("_"):
            yield name, found.fget.__annotations__["return"], prose(found.__doc__)


def _fields(owner: type) -> list[Any]:
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    return [field for field in fields if not field.name.startswith("_")]


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    for name, found in vars(owner).items():
        if inspect.isfunction(found) and not name.startswith("_") and found.__doc__:
            yield name, found


def _function(heading: str, name: str, found: Any) -> str:
    signature = inspect.signature(found)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    shown = _type(_unquoted(str(signature.replace(parameters=parameters))))
    line = f"def {name}{shown}: ..."
    if len(line) > _LONGEST:
        line = _over_lines(line, parameters)
    return f"{heading}\n\n```python\n{line}\n```\n\n{_text(found.__doc__)}"


def _unquoted(signature: str) -> str:
    """Take the quotes off types, not off defaults."""
    return re.sub(r"= '([^']*)'|'([^']*)'", lambda m: m[2] if m[1] is None else f'= "{m[1]}"', signature)


def _over_lines(line: str, parameters: list[inspect.Parameter]) -> str:
    """Write a signature with a parameter on each line, as the formatter has it."""
    begin, _, rest = line.partition("(")
    end = rest[rest.rindex(")") :]
    words = [_type(_unquoted(str(parameter))) for parameter in parameters]
    named = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters]
    if True in named:
        words.insert(named.index(True), "*")
    return "\n".join([f"{begin}(", *(f"    {word}," for word in words), end])


def _text(docstring: str | None) -> str:
    """A docstring as Markdown; what it takes, and what it raises, as lists."""
    lines = []
    is_list = False
    for line in inspect.cleandoc(docstring or "").splitlines():
        if line in _SECTIONS:
            is_list = True
            lines += [line.replace("Args:", "Arguments:"), ""]
        elif is_list and re.match(r"    \S", line):
            name, colon, meaning = line.strip().partition(": ")
            lines.append(f"- `{name}`: {meaning}" if colon else f"- {line.strip()}")
        else:
            lines.append(line.strip() if not is_list else f"  {line.strip()}".rstrip())
    return prose("\n".join(lines))


def _type(kind: Any) -> str:
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    text = re.sub(r"\b(?!pa\.|pandas\.)(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    return text.replace("pa.", "pyarrow.")
