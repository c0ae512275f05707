"""Docstrings of attributes, enumeration members and constants, which Python itself does not keep."""

import ast
import inspect
import itertools
import textwrap
from enum import Enum
from types import ModuleType


def attribute_docs(owner: type | ModuleType) -> dict[str, str]:
    """Name -> the string literal that follows its assignment in the source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    body = tree.body[0].body if isinstance(owner, type) else tree.body  # type: ignore[attr-defined]
    found = {}
    for statement, after in itertools.pairwise(body):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])  # one, where annotated
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if names and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[names[0]] = inspect.cleandoc(str(after.value.value))
    return found


def member_docs(enumeration: type[Enum]) -> dict[str, str]:
    """Value -> meaning, in the order of the definition; empty where a member has no docstring."""
    docs = attribute_docs(enumeration)
    return {str(member.value): docs.get(member.name, "") for member in enumeration}
