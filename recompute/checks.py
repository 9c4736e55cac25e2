"""Checks of what a setting is, before anything is done with it; each error names field, value and rule.

How large a count may be is checked by config.check_count, which of several texts by config.parse_choice.
"""

from __future__ import annotations

import math

from recompute.errors import ConfigError


def check_kind(field: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Refuse a value that is no instance of a class, or has not what a protocol asks for.

    Args:
        field: Name of the setting.
        value: What was given. A class is no instance, whatever it has: `PerToken` in place of `PerToken()`.
        kind: The class or runtime-checkable protocol, or several.
        what: What it must be, as the end of the sentence "must be ...".

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(value, type) or not isinstance(value, kind):
        raise ConfigError(field=field, value=value, rule=f"must be {what}")


def check_integer(field: str, value: object) -> None:
    """Refuse a value that is no integer; True is none.

    Raises:
        ConfigError: It is something else.
    """
    if type(value) is not int:
        raise ConfigError(field=field, value=value, rule="must be an integer")


def check_positive(field: str, value: object) -> None:
    """Refuse a value that is no finite number above 0; True is none.

    Raises:
        ConfigError: It is something else.
    """
    if (type(value) is not int and type(value) is not float) or not 0 < value < math.inf:
        raise ConfigError(field=field, value=value, rule="must be a finite number above 0")
