"""What commands print: rich tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console()
"""Standard output, for people."""
messages = Console(stderr=True)
"""Standard error: everything else when stdout carries JSON."""


def print_json(payload: object) -> None:
    """Print one JSON object on stdout; numbers that JSON does not know (a diverged loss) become null."""
    print(json.dumps(_finite(payload), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table whose first column is text and whose others are right-aligned."""
    result = Table(title=title, title_justify="left", title_style="bold")
    for place, column in enumerate(columns):
        result.add_column(column, justify="left" if place == 0 else "right")
    for row in rows:
        result.add_row(*(str(cell) for cell in row))
    return result


def num_bytes(count: int) -> str:
    """Bytes with thousands separators, so that exact equality can be seen."""
    return f"{count:,}"
