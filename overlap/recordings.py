"""recordings: the timelines in a trace file, recorded on a device or simulated; all of them or one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from overlap.timeline import Timeline, read_trace
from recompute.errors import ConfigError

_MARK = "#"


def read_json(field: str, name: str) -> Any:
    """The content of a JSON file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(field=field, value=name, rule=f"cannot be read as JSON: {error}") from error


def split_name(name: str) -> tuple[str, int | None]:
    """`FILE#N` as its two parts; N is None where the name has no such end."""
    path, mark, number = name.rpartition(_MARK)
    return (path, int(number)) if mark and number.isdecimal() else (name, None)


def pick(field: str, name: str, content: Any) -> tuple[Timeline, ...]:
    """The timelines of a trace that the end of `FILE#N` chooses: one, or all without it.

    Args:
        field: The setting that named the file.
        name: As given.
        content: The trace.

    Raises:
        ConfigError: It is no trace of ours, or has no timeline of that number.
    """
    timelines = read_trace(content)
    _, number = split_name(name)
    if number is None:
        return timelines
    if number >= len(timelines):
        raise ConfigError(field=field, value=name, rule=f"the file holds timelines 0 to {len(timelines) - 1}")
    return (timelines[number],)


def load_recording(field: str, name: str) -> tuple[Timeline, ...]:
    """The timelines of a trace file, or one of them.

    Args:
        field: The setting that names the file.
        name: A path; with `#N` at its end, the timeline of that number alone, counted from 0.

    Raises:
        ConfigError: The file cannot be read, is no trace of ours, or has no timeline of that number.
    """
    return pick(field, name, read_json(field, split_name(name)[0]))
