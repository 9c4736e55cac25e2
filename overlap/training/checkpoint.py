"""Training checkpoints: everything the next step depends on, in one file that is replaced atomically."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from overlap.chunk import ModelChunk, check_chunk
from recompute.checks import check_kind
from recompute.errors import ConfigError

FORMAT = 1
_PARTS = {"format", "config", "model", "optimizer", "rng"}


def save_checkpoint(path: Path, chunk: ModelChunk, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> None:
    """Write weights, buffers (expert bias, counters), step count, optimizer and generator state.

    The file appears whole or not at all: it is written beside its place and renamed.

    Args:
        path: Where to.
        chunk: The model.
        optimizer: Its optimizer.
        config: What a resumed run must agree on.

    Raises:
        ConfigError: There is a folder; `path` is no Path, or `chunk` no ModelChunk.
    """
    check_chunk(chunk)
    check_kind("save", path, Path, "a Path")
    if path.is_dir():
        raise ConfigError(field="save", value=str(path), rule="must be a file to write, not a folder")
    payload = {
        "format": FORMAT,
        "config": dict(config),
        "model": chunk.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save(payload, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, chunk: ModelChunk, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> None:
    """Take everything back; the next step is then the one that an uninterrupted run would have done.

    Raises:
        ConfigError: The file is missing, no checkpoint, or of another config (names the fields that differ).
    """
    check_chunk(chunk)
    check_kind("resume", path, Path, "a Path")
    try:
        payload = torch.load(path, weights_only=True)
    except OSError as error:
        raise ConfigError(
            field="resume", value=str(path), rule=f"must be a readable file ({error.strerror})"
        ) from error
    except Exception as error:
        raise ConfigError(field="resume", value=str(path), rule="must be a checkpoint of this program") from error
    if not isinstance(payload, dict) or payload.get("format") != FORMAT or payload.keys() != _PARTS:
        raise ConfigError(field="resume", value=str(path), rule=f"must be a checkpoint of format {FORMAT}")
    check_config(path, payload["config"], config)
    if payload["model"].keys() != chunk.state_dict().keys():
        raise ConfigError(field="resume", value=str(path), rule="holds another model: other parameters or buffers")
    chunk.load_state_dict(payload["model"])
    optimizer.load_state_dict(payload["optimizer"])
    torch.set_rng_state(payload["rng"])


def check_config(path: Path, saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse to resume a run of another config.

    Raises:
        ConfigError: Names the first field that differs.
    """
    for name in sorted({*saved, *config}):
        if saved.get(name) != config.get(name):
            rule = f"the checkpoint {path} was made with {name}={saved.get(name)!r}"
            raise ConfigError(field=name, value=config.get(name), rule=rule)
