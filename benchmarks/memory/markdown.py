"""A result file as Markdown: the environment, then a table for each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.memory.golden import Payload

_HIDDEN = frozenset({"steps"})
"""Fields for programs only."""


def markdown(payload: Payload) -> str:
    """Write a payload as Markdown."""
    return "\n".join(_lines(payload)) + "\n"


def _lines(payload: Payload) -> Iterator[str]:
    yield f"# Suite {payload['suite']}"
    yield ""
    yield from (f"- {name}: {value}" for name, value in payload["environment"].items())
    for name, rows in payload.items():
        if isinstance(rows, list) and rows:
            yield from ("", f"## {name}", "")
            yield from _table(rows)


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    flat = [dict(_cells(row)) for row in rows]
    columns = list(dict.fromkeys(column for row in flat for column in row))
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'--:|' * (len(columns) - 1)}"
    yield from (f"| {' | '.join(_text(row.get(column, '')) for column in columns)} |" for row in flat)


def _cells(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and name not in _HIDDEN:
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        elif name not in _HIDDEN:
            yield name, value


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
