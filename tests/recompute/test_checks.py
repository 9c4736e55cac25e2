"""What a setting is: checked by kind, with field, value and rule in the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recompute.checks import check_integer, check_kind, check_positive
from recompute.errors import ConfigError


@pytest.mark.parametrize("value", [None, "x", str, 1])
def test_kind(value: object) -> None:
    check_kind("name", "", str, "text")
    if value == "x":
        check_kind("name", value, (str, int), "text or a number")
        return
    with pytest.raises(ConfigError, match="must be text") as raised:
        check_kind("name", value, str, "text")
    assert (raised.value.field, raised.value.value) == ("name", value)


@pytest.mark.parametrize(
    ("check", "good", "bad", "rule"),
    [
        (check_integer, [0, -1, 10**30], [None, True, 1.0, "1"], "must be an integer"),
        (check_positive, [1, 1e-9], [None, True, 0, -1, "1", float("nan"), float("inf")], "a finite number above 0"),
    ],
)
def test_numbers(check: Callable[[str, Any], None], good: list[Any], bad: list[Any], rule: str) -> None:
    for value in good:
        check("seed", value)
    for value in bad:
        with pytest.raises(ConfigError, match=rule):
            check("seed", value)
