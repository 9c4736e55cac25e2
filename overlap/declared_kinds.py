"""Whether the fields of a declaration hold what their annotations say, before anything reads them.

Values are declared far from where they are used: text in place of a Lane, or 'no' in place of False, would be found in
the middle of a step, or never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from overlap.errors import ProgramError

Kinds = Mapping[str, type]
"""Classes that annotations name, by name."""
_Holds = Callable[[Any, Kinds], bool]
_PLAIN: Mapping[str, _Holds] = {
    "str": lambda value, kinds: isinstance(value, str),
    "int": lambda value, kinds: type(value) is int,
    "bool": lambda value, kinds: type(value) is bool,
    "float": lambda value, kinds: type(value) in (int, float) and math.isfinite(value),
    "Any": lambda value, kinds: True,
}


def check_fields(where: str, declared: Any, kinds: Kinds) -> None:
    """Check the fields of a dataclass that its constructor takes.

    Args:
        where: What it declares, for the error.
        declared: An instance of a dataclass with annotations as text.
        kinds: The classes that they name, dataclasses and runtime-checkable protocols.

    Raises:
        ProgramError: Names the field, its value and what it must be.
    """
    for field in fields(declared):
        value = getattr(declared, field.name)
        if field.init and not _holds(str(field.type))(value, kinds):
            raise ProgramError(f"{where}: {field.name}={value!r} must be {field.type}")


@cache
def _holds(annotation: str) -> _Holds:
    """Whether a value is what an annotation says."""
    if annotation.endswith(" | None"):
        inner = _holds(annotation.removesuffix(" | None"))
        return lambda value, kinds: value is None or inner(value, kinds)
    if annotation.startswith("Callable["):
        return lambda value, kinds: callable(value)
    for kind, begin, end in ((tuple, "tuple[", ", ...]"), (frozenset, "frozenset[", "]")):
        if annotation.startswith(begin):
            return _every(kind, _holds(annotation.removeprefix(begin).removesuffix(end)))
    return _PLAIN.get(annotation, lambda value, kinds: isinstance(value, kinds[annotation]))


def _every(kind: type[Iterable[Any]], inner: _Holds) -> _Holds:
    return lambda value, kinds: type(value) is kind and all(inner(entry, kinds) for entry in value)
