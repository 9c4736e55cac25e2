"""Folders and files that commands write to."""

from __future__ import annotations

from pathlib import Path

from recompute.errors import ConfigError


def folder_at(field: str, value: str) -> Path:
    """A folder, made if it is not there; asked for before anything runs, so that no result is lost for want of it.

    Args:
        field: The option's name.
        value: Its path.

    Raises:
        ConfigError: It cannot be made there.
    """
    folder = Path(value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            field=field, value=value, rule=f"must be a folder that can be made: {error.strerror}"
        ) from None
    return folder


def file_at(field: str, value: str) -> Path:
    """A file to write, its folder made if it is not there; asked for before anything runs, as folder_at.

    Args:
        field: The option's name.
        value: Its path.

    Raises:
        ConfigError: It is a folder, or its folder cannot be made.
    """
    path = Path(value)
    if path.is_dir():
        raise ConfigError(field=field, value=value, rule="must be a file to write, not a folder")
    folder_at(field, str(path.parent))
    return path
