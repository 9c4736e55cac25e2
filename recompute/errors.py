"""Errors a user of recompute/ can see.

    ValueError
    +-- ConfigError       a setting is wrong; names the field, its value and the rule it breaks
    RuntimeError
    +-- RecomputeError    a replay cannot give what the first pass gave

Both are raised with `raise`, never with `assert`, so that `python -O` keeps them (DESIGN R16).
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting breaks a rule: `recompute_num_layers=0: must be an integer of at least 1`.

    Args:
        field: Name of the setting, as the user writes it.
        value: What the user gave; printed with `repr`, so that the text '2' and the number 2 differ.
        rule: What must hold, as the end of the sentence "this setting ...".
    """

    def __init__(self, *, field: str, value: object, rule: str) -> None:
        self.field = field
        self.value = value
        self.rule = rule
        super().__init__(f"{field}={value!r}: {rule}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by field: ranks hand errors to each other, and the arguments are keywords."""
        return _rebuild, (type(self), self.field, self.value, self.rule)


class RecomputeError(RuntimeError):
    """A replay failed: its saved inputs are gone, or its outputs do not match those of the first pass."""


def _rebuild(kind: type[ConfigError], field: str, value: object, rule: str) -> ConfigError:
    """Make the error again from its fields (see `ConfigError.__reduce__`)."""
    return kind(field=field, value=value, rule=rule)
